"""The stages of the depth-blocked schedule on TPU, for bfloat16 storage. `schedule.py` says when each one runs.

Inside, tokens are one axis, the last, and are padded to whole tiles (`pallas_stage_layout.py` says why the last).
Histories are buffers of full depth, taken over from call to call; what is not yet written in them is never used. The
kernels: `pallas_stage_forward.py`, `pallas_stage_backward.py`.

Logits are made again wherever a source is read: on the matrix unit they cost less than moving them would. What a pass
over the other blocks leaves for its own block is float32: what sources have in common cancels in the gradient of a
query, and one feature far above the others of its head must not take their digits.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mhar_kernels import pre_norm
from mhar_kernels.pallas_stage_backward import Cotangents, Pulled, finish_call, pull_call, sites_at_once
from mhar_kernels.pallas_stage_forward import Buffers, Partial, merge_call, mix_call, sources_at_once
from mhar_kernels.pallas_stage_layout import LANES, MIB, VMEM_BUDGET, Geometry
from mhar_kernels.schedule import Plan

LARGEST_BLOCK = 16
_MOST_LOGITS = 512  # rows of logits of one block of sites; beyond that the vector unit would be quicker


class History(NamedTuple):
    """All sources so far and what is known of them."""

    buffers: Buffers
    queries: jax.Array  # [N, heads, D] float32: each head's effective query, zero outside its features


class Later(NamedTuple):
    """What the sites left so far gave back."""

    cotangents: Cotangents
    d_queries: tuple[jax.Array, ...]  # partial sums [cores, sites, D], one a call, in the order of `_query_sites`


def unsupported(dtype: str, dim: int, num_heads: int, block_size: int, *, interpret: bool) -> str | None:
    """Why the stages cannot run a stack, which then runs site by site; None if they can."""
    if dtype != "bfloat16":
        return f"they store bfloat16, not {dtype}"
    geometry = Geometry.of(1, 1, dim, num_heads, 0.0, interpret)
    if block_size > LARGEST_BLOCK or block_size * geometry.heads > _MOST_LOGITS:
        return f"{block_size} sites of {num_heads} heads a block are more than they handle at once"
    if interpret:
        return None
    if dim % LANES or geometry.width % 16:
        return f"they take a width of whole lane tiles and heads of a multiple of 16, got {dim} and {geometry.width}"
    chunk = sites_at_once(block_size)
    # Of `pull`, the largest: the block's sources, a chunk of cotangents and the float32 result, twice; temporaries.
    needed = dim * LANES * (2 * 2 * (block_size + chunk) + (2 * 4 + 8) * block_size)
    if needed > VMEM_BUDGET:
        return f"a block of {block_size} sources of width {dim} takes {needed // MIB} MiB of VMEM"
    return None


def start(plan: Plan, x: jax.Array, queries: jax.Array, low: jax.Array | None) -> History:
    """See `schedule.Stages`."""
    del low  # what float32 loses of a query is far below what bfloat16 loses of a source
    g, n = _geometry(plan, x), plan.num_sites
    head, feature = jnp.arange(g.heads)[:, None], jnp.arange(g.dim)[None]
    own = feature // g.width == head
    buffers = Buffers(
        sources=jax.lax.empty((n, g.dim, g.tokens), x.dtype),
        inverse_rms=jax.lax.empty((n, 1, g.tokens), jnp.float32),
        lse=jax.lax.empty((n, g.heads, g.tokens), jnp.float32),
        rest=jax.lax.empty((n, g.dim, g.tokens), jnp.int16),
    )
    return History(buffers, jnp.where(own[None], queries[:, None, :], 0.0))


def mix(plan: Plan, history: History, block: range) -> Partial:
    """See `schedule.Stages`."""
    g = _geometry_of(plan, history)
    return _mix(g, block, sources_at_once(plan.block_size), history)


def merge(
    plan: Plan,
    history: History,
    site: int,
    source: jax.Array,
    outside: Partial | None,
    norm: jax.Array | None,
    fresh: bool = True,
) -> tuple[History, jax.Array, jax.Array]:
    """See `schedule.Stages`."""
    g = _geometry(plan, source)
    position = site - plan.block_of(site).start
    buffers, out = _merge(g, position, history.buffers, history.queries, site, _flat(g, source), outside)
    mixed = _like(out, source)
    return history._replace(buffers=buffers), pre_norm.apply(mixed, norm, plan.norm_eps), mixed


def again(plan: Plan, history: History, after: jax.Array) -> History:
    """See `schedule.Stages`."""
    queries, _ = jax.lax.optimization_barrier((history.queries, after))
    return history._replace(queries=queries)


def source(plan: Plan, history: History, site: int, like: jax.Array) -> jax.Array:
    """See `schedule.Stages`."""
    return _like(history.buffers.sources[site].T, like)


def begin(plan: Plan, history: History) -> Later:
    """See `schedule.Stages`."""
    sources, lse = history.buffers.sources, history.buffers.lse
    return Later(Cotangents(jax.lax.empty(sources.shape, sources.dtype), jax.lax.empty(lse.shape, lse.dtype)), ())


def pull(plan: Plan, history: History, later: Later, block: range) -> tuple[Later, Pulled]:
    """See `schedule.Stages`."""
    g = _geometry_of(plan, history)
    pulled, d_query = _pull(g, block, sites_at_once(plan.block_size), history, later.cotangents)
    return later._replace(d_queries=(*later.d_queries, d_query)), pulled


def finish(
    plan: Plan,
    history: History,
    later: Later,
    site: int,
    read: jax.Array,
    kept: jax.Array,
    cotangent: jax.Array,
    outside: Pulled | None,
    norm: jax.Array | None,
) -> tuple[Later, jax.Array, jax.Array | None]:
    """See `schedule.Stages`."""
    cotangent, d_norm = pre_norm.pull(kept, norm, plan.norm_eps, cotangent)
    g, block = _geometry(plan, kept), plan.block_of(site)
    cotangents, d_source, d_query = _finish(
        g,
        site - block.start,
        block.stop - site,
        history.buffers,
        later.cotangents,
        history.queries,
        site,
        _flat(g, kept),
        _flat(g, cotangent),
        outside,
    )
    return Later(cotangents, (*later.d_queries, d_query)), _like(d_source, cotangent), d_norm


def query_gradient(plan: Plan, history: History, later: Later) -> jax.Array:
    """See `schedule.Stages`. The kernels have added up their tokens; this adds up cores and calls."""
    n, dim = plan.num_sites, history.queries.shape[-1]
    total = jnp.zeros((n, dim), jnp.float32)
    for first, d_query in zip(_query_sites(plan), later.d_queries, strict=True):
        rows = jnp.sum(d_query, axis=0)[: n - first]
        total = total.at[first : first + len(rows)].add(rows)
    return total


def _query_sites(plan: Plan) -> list[int]:
    """The first site of each call's query gradient, in the order of the backward pass."""
    firsts = []
    for block in reversed(plan.blocks()):
        firsts += [block.stop] * (block.stop < plan.num_sites)
        firsts += reversed(block)
    return firsts


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _mix(g: Geometry, block: range, chunk: int, history: History) -> Partial:
    return mix_call(g, history.buffers, history.queries, block, chunk)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _pull(g: Geometry, block: range, chunk: int, history: History, later: Cotangents) -> tuple[Pulled, jax.Array]:
    return pull_call(g, history.buffers, later, history.queries, block, chunk)


