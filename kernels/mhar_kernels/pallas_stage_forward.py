"""The forward stages of the blocked schedule as Pallas TPU kernels; `stages_pallas.py` says what each array is."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mhar_kernels.pallas_common import rest_of
from mhar_kernels.pallas_stage_layout import Geometry, Operand, call, float32
from mhar_kernels.pallas_stage_math import (
    add_up,
    inverse_rms,
    logits,
    stacked_parts,
    turn_in,
    turn_out,
    when_first,
)

MIX, MERGE = "depth_stack_mix", "depth_stack_merge"
_LOWEST = -1e30  # below every logit, and finite: the difference of two of them is no NaN


class Partial(NamedTuple):
    """The part of a block's mixes that comes from the sources before the block; normalised by itself."""

    mix: jax.Array  # [sites, D, T] float32
    lse: jax.Array  # [sites, heads, T] float32: log Σ exp(logit)


class Buffers(NamedTuple):
    """What a merge writes one row of."""

    sources: jax.Array  # [N, D, T]
    inverse_rms: jax.Array  # [N, 1, T] float32
    lse: jax.Array  # [N, heads, T] float32, of whole mixes
    rest: jax.Array  # [N, D, T] int16: what rounding took from the mixes; Δ would be off by as much as they are


def sources_at_once(block_size: int) -> int:
    """Sources of one step of `mix`: all blocks before the one at hand are full, so a divisor of S leaves no rest."""
    return max(n for n in range(1, 5) if block_size % n == 0)


def mix_call(geometry: Geometry, buffers: Buffers, queries: jax.Array, block: range, chunk: int) -> Partial:
    """One pass over the sources before a block, `chunk` at a time, for all its sites.

    queries: effective, float32 [N, heads, D], each head's row zero outside its features.
    """
    g, count = geometry, len(block)
    steps, rows = block.start // chunk, count * g.heads

    def kernel(at: Any, inputs: Any, outputs: Any, scratch: Any) -> None:
        sources, r, q = inputs
        out, out_lse = outputs
        top, total, weights, lhs = scratch
        step = g.tile_index()[1]
        when_first(step == 0, (out, total))

        @pl.when(step == 0)
        def _() -> None:
            top[...] = jnp.full(top.shape, _LOWEST, jnp.float32)
            lhs[...] = stacked_parts(q[...].reshape(rows, g.dim), 3)

        new = [logits(lhs[...], sources[n], r[n]) for n in range(chunk)]
        old_top = top[...]
        new_top = old_top
        for x in new:
            new_top = jnp.maximum(new_top, x)
        top[...] = new_top
        weights[chunk] = jnp.exp(old_top - new_top)
        for n, x in enumerate(new):
            weights[n] = jnp.exp(x - new_top)
        total[...] = total[...] * weights[chunk] + add_up([weights[n] for n in range(chunk)])

        def add(head: Any, slices: list[Any]) -> None:
            for s in slices:
                values = [sources[n, s, :].astype(jnp.float32) for n in range(chunk)]
                for i in range(count):
                    row = pl.ds(i * g.heads + head, 1)
                    terms = [weights[n, row, :] * value for n, value in enumerate(values)]
                    out[i, s, :] = add_up([out[i, s, :] * weights[chunk, row, :], *terms])

        g.each_piece(add)

        @pl.when(step == steps - 1)
        def _() -> None:
            weights[0] = 1 / total[...]

            def normalise(head: Any, slices: list[Any]) -> None:
                for i in range(count):
                    for s in slices:
                        out[i, s, :] *= weights[0, pl.ds(i * g.heads + head, 1), :]

            g.each_piece(normalise)
            out_lse[...] = (top[...] + jnp.log(total[...])).reshape(count, g.heads, g.tile)

    whole = lambda at, step: 0
    spec = lambda width: g.depth_spec(count, width, whole)
    outputs = [
        Operand(g.history(count, g.dim, jnp.float32), spec(g.dim)),  # in VMEM until the last step: the sums
        Operand(g.history(count, g.heads, jnp.float32), spec(g.heads)),
    ]
    pairs = g.tokens * block.start * count
    cost = pl.CostEstimate(
        flops=pairs * (2 * g.dim + 6 * g.heads * g.dim),  # the mixes, and three passes of logits for all heads
        bytes_accessed=g.tokens * ((block.start + 2 * count) * g.dim * 2 + 4 * block.start + 4 * count * g.heads)
        + 4 * rows * g.dim,
        transcendentals=pairs * g.heads,
    )
    made = call(
        g,
        kernel,
        MIX,
        block.start,
        [
            Operand(buffers.sources, g.chunk_spec(chunk, g.dim, lambda step: step)),
            Operand(buffers.inverse_rms, g.chunk_spec(chunk, 1, lambda step: step)),
            Operand(queries, g.query_spec(count)),
        ],
        outputs,
        [
            float32(rows, g.tile),
            float32(rows, g.tile),
            float32(chunk + 1, rows, g.tile),
            pltpu.VMEM((3 * rows, g.dim), jnp.bfloat16),
        ],
        steps=steps,
        cost=cost,
    )
    return Partial(*made)


