"""The backward stages of the blocked schedule as Pallas TPU kernels; `stages_pallas.py` says what each array is.

For source n and site i >= n, with α = exp(ℓ − lse) and Δ = <dO, O> (README.md has the derivation):

    dℓ = α (<dO_i[h], s_n[h]> − Δ_i),    d s_n += α dO_i[h] + (dℓ r_n) q̃_i[h],    d q̃_i[h] += (dℓ r_n) s_n[h]
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mhar_kernels.pallas_common import with_rest
from mhar_kernels.pallas_stage_forward import Buffers
from mhar_kernels.pallas_stage_layout import Geometry, Operand, Ref, call, float32
from mhar_kernels.pallas_stage_math import (
    add_up,
    head_sums,
    keyed_sums,
    logits,
    own_heads,
    query_sum,
    stacked_parts,
    turn_in,
    turn_out,
    when_first,
)

PULL, FINISH = "depth_stack_pull", "depth_stack_finish"


class Pulled(NamedTuple):
    """What the sites behind a block give to the gradients of its sources."""

    value: jax.Array  # [sources, D, T] float32: Σ over sites of α dO + (dℓ r) q̃
    shared: jax.Array  # [sources, 1, T] float32: Σ over sites and heads of dℓ ℓ


class Cotangents(NamedTuple):
    """What a finished site leaves, a row each."""

    d_out: jax.Array  # [N, D, T]: dO
    delta: jax.Array  # [N, heads, T] float32: Δ


def sites_at_once(block_size: int) -> int:
    """Sites of one step of `pull`: a divisor of S, so that the step after a block starts on its last row."""
    return max(n for n in range(1, 9) if block_size % n == 0)


def pull_call(
    geometry: Geometry,
    buffers: Buffers,
    later: Cotangents,
    queries: jax.Array,
    block: range,
    chunk: int,
    row: int | None = None,
) -> tuple[Pulled, jax.Array]:
    """One pass over all sites behind a full block, `chunk` (a divisor of S) at a time, for all its sources.

    row: where the first of those sites is in what has a row a site, a multiple of `chunk`; None: at its number.

    Returns:
      What they give to the sources' gradients, and partial sums of the query gradient [cores, sites + rest, D] float32
      of the sites from `block.stop` on; those past the last are zero.
    """
    g, count = geometry, len(block)
    sites = g.num_sites - block.stop
    steps = -(-sites // chunk)
    ragged, rows = sites % chunk, chunk * g.heads

    def kernel(at: Any, inputs: Any, outputs: Any, scratch: Any) -> None:
        sources, r, d_out, lse, delta, q = inputs
        out, shared, d_query = outputs
        logit, d_key, dots, alpha = scratch
        first_tile, step = g.tile_index()
        when_first(step == 0, (out, shared, dots))
        if ragged:
            when_first(step == steps - 1, (d_key,))

        @pl.when(first_tile)
        def _() -> None:
            d_query[0, step] = jnp.zeros((chunk, g.dim), jnp.float32)

        query = q[pl.ds(step * chunk, chunk)].reshape(rows, g.dim)
        lhs = stacked_parts(query, 3)
        for n in range(count):
            logit[n] = logits(lhs, sources[n], r[n]).reshape(chunk, g.heads, g.tile)

        def add_sites(first: Any, together: int) -> None:
            lefts = [lambda s, i=first + j: _wide(d_out, s, i) for j in range(together)]
            head_sums(g, lefts, [lambda s, n=n: _wide(sources, s, n) for n in range(count)], dots)
            for j in range(together):
                i = first + j
                for n in range(count):
                    a = jnp.exp(logit[n, i] - lse[i])
                    d_logit = a * (dots[j, n] - delta[i])
                    alpha[j, n] = a
                    d_key[n, i] = d_logit * r[n]
                    shared[n] += jnp.sum(d_logit * logit[n, i], axis=0, keepdims=True)

            def add(head: Any, slices: list[Any]) -> None:
                row = pl.ds(head, 1)
                for s in slices:
                    d = [_wide(d_out, s, first + j) for j in range(together)]
                    for n in range(count):
                        out[n, s, :] += add_up([alpha[j, n, row, :] * d[j] for j in range(together)])

            g.each_piece(add)

        # Two sites at a time halve the loads and stores of the sums; the last chunk may leave one.
        here = jnp.minimum(chunk, sites - step * chunk)
        pl.loop(0, jax.lax.div(here, 2))(lambda pair: add_sites(2 * pair, 2))
        if chunk % 2 or ragged % 2:
            pl.when(jax.lax.rem(here, 2) == 1)(lambda: add_sites(here - 1, 1))

        keys = [d_key[n].reshape(rows, g.tile) for n in range(count)]
        for n, value in enumerate(keyed_sums(query, keys)):
            out[n] += value
        d_query[0, step] += own_heads(g, add_up([query_sum(k, sources[n]) for n, k in enumerate(keys)]))

    first = lambda at, step: at
    whole = lambda at, step: 0
    sites_from = lambda step: (block.stop if row is None else row) // chunk + step
    behind = queries[block.stop :]
    if ragged:
        behind = jnp.pad(behind, ((0, chunk - ragged), (0, 0), (0, 0)))
    inputs = [
        Operand(buffers.sources, g.depth_spec(count, g.dim, first)),
        Operand(buffers.inverse_rms, g.depth_spec(count, 1, first)),
        Operand(later.d_out, g.chunk_spec(chunk, g.dim, sites_from)),
        Operand(buffers.lse, g.chunk_spec(chunk, g.heads, sites_from)),
        Operand(later.delta, g.chunk_spec(chunk, g.heads, sites_from)),
        Operand(behind, g.constant_spec(*behind.shape)),
    ]
    sums = jax.ShapeDtypeStruct((g.cores, steps, chunk, g.dim), jnp.float32)
    outputs = [
        Operand(g.history(count, g.dim, jnp.float32), g.depth_spec(count, g.dim, whole)),  # in VMEM: the sums
        Operand(g.history(count, 1, jnp.float32), g.depth_spec(count, 1, whole)),
        Operand(sums, g.sum_spec(*sums.shape[1:])),
    ]
    pairs = g.tokens * sites * count
    cost = pl.CostEstimate(
        flops=pairs * g.dim * (4 + 16 * g.heads),  # 3 passes of logits, 3 of the keys' part, 2 of the query gradient
        bytes_accessed=g.tokens * (2 * g.dim * (sites + 3 * count) + 8 * g.heads * sites + 8 * count)
        + 4 * g.dim * (g.heads * sites + g.cores * sites),
        transcendentals=pairs * g.heads,
    )
    value, shared, d_query = call(
        g,
        kernel,
        PULL,
        block.start,
        inputs,
        outputs,
        [
            float32(count, chunk, g.heads, g.tile),
            float32(count, chunk, g.heads, g.tile),
            float32(2, count, g.heads, g.tile),
            float32(2, count, g.heads, g.tile),
        ],
        steps=steps,
        temporaries=2 * 4 * count * g.dim * g.tile,
        cost=cost,
    )
    return Pulled(value, shared), d_query.reshape(g.cores, steps * chunk, g.dim)


def finish_call(
    geometry: Geometry,
    buffers: Buffers,
    later: Cotangents,
    queries: jax.Array,
    site: Any,
    position: int,
    sites: int,
    mix: jax.Array,
    cotangent: jax.Array,
    outside: Pulled | None,
) -> tuple[Cotangents, jax.Array, jax.Array]:
    """The cotangent [T, D] of site `site`'s mix [T, D] enters; the gradient of its source is finished.

    position: in its block; sites: how many of the block from this one on, which all read the source. site: may be
    traced.

    Returns:
      The buffers, the gradient [T, D], and partial sums of the query gradient [cores, sites, D] of those sites.
    """
    g = geometry
    rows = sites * g.heads
    given = [] if outside is None else list(outside)

    def kernel(at: Any, inputs: Any, outputs: Any, scratch: Any) -> None:
        fresh, mixed, rest, sources, r, lse, d_outs, deltas, q, *pulled = inputs
        d_out, delta, out, d_query = outputs
        acc, exact, logit, d_key, dots, alpha, shared = scratch
        first_tile = g.tile_index()[0]

        @pl.when(first_tile)
        def _() -> None:
            d_query[...] = jnp.zeros(d_query.shape, jnp.float32)

        turn_in(g, fresh, d_out)
        with_its_rest = lambda rows, features: with_rest(rows.astype(jnp.float32), rest[0, features, :], "bfloat16")
        turn_in(g, mixed, exact, with_its_rest)
        dots[...] = jnp.zeros(dots.shape, jnp.float32)
        head_sums(g, [lambda s: _wide(d_out, s)], [lambda s: exact[0, s, :]], dots)
        delta[0] = dots[0, 0]
        query = q[...].reshape(rows, g.dim)
        logit[...] = logits(stacked_parts(query, 3), sources[0], r[0]).reshape(sites, g.heads, g.tile)

        def start(head: Any, slices: list[Any]) -> None:
            for s in slices:
                acc[s, :] = pulled[0][0, s, :] if pulled else jnp.zeros((s.size, g.tile), jnp.float32)

        g.each_piece(start)
        shared[...] = pulled[1][0] if pulled else jnp.zeros(shared.shape, jnp.float32)

        def add_site(i: Any, d: Ref, row: Any, site_delta: jax.Array) -> None:
            head_sums(g, [lambda s: _wide(d, s, row)], [lambda s: _wide(sources, s)], dots)
            a = jnp.exp(logit[i] - lse[i])
            d_logit = a * (dots[0, 0] - site_delta)
            if isinstance(i, int):  # the first site of all reads one source: its weight is one whatever the query
                d_logit = jnp.where(at == 0, 0.0, d_logit)
            alpha[...] = a
            d_key[i] = d_logit * r[0]
            shared[...] += jnp.sum(d_logit * logit[i], axis=0, keepdims=True)

            def add(head: Any, slices: list[Any]) -> None:
                for s in slices:
                    acc[s, :] += alpha[pl.ds(head, 1), :] * _wide(d, s, row)

            g.each_piece(add)

        add_site(0, d_out, 0, delta[0])
        if sites > 1:
            pl.loop(1, sites)(lambda i: add_site(i, d_outs, i - 1, deltas[i - 1]))
        keys = d_key[...].reshape(rows, g.tile)
        acc[...] += keyed_sums(query, [keys])[0]
        d_query[0] += own_heads(g, query_sum(keys, sources[0]))
        factor = r[0] * r[0] * (1 / g.dim) * shared[...]
        turn_out(g, lambda features: acc[features, :] - factor * _wide(sources, features), out)

    own = lambda at, step: at
    others = lambda width: (
        g.depth_spec(sites - 1, width, lambda at, step: at + 1) if sites > 1 else g.unread_spec(width)
    )
    here = lambda at, step: position
    inputs = [
        Operand(cotangent, g.token_spec()),
        Operand(mix, g.token_spec()),
        Operand(buffers.rest, g.depth_spec(1, g.dim, own)),
        Operand(buffers.sources, g.depth_spec(1, g.dim, own)),
        Operand(buffers.inverse_rms, g.depth_spec(1, 1, own)),
        Operand(buffers.lse, g.depth_spec(sites, g.heads, own)),
        Operand(later.d_out, others(g.dim)),
        Operand(later.delta, others(g.heads)),
        Operand(queries, g.query_spec(sites)),
        *(Operand(x, g.depth_spec(1, x.shape[1], here)) for x in given),
    ]
    sums = jax.ShapeDtypeStruct((g.cores, sites, g.dim), jnp.float32)
    outputs = [
        Operand(later.d_out, g.depth_spec(1, g.dim, own)),
        Operand(later.delta, g.depth_spec(1, g.heads, own)),
        Operand(cotangent, g.token_spec()),
        Operand(sums, g.sum_spec(sites, g.dim)),
    ]
    cost = pl.CostEstimate(
        flops=g.tokens * g.dim * (sites * (4 + 16 * g.heads) + 4),
        bytes_accessed=g.tokens
        * (2 * g.dim * (sites + 5 + len(given)) + 4 * (2 * g.heads * sites + 1 + len(given) // 2))
        + 4 * g.dim * (rows + g.cores * sites),
        transcendentals=g.tokens * rows,
    )
    d_out, delta, out, d_query = call(
        g,
        kernel,
        FINISH,
        site,
        inputs,
        outputs,
        [
            float32(g.dim, g.tile),
            float32(1, g.dim, g.tile),
            float32(sites, g.heads, g.tile),
            float32(sites, g.heads, g.tile),
            float32(1, 1, g.heads, g.tile),
            float32(g.heads, g.tile),
            float32(1, g.tile),
        ],
        aliases={6: 0, 7: 1},
        cost=cost,
    )
    return Cotangents(d_out, delta), out, d_query


def _wide(ref: Ref, rows: Any, n: Any = 0) -> jax.Array:
    return ref[n, rows, :].astype(jnp.float32)
