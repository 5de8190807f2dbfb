"""The stages of the depth-blocked schedule on GPUs, through jax-triton: launches of the kernels in `triton_stage_*.py`.

`schedule.Stages` says what each stage is for. Tokens are flattened to one axis [T]. Histories live in buffers of full
depth that kernels write in place; the first kernel that writes a buffer makes it. 16-bit storage only.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mhar_kernels import pre_norm, traffic, triton_stage_calls, triton_stage_rows
from mhar_kernels.rounding import as_two
from mhar_kernels.schedule import Plan
from mhar_kernels.triton_stage_calls import Shape, call, unused

# Time a row of each stage, in units of a row at copy bandwidth, as measured on an H200 (README.md). From these
# `traffic.best_block_size` finds S.
COSTS = traffic.Rows(mix=1.7, merge=1.3, pull=2.2, finish=1.85, query=1.7)
# Steps in flight through shared memory, by kernel.
_STAGES = {"merge": 3, "finish": 3}


class History(NamedTuple):
    """All sources so far, and what is known of them."""

    queries: jax.Array  # float32 [N, D], effective
    high: jax.Array  # [N, D] in the storage dtype: the queries, and
    low: jax.Array  # what that rounding took
    sources: jax.Array | None  # [N, T, D]
    inverse_rms: jax.Array | None  # float32 [T, NP]
    lse: jax.Array | None  # float32 [T, H, NP]
    logits: jax.Array | None  # float32 [T, N, S, H]: site, source counted from the start of the site's block


class Read(NamedTuple):
    """What `finish` needs of a site beside what was read there."""

    rest: jax.Array  # `Shape.rest`: what rounding took from that; Δ would be off by as much as mixes are
    mix_rms: jax.Array  # float32 [T]: inverse RMS of the mix, where the kernel applies the norm
    mix: jax.Array | None  # [..., D], where the norm is not the kernel's


class Later(NamedTuple):
    """What the sites left so far gave back."""

    cotangents: jax.Array | None  # [N, T, D]
    deltas: jax.Array | None  # float32 [T, H, NP]
    keys: jax.Array | None  # float32 [T, H, N, NP]: dl r of each source and site


def supports(dtype, head_dim: int) -> bool:
    """Whether a stack runs by blocks: 16-bit storage, and heads wide enough that a number a pair is little beside them.

    float32 storage would need its products in float64; narrow heads would have more logits than features.
    """
    return dtype in (jnp.bfloat16, jnp.float16) and head_dim >= 16


def start(plan: Plan, x: jax.Array, queries: jax.Array, low: jax.Array | None) -> History:
    """See `schedule.Stages`."""
    del low  # only float32 storage has it
    return History(queries, *as_two(queries, x.dtype), None, None, None, None)


def merge(
    plan: Plan,
    history: History,
    site: int,
    source: jax.Array,
    outside,
    norm: jax.Array | None,
    fresh: bool = True,
) -> tuple[History, jax.Array, Read]:
    """See `schedule.Stages`."""
    shape = Shape.of(plan, source)
    fused = norm is not None and _fuses_norm(source.dtype)
    partial = outside if outside is not None else _no_partial()
    old = history[3:]
    *buffers, read, rest, mix_rms = call(
        shape,
        triton_stage_rows.merge_kernel,
        [
            source.reshape(shape.tokens, shape.dim),
            history.queries,
            _safe(norm if fused else None),
            *partial,
            *(unused(o.dtype) if a is None else a for a, o in zip(old, shape.history(plan.keep), strict=True)),
            shape.tokens,
            site,
            plan.block_of(site).start,
        ],
        [
            *shape.history(plan.keep),
            shape.row(),
            shape.rest() if plan.keep else _none(shape.rest().dtype),
            jax.ShapeDtypeStruct((shape.tokens,), jnp.float32) if plan.keep and fused else _none(jnp.float32),
        ],
        {
            **shape.rows(),
            "EPS": plan.eps,
            "NORM_EPS": plan.norm_eps,
            "NORM": fused,
            "KEEP": plan.keep,
            "OUTSIDE": outside is not None,
            "PACKED": shape.packed,
            "STAGES": _STAGES["merge"],
        },
        (shape.tokens,),
        warps=shape.row_warps,
        aliases={5 + i: i for i, a in enumerate(old) if a is not None},
    )
    history = History(*history[:3], *buffers)
    read = read.reshape(source.shape)
    if fused or norm is None:
        return history, read, Read(rest, mix_rms, None)
    return history, pre_norm.apply(read, norm, plan.norm_eps), Read(rest, mix_rms, read)


def mix(plan: Plan, history: History, block: range) -> list[jax.Array]:
    """See `schedule.Stages`: `Shape.partial`, with the log-sum-exp."""
    assert history.sources is not None
    shape = Shape.of(plan, history.sources[0])
    return triton_stage_calls.mix(
        shape, history.sources, history.inverse_rms, history.high, history.low, block.start, len(block)
    )


def again(plan: Plan, history: History, after: jax.Array) -> History:
    """See `schedule.Stages`."""
    queries, high, low, _ = jax.lax.optimization_barrier((*history[:3], after))
    history = history._replace(queries=queries, high=high, low=low)
    if history.lse is not None and history.lse.ndim == 1:
        return history._replace(lse=None, logits=None)  # nothing was kept in them
    return history


def source(plan: Plan, history: History, site: int, like: jax.Array) -> jax.Array:
    """See `schedule.Stages`."""
    assert history.sources is not None
    return history.sources[site].reshape(like.shape)


def begin(plan: Plan, history: History) -> Later:
    """See `schedule.Stages`."""
    return Later(None, None, None)


def pull(plan: Plan, history: History, later: Later, block: range) -> tuple[Later, Any]:
    """See `schedule.Stages`: `Shape.partial`, short of the term in the source's own direction, with Σ dl l."""
    assert history.sources is not None
    shape = Shape.of(plan, history.sources[0])
    keys, *partial = triton_stage_calls.pull(
        shape,
        history.sources,
        history.inverse_rms,
        history.high,
        history.low,
        history.lse,
        later.cotangents,
        later.deltas,
        later.keys,
        block.start,
        len(block),
        outputs=[shape.later()[2], *shape.partial()],
        aliases={7: 0},
    )
    return later._replace(keys=keys), tuple(partial)


