"""Depth routing on TPU: Pallas Mosaic kernels, forward and backward (README.md, "Pallas TPU").

This module checks what can run, lays the arrays out for the kernels and puts the pieces of their results together.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mhar_kernels import batching, twofloat
from mhar_kernels.contract import RouteArrays, RouteCall, RouteForward, RouteGrads, RouteSaved
from mhar_kernels.pallas_backward import backward_call
from mhar_kernels.pallas_common import Inputs, Layout
from mhar_kernels.pallas_forward import forward_call
from mhar_kernels.pallas_heads import Heads
from mhar_kernels.pallas_plan import (
    MIB,
    NAME,
    Plan,
    backward_plan,
    capacity,
    forward_plan,
    kept_arrays,
    sublanes,
)
from mhar_kernels.twofloat import Pair

__all__ = ["NAME", "backward", "forward", "heuristic", "unsupported"]
LARGEST_DIM = 16384


class Statistics(NamedTuple):
    """What the forward kernel leaves for the backward kernel beside the mix."""

    softmax: jax.Array  # [T, 2H] float32: the reference logit m, and the log of the sum of exp(logit - m)
    rest: jax.Array | None  # [T, D] int16: what rounding took from the mix, where the backward pass reads that


def unsupported(call: RouteCall) -> str | None:
    """Why the call cannot run here and what would work; None if it can."""
    if call.dtype not in ("float32", "bfloat16", "float16"):
        return f"it stores float32, bfloat16 or float16, not {call.dtype}; implementation='xla' takes {call.dtype}"
    if not call.interpret and call.platform != "tpu":
        return (
            f"it is compiled for TPU and this call runs on {call.platform}; "
            "interpret=True runs it anywhere, slowly, and implementation='xla' runs everywhere"
        )
    if call.dim > LARGEST_DIM:
        return f"it takes a width D of at most {LARGEST_DIM}, got {call.dim}; implementation='xla' takes any width"
    if dict(call.tile or ()).get("sweeps", 1) > 2:
        return f"tile 'sweeps' must be 1 or 2, got {dict(call.tile or ())['sweeps']}"
    for plan in (forward_plan(call), backward_plan(call)):
        if plan.rows % 8 or (not call.interpret and plan.rows % sublanes(call)):
            return f"tile rows must be a multiple of {sublanes(call)} for {call.dtype}, got {plan.rows}"
        if plan.vmem_bytes > capacity(call):
            return (
                f"its tile would take {plan.vmem_bytes / MIB:.1f} MiB of VMEM, more than {capacity(call) / MIB:.1f}; "
                "pass a smaller tile={'rows': ..., 'chunk': ...} or none, or implementation='xla'"
            )
    return None


class Tile(NamedTuple):
    """Sizes that decide a forward kernel's speed, not its result."""

    rows: int  # tokens
    chunk: int  # sources


class BackwardTile(NamedTuple):
    """Of a backward kernel; the forward kernel keeps what that many sweeps need."""

    rows: int
    chunk: int
    sweeps: int


def heuristic(call: RouteCall, direction: str) -> Tile | BackwardTile:
    """The tile that a call gets by itself."""
    if direction == "forward":
        plan = forward_plan(call)
        return Tile(plan.rows, plan.chunk)
    plan = backward_plan(call)
    return BackwardTile(plan.rows, plan.chunk, 2 if plan.resident else 1)


def forward(call: RouteCall, arrays: RouteArrays) -> RouteForward:
    """One pass over the sources."""
    call, arrays = _without_empty_stack(call, arrays)
    keep = kept_arrays(call)

    def kernel(layout: Layout, inputs: Inputs) -> _Pieces:
        return forward_call(layout, inputs, keep), []

    (out, stats, *rest), _ = _run(call, forward_plan(call), kernel, _inputs(call, arrays, residual=arrays.residual))
    kept = {name: rest.pop(0)[:, : call.dim] for name in keep}
    weights = rest.pop(0) if call.return_weights else None
    statistics = Statistics(stats, kept.get("rest"))
    return RouteForward(out[:, : call.dim], kept.get("mix"), statistics, weights)


