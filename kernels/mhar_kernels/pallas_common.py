"""What both Pallas TPU kernels share: the grid, the blocks each array comes in, and the call itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mhar_kernels import pallas_float16, varying
from mhar_kernels.contract import RouteCall
from mhar_kernels.pallas_heads import Entries, Heads, Tile, lane_tile
from mhar_kernels.pallas_plan import Plan
from mhar_kernels.pallas_ring import Ref
from mhar_kernels.pallas_scores import Logits, Scorer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """The inputs of a kernel: arrays outside it, references to their blocks inside.

    Every array has a leading axis of vmapped groups, of size G, or of size 1 if all groups share it. D is padded to
    whole lane tiles. T is a multiple of the tile's rows up to the last tile of the grid.
    """

    query: Any  # [G, 1 or 2, D] float32: the effective query and, for pairs, what rounding it lost
    sources: tuple[Any, ...]  # N arrays [G, T, D], or one [G, N, T, D]; stay in HBM
    members: Any = None  # [1, group, 128] bfloat16, the head membership matrix
    null: Any = None  # [G, 1, D] float32
    null_logit: Any = None  # [G, 2, H] float32: the null source's logits, high and low
    gate: Any = None  # [G, 1, 1] float32
    residual: Any = None  # [G, T, D]
    # Backward only:
    d_out: Any = None  # [G, T, D]
    stats: Any = None  # [G, T, 2H] float32, as the forward kernel leaves them
    mix: Any = None  # [G, T, D] storage dtype
    rest: Any = None  # [G, T, D] int16: what rounding took from the mix
    shift: Any = None  # [G, T, H] float32: sum over depth of weights * d_weights
    d_weights: Any = None  # [G, N(+1), T, H] float32

    def membership(self) -> jax.Array | None:
        """The membership matrix, inside a kernel."""
        return None if self.members is None else self.members[0]


@dataclass(frozen=True)
class Layout:
    """The grid of one call: (cores, groups, tiles of a core). Tiles of a core run in order and are pipelined."""

    call: RouteCall
    plan: Plan
    heads: Heads
    groups: int
    grouped: frozenset[str]  # inputs with an axis of `groups`
    num_tiles: int

    @property
    def cores(self) -> int:
        """v4 and v5p split this axis over their two cores; on other chips it is one pipeline restart."""
        return min(2, self.num_tiles)

    @property
    def tiles_per_core(self) -> int:
        """Tiles of core 0; the last core may have fewer."""
        return -(-self.num_tiles // self.cores)

    @property
    def exact(self) -> bool:
        """Whether scores are float32 pairs."""
        return self.call.dtype == "float32"

    def source_group(self) -> jax.Array:
        """Inside a kernel: the sources' index on the group axis."""
        return self.output_group() if "sources" in self.grouped else jnp.int32(0)

    def output_group(self) -> jax.Array:
        """Inside a kernel: the group of this step."""
        return pl.program_id(1)

    def core_tiles(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Inside a kernel: this step's tile within its core, the core's first tile, and how many it has."""
        first = pl.program_id(0) * self.tiles_per_core
        return pl.program_id(2), first, jnp.minimum(self.tiles_per_core, self.num_tiles - first)

    def scorer(self, given: Inputs, membership: jax.Array | None) -> Scorer:
        """Inside a kernel: the query, ready to score sources."""
        low = lambda t: given.query[0, 1:2, lane_tile(t)]
        query = lambda t: given.query[0, 0:1, lane_tile(t)]
        return Scorer(self.heads, self.call.eps, self.exact, query, low, membership)

    def null_logit(self, given: Inputs) -> Logits:
        """Inside a kernel: the null source's logits for one group of rows, high and low."""
        rows = self.plan.group
        parts = [
            self.heads.unpack(jnp.broadcast_to(given.null_logit[0, i : i + 1, :], (rows, self.heads.num_heads)))
            for i in range(1 + self.exact)
        ]
        return parts[0], parts[1] if self.exact else None

    def each_group(self, visit: Callable[[pl.Slice], None]) -> None:
        """Inside a kernel: visit(rows) for each group of rows of the tile."""
        size = self.plan.group
        pl.loop(0, self.plan.rows // size)(lambda step: visit(pl.ds(pl.multiple_of(step * size, size), size)))

    def row_spec(self, width: int, *, grouped: bool = True) -> pl.BlockSpec:
        """Blocks of [G, T, width] by tile."""
        return pl.BlockSpec((1, self.plan.rows, width), lambda c, g, j: (g * grouped, self._tile(c, j), 0))

    def depth_spec(self, depth: int, width: int, *, grouped: bool = True) -> pl.BlockSpec:
        """Blocks of [G, depth, T, width] by tile."""
        block = (1, depth, self.plan.rows, width)
        return pl.BlockSpec(block, lambda c, g, j: (g * grouped, 0, self._tile(c, j), 0))

    def partial_spec(self, width: int) -> pl.BlockSpec:
        """Blocks of [G, cores, 8, width] that a core adds to over all its tiles."""
        return pl.BlockSpec((1, 1, 8, width), lambda c, g, j: (g, c, 0, 0))

    def partial_shape(self, width: int) -> tuple[int, ...]:
        """The shape that goes with `partial_spec`."""
        return (self.groups, self.cores, 8, width)

    def run(
        self,
        kernel: Callable[..., None],
        name: str,
        inputs: Inputs,
        shapes: Sequence[tuple[tuple[int, ...], str]],
        specs: Sequence[pl.BlockSpec],
        scratch: Sequence[Any],
        cost: pl.CostEstimate,
    ) -> list[jax.Array]:
        """Calls kernel(inputs as references, output references, scratch references)."""
        entries = [(f, getattr(inputs, f)) for f in _FIELDS if getattr(inputs, f) is not None]
        operands = [pallas_float16.as_bits(array) for _, array in entries]
        sources_in = [pallas_float16.as_bits(array) for array in inputs.sources]
        in_specs = [self._input_spec(name, array) for name, array in entries]
        num_inputs = len(operands)
        axes = varying.axes(inputs)

        def body(*refs: Ref) -> None:
            refs = tuple(ref.bitcast(jnp.int16) if ref.dtype == jnp.float16 else ref for ref in refs)
            fields = {field: ref for (field, _), ref in zip(entries, refs, strict=False)}
            sources = refs[num_inputs : num_inputs + len(inputs.sources)]
            rest = refs[num_inputs + len(sources) :]
            kernel(Inputs(sources=tuple(sources), **fields), rest[: len(shapes)], rest[len(shapes) :])

        return pl.pallas_call(
            body,
            name=name,
            grid=(self.cores, self.groups, self.tiles_per_core),
            in_specs=[*in_specs, *(HBM_SPEC for _ in inputs.sources)],
            out_specs=list(specs),
            out_shape=[
                jax.ShapeDtypeStruct(
                    shape, jnp.dtype(dtype), manual_axis_type=jax.sharding.ManualAxisType(varying=axes)
                )
                for shape, dtype in shapes
            ],
            scratch_shapes=list(scratch),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=self.plan.vmem_limit
            ),
            cost_estimate=cost,
            interpret=self.call.interpret,
        )(*varying.over(axes, [*operands, *sources_in]))

    def _input_spec(self, name: str, array: jax.Array) -> pl.BlockSpec:
        grouped = name in self.grouped
        if name == "d_weights":
            return self.depth_spec(array.shape[1], array.shape[3], grouped=grouped)
        if name in _BY_ROW:
            return self.row_spec(array.shape[2], grouped=grouped)
        return pl.BlockSpec((1, *array.shape[1:]), lambda c, g, j: (g * grouped, 0, 0))

    def _tile(self, core: jax.Array, step: jax.Array) -> jax.Array:
        # A core's surplus step stays on the last block, and does nothing to it.
        return jnp.minimum(core * self.tiles_per_core + step, self.num_tiles - 1)


_BY_ROW = ("residual", "d_out", "stats", "mix", "rest", "shift")
_FIELDS = ("query", "members", "null", "null_logit", "gate", *_BY_ROW, "d_weights")
HBM_SPEC = pl.BlockSpec(memory_space=pltpu.HBM)


def rest_of(mix: jax.Array, dtype: str) -> jax.Array:
    """What rounding float32 to a 16-bit storage dtype takes off, as int16 in units of 2^-16 of a last place."""
    info = jnp.finfo(dtype)
    # A conversion to the storage dtype and back might be dropped by XLA; this is not.
    rounded = jax.lax.reduce_precision(mix, info.nexp, info.nmant)
    power = _power(rounded)
    inverse = jax.lax.bitcast_convert_type(jnp.uint32(254 << 23) - _bits(power), jnp.float32)
    steps = (mix - rounded) * inverse * 2.0 ** (info.nmant + 16)
    most = 2.0**15 - 1
    return jnp.clip(steps, -most, most).astype(jnp.int32).astype(jnp.int16)


def with_rest(rounded: jax.Array, rest: jax.Array, dtype: str) -> jax.Array:
    """The float32 number that `rest_of` was of, to 24 bits, from its rounded value."""
    unit = _power(rounded) * 2.0 ** -(jnp.finfo(dtype).nmant + 16)
    return rounded + rest.astype(jnp.int32).astype(jnp.float32) * unit


def _power(x: jax.Array) -> jax.Array:
    """The power of two of x; at least 2^-90, so that its inverse and what is made of both stay within float32."""
    return jnp.maximum(jax.lax.bitcast_convert_type(_bits(x) & jnp.uint32(0x7F800000), jnp.float32), 2.0**-90)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def source_tile(buffer: Ref, slot: jax.Array, i: int, rows: pl.Slice) -> Tile:
    """Lane tiles of one source in a slot, as float32."""
    return lambda t: pallas_float16.to_float32(buffer[slot, i, rows, lane_tile(t)])


def load_entries(ref: Ref, rows: pl.Slice) -> Entries:
    """Entries from scratch memory of `Heads.entries_shape`."""
    return [ref[i, rows, :] for i in range(ref.shape[0])]


def store_entries(ref: Ref, rows: pl.Slice, entries: Entries) -> None:
    """Entries to scratch memory of `Heads.entries_shape`."""
    for i, value in enumerate(entries):
        ref[i, rows, :] = value