def finish(
    plan: Plan,
    history: History,
    later: Later,
    site: int,
    read: jax.Array,
    kept: Read,
    cotangent: jax.Array,
    outside,
    norm: jax.Array | None,
) -> tuple[Later, jax.Array, jax.Array | None]:
    """See `schedule.Stages`."""
    shape, block = Shape.of(plan, read), plan.block_of(site)
    fused = norm is not None and kept.mix is None
    d_norm = None
    if fused:
        products = cotangent.astype(jnp.float32) * read.astype(jnp.float32)
        d_norm = jnp.sum(products, axis=tuple(range(read.ndim - 1))) / _safe(norm)
    elif kept.mix is not None:
        read = kept.mix
        cotangent, d_norm = pre_norm.pull(read, norm, plan.norm_eps, cotangent)
    partial = outside if outside is not None else _no_partial()
    first = site == plan.num_sites - 1
    *buffers, d_source = call(
        shape,
        triton_stage_rows.finish_kernel,
        [
            cotangent.reshape(shape.tokens, shape.dim),
            read.reshape(shape.tokens, shape.dim),
            kept.rest,
            kept.mix_rms,
            _safe(norm if fused else None),
            history.high,
            history.sources,
            history.inverse_rms,
            history.lse,
            history.logits,
            *partial,
            *(unused(o.dtype) if a is None else a for a, o in zip(later, shape.later(), strict=True)),
            shape.tokens,
            site,
            block.start,
            block.stop,
        ],
        [*shape.later(), shape.row()],
        {
            **shape.rows(),
            "NORM": fused,
            "OUTSIDE": outside is not None,
            "PACKED": shape.packed,
            "STAGES": _STAGES["finish"],
        },
        (shape.tokens,),
        warps=shape.row_warps,
        aliases={} if first else {12 + i: i for i in range(3)},
    )
    return Later(*buffers), d_source.reshape(read.shape), d_norm


def query_gradient(plan: Plan, history: History, later: Later) -> jax.Array:
    """See `schedule.Stages`."""
    assert history.sources is not None
    shape = Shape.of(plan, history.sources[0])
    return triton_stage_calls.query(shape, history.sources, later.keys, range(shape.depth))


def _fuses_norm(dtype) -> bool:
    """Whether what is read can stand for the mix: divided by a scale as small as may be, as bfloat16's range allows."""
    return dtype == jnp.bfloat16


def _safe(scale: jax.Array | None) -> jax.Array:
    """The norm's scale with no entry so small that what it scaled could not be found again; nothing in any sum."""
    if scale is None:
        return unused(jnp.float32)
    return jnp.where(jnp.abs(scale) < 1e-20, 1e-20, scale)


def _no_partial() -> tuple[jax.Array, ...]:
    """Stands for what a block's pass would leave, where there is none."""
    return unused(jnp.float32), unused(jnp.float32)


def _none(dtype) -> jax.ShapeDtypeStruct:
    """Of a result that a kernel does not write."""
    return jax.ShapeDtypeStruct((1,), dtype)


__all__ = ["again", "begin", "finish", "merge", "mix", "pull", "query_gradient", "source", "start"]