def backward(
    call: RouteCall, arrays: RouteArrays, saved: RouteSaved, d_out: jax.Array, d_weights: jax.Array | None
) -> RouteGrads:
    """One more pass over the sources. Sums over tokens are float32 in two stages, in a fixed order: eight rows a core
    inside the kernel, then the sum of these."""
    full_call = call
    call, arrays = _without_empty_stack(call, arrays)
    plan = backward_plan(call)
    statistics: Statistics = saved.lse
    given: dict[str, jax.Array | None] = {"d_out": d_out, "stats": statistics.softmax}
    if not plan.resident:
        given.update(mix=saved.mix, rest=statistics.rest)
    if d_weights is not None:
        assert saved.weights is not None
        given.update(d_weights=d_weights, shift=jnp.sum(saved.weights * d_weights, axis=0))

    def kernel(layout: Layout, inputs: Inputs) -> _Pieces:
        made = backward_call(layout, inputs)
        return made[: len(inputs.sources)], [jnp.sum(x, axis=(1, 2)) for x in made[len(inputs.sources) :]]

    d_sources, sums = _run(call, plan, kernel, _inputs(call, arrays, **given))
    d_sources = [x[..., : call.dim] for x in d_sources]
    d_query, d_null, d_gate = sums.pop(0)[: call.dim], None, None
    if arrays.null_source is not None:
        d_null_mixed, d_logit = sums.pop(0)[: call.dim], sums.pop(0)
        logit, inverse_rms = _null_logit(call, arrays)
        d_key = jnp.repeat(d_logit * inverse_rms, call.head_dim)
        along = inverse_rms**2 / call.dim * jnp.sum(d_logit * logit.high)
        d_null = d_null_mixed + d_key * arrays.query - along * arrays.null_source
        d_query = d_query + d_key * arrays.null_source
    if arrays.gate is not None:
        d_gate = jnp.sum(sums.pop(0))
    return RouteGrads(
        sources=_like(full_call, d_sources),
        query=d_query,
        null_source=d_null,
        residual=None if arrays.residual is None else d_out,
        gate=d_gate,
    )


_Pieces = tuple[list[jax.Array], list[jax.Array]]  # arrays by token, [G, .., T, width], and sums over tokens [G, width]


