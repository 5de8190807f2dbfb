"""The logits of a few rows inside a Pallas TPU kernel: r_n <query[h], s_n[h]>, in float32 or as float32 pairs.

bfloat16 and float16 storage take float32 multiplications and additions on the vector unit. The matrix unit would need
three bfloat16 passes for the query's 24 bits, and its results would lie one lane a head, each to be broadcast again.
float32 storage takes pairs (twofloat.py says why), whose sums over features are made exact instead of compensated:
each term is cut at a bit position set by the row's largest value, so that the upper parts add up without rounding
(error-free extraction, Rump, Ogita and Oishi 2008); what is left is 2^-10 of it or less and is added in plain float32.
That costs four operations a term where a compensated addition takes eleven.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mhar_kernels import twofloat
from mhar_kernels.pallas_heads import Entries, Heads, Tile


@dataclass(frozen=True)
class Score:
    """Of one source: logit = high + low, inverse RMS to be broadcast over a row, and the products asked for."""

    high: Entries
    low: Entries | None
    inverse_rms: jax.Array
    products: list[Entries]

    @property
    def logits(self) -> "Logits":
        """Both parts."""
        return self.high, self.low


@dataclass(frozen=True)
class Scorer:
    """The effective query of a call as rows of lane tiles, and how exactly to use it."""

    heads: Heads
    eps: float
    exact: bool  # pairs
    query: Tile  # [1, 128]
    query_low: Tile
    membership: jax.Array | None

    def score(self, source: Tile, others: Sequence[Tile] = ()) -> Score:
        """One sweep over a source: its logits and, for each of `others`, the head sums of its product with it."""
        if self.exact:
            return self._exact(source, others)
        squares: list[jax.Array] = []

        def terms(tile: int) -> list[jax.Array]:
            s = source(tile)
            squares.append(s * s)
            return [s * self.query(tile), *(s * other(tile) for other in others)]

        dots, *products = self.heads.sums(terms, self.membership)
        inverse_rms = jax.lax.rsqrt(_row_sum(squares) / self.heads.dim + self.eps)
        return Score([dot * inverse_rms for dot in dots], None, inverse_rms, products)

    def _exact(self, source: Tile, others: Sequence[Tile]) -> Score:
        heads = self.heads
        row_bound = _power_of_two_above(_row_max(source, heads.tiles))
        query_bound = _power_of_two_above(_row_max(self.query, heads.tiles))
        cut, cut_square = self._cut(row_bound * query_bound), self._cut(row_bound * row_bound)
        squares: list[tuple[jax.Array, jax.Array]] = []

        def terms(tile: int) -> list[jax.Array]:
            s = source(tile)
            s_high, s_low = _halves(s)
            q_high, q_low = _halves(self.query(tile))
            squares.append(_extract(s_high * s_high, 2.0 * (s_high * s_low) + s_low * s_low, cut_square))
            rest = s_high * q_low + s_low * q_high + (s_low * q_low + s * self.query_low(tile))
            return [*_extract(s_high * q_high, rest, cut), *(s * other(tile) for other in others)]

        upper, lower, *products = heads.sums(terms, self.membership)
        square = twofloat.two_sum(_row_sum([u for u, _ in squares]), _row_sum([x for _, x in squares]))
        inverse_rms = twofloat.inverse_rms(twofloat.divide(square, heads.dim), self.eps)
        logits = [twofloat.multiply(twofloat.two_sum(u, x), inverse_rms) for u, x in zip(upper, lower, strict=True)]
        return Score([x.high for x in logits], [x.low for x in logits], inverse_rms.high, products)

    def _cut(self, bound: jax.Array) -> jax.Array:
        """Adding and subtracting this rounds terms below `bound` to a unit of which D terms sum exactly in 24 bits."""
        bits = min(22, 24 - math.ceil(math.log2(self.heads.dim)))
        return bound * (1.5 * 2.0 ** (23 - bits))


Logits = tuple[Entries, Entries | None]  # high and, of pairs, low


def largest(logits: Sequence[Logits]) -> Logits:
    """The largest of some logits, of each row and head. As pairs, so that its own exponential is exactly one."""
    high = [functools.reduce(jnp.maximum, of_head) for of_head in zip(*(h for h, _ in logits), strict=True)]
    lows = [low for _, low in logits if low is not None]
    if not lows:
        return high, None
    at_top = [
        [jnp.where(h == top, x, -jnp.inf) for h, x, top in zip(hs, xs, high, strict=True)]
        for (hs, _), xs in zip(logits, lows, strict=True)
    ]
    return high, [functools.reduce(jnp.maximum, of_head) for of_head in zip(*at_top, strict=True)]


def exponentials(logits: Logits, reference: Logits) -> Entries:
    """exp(logits - reference). The difference of near logits is exact, so the digits in the low parts count."""
    differences = [h - top for h, top in zip(logits[0], reference[0], strict=True)]
    if reference[1] is not None and logits[1] is not None:
        lows = zip(logits[1], reference[1], strict=True)
        differences = [d + (x - y) for d, (x, y) in zip(differences, lows, strict=True)]
    elif reference[1] is not None:
        differences = [d - y for d, y in zip(differences, reference[1], strict=True)]
    return [jnp.exp(d) for d in differences]


def _row_sum(tiles: Sequence[jax.Array]) -> jax.Array:
    """Sum of [rows, 128] tiles over tiles and lanes: [rows, 1]."""
    total = tiles[0]
    for tile in tiles[1:]:
        total = total + tile
    return jnp.sum(total, axis=-1, keepdims=True)


def _row_max(row: Tile, tiles: int) -> jax.Array:
    largest = jnp.abs(row(0))
    for tile in range(1, tiles):
        largest = jnp.maximum(largest, jnp.abs(row(tile)))
    return jnp.max(largest, axis=-1, keepdims=True)


def _power_of_two_above(x: jax.Array) -> jax.Array:
    exponent = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    return 2.0 * jax.lax.bitcast_convert_type(exponent, jnp.float32)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as a sum of two numbers of 12 bits, whose products are exact."""
    high = jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000), jnp.float32
    )
    return high, x - high


def _extract(product: jax.Array, rest: jax.Array, cut: jax.Array) -> tuple[jax.Array, jax.Array]:
    """product + rest cut in two. `product` is exact, for the reason that `twofloat.two_prod` gives."""
    upper = (product + cut) - cut
    return upper, (product - upper) + rest
