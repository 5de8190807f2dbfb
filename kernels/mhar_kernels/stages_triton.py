"""The stages of the depth-blocked schedule on GPUs, through jax-triton: launches of the kernels in `triton_stage_*.py`.

`schedule.Stages` says what each stage is for. Tokens are flattened to one axis [T]. Histories live in buffers of full
depth that kernels write in place; the first kernel that writes a buffer makes it. 16-bit storage only.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from triton.runtime.jit import JITFunction

from mhar_kernels import pre_norm, traffic, triton_launch, triton_stage_heads, triton_stage_rows
from mhar_kernels.schedule import Plan

# Time a row of each stage, in units of a row at copy bandwidth, as measured on an H200 (README.md). From these
# `traffic.best_block_size` finds S.
COSTS = traffic.Rows(mix=1.7, merge=1.3, pull=2.2, finish=1.85, query=1.7)
# Steps in flight through shared memory, by kernel.
_STAGES = {"merge": 3, "mix": 2, "pull": 2, "finish": 3, "query": 3}
# Fewest rows of one token in a product of 16 rows: 16 / this many tokens share a program.
_LEAST = {"mix": 1, "pull": 1}
_QUERY_WARPS = 132 * 16  # of the query kernel: sixteen a multiprocessor of an H100 or H200


class History(NamedTuple):
    """All sources so far, and what is known of them."""

    queries: jax.Array  # float32 [N, D], effective
    high: jax.Array  # [N, D] in the storage dtype: the queries, and
    low: jax.Array  # what that rounding took
    sources: jax.Array | None  # [N, T, D]
    inverse_rms: jax.Array | None  # float32 [T, NP]
    lse: jax.Array | None  # float32 [T, H, NP]
    logits: jax.Array | None  # float32 [T, N, S, H]: site, source counted from the start of the site's block
    rests: tuple[jax.Array, ...]  # int8 [T, D] a site: what rounding took from what is read there; Δ needs it
    mix_rms: tuple[jax.Array, ...]  # float32 [T] a site: inverse RMS of its mix, where the kernel applies the norm


class Later(NamedTuple):
    """What the sites left so far gave back."""

    cotangents: jax.Array | None  # [N, T, D]
    deltas: jax.Array | None  # float32 [T, H, NP]
    keys: jax.Array | None  # [T, H, N, NP] in the storage dtype: dl r of each source and site


def supports(dtype, head_dim: int) -> bool:
    """Whether a stack runs by blocks: 16-bit storage, and heads wide enough that a number a pair is little beside them.

    float32 storage would need its products in float64; narrow heads would have more logits than features.
    """
    return dtype in (jnp.bfloat16, jnp.float16) and head_dim >= 16


def start(plan: Plan, x: jax.Array, queries: jax.Array, low: jax.Array | None) -> History:
    """See `schedule.Stages`."""
    del low  # only float32 storage has it
    high = queries.astype(x.dtype)
    return History(queries, high, (queries - high.astype(jnp.float32)).astype(x.dtype), None, None, None, None, (), ())


def merge(
    plan: Plan, history: History, site: int, source: jax.Array, outside, norm: jax.Array | None
) -> tuple[History, jax.Array, jax.Array | None]:
    """See `schedule.Stages`."""
    shape = _Shape.of(plan, source)
    fused = norm is not None and _fuses_norm(source.dtype)
    partial, partial_lse = outside if outside is not None else (_unused(shape.dtype), _unused(jnp.float32))
    old = history[3:7]
    *buffers, read, rest, mix_rms = _call(
        shape,
        triton_stage_rows.merge_kernel,
        [
            source.reshape(shape.tokens, shape.dim),
            history.queries,
            _safe(norm if fused else None),
            partial,
            partial_lse,
            *(_unused(o.dtype) if a is None else a for a, o in zip(old, shape.history(plan.keep), strict=True)),
            shape.tokens,
            site,
            plan.block_of(site).start,
        ],
        [
            *shape.history(plan.keep),
            shape.row(),
            shape.row(jnp.int8) if plan.keep else _none(jnp.int8),
            jax.ShapeDtypeStruct((shape.tokens,), jnp.float32) if plan.keep and fused else _none(jnp.float32),
        ],
        {
            **shape.rows(),
            "EPS": plan.eps,
            "NORM_EPS": plan.norm_eps,
            "NORM": fused,
            "KEEP": plan.keep,
            "OUTSIDE": outside is not None,
            "STAGES": _STAGES["merge"],
        },
        (shape.tokens,),
        warps=shape.row_warps,
        aliases={} if site == 0 else {5 + i: i for i in range(4)},
    )
    sources, inverse_rms, lse, logits = buffers
    new = {"sources": sources, "inverse_rms": inverse_rms, "lse": lse, "logits": logits}
    history = history._replace(**new, rests=(*history.rests, rest), mix_rms=(*history.mix_rms, mix_rms))
    read = read.reshape(source.shape)
    if fused or norm is None:
        return history, read, None
    return history, pre_norm.apply(read, norm, plan.norm_eps), read


def mix(plan: Plan, history: History, block: range) -> tuple[jax.Array, jax.Array]:
    """See `schedule.Stages`: [S, T, D] normalised, and its log-sum-exp [S, T, H]."""
    assert history.sources is not None
    shape = _Shape.of(plan, history.sources[0])
    together = shape.together("mix")
    results = _call(
        shape,
        triton_stage_heads.mix_kernel,
        [history.sources, history.inverse_rms, history.high, history.low, shape.tokens, block.start, len(block)],
        shape.partial(),
        {**shape.heads(), "SB": together, "STAGES": _STAGES["mix"]},
        (-(-shape.tokens // (16 // together)) * shape.num_heads, -(-len(block) // together)),
        warps=shape.head_warps,
    )
    return results[0], results[1]


def begin(plan: Plan, history: History) -> Later:
    """See `schedule.Stages`."""
    return Later(None, None, None)


def pull(plan: Plan, history: History, later: Later, block: range) -> tuple[Later, Any]:
    """See `schedule.Stages`: [S, T, D] short of the term in the source's own direction, and Σ dl l [S, T, H]."""
    assert history.sources is not None
    shape = _Shape.of(plan, history.sources[0])
    inputs = [
        history.sources,
        history.inverse_rms,
        history.high,
        history.low,
        history.lse,
        later.cotangents,
        later.deltas,
        later.keys,
        shape.tokens,
        block.start,
        len(block),
    ]
    together = shape.together("pull")
    keys, *partial = _call(
        shape,
        triton_stage_heads.pull_kernel,
        inputs,
        [shape.later()[2], *shape.partial()],
        {**shape.heads(), "N": shape.depth, "SB": together, "STAGES": _STAGES["pull"]},
        (-(-shape.tokens // (16 // together)), shape.num_heads, -(-len(block) // together)),
        warps=shape.head_warps,
        aliases={7: 0},
    )
    return later._replace(keys=keys), tuple(partial)


def finish(
    plan: Plan,
    history: History,
    later: Later,
    site: int,
    read: jax.Array,
    kept: jax.Array | None,
    cotangent: jax.Array,
    outside,
    norm: jax.Array | None,
) -> tuple[Later, jax.Array, jax.Array | None]:
    """See `schedule.Stages`."""
    shape, block = _Shape.of(plan, read), plan.block_of(site)
    fused = norm is not None and kept is None
    d_norm = None
    if fused:
        products = cotangent.astype(jnp.float32) * read.astype(jnp.float32)
        d_norm = jnp.sum(products, axis=tuple(range(read.ndim - 1))) / _safe(norm)
    elif kept is not None:
        read = kept
        cotangent, d_norm = pre_norm.pull(kept, norm, plan.norm_eps, cotangent)
    partial, shared = outside if outside is not None else (_unused(shape.dtype), _unused(jnp.float32))
    first = site == plan.num_sites - 1
    *buffers, d_source = _call(
        shape,
        triton_stage_rows.finish_kernel,
        [
            cotangent.reshape(shape.tokens, shape.dim),
            read.reshape(shape.tokens, shape.dim),
            history.rests[site],
            history.mix_rms[site],
            _safe(norm if fused else None),
            history.high,
            history.sources,
            history.inverse_rms,
            history.lse,
            history.logits,
            partial,
            shared,
            *(_unused(o.dtype) if a is None else a for a, o in zip(later, shape.later(), strict=True)),
            shape.tokens,
            site,
            block.start,
            block.stop,
        ],
        [*shape.later(), shape.row()],
        {**shape.rows(), "NORM": fused, "OUTSIDE": outside is not None, "STAGES": _STAGES["finish"]},
        (shape.tokens,),
        warps=shape.row_warps,
        aliases={} if first else {12 + i: i for i in range(3)},
    )
    return Later(*buffers), d_source.reshape(read.shape), d_norm


def query_gradient(plan: Plan, history: History, later: Later) -> jax.Array:
    """See `schedule.Stages`: partial sums over tokens by the kernel, added up in a fixed order."""
    assert history.sources is not None
    shape = _Shape.of(plan, history.sources[0])
    sites = min(128, max(16, _power_of_two(shape.depth)))
    tiles = -(-shape.depth // sites)
    parts = 1 if shape.head_dim <= 256 else -(-shape.head_dim // 128)  # accumulators of a program stay in registers
    first, second = _halves(shape.head_dim) if parts == 1 else (128, 0)
    warps = min(8, max(1, sites * first // 2048))
    chunk = -(-shape.tokens // min(shape.tokens, max(1, _QUERY_WARPS // (warps * shape.num_heads * parts * tiles))))
    chunks = -(-shape.tokens // chunk)
    (partial,) = _call(
        shape,
        triton_stage_heads.query_kernel,
        [history.sources, later.keys, shape.tokens, chunk],
        [jax.ShapeDtypeStruct((chunks, shape.depth, shape.dim), jnp.float32)],
        {
            **shape.sizes(),
            "N": shape.depth,
            "MS": sites,
            "K1": first,
            "K2": second,
            "PARTS": parts,
            "STAGES": _STAGES["query"],
        },
        (shape.num_heads * parts, chunks, tiles),
        warps=warps,
    )
    return jnp.sum(partial, axis=0)


class _Shape(NamedTuple):
    """Sizes of a stack as its kernels see it."""

    dtype: Any
    tokens: int
    dim: int
    num_heads: int
    depth: int  # N, sources and sites
    block: int  # S
    interpret: bool

    @classmethod
    def of(cls, plan: Plan, row: jax.Array) -> "_Shape":
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
        return first, max(16, _power_of_two(left)) if left > 0 else 0, count

    @property
    def row_warps(self) -> int:
        """Of kernels that hold whole rows: up to 20 features a lane. (16 at D 512, where two warps were slower.)"""
        return min(16, max(1, _power_of_two(-(-self.dim // 640))))

    @property
    def head_warps(self) -> int:
        """Of kernels that hold 16 rows of a head."""
        first, _, count = self.chunks
        return min(8, max(1, _power_of_two(first * count // 128)))

    def together(self, kernel: str) -> int:
        """SB: sites, or sources, of one token in a product of 16 rows."""
        return min(16, max(_LEAST[kernel], _power_of_two(self.block)))

    def row(self, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.tokens, self.dim), dtype or self.dtype)

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
            jax.ShapeDtypeStruct((t, h, n, self.padded), self.dtype),
        ]

    def partial(self) -> list[jax.ShapeDtypeStruct]:
        """Of what a block's pass leaves for its sites."""
        rows = jax.ShapeDtypeStruct((self.block, self.tokens, self.dim), self.dtype)
        return [rows, jax.ShapeDtypeStruct((self.block, self.tokens, self.num_heads), jnp.float32)]

    def rows(self) -> dict[str, Any]:
        """Constants of kernels that hold whole rows, as tiles [HB, 1, L]."""
        heads = _power_of_two(self.num_heads)
        most = max(1, 32 * self.row_warps // heads) * 8  # 16 bytes a lane
        width = most
        while width > 1 and -(-self.head_dim // width) * width > 1.1 * self.head_dim:
            width //= 2
        sizes = {"D": self.dim, "H": self.num_heads, "K": self.head_dim, "HB": heads, "L": width}
        mantissa = {"MANTISSA": 10 if self.dtype == jnp.float16 else 7}
        depth = {"N": self.depth, "NP": self.padded, "S": self.block}
        return {**sizes, **depth, **mantissa, "C": -(-self.head_dim // width)}

    def sizes(self) -> dict[str, int]:
        """Constants of every kernel that takes a head at a time."""
        return {"D": self.dim, "H": self.num_heads, "K": self.head_dim, "NP": self.padded}

    def heads(self) -> dict[str, Any]:
        """Constants of kernels that hold one head of several rows."""
        first, second, count = self.chunks
        return {**self.sizes(), "K1": first, "K2": second, "C1": count, "C": count + (second > 0)}


def _call(
    shape: _Shape,
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


def _fuses_norm(dtype) -> bool:
    """Whether what is read can stand for the mix: divided by a scale as small as may be, as bfloat16's range allows."""
    return dtype == jnp.bfloat16


def _safe(scale: jax.Array | None) -> jax.Array:
    """The norm's scale with no entry so small that what it scaled could not be found again; nothing in any sum."""
    if scale is None:
        return _unused(jnp.float32)
    return jnp.where(jnp.abs(scale) < 1e-20, 1e-20, scale)


def _halves(k: int) -> tuple[int, int]:
    """Two powers of two, at least 16, that cover k; the second is 0 where one does."""
    if k <= 16 or k & (k - 1) == 0:
        return max(16, k), 0
    first = max(16, 1 << (k.bit_length() - 1))
    return first, max(16, _power_of_two(k - first))


def _none(dtype) -> jax.ShapeDtypeStruct:
    """Of a result that a kernel does not write."""
    return jax.ShapeDtypeStruct((1,), dtype)


def _unused(dtype) -> jax.Array:
    """Stands for an operand that a kernel does not read."""
    return jnp.zeros((1,), dtype)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


__all__ = ["begin", "finish", "merge", "mix", "pull", "query_gradient", "start"]