# A site's kernels depend on its place in its block alone; its number is an argument, so each kind is traced once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _merge(g: Geometry, position: int, buffers: Any, queries: Any, site: Any, source: Any, outside: Any):
    return merge_call(g, buffers, queries, site, position, source, outside)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _finish(
    g: Geometry,
    position: int,
    sites: int,
    buffers: Any,
    later: Any,
    queries: Any,
    site: Any,
    mix: Any,
    cotangent: Any,
    outside: Any,
):
    return finish_call(g, buffers, later, queries, site, position, sites, mix, cotangent, outside)


def _geometry(plan: Plan, x: jax.Array) -> Geometry:
    dim = x.shape[-1]
    return Geometry.of(plan.num_sites, x.size // dim, dim, plan.num_heads, plan.eps, plan.interpret)


def _geometry_of(plan: Plan, history: History) -> Geometry:
    _, dim, tokens = history.buffers.sources.shape
    return Geometry.of(plan.num_sites, tokens, dim, plan.num_heads, plan.eps, plan.interpret)


def _flat(g: Geometry, x: jax.Array) -> jax.Array:
    """[T, D] of [..., D], padded to whole tiles by rows of zeros, whose gradients are zero."""
    rows = x.reshape(-1, g.dim)
    extra = g.tokens - rows.shape[0]
    return jnp.pad(rows, ((0, extra), (0, 0))) if extra else rows


def _like(rows: jax.Array, x: jax.Array) -> jax.Array:
    """[..., D] of [T, D], as x."""
    return rows[: x.size // x.shape[-1]].reshape(x.shape)