def merge_call(
    geometry: Geometry,
    buffers: Buffers,
    queries: jax.Array,
    site: Any,
    position: int,
    source: jax.Array,
    outside: Partial | None,
) -> tuple[Buffers, jax.Array]:
    """Source `site` [T, D], at `position` in its block, enters the buffers; and the mix [T, D] of its site.

    site: may be traced.
    """
    g = geometry
    others = position + (outside is not None)
    given = [] if outside is None else list(outside)

    def kernel(at: Any, inputs: Any, outputs: Any, scratch: Any) -> None:
        fresh, sources, r, _, _, q, *partial = inputs
        sources_out, r_out, lse_out, rest_out, out = outputs
        weights, mixed, total = scratch
        turn_in(g, fresh, sources_out)
        r_out[0] = inverse_rms(g, sources_out, total)
        query = stacked_parts(q[0], 3)
        rows = [logits(query, sources[n], r[n]) for n in range(position)]
        rows.append(logits(query, sources_out[0], r_out[0]))
        if partial:
            rows.append(partial[1][0])
        top = rows[0]
        for x in rows[1:]:
            top = jnp.maximum(top, x)
        exponentials = [jnp.exp(x - top) for x in rows]
        sums = add_up(exponentials)
        lse_out[0] = top + jnp.log(sums)
        for n, e in enumerate(exponentials):
            weights[n] = e / sums

        def add(head: Any, slices: list[Any]) -> None:
            for s in slices:
                values = [sources[n, s, :].astype(jnp.float32) for n in range(position)]
                values.append(sources_out[0, s, :].astype(jnp.float32))
                if partial:
                    values.append(partial[0][0, s, :])
                mixed[s, :] = add_up([weights[n, pl.ds(head, 1), :] * value for n, value in enumerate(values)])

        g.each_piece(add)

        def write(features: Any) -> jax.Array:
            rest_out[0, features, :] = rest_of(mixed[features, :], "bfloat16")
            return mixed[features, :]

        turn_out(g, write, out)

    own = lambda at, step: at
    here = lambda at, step: position
    block_rows = lambda width: (
        g.depth_spec(position, width, lambda at, step: at - position) if position else g.unread_spec(width)
    )
    inputs = [
        Operand(source, g.token_spec()),
        Operand(buffers.sources, block_rows(g.dim)),
        Operand(buffers.inverse_rms, block_rows(1)),
        Operand(buffers.lse, g.unread_spec(g.heads)),
        Operand(buffers.rest, g.unread_spec(g.dim)),
        Operand(queries, g.query_spec(1)),
        *(Operand(x, g.depth_spec(1, x.shape[1], here)) for x in given),
    ]
    outputs = [
        Operand(buffers.sources, g.depth_spec(1, g.dim, own)),
        Operand(buffers.inverse_rms, g.depth_spec(1, 1, own)),
        Operand(buffers.lse, g.depth_spec(1, g.heads, own)),
        Operand(buffers.rest, g.depth_spec(1, g.dim, own)),
        Operand(source, g.token_spec()),
    ]
    cost = pl.CostEstimate(
        flops=g.tokens * g.dim * (2 * (others + 2) + 6 * g.heads * (position + 1)),
        bytes_accessed=g.tokens
        * (2 * g.dim * (position + 4 + len(given)) + 4 * (position + 1 + (1 + len(given) // 2) * g.heads))
        + 4 * g.heads * g.dim,
        transcendentals=g.tokens * g.heads * (others + 2),
    )
    *made, out = call(
        g,
        kernel,
        MERGE,
        site,
        inputs,
        outputs,
        [float32(others + 1, g.heads, g.tile), float32(g.dim, g.tile), float32(1, g.tile)],
        aliases={1: 0, 2: 1, 3: 2, 4: 3},
        cost=cost,
    )
    return Buffers(*made), out
