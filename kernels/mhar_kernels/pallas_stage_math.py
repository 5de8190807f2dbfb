"""The arithmetic that the Pallas stages share, on tiles with features on sublanes and tokens on lanes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mhar_kernels.pallas_stage_layout import Geometry, Ref


def parts(x: jax.Array, count: int) -> list[jax.Array]:
    """float32 arrays of bfloat16 numbers whose sum is x: exactly where there are three, to 16 bits where two.

    Bits are cleared, not rounded: a compiler may drop a conversion to bfloat16 and back.
    """
    out = []
    for _ in range(count - 1):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        out.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
        x = x - out[-1]
    return [*out, x]


def stacked_parts(x: jax.Array, count: int) -> jax.Array:
    """[count * m, w] bfloat16: the parts of x [m, w], one below the other."""
    return jnp.concatenate(parts(x, count), axis=0).astype(jnp.bfloat16)


def logits(query_parts: jax.Array, source: jax.Array, inverse_rms: jax.Array) -> jax.Array:
    """r <q̃[h], s[h]>: [rows, R] float32 of queries [3 * rows, D], zero outside their head, and a source [D, R].

    Three bfloat16 passes: the source is exact in one part, the query in three, so the product is one of float32.
    """
    product = dot(query_parts, source, ((1,), (0,)))
    rows = product.shape[0] // 3
    return (product[:rows] + (product[rows : 2 * rows] + product[2 * rows :])) * inverse_rms


def keyed_sums(queries: jax.Array, d_keys: Sequence[jax.Array]) -> list[jax.Array]:
    """Σ over rows of (dℓ r) q̃: [D, R] float32 for each of d_keys [rows, R], of queries [rows, D]; to 16 bits.

    All of d_keys are one operand, so that the queries are turned once; and both parts of a query meet a key in one
    product, since the matrix unit sums over 128 rows at the price of fewer.
    """
    queries_high, queries_low = parts(queries, 2)
    highs, lows = zip(*(parts(k, 2) for k in d_keys), strict=True)
    high, low = (jnp.concatenate(k, axis=1).astype(jnp.bfloat16) for k in (highs, lows))
    both = jnp.concatenate([queries_high, queries_low], axis=0).astype(jnp.bfloat16)
    contract = ((0,), (0,))
    total = dot(both, jnp.concatenate([high, high], axis=0), contract)
    total = total + dot(queries_high.astype(jnp.bfloat16), low, contract)
    width = d_keys[0].shape[1]
    return [total[:, n * width : (n + 1) * width] for n in range(len(d_keys))]


def query_sum(d_keys: jax.Array, source: jax.Array) -> jax.Array:
    """Σ over tokens of (dℓ r) s: [rows, D] float32, every head's number with all features of the source [D, R]."""
    product = dot(stacked_parts(d_keys, 2), source, ((1,), (1,)))
    rows = d_keys.shape[0]
    return product[:rows] + product[rows:]


def own_heads(geometry: Geometry, sums: jax.Array) -> jax.Array:
    """[sites, D] of `query_sum` [sites * heads, D]: of each head its own features."""
    shape = (geometry.heads, geometry.dim)
    feature, head = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 0))
    own = (feature >= head * geometry.width) & (feature < (head + 1) * geometry.width)
    by_site = sums.reshape(-1, *shape)
    return jnp.sum(jnp.where(own[None], by_site, 0.0), axis=1)


def dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    """A product of bfloat16 matrices, added up in float32."""
    return jax.lax.dot_general(
        a, b, (contract, ((), ())), precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32
    )


def inverse_rms(geometry: Geometry, source: Ref, total: Ref) -> jax.Array:
    """1/RMS [1, R] of source[0] [D, R]; total: scratch memory [1, R]."""
    total[...] = jnp.zeros(total.shape, jnp.float32)

    def add(_: Any, slices: list[Any]) -> None:
        values = [source[0, rows, :].astype(jnp.float32) for rows in slices]
        total[...] += jnp.sum(add_up([v * v for v in values]), axis=0, keepdims=True)

    geometry.each_piece(add)
    return jax.lax.rsqrt(total[...] / geometry.dim + geometry.eps)


def head_sums(geometry: Geometry, lefts: Sequence[Any], rights: Sequence[Any], out: Ref) -> None:
    """out[i, n, h] = <lefts[i][h], rights[n][h]>, each a function of rows that gives [.., R] float32.

    Padded heads keep what is in `out`, or get zeros.
    """
    several = geometry.piece != geometry.width
    if several:
        out[...] = jnp.zeros(out.shape, jnp.float32)

    def add(head: Any, slices: list[Any]) -> None:
        row = pl.ds(head, 1)
        values = [[left(s) for s in slices] for left in lefts]
        for n, right in enumerate(rights):
            others = [right(s) for s in slices]
            for i, value in enumerate(values):
                terms = add_up([v * w for v, w in zip(value, others, strict=True)])
                total = jnp.sum(terms, axis=0, keepdims=True)
                out[i, n, row, :] = out[i, n, row, :] + total if several else total

    geometry.each_piece(add)


def turn_in(geometry: Geometry, tokens: Ref, out: Ref, change: Any = lambda rows, features: rows) -> None:
    """out[0] [D, R] = change(tokens [R, D] turned, features), a square of features at a time."""

    def turn(features: Any) -> None:
        out[0, features, :] = change(tokens[:, features].T, features)

    geometry.each_slab(turn)


def turn_out(geometry: Geometry, rows: Any, out: Ref) -> None:
    """out [R, D] = rows(features) [.., R] float32 turned and rounded."""

    def turn(features: Any) -> None:
        out[:, features] = rows(features).T.astype(out.dtype)

    geometry.each_slab(turn)


def add_up(terms: Sequence[jax.Array]) -> jax.Array:
    """Their sum."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def when_first(condition: Any, refs: Sequence[Ref]) -> None:
    """Sets references to zero where the condition holds."""

    @pl.when(condition)
    def _() -> None:
        for ref in refs:
            ref[...] = jnp.zeros(ref.shape, ref.dtype)
