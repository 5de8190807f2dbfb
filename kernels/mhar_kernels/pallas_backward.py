"""The backward Pallas TPU kernel: each source read once, its gradient written once.

The gradient of a logit needs Delta = <d_out, mix> of its head, a sum over all sources. A resident tile keeps its
sources in VMEM: a first sweep makes the weights and <d_out, s_n>, hence Delta in float32, a second sweep the gradients.
These weights are divided by their own sum: where a logit is large, rounding it differently than the forward kernel did
would put their sum off one, and Delta with it.
Otherwise the forward kernel has left the mix and, of 16-bit storage, what rounding took from it, and one sweep does
both. The rounded mix alone would not do: an error of 2^-9 in every logit's gradient makes the query's gradient a
thousand times less accurate than that of the xla implementation.

A source's gradient overwrites the source in its slot and is copied out from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mhar_kernels.pallas_common import HBM_SPEC, Inputs, Layout, load_entries, source_tile, store_entries, with_rest
from mhar_kernels.pallas_float16 import storage, to_float32, to_storage
from mhar_kernels.pallas_heads import Entries, Tile, fold_rows, lane_tile
from mhar_kernels.pallas_ring import Index, Ref, Ring, SourceRefs
from mhar_kernels.pallas_scores import Logits, exponentials

KERNEL = "depth_route_backward"


@dataclass(frozen=True)
class _Outputs:
    """Sums over tokens are eight rows a core, added up outside: [1, 1, 8, ...]."""

    sources: tuple[Ref, ...]  # as the inputs, in HBM
    query: Ref
    null_mixed: Ref  # sum of weight * gate * d_out, [.., D]
    null_logit: Ref  # sum of the logit's gradient, [.., H]
    gate: Ref  # sum of <d_out, mix>, [.., H]


@dataclass(frozen=True)
class _Scratch:
    buffer: Ref  # [slots, chunk, rows, D] sources, then their gradients
    top: Ref  # entries: the softmax's reference logit
    log_total: Ref  # entries: log of the sum of exp(logit - top)
    delta: Ref  # entries: <d_out, mix>; at last what the logits' gradients take off, with gate and d_weights
    weight_sum: Ref = None  # entries: sum of the weights, for a resident tile
    packed_delta: Ref = None  # [rows, H]: delta in its last form, for a resident tile
    packed_scale: Ref = None  # [rows, H]: 1 / weight_sum
    kept: Ref = None  # [N, rows, 3H + 1] of a resident tile: weight, <d_out, s> and logit a head; inverse RMS
    null_product: Ref = None  # entries: <d_out, null source>


def backward_call(layout: Layout, inputs: Inputs) -> list[jax.Array]:
    """Source gradients, then partial sums over tokens: query [G, cores, 8, D], and for a null source
    [G, cores, 8, D] and [G, cores, 8, H], and for a gate [G, cores, 8, H]."""
    call, plan, dim, heads = layout.call, layout.plan, layout.heads.padded, layout.call.num_heads
    tokens = (layout.groups, call.num_sources, call.tokens, dim) if call.stacked else (layout.groups, call.tokens, dim)
    num_refs = len(inputs.sources)
    widths = [dim, *([dim, heads] if call.has_null else []), *([heads] if call.has_gate else [])]
    shapes = [(tokens, call.dtype)] * num_refs + [(layout.partial_shape(w), "float32") for w in widths]
    specs = [HBM_SPEC] * num_refs + [layout.partial_spec(w) for w in widths]
    entries = pltpu.VMEM(layout.heads.entries_shape(plan.rows), jnp.float32)
    temporaries = {
        "buffer": pltpu.VMEM((plan.slots, plan.chunk, plan.rows, dim), storage(call.dtype)),
        **dict.fromkeys(("top", "log_total", "delta"), entries),
    }
    if call.has_null:
        temporaries["null_product"] = entries
    if plan.resident:
        temporaries["weight_sum"] = entries
        temporaries |= dict.fromkeys(("packed_delta", "packed_scale"), pltpu.VMEM((plan.rows, heads), jnp.float32))
        temporaries["kept"] = pltpu.VMEM((max(1, call.num_sources), plan.rows, 3 * heads + 1), jnp.float32)
    semaphores = [pltpu.SemaphoreType.DMA((plan.slots,))] * 2

    def kernel(given: Inputs, outs: Sequence[Ref], rest: Sequence[Ref]) -> None:
        sums = list(outs[num_refs:])
        query = sums.pop(0)
        null_mixed, null_logit = (sums.pop(0), sums.pop(0)) if call.has_null else (None, None)
        outputs = _Outputs(
            tuple(outs[:num_refs]), query, null_mixed, null_logit, sums.pop(0) if call.has_gate else None
        )
        scratch = _Scratch(**dict(zip(temporaries, rest, strict=False)))
        _Pass(layout, given, outputs, scratch).run(*rest[len(temporaries) :])

    return layout.run(kernel, KERNEL, inputs, shapes, specs, [*temporaries.values(), *semaphores], _cost(layout))


@dataclass(frozen=True)
class _Pass:
    layout: Layout
    given: Inputs
    outputs: _Outputs
    scratch: _Scratch

    def run(self, loaded: Ref, stored: Ref) -> None:
        layout, plan, call = self.layout, self.layout.plan, self.layout.call
        tile, first_tile, tiles = layout.core_tiles()
        group = layout.source_group()
        sources = SourceRefs(self.given.sources, call.stacked, group, plan.rows)
        gradients = SourceRefs(self.outputs.sources, call.stacked, layout.output_group(), plan.rows)
        ring = Ring(plan, self.scratch.buffer, first_tile, tiles)
        start = tile * plan.chunks

        @pl.when(tile == 0)
        def _():
            for ref in (self.outputs.query, self.outputs.null_mixed, self.outputs.null_logit, self.outputs.gate):
                if ref is not None:
                    ref[...] = jnp.zeros(ref.shape, ref.dtype)
            ring.load_first(sources, loaded)

        def score(index, count):
            item = start + index
            ring.wait(sources, loaded, item, count)
            self._score_chunk(jax.lax.rem(item, plan.slots), plan.first_source(index), count)

        def differentiate(index, count):
            item = start + index
            if not plan.resident:
                ring.wait(sources, loaded, item, count)
            self._differentiate_chunk(jax.lax.rem(item, plan.slots), plan.first_source(index), count)
            known = isinstance(index, int)
            ring.store(gradients, stored, item, index if known else None)

            # The slot of the chunk before is free once its gradients are out.
            @pl.when(item > 0)
            def _():
                ring.wait_stored(gradients, stored, item - 1, plan.chunk_after(index, -1) if known else None)
                following = plan.chunk_after(index, plan.slots - 1) if known else None
                ring.load(sources, loaded, item - 1 + plan.slots, following)

        def each_chunk(visit):
            if call.num_sources:
                visit(0, plan.first)
            plan.later_chunks(lambda index: visit(index, plan.chunk))

        @pl.when(tile < tiles)
        def _():
            self._start_delta()
            if plan.resident:
                each_chunk(score)
            self._finish_delta()
            each_chunk(differentiate)

        if call.num_sources:

            @pl.when(tile == tiles - 1)
            def _():
                ring.wait_stored(gradients, stored, start + plan.chunks - 1, plan.chunks - 1)

    def _d_out(self, rows: pl.Slice) -> Tile:
        return lambda t: to_float32(self.given.d_out[0, rows, lane_tile(t)])

    def _weights(self, rows: pl.Slice, logits: Logits) -> Entries:
        top, log_total = load_entries(self.scratch.top, rows), load_entries(self.scratch.log_total, rows)
        # At most 1, but where a huge logit was rounded otherwise than in the forward kernel.
        return [jnp.minimum(x, 1.0) for x in exponentials(logits, (top, log_total))]

    def _gated(self, x: jax.Array) -> jax.Array:
        return x if self.given.gate is None else x * self.given.gate[0]

    def _mix(self, rows: pl.Slice, t: int) -> jax.Array:
        mix = to_float32(self.given.mix[0, rows, lane_tile(t)])
        if self.given.rest is None:
            return mix
        return with_rest(mix, self.given.rest[0, rows, lane_tile(t)], self.layout.call.dtype)

    def _start_delta(self) -> None:
        """The softmax's statistics as entries, and the part of <d_out, mix> that is not a sum over sources."""
        heads, given, scratch = self.layout.heads, self.given, self.scratch
        membership = given.membership()

        def visit(rows: pl.Slice) -> None:
            d_out = self._d_out(rows)
            store_entries(scratch.top, rows, heads.unpack(given.stats[0, rows, : heads.num_heads]))
            store_entries(scratch.log_total, rows, heads.unpack(given.stats[0, rows, heads.num_heads :]))
            if given.null is not None:
                product = heads.sums(lambda t: (d_out(t) * given.null[0, 0:1, lane_tile(t)],), membership)[0]
                store_entries(scratch.null_product, rows, product)
            if given.mix is not None:
                delta = heads.sums(lambda t: (d_out(t) * self._mix(rows, t),), membership)[0]
            elif given.null is not None:
                weights = self._weights(rows, self.layout.null_logit(given))
                delta = [a * b for a, b in zip(weights, product, strict=True)]
                store_entries(scratch.weight_sum, rows, weights)
            else:
                entries, _, lanes = scratch.delta.shape
                delta = [jnp.zeros((self.layout.plan.group, lanes), jnp.float32)] * entries
                store_entries(scratch.weight_sum, rows, delta)
            store_entries(scratch.delta, rows, delta)

        self.layout.each_group(visit)

    def _score_chunk(self, slot: jax.Array, first_source: Index, count: int) -> None:
        """First sweep: keeps what a chunk's gradients need of its scores and adds its share of <d_out, mix>."""
        scratch, heads = self.scratch, self.layout.heads
        scorer = self.layout.scorer(self.given, self.given.membership())

        def visit(rows: pl.Slice) -> None:
            delta, weight_sum = load_entries(scratch.delta, rows), load_entries(scratch.weight_sum, rows)
            for i in range(count):
                score = scorer.score(source_tile(scratch.buffer, slot, i, rows), [self._d_out(rows)])
                weights, products = self._weights(rows, score.logits), score.products[0]
                kept = heads.pack(weights, products, score.high, score.inverse_rms)
                scratch.kept[first_source + i, rows, :] = kept
                delta = [d + a * b for d, a, b in zip(delta, weights, products, strict=True)]
                weight_sum = _sums(weight_sum, weights)
            store_entries(scratch.delta, rows, delta)
            store_entries(scratch.weight_sum, rows, weight_sum)

        self.layout.each_group(visit)

    def _finish_delta(self) -> None:
        """Gradients of gate and null source, which need no source; then Delta as the logits' gradients use it."""
        given, scratch, outputs, heads = self.given, self.scratch, self.outputs, self.layout.heads
        membership = given.membership()

        def visit(rows: pl.Slice) -> None:
            delta, scale = load_entries(scratch.delta, rows), None
            if scratch.weight_sum is not None:
                scale = [_inverse(x) for x in load_entries(scratch.weight_sum, rows)]
                scratch.packed_scale[rows, :] = heads.pack(scale)
                delta = _products(delta, scale)
            if outputs.gate is not None:
                outputs.gate[0, 0] += fold_rows(heads.pack(delta))
            delta = [self._gated(x) for x in delta]
            if given.shift is not None:
                delta = _sums(delta, heads.unpack(given.shift[0, rows, :]))
            if scratch.packed_delta is None:
                store_entries(scratch.delta, rows, delta)
            else:
                scratch.packed_delta[rows, :] = heads.pack(delta)
            if outputs.null_mixed is None:
                return
            weights = self._weights(rows, self.layout.null_logit(given))
            if scale is not None:
                weights = _products(weights, scale)
            d_weights = self._d_weights(rows, load_entries(scratch.null_product, rows), 0)
            outputs.null_logit[0, 0] += fold_rows(heads.pack(_d_logits(weights, d_weights, delta)))
            spread, d_out = heads.spread([self._gated(x) for x in weights], membership), self._d_out(rows)
            for t in range(heads.tiles):
                outputs.null_mixed[0, 0, :, lane_tile(t)] += fold_rows(spread(t) * d_out(t))

        self.layout.each_group(visit)

    def _d_weights(self, rows: pl.Slice, product: Entries, n: Index) -> Entries:
        """The cotangent of one source's weights: through the mix and, if they were returned, their own."""
        through_mix = [self._gated(x) for x in product]
        if self.given.d_weights is None:
            return through_mix
        return _sums(through_mix, self.layout.heads.unpack(self.given.d_weights[0, n, rows, :]))

    def _factors(self, rows: pl.Slice, source: Tile, n: Index) -> "_Factors":
        """From a score made here."""
        heads, membership = self.layout.heads, self.given.membership()
        score = self.layout.scorer(self.given, membership).score(source, [self._d_out(rows)])
        weights, delta = self._weights(rows, score.logits), load_entries(self.scratch.delta, rows)
        d_logits = _d_logits(weights, self._d_weights(rows, score.products[0], n), delta)
        along = heads.across([a * b for a, b in zip(d_logits, score.high, strict=True)])
        return _Factors(
            heads.spread([self._gated(x) for x in weights], membership),
            heads.spread([x * score.inverse_rms for x in d_logits], membership),
            score.inverse_rms * score.inverse_rms * (1.0 / heads.dim) * along,
        )

    def _factors_kept(self, rows: pl.Slice, source: Index, n: Index) -> "_Factors":
        """From a score that the first sweep kept."""
        given, scratch, heads, membership = self.given, self.scratch, self.layout.heads, self.given.membership()
        assert scratch.kept is not None
        assert scratch.packed_delta is not None
        assert scratch.packed_scale is not None
        kept, count = scratch.kept[source, rows, :], heads.num_heads
        weights, products, logits = (kept[:, k * count : (k + 1) * count] for k in range(3))
        weights = weights * scratch.packed_scale[rows, :]
        inverse_rms = kept[:, 3 * count :]
        d_weights = self._gated(products)
        if given.d_weights is not None:
            d_weights = d_weights + given.d_weights[0, n, rows, :]
        d_logits = weights * (d_weights - scratch.packed_delta[rows, :])
        along = jnp.sum(d_logits * logits, axis=-1, keepdims=True)
        return _Factors(
            heads.spread_packed(self._gated(weights), membership),
            heads.spread_packed(d_logits * inverse_rms, membership),
            inverse_rms * inverse_rms * (1.0 / heads.dim) * along,
        )

    def _differentiate_chunk(self, slot: jax.Array, first_source: Index, count: int) -> None:
        given, scratch, outputs, heads = self.given, self.scratch, self.outputs, self.layout.heads
        has_null = self.layout.call.has_null

        def visit(rows: pl.Slice) -> None:
            sources = [source_tile(scratch.buffer, slot, i, rows) for i in range(count)]
            factors = []
            for i, source in enumerate(sources):
                n = has_null + first_source + i
                if self.layout.plan.resident:
                    factors.append(self._factors_kept(rows, first_source + i, n))
                else:
                    factors.append(self._factors(rows, source, n))

            for t in range(heads.tiles):
                d_out, query = self._d_out(rows)(t), given.query[0, 0:1, lane_tile(t)]
                d_query = jnp.zeros((8, d_out.shape[1]), jnp.float32)
                for i, (source, factor) in enumerate(zip(sources, factors, strict=True)):
                    s, keyed = source(t), factor.keyed(t)
                    gradient = factor.mixed(t) * d_out + keyed * query - factor.own * s
                    scratch.buffer[slot, i, rows, lane_tile(t)] = to_storage(gradient, scratch.buffer.dtype)
                    d_query = d_query + fold_rows(keyed * s)
                outputs.query[0, 0, :, lane_tile(t)] += d_query

        self.layout.each_group(visit)