def _run(call: RouteCall, plan: Plan, kernel: Callable[[Layout, Inputs], _Pieces], inputs: Inputs) -> _Pieces:
    """The kernel over all tokens and, under vmap, over all groups; the results without the axis of groups."""

    def whole(inputs: Inputs) -> _Pieces:
        full = call.tokens // plan.rows
        parts = []
        if full:
            parts.append(kernel(_layout(call, plan, inputs, full), inputs))
        if left := call.tokens % plan.rows:
            # The tokens after the last full tile, in a tile of their own: the one copy made, and of a tile at most.
            rows = -(-left // sublanes(call)) * sublanes(call)
            last = _last_tokens(inputs, full * plan.rows, left, rows)
            last_call = replace(call, tokens=rows)
            parts.append(kernel(_layout(last_call, plan.for_rows(rows, sublanes(call)), last, 1), last))
        by_token, sums = parts[0]
        if len(parts) == 2:
            at = full * plan.rows
            by_token = [a.at[..., at:, :].set(b[..., :left, :]) for a, b in zip(by_token, parts[1][0], strict=True)]
            sums = [a + b for a, b in zip(sums, parts[1][1], strict=True)]
        elif not full:
            by_token = [a[..., :left, :] for a in by_token]
        return by_token, sums

    return jax.tree.map(lambda x: x[0], _over_groups(whole)(inputs))


def _over_groups(whole: Callable[[Inputs], _Pieces]) -> Callable[[Inputs], _Pieces]:
    """Under vmap the axis of groups grows by the mapped one, which the kernel's grid walks; nested maps likewise."""

    @jax.custom_batching.custom_vmap
    def run(inputs: Inputs) -> _Pieces:
        return whole(inputs)

    @run.def_vmap
    def over(size: int, is_mapped: list[Inputs], inputs: Inputs):
        (mapped,) = is_mapped
        if size == 0:
            none = batching.of_none(run, [mapped], [inputs])
            return none, jax.tree.map(lambda _: True, none)
        if any(mapped.sources):  # all share one axis
            sources = tuple(
                s if m else jnp.broadcast_to(s, (size, *s.shape))
                for s, m in zip(inputs.sources, mapped.sources, strict=True)
            )
            inputs = replace(inputs, sources=sources)
            mapped = replace(mapped, sources=tuple(True for _ in sources))
        pairs = list(zip(jax.tree.leaves(inputs), jax.tree.leaves(mapped), strict=True))
        groups = max(x.shape[1 if m else 0] for x, m in pairs)

        def merge(x: jax.Array, along: bool) -> jax.Array:
            if not along and x.shape[0] == 1:
                return x  # shared by all
            if not along:
                x = jnp.broadcast_to(x, (size, *x.shape))
            return jnp.broadcast_to(x, (size, groups, *x.shape[2:])).reshape(size * groups, *x.shape[2:])

        out = run(jax.tree.map(merge, inputs, mapped))
        out = jax.tree.map(lambda x: x.reshape(size, groups, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return run


def _layout(call: RouteCall, plan: Plan, inputs: Inputs, num_tiles: int) -> Layout:
    groups = max(x.shape[0] for x in jax.tree.leaves(inputs))
    grouped = frozenset(
        name for name, value in vars(inputs).items() if any(x.shape[0] == groups > 1 for x in jax.tree.leaves(value))
    )
    return Layout(call, plan, Heads(call.dim, call.num_heads), groups, grouped, num_tiles)


def _last_tokens(inputs: Inputs, start: int, count: int, rows: int) -> Inputs:
    """`count` tokens from `start`, and padding up to `rows` with zero gradients and nothing infinite on the way."""

    def padded(x: jax.Array | None, fill: float) -> Any:
        if x is None:
            return None
        widths = [(0, 0)] * (x.ndim - 2) + [(0, rows - count), (0, 0)]
        return jnp.pad(x[..., start : start + count, :], widths, constant_values=fill)

    return replace(
        inputs,
        sources=tuple(padded(s, 1.0) for s in inputs.sources),
        stats=padded(inputs.stats, float(jnp.finfo(jnp.float32).max)),  # no logit is larger: weights of exp(-inf)
        **{k: padded(getattr(inputs, k), 0.0) for k in ("residual", "d_out", "mix", "rest", "shift", "d_weights")},
    )


def _inputs(call: RouteCall, arrays: RouteArrays, **by_token: jax.Array | None) -> Inputs:
    """The kernel's inputs, with an axis of one group in front and rows padded to whole lane tiles."""
    heads = Heads(call.dim, call.num_heads)

    def wide(x: jax.Array) -> jax.Array:
        extra = heads.padded - call.dim
        return (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)]) if extra else x)[None]

    query = [arrays.query]
    if call.dtype == "float32":
        query.append(jnp.zeros_like(arrays.query) if arrays.query_low is None else arrays.query_low)
    null = None
    if arrays.null_source is not None:
        null = wide(arrays.null_source[None]), jnp.stack(_null_logit(call, arrays)[0])[None]
    rows = {
        k: wide(x) if x.shape[-1] == call.dim and k in _WIDE else x[None] for k, x in by_token.items() if x is not None
    }
    return Inputs(
        query=wide(jnp.stack(query)),
        sources=tuple(wide(s) for s in jax.tree.leaves(arrays.sources)),
        members=heads.membership()[None] if heads.on_matrix_unit else None,
        null=None if null is None else null[0],
        null_logit=None if null is None else null[1],
        gate=None if arrays.gate is None else arrays.gate.reshape(1, 1, 1),
        **rows,
    )


_WIDE = ("residual", "d_out", "mix", "rest")


def _null_logit(call: RouteCall, arrays: RouteArrays) -> tuple[Pair, jax.Array]:
    """The null source's logits [H] as pairs and its inverse RMS []: the same for every token."""
    null, query = arrays.null_source, arrays.query
    assert null is not None
    mean_square = twofloat.divide(twofloat.sum_last(twofloat.two_prod(null, null)), call.dim)
    inverse_rms = twofloat.inverse_rms(mean_square, call.eps)
    terms = twofloat.two_prod(null, query)
    if arrays.query_low is not None:
        terms = Pair(terms.high, terms.low + null * arrays.query_low)
    slices = Pair(*(x.reshape(call.num_heads, call.head_dim) for x in terms))
    shape = (call.num_heads,)
    logit = twofloat.multiply(twofloat.sum_last(slices), Pair(*(jnp.broadcast_to(x, shape) for x in inverse_rms)))
    return logit, inverse_rms.high


def _without_empty_stack(call: RouteCall, arrays: RouteArrays) -> tuple[RouteCall, RouteArrays]:
    """A stacked array of no sources as a sequence of none, which needs no reference."""
    if call.num_sources or not call.stacked:
        return call, arrays
    return replace(call, stacked=False), arrays._replace(sources=())


def _like(call: RouteCall, d_sources: list[jax.Array]) -> Any:
    if not call.stacked:
        return tuple(d_sources)
    return d_sources[0] if d_sources else jnp.zeros((0, call.tokens, call.dim), call.dtype)
