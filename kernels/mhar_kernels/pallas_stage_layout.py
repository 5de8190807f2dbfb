"""How the Pallas stages of the blocked schedule lay out a stack, and the one call they all make.

Tokens lie on the lanes: histories are [depth, D, T], and what has one number a head is [depth, H, T]. A weight of one
token and head then meets its head's features by a broadcast over sublanes, which is free, a head's sum is a sum of
registers, and a head may start at any multiple of 16 features. With features on the lanes both would be moves between
lanes, one for each source, site and head. A source, a mix and their cotangents have features last outside, so each is
turned once, by the kernel that first reads or last writes it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mhar_kernels import varying

Ref = Any  # a Pallas reference; JAX has no public type for it
LANES = 128
MIB = 2**20
# v5p has 64 MiB of VMEM, v5e and v6e 128; the compiler needs some beside the buffers counted here.
VMEM_BUDGET = 52 * MIB
_TEMPORARIES = 8 * MIB
_SUBLANES = 8
_PACKED = 16  # features of one register of 16-bit numbers


@dataclass(frozen=True)
class Geometry:
    """What is static about the kernels of one stack."""

    num_sites: int  # N, of sites and of sources
    tokens: int  # T, padded to whole tiles
    tile: int  # R, tokens of a tile
    dim: int  # D
    num_heads: int  # H
    eps: float
    interpret: bool

    @classmethod
    def of(cls, num_sites: int, tokens: int, dim: int, num_heads: int, eps: float, interpret: bool) -> "Geometry":
        """For `tokens` before padding. Interpreted tiles are small, so that tests meet several."""
        tile = _SUBLANES if interpret else LANES
        return cls(num_sites, -(-tokens // tile) * tile, tile, dim, num_heads, eps, interpret)

    @property
    def heads(self) -> int:
        """H padded to whole registers: the rows that one site's logits take. Padded heads have logits of zero."""
        return -(-self.num_heads // _SUBLANES) * _SUBLANES

    @property
    def width(self) -> int:
        """K = D / H."""
        return self.dim // self.num_heads

    @property
    def tiles(self) -> int:
        """Tiles of all cores."""
        return self.tokens // self.tile

    @property
    def cores(self) -> int:
        """v4 and v5p split the grid's first axis over their two cores; on other chips it is one pipeline restart."""
        return 2 if self.tiles % 2 == 0 else 1

    @property
    def piece(self) -> int:
        """Features, all of one head, that one loop body handles."""
        fitting = [p for p in range(_PACKED, min(self.width, 160) + 1, _PACKED) if self.width % p == 0]
        return fitting[-1] if fitting else self.width

    def each_piece(self, visit: Callable[[Any, list[Any]], None]) -> None:
        """Inside a kernel: visit(head, slices) for all features, a piece at a time, cut into slices of few registers.

        The head is its index; it may be traced.
        """
        piece, per_head = self.piece, self.width // self.piece
        step = next((s for s in (32, 16) if piece % s == 0), piece)

        def at(index: Any) -> None:
            slices = [_aligned(index * piece + start, step) for start in range(0, piece, step)]
            visit(
                index
                if per_head == 1
                else index // per_head
                if isinstance(index, int)
                else jax.lax.div(index, per_head),
                slices,
            )

        count = self.dim // piece
        if count == 1:
            at(0)
        else:
            pl.loop(0, count)(lambda index: at(index))

    def each_slab(self, visit: Callable[[Any], None]) -> None:
        """Inside a kernel: visit(features) for all features, a square of R tokens at a time."""
        slab = LANES if self.dim % LANES == 0 else self.dim
        if self.dim == slab:
            visit(pl.ds(0, slab))
        else:
            pl.loop(0, self.dim // slab)(lambda index: visit(_aligned(index * slab, slab)))

    def tile_index(self) -> tuple[Any, Any]:
        """Inside a kernel: whether this is its core's first tile, and the step within the tile."""
        return pl.program_id(1) == 0, pl.program_id(2)

    def token_spec(self) -> pl.BlockSpec:
        """Blocks of [T, D] by tile."""
        return pl.BlockSpec((self.tile, self.dim), lambda c, t, j, at: (self._tile(c, t), 0))

    def depth_spec(self, count: int, width: int, start: Callable[[Any, Any], Any]) -> pl.BlockSpec:
        """Blocks of [depth, width, T] by tile: `count` rows of depth from start(at, step) on."""
        block = (pl.Element(count), pl.Element(width), pl.Element(self.tile))
        return pl.BlockSpec(
            block,
            lambda c, t, j, at: (start(at[0], j), 0, pl.multiple_of(self._tile(c, t) * self.tile, self.tile)),
        )

    def unread_spec(self, width: int) -> pl.BlockSpec:
        """Of a buffer [depth, width, T] that is only taken over: some block, always the same, so that it comes once."""
        return pl.BlockSpec((1, width, self.tile), lambda c, t, j, at: (0, 0, 0))

    def chunk_spec(self, count: int, width: int, start: Callable[[Any], Any]) -> pl.BlockSpec:
        """Blocks of [depth, width, T] by tile: chunk start(step) of `count` rows; the last may hang over the end."""
        return pl.BlockSpec((count, width, self.tile), lambda c, t, j, at: (start(j), 0, self._tile(c, t)))

    def query_spec(self, count: int) -> pl.BlockSpec:
        """`count` sites of [sites, heads, D] from `at` on."""
        block = (pl.Element(count), pl.Element(self.heads), pl.Element(self.dim))
        return pl.BlockSpec(block, lambda c, t, j, at: (at[0], 0, 0), pipeline_mode=pl.Buffered(1))

    def constant_spec(self, *shape: int) -> pl.BlockSpec:
        """The whole of an array [...] at every step."""
        return pl.BlockSpec(shape, lambda c, t, j, at: (0,) * len(shape), pipeline_mode=pl.Buffered(1))

    def sum_spec(self, *shape: int) -> pl.BlockSpec:
        """The whole of [cores, *shape], which a core adds to over all its tiles."""
        return pl.BlockSpec((1, *shape), lambda c, t, j, at: (c, *(0 for _ in shape)))

    def history(self, depth: int, width: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """An array [depth, width, T]."""
        return jax.ShapeDtypeStruct((depth, width, self.tokens), dtype)

    def _tile(self, core: Any, index: Any) -> Any:
        return core * (self.tiles // self.cores) + index


@dataclass(frozen=True)
class Operand:
    """An input with its blocks, or an output (its shape) with its blocks."""

    array: Any
    spec: pl.BlockSpec

    def vmem_bytes(self) -> int:
        """Of its buffers."""
        block: Any = self.spec.block_shape
        sizes = [getattr(b, "block_size", b) for b in block]
        buffers = 2 if self.spec.pipeline_mode is None else 1
        return buffers * math.prod(sizes) * jnp.dtype(self.array.dtype).itemsize


def call(
    geometry: Geometry,
    kernel: Callable[..., None],
    name: str,
    at: Any,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    scratch: Sequence[Any],
    *,
    steps: int = 1,
    aliases: dict[int, int] | None = None,
    temporaries: int = 0,
    cost: pl.CostEstimate,
) -> list[jax.Array]:
    """Calls kernel(at, input references, output references, scratch references) on grid (cores, tiles, steps).

    at: a site, or the first site of a block; may be traced. aliases: input -> output that takes over its buffer.
    temporaries: bytes of VMEM for large values, beside what any kernel has.
    """
    aliases = dict(aliases or {})
    read = len(inputs)
    if geometry.interpret:
        # The interpreter pads an array to a multiple of its block, so a buffer's two blocks must be alike there: what
        # is taken over comes once more, behind the others, and the kernel does not look at it.
        inputs = [*inputs, *(Operand(inputs[i].array, outputs[o].spec) for i, o in aliases.items())]
        aliases = {read + k: o for k, o in enumerate(aliases.values())}
    arrays = [operand.array for operand in inputs]
    axes = varying.axes(arrays)
    vmem = sum(o.vmem_bytes() for o in (*inputs, *outputs)) + sum(
        math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in scratch
    )
    marks = jax.sharding.ManualAxisType(varying=axes)
    first, second = 1 + len(inputs), 1 + len(inputs) + len(outputs)
    return pl.pallas_call(
        lambda *refs: kernel(refs[0][0], refs[1 : 1 + read], refs[first:second], refs[second:]),
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(geometry.cores, geometry.tiles // geometry.cores, steps),
            in_specs=[operand.spec for operand in inputs],
            out_specs=[operand.spec for operand in outputs],
            scratch_shapes=list(scratch),
        ),
        out_shape=[jax.ShapeDtypeStruct(o.array.shape, o.array.dtype, manual_axis_type=marks) for o in outputs],
        input_output_aliases={1 + i: o for i, o in aliases.items()},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=max(16 * MIB, vmem + temporaries + _TEMPORARIES),
        ),
        cost_estimate=cost,
        interpret=geometry.interpret,
    )(*varying.over(axes, [jnp.asarray(at, jnp.int32).reshape(1), *arrays]))


def float32(*shape: int) -> Any:
    """Scratch memory."""
    return pltpu.VMEM(shape, jnp.float32)


def _aligned(start: Any, size: int) -> Any:
    """A slice; sizes of whole registers start at multiples of them."""
    if isinstance(start, int) or size % _SUBLANES:
        return pl.ds(start, size)
    return pl.ds(pl.multiple_of(start, size if size % _PACKED == 0 else _SUBLANES), size)
