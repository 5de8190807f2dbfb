"""The forward Pallas TPU kernel: each source read once, softmax over depth online, a chunk of sources at a time."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mhar_kernels.pallas_common import Inputs, Layout, load_entries, rest_of, source_tile, store_entries
from mhar_kernels.pallas_float16 import storage, to_float32, to_storage
from mhar_kernels.pallas_heads import Heads, lane_tile
from mhar_kernels.pallas_ring import Ref, Ring, SourceRefs
from mhar_kernels.pallas_scores import Logits, exponentials, largest

KERNEL = "depth_route_forward"


@dataclass(frozen=True)
class _Outputs:
    out: Ref  # [1, rows, D]
    stats: Ref  # [1, rows, 2H]: the reference logit m, and the log of the sum of exp(logit - m)
    mix: Ref  # [1, rows, D] storage dtype, before gate and residual
    rest: Ref  # [1, rows, D] int16: what rounding took from the mix
    weights: Ref  # [1, N(+1), rows, H]


@dataclass(frozen=True)
class _Scratch:
    buffer: Ref  # [slots, chunk, rows, D] storage dtype
    mix: Ref  # [rows, D] float32, times the softmax's sum
    top: Ref  # entries: largest logit so far
    total: Ref  # entries: sum of exp(logit - top)
    top_low: Ref  # entries: the low part of `top`, of pairs
    tops: Ref  # [chunks, rows, H or 2H]: `top` after each chunk, which its part of `weights` is relative to


def forward_call(layout: Layout, inputs: Inputs, keep: tuple[str, ...]) -> list[jax.Array]:
    """out [G, T, D], stats [G, T, 2H]; of mix and rest [G, T, D] those to keep; weights [G, N(+1), T, H] if asked for.

    D is padded.
    """
    call, plan, dim = layout.call, layout.plan, layout.heads.padded
    rows, heads = plan.rows, call.num_heads
    tokens = (layout.groups, call.tokens)
    shapes: list[tuple[tuple[int, ...], str]] = [((*tokens, dim), call.dtype), ((*tokens, 2 * heads), "float32")]
    specs = [layout.row_spec(dim), layout.row_spec(2 * heads)]
    for name in keep:
        shapes.append(((*tokens, dim), call.dtype if name == "mix" else "int16"))
        specs.append(layout.row_spec(dim))
    if call.return_weights:
        shapes.append(((layout.groups, call.rows, call.tokens, heads), "float32"))
        specs.append(layout.depth_spec(call.rows, heads))
    scratch = [
        pltpu.VMEM((plan.slots, plan.chunk, rows, dim), storage(call.dtype)),
        pltpu.VMEM((rows, dim), jnp.float32),
        *[pltpu.VMEM(layout.heads.entries_shape(rows), jnp.float32)] * (2 + layout.exact),
        pltpu.SemaphoreType.DMA((plan.slots,)),
    ]
    if call.return_weights:
        scratch.append(pltpu.VMEM((plan.chunks, rows, heads * (1 + layout.exact)), jnp.float32))

    def kernel(given: Inputs, outs: Sequence[Ref], temporaries: Sequence[Ref]) -> None:
        out, stats, *optional = outs
        kept = {name: optional.pop(0) if name in keep else None for name in ("mix", "rest")}
        outputs = _Outputs(out, stats, weights=optional.pop(0) if call.return_weights else None, **kept)
        left = list(temporaries)
        buffer, acc, top, total = (left.pop(0) for _ in range(4))
        top_low = left.pop(0) if layout.exact else None
        semaphores = left.pop(0)
        scratch = _Scratch(buffer, acc, top, total, top_low, left.pop(0) if left else None)
        _kernel(layout, given, outputs, scratch, semaphores)

    return layout.run(kernel, KERNEL, inputs, shapes, specs, scratch, _cost(layout, keep))


def _kernel(layout: Layout, given: Inputs, outputs: _Outputs, scratch: _Scratch, semaphores: Ref) -> None:
    call, plan = layout.call, layout.plan
    tile, first_tile, tiles = layout.core_tiles()
    sources = SourceRefs(given.sources, call.stacked, layout.source_group(), plan.rows)
    ring = Ring(plan, scratch.buffer, first_tile, tiles)

    @pl.when(tile == 0)
    def _():
        ring.load_first(sources, semaphores)

    @pl.when(tile < tiles)
    def _():
        def chunk(index, count):
            item = tile * plan.chunks + index
            known = isinstance(index, int)
            ring.wait(sources, semaphores, item, count)
            _mix_chunk(layout, given, outputs, scratch, jax.lax.rem(item, plan.slots), index, count)
            ring.load(sources, semaphores, item + plan.slots, plan.chunk_after(index, plan.slots) if known else None)

        chunk(0, plan.first)
        plan.later_chunks(lambda index: chunk(index, plan.chunk))
        _finish(layout, given, outputs, scratch)


def _mix_chunk(layout, given, outputs, scratch, slot, index, count):
    """Scores the `count` sources of one chunk and adds them to the running softmax and mix; chunk 0 starts these."""
    call, plan, heads = layout.call, layout.plan, layout.heads
    membership = given.membership()
    scorer = layout.scorer(given, membership)
    is_first = isinstance(index, int)

    def visit(rows: pl.Slice) -> None:
        values = [source_tile(scratch.buffer, slot, i, rows) for i in range(count)]
        scores = [scorer.score(value) for value in values]
        logits = [score.logits for score in scores]
        if is_first and call.has_null:
            values.insert(0, lambda t: given.null[0, 0:1, lane_tile(t)])
            logits.insert(0, layout.null_logit(given))

        old_top = None if is_first else _load_top(scratch, rows)
        top = largest(logits if old_top is None else [old_top, *logits])
        weights = [exponentials(x, top) for x in logits]
        total = [functools.reduce(jnp.add, of_head) for of_head in zip(*weights, strict=True)]
        rescale = None
        if old_top is not None:
            scale = exponentials(old_top, top)
            old_total = load_entries(scratch.total, rows)
            total = [new + old * x for new, old, x in zip(total, old_total, scale, strict=True)]
            rescale = heads.spread(scale, membership)
        _store_top(scratch, rows, top)
        store_entries(scratch.total, rows, total)
        if outputs.weights is not None:
            scratch.tops[index, rows, :] = _pack_top(heads, top)
            offset = 0 if is_first else call.has_null + plan.first_source(index)
            for i, weight in enumerate(weights):
                outputs.weights[0, offset + i, rows, :] = heads.pack(weight)

        spread = [heads.spread(w, membership) for w in weights]
        for t in range(heads.tiles):
            mix = None if rescale is None else scratch.mix[rows, lane_tile(t)] * rescale(t)
            for weight, value in zip(spread, values, strict=True):
                term = weight(t) * value(t)
                mix = term if mix is None else mix + term
            scratch.mix[rows, lane_tile(t)] = mix

    layout.each_group(visit)


def _load_top(scratch: _Scratch, rows: pl.Slice) -> Logits:
    low = None if scratch.top_low is None else load_entries(scratch.top_low, rows)
    return load_entries(scratch.top, rows), low


def _store_top(scratch: _Scratch, rows: pl.Slice, top: Logits) -> None:
    store_entries(scratch.top, rows, top[0])
    if top[1] is not None:
        store_entries(scratch.top_low, rows, top[1])


def _pack_top(heads: Heads, top: Logits) -> jax.Array:
    return heads.pack(top[0]) if top[1] is None else heads.pack(top[0], top[1])


def _finish(layout: Layout, given: Inputs, outputs: _Outputs, scratch: _Scratch) -> None:
    """Divides by the softmax's sum, applies gate and residual, rounds once."""
    call, plan, heads = layout.call, layout.plan, layout.heads
    membership = given.membership()

    def visit(rows: pl.Slice) -> None:
        top, total = _load_top(scratch, rows), load_entries(scratch.total, rows)
        # Relative to the high part alone, as the backward kernel wants it.
        logs = [jnp.log(x) for x in total]
        logs = logs if top[1] is None else [x + low for x, low in zip(logs, top[1], strict=True)]
        outputs.stats[0, rows, : call.num_heads] = heads.pack(top[0])
        outputs.stats[0, rows, call.num_heads :] = heads.pack(logs)
        inverse = heads.spread([1.0 / x for x in total], membership)
        for t in range(heads.tiles):
            mix = scratch.mix[rows, lane_tile(t)] * inverse(t)
            if outputs.mix is not None:
                outputs.mix[0, rows, lane_tile(t)] = to_storage(mix, outputs.mix.dtype)
            if outputs.rest is not None:
                outputs.rest[0, rows, lane_tile(t)] = rest_of(mix, call.dtype)
            if given.gate is not None:
                mix = mix * given.gate[0]
            if given.residual is not None:
                mix = mix + to_float32(given.residual[0, rows, lane_tile(t)])
            outputs.out[0, rows, lane_tile(t)] = to_storage(mix, outputs.out.dtype)

        if outputs.weights is not None:
            packed_top, packed_total = _pack_top(heads, top), heads.pack(total)

            def normalise(index, start, count):
                past = scratch.tops[index, rows, :] - packed_top
                if layout.exact:
                    past = past[:, : call.num_heads] + past[:, call.num_heads :]
                factor = jnp.exp(past) / packed_total
                for i in range(count):
                    outputs.weights[0, start + i, rows, :] = outputs.weights[0, start + i, rows, :] * factor

            normalise(0, 0, plan.first + call.has_null)

            plan.later_chunks(lambda i: normalise(i, call.has_null + plan.first_source(i), plan.chunk))

    layout.each_group(visit)


def _cost(layout: Layout, keep: tuple[str, ...]) -> pl.CostEstimate:
    """A feature of a source takes a square, a product with the query and one with its weight, each added up."""
    call = layout.call
    rows = layout.groups * layout.num_tiles * layout.plan.rows
    size = jnp.dtype(call.dtype).itemsize
    per_feature = (call.num_sources + 1 + call.has_residual + len(keep)) * size
    per_head = 8 + 4 * call.rows * call.return_weights
    return pl.CostEstimate(
        flops=6 * rows * call.dim * call.rows,
        bytes_accessed=rows * (call.dim * per_feature + call.num_heads * per_head),
        transcendentals=rows * (call.rows * (call.num_heads + 1) + call.num_heads),
    )