@dataclass(frozen=True)
class _Factors:
    """A source's gradient is mixed * d_out + keyed * query - own * source."""

    mixed: Tile
    keyed: Tile
    own: jax.Array


def _sums(a: Entries, b: Entries) -> Entries:
    return [x + y for x, y in zip(a, b, strict=True)]


def _products(a: Entries, b: Entries) -> Entries:
    return [x * y for x, y in zip(a, b, strict=True)]


def _inverse(weight_sum: jax.Array) -> jax.Array:
    """Zero for tokens of padding, which have no weights."""
    return jnp.where(weight_sum == 0, 0.0, 1.0 / weight_sum)


def _d_logits(weights: Entries, d_weights: Entries, delta: Entries) -> Entries:
    return [a * (b - c) for a, b, c in zip(weights, d_weights, delta, strict=True)]


def _cost(layout: Layout) -> pl.CostEstimate:
    """A feature of a source takes three products that are summed (square, query, d_out), three more for its gradient
    and one for the query's."""
    call = layout.call
    rows = layout.groups * layout.num_tiles * layout.plan.rows
    size = jnp.dtype(call.dtype).itemsize
    per_feature = (2 * call.num_sources + 1 + (0 if layout.plan.resident else 1 + (size == 2))) * size
    per_head = 8 + 4 * call.rows * call.return_weights
    return pl.CostEstimate(
        flops=14 * rows * call.dim * call.rows,
        bytes_accessed=rows * (call.dim * per_feature + call.num_heads * per_head),
        transcendentals=rows * call.rows * (call.num_heads + 1),
    )
