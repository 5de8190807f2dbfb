"""Sizes of the depth-blocked schedule as its Triton kernels see them, and their launches.

`call` launches any of them; `mix`, `pull` and `query` are those that work across blocks.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from triton.runtime.jit import JITFunction

from mhar_kernels import triton_launch, triton_stage_heads
from mhar_kernels.schedule import Plan

# Steps in flight through shared memory, by kernel.
_STAGES = {"mix": 2, "pull": 2, "query": 3}
# Fewest rows of one token in a product of 16 rows: 16 / this many tokens share a program.
_LEAST = {"mix": 1, "pull": 1}

_QUERY_WARPS = 132 * 16  # of the query kernel: sixteen a multiprocessor of an H100 or H200


class Shape(NamedTuple):
    """Sizes of a stack as its kernels see it."""

    dtype: Any
    tokens: int
    dim: int
    num_heads: int
    depth: int  # N, sources and sites
    block: int  # S
    interpret: bool

    @classmethod
    def of(cls, plan: Plan, row: jax.Array) -> "Shape":
        """row: anything [..., D]."""
        tokens = int(np.prod(row.shape[:-1], dtype=np.int64))
        size = min(plan.block_size, plan.num_sites)
        return cls(row.dtype, tokens, row.shape[-1], plan.num_heads, plan.num_sites, size, plan.interpret)

    @property
    def padded(self) -> int:
        """NP: N rounded up, so that 16 sites of a token can be read at once."""
        return -(-self.depth // 16) * 16

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def chunks(self) -> tuple[int, int, int]:
        """K1, K2 and C1: powers of two, at least 16, so that C1 * K1 + K2 covers a head closely."""
        k = self.head_dim
        if k <= 128:
            first = max(16, 1 << (k.bit_length() - 1))
        else:
            first = 128
        count = max(1, k // first)
        left = k - count * first
        return first, max(16, power_of_two(left)) if left > 0 else 0, count

    @property
    def mantissa(self) -> int:
        """Bits of the storage dtype's mantissa."""
        return jnp.finfo(self.dtype).nmant

    @property
    def row_warps(self) -> int:
        """Of kernels that hold whole rows: up to 20 features a lane. (16 at D 512, where two warps were slower.)"""
        return min(16, max(1, power_of_two(-(-self.dim // 640))))

    @property
    def head_warps(self) -> int:
        """Of kernels that hold 16 rows of a head."""
        first, _, count = self.chunks
        return min(8, max(1, power_of_two(first * count // 128)))

    def together(self, kernel: str) -> int:
        """SB: sites, or sources, of one token in a product of 16 rows."""
        return min(16, max(_LEAST[kernel], power_of_two(self.block)))

    def row(self, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.tokens, self.dim), dtype or self.dtype)

    @property
    def packed(self) -> bool:
        """Whether what rounding took from a mix is kept in 10 bits: where a byte's four features are of one tile."""
        return self.rows()["L"] % 4 == 0 and self.head_dim % 4 == 0

    def rest(self) -> jax.ShapeDtypeStruct:
        """Of that, a site."""
        if self.packed:
            return jax.ShapeDtypeStruct((self.tokens, self.dim + self.dim // 4), jnp.int8)
        return self.row(jnp.int16)

    def history(self, keep: bool) -> list[jax.ShapeDtypeStruct]:
        """Of sources, inverse_rms, lse and logits; the last two are for a backward pass."""
        t, n, h = self.tokens, self.depth, self.num_heads
        first = jax.ShapeDtypeStruct((n, t, self.dim), self.dtype), jax.ShapeDtypeStruct((t, self.padded), jnp.float32)
        shapes = ((t, h, self.padded), (t, n, self.block, h)) if keep else ((1,), (1,))
        return [*first, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)]

    def later(self) -> list[jax.ShapeDtypeStruct]:
        """Of cotangents, deltas and keys."""
        t, n, h = self.tokens, self.depth, self.num_heads
        return [
            jax.ShapeDtypeStruct((n, t, self.dim), self.dtype),
            jax.ShapeDtypeStruct((t, h, self.padded), jnp.float32),
            jax.ShapeDtypeStruct((t, h, n, self.padded), jnp.float32),
        ]

    def partial(self) -> list[jax.ShapeDtypeStruct]:
        """Of what a block's pass leaves for its sites: rows, and a number a head."""
        widths = (self.dim, self.num_heads)
        return [jax.ShapeDtypeStruct((self.block, self.tokens, w), jnp.float32) for w in widths]

    def rows(self) -> dict[str, Any]:
        """Constants of kernels that hold whole rows, as tiles [HB, 1, L]."""
        heads = power_of_two(self.num_heads)
        most = max(1, 32 * self.row_warps // heads) * 8  # 16 bytes a lane
        width = most
        while width > 1 and -(-self.head_dim // width) * width > 1.1 * self.head_dim:
            width //= 2
        sizes = {"D": self.dim, "H": self.num_heads, "K": self.head_dim, "HB": heads, "L": width}
        depth = {"N": self.depth, "NP": self.padded, "S": self.block}
        return {**sizes, **depth, "MANTISSA": self.mantissa, "C": -(-self.head_dim // width)}

    def sizes(self) -> dict[str, int]:
        """Constants of every kernel that takes a head at a time."""
        return {"D": self.dim, "H": self.num_heads, "K": self.head_dim, "NP": self.padded}

    def heads(self) -> dict[str, Any]:
        """Constants of kernels that hold one head of several rows."""
        first, second, count = self.chunks
        chunks = {"K1": first, "K2": second, "C1": count, "C": count + (second > 0)}
        return {**self.sizes(), **chunks}


def call(
    shape: Shape,
    kernel: JITFunction,
    inputs: list[Any],
    outputs: list[jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
    grid: tuple[int, ...],
    warps: int,
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """One launch; under vmap, one after another."""
    numbers = {i: x for i, x in enumerate(inputs) if isinstance(x, int)}
    name = f"depth_stack_{kernel.fn.__name__.removesuffix('_kernel')}"

    @jax.custom_batching.sequential_vmap
    def run(*arrays: jax.Array) -> list[jax.Array]:
        left = iter(arrays)
        operands = [numbers[i] if i in numbers else next(left) for i in range(len(inputs))]
        return triton_launch.run(
            kernel, name, operands, outputs, constants, grid, warps, constants["STAGES"], shape.interpret, aliases
        )

    return run(*(x for x in inputs if not isinstance(x, int)))


def mix(shape: Shape, sources: Any, inverse_rms: Any, high: Any, low: Any, start: int, sites: int) -> list[jax.Array]:
    """What the first `start` sources give to `sites` sites from `start` on, normalised: `Shape.partial`, with the lse.

    sources: [.., T, D]. inverse_rms: float32 [T, NP]. high, low: effective queries [N, D] as two storage numbers.
    """
    together = shape.together("mix")
    return call(
        shape,
        triton_stage_heads.mix_kernel,
        [sources, inverse_rms, high, low, shape.tokens, start, sites],
        shape.partial(),
        {**shape.heads(), "SB": together, "STAGES": _STAGES["mix"]},
        (-(-shape.tokens // (16 // together)) * shape.num_heads, -(-sites // together)),
        warps=shape.head_warps,
    )


def pull(
    shape: Shape,
    sources: Any,
    inverse_rms: Any,
    high: Any,
    low: Any,
    lse: Any,
    cotangents: Any,
    deltas: Any,
    keys: Any,
    start: int,
    count: int,
    *,
    outputs: list[jax.ShapeDtypeStruct],
    skipped: int = 0,
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """What the sites from start + count on give to `count` sources from `start` on.

    lse, deltas: float32 [T, H, NP]. cotangents: [.., T, D], of sites from `skipped` on. outputs: float32 keys
    [T, H, .., NP] (dl r of each source and site), the gradients short of the term in the source's own direction
    and Σ dl l (`Shape.partial`).
    """
    together = shape.together("pull")
    return call(
        shape,
        triton_stage_heads.pull_kernel,
        [
            *(sources, inverse_rms, high, low, lse, cotangents, deltas, keys),
            *(shape.tokens, start, count, shape.depth, skipped, outputs[0].shape[2]),
        ],
        outputs,
        {**shape.heads(), "SB": together, "STAGES": _STAGES["pull"]},
        (-(-shape.tokens // (16 // together)), shape.num_heads, -(-count // together)),
        warps=shape.head_warps,
        aliases=aliases,
    )


def query(shape: Shape, sources: Any, keys: Any, sites: range) -> jax.Array:
    """The gradient [sites, D] float32 of effective queries: sums over tokens by the kernel, added up in a fixed order.

    sources: [N, T, D]. keys: float32 [T, H, N, NP].
    """
    number = keys.shape[2]
    width = min(64, max(16, power_of_two(len(sites))))  # sites of a program
    tiles = -(-len(sites) // width)
    parts = 1 if shape.head_dim <= 256 else -(-shape.head_dim // 128)  # accumulators of a program stay in registers
    first, second = halves(shape.head_dim) if parts == 1 else (128, 0)
    warps = min(8, max(1, width * first // 2048))
    chunk = -(-shape.tokens // min(shape.tokens, max(1, _QUERY_WARPS // (warps * shape.num_heads * parts * tiles))))
    chunks = -(-shape.tokens // chunk)
    (partial,) = call(
        shape,
        triton_stage_heads.query_kernel,
        [sources, keys, shape.tokens, number, sites.start, sites.stop, chunk],
        [jax.ShapeDtypeStruct((chunks, len(sites), shape.dim), jnp.float32)],
        {
            **shape.sizes(),
            "MS": width,
            "K1": first,
            "K2": second,
            "PARTS": parts,
            "TB": _query_tokens(first + second, warps),
            "STAGES": _STAGES["query"],
        },
        (shape.num_heads * parts, tiles, chunks),
        warps=warps,
    )
    return jnp.sum(partial, axis=0)


def _query_tokens(features: int, warps: int) -> int:
    """TB: as many tokens a product as registers hold, and as three steps leave within 99 KiB of shared memory."""
    if not 64 <= features <= 160:
        return 16
    return 64 if warps >= 4 else 32


def unused(dtype) -> jax.Array:
    """Stands for an operand that a kernel does not read."""
    return jnp.zeros((1,), dtype)


def halves(k: int) -> tuple[int, int]:
    """Two powers of two, at least 16, that cover k; the second is 0 where one does."""
    if k <= 16 or k & (k - 1) == 0:
        return max(16, k), 0
    first = max(16, 1 << (k.bit_length() - 1))
    return first, max(16, power_of_two(k - first))


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
