"""Sums and broadcasts over head slices inside a Pallas TPU kernel.

A row of D features lies on the lanes, 128 to a tile; head h owns lanes [hK, (h+1)K), which need not be aligned. Numbers
with one value a row and head (logits, weights) are `Entries`, in one of two layouts:

- K >= 64: H arrays [rows, 128], each holding its head's value in every lane. A cross-lane reduction (float32, a tree
  over the lanes) leaves its result that way, so multiplying a tile by its head's weight needs no broadcast. Tiles of
  one head are added up before the reduction; a tile that heads share costs a select.
- K < 64: one array [rows, H]. Sums and broadcasts are products with the 0/1 matrix of head membership on the matrix
  unit. It multiplies bfloat16, so a float32 operand is cut into three bfloat16 parts by clearing bits. They hold all
  its 24 bits, and 0 and 1 are exact: the product has float32 accuracy in three passes, where Precision.HIGHEST takes
  six.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

LANES = 128
_SMALLEST_VECTOR_HEAD = 64

Tile = Callable[[int], jax.Array]  # lane tile -> [rows, 128] float32
Entries = list[jax.Array]  # see above


@dataclass(frozen=True)
class Heads:
    """Where H head slices of width K lie in a row padded to whole tiles of 128 lanes."""

    dim: int  # D = H * K
    num_heads: int  # H

    @property
    def width(self) -> int:
        """K."""
        return self.dim // self.num_heads

    @property
    def on_matrix_unit(self) -> bool:
        """Whether slices are too narrow for the vector unit."""
        return self.width < _SMALLEST_VECTOR_HEAD

    @property
    def group(self) -> int:
        """Features of 128 heads, or of all of them: the rows of the membership matrix."""
        return _round_up(min(self.num_heads, LANES) * self.width, LANES)

    @property
    def padded(self) -> int:
        """D rounded up to whole tiles, and to whole groups of 128 heads where there are several."""
        if self.on_matrix_unit and self.num_heads > LANES:
            return _round_up(self.dim, self.group)
        return _round_up(self.dim, LANES)

    @property
    def tiles(self) -> int:
        """Lane tiles of a padded row."""
        return self.padded // LANES

    def spans(self, tile: int) -> list[tuple[int, int, int]]:
        """(head, first lane, last lane + 1) for each head with lanes in this tile."""
        start, stop = tile * LANES, min((tile + 1) * LANES, self.dim)
        return [
            (h, max(h * self.width, start) - start, min((h + 1) * self.width, stop) - start)
            for h in range(start // self.width, _ceil_div(stop, self.width))
        ]

    def membership(self) -> jax.Array:
        """[group, 128] bfloat16: 1 where feature w of a group belongs to its head h."""
        feature = jax.lax.broadcasted_iota(jnp.int32, (self.group, LANES), 0)
        head = jax.lax.broadcasted_iota(jnp.int32, (self.group, LANES), 1)
        return ((feature >= head * self.width) & (feature < (head + 1) * self.width)).astype(jnp.bfloat16)

    def entries_shape(self, rows: int) -> tuple[int, int, int]:
        """The shape of scratch memory for entries: one leading index an array."""
        return (1, rows, self.num_heads) if self.on_matrix_unit else (self.num_heads, rows, LANES)

    def sums(self, terms: Callable[[int], Sequence[jax.Array]], membership: jax.Array | None) -> list[Entries]:
        """terms(tile) -> k arrays [rows, 128] float32; returns k entries, each head slice summed."""
        if self.on_matrix_unit:
            columns = list(zip(*(terms(tile) for tile in range(self.tiles)), strict=True))
            return [[self._matrix_sum(c, membership)] for c in columns]
        partial: dict[int, list[jax.Array]] = {}
        for tile in range(self.tiles):
            values = terms(tile)
            for head, low, high in self.spans(tile):
                own = [_only(v, low, high) for v in values]
                partial[head] = [a + b for a, b in zip(partial[head], own, strict=True)] if head in partial else own
        return [[all_lanes(partial[h][k]) for h in range(self.num_heads)] for k in range(len(values))]

    def _matrix_sum(self, tiles: Sequence[jax.Array], membership: jax.Array | None) -> jax.Array:
        per_group = self.group // LANES
        out = []
        for start in range(0, self.tiles, per_group):
            x = jnp.concatenate(tiles[start : start + per_group], axis=-1)
            out.append(sum(_dot(part, membership, ((1,), (0,))) for part in bfloat16_parts(x)))
        return jnp.concatenate(out, axis=-1)[:, : self.num_heads]

    def spread(self, entries: Entries, membership: jax.Array | None) -> Tile:
        """A function of the tile: [rows, 128] with each lane holding its head's value."""
        if self.on_matrix_unit:
            values = entries[0]
            padded_heads = _round_up(self.num_heads, LANES)
            if self.num_heads < padded_heads:
                zeros = jnp.zeros((values.shape[0], padded_heads - self.num_heads), values.dtype)
                values = jnp.concatenate([values, zeros], axis=-1)
            groups = [
                functools.reduce(
                    jnp.add,
                    (_dot(part, membership, ((1,), (1,))) for part in bfloat16_parts(values[:, g : g + LANES])),
                )
                for g in range(0, padded_heads, LANES)
            ]
            per_group = self.group // LANES
            return lambda tile: groups[tile // per_group][:, lane_tile(tile % per_group)]

        return lambda tile: self._select(tile, lambda head: entries[head])

    def across(self, entries: Entries) -> jax.Array:
        """Sum over heads, to be broadcast over a row: [rows, 128] or [rows, 1]."""
        if self.on_matrix_unit:
            return jnp.sum(entries[0], axis=-1, keepdims=True)
        total = entries[0]
        for value in entries[1:]:
            total = total + value
        return total

    def pack(self, entries: Entries, *more: Entries | jax.Array) -> jax.Array:
        """[rows, H]; with `more` entries or single columns [rows, 1] beside them."""
        parts = [entries, *more]
        if self.on_matrix_unit:
            arrays = [p if isinstance(p, jax.Array) else p[0] for p in parts]
            return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)
        columns = [c[:, :1] for p in parts for c in ([p] if isinstance(p, jax.Array) else p)]
        shape = (columns[0].shape[0], len(columns))
        lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        out = jnp.broadcast_to(columns[0], shape)
        for i, column in enumerate(columns[1:], start=1):
            out = jnp.where(lane == i, jnp.broadcast_to(column, shape), out)
        return out

    def unpack(self, values: jax.Array) -> Entries:
        """Entries from [rows, H]."""
        if self.on_matrix_unit:
            return [values]
        return [_broadcast_head(values, h) for h in range(self.num_heads)]

    def spread_packed(self, values: jax.Array, membership: jax.Array | None) -> Tile:
        """`spread` of [rows, H]. A head is broadcast when a tile first asks for it: all at once would spill."""
        if self.on_matrix_unit:
            return self.spread([values], membership)
        made: dict[int, jax.Array] = {}

        def of_head(head: int) -> jax.Array:
            if head not in made:
                made[head] = _broadcast_head(values, head)
            return made[head]

        return lambda tile: self._select(tile, of_head)

    def _select(self, tile: int, of_head: Callable[[int], jax.Array]) -> jax.Array:
        spans = self.spans(tile)
        out = of_head(spans[-1][0])
        for head, _, high in reversed(spans[:-1]):
            lane = jax.lax.broadcasted_iota(jnp.int32, out.shape, 1)
            out = jnp.where(lane < high, of_head(head), out)
        return out


def _broadcast_head(values: jax.Array, head: int) -> jax.Array:
    return jnp.broadcast_to(values[:, head : head + 1], (values.shape[0], LANES))


def all_lanes(x: jax.Array) -> jax.Array:
    """[rows, 128] -> [rows, 128]: the sum over lanes, in every lane."""
    return jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)


def lane_tile(index: int) -> slice:
    """The lanes of one tile."""
    return slice(index * LANES, (index + 1) * LANES)


def bfloat16_parts(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays whose sum is the float32 array x, exactly.

    Bits are cleared, not rounded: a compiler may drop a float32 -> bfloat16 -> float32 round trip.
    """
    parts = []
    for _ in range(2):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        high = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(high.astype(jnp.bfloat16))
        x = x - high
    return [*parts, x.astype(jnp.bfloat16)]


def fold_rows(x: jax.Array) -> jax.Array:
    """[rows, w] -> [8, w]: sums every eighth row, which needs no move between sublanes."""
    out = x[:8]
    for start in range(8, x.shape[0], 8):
        out = out + x[start : start + 8]
    return out


def _only(x: jax.Array, low: int, high: int) -> jax.Array:
    if low == 0 and high == LANES:
        return x
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((lane >= low) & (lane < high), x, 0.0)


def _dot(a: jax.Array, b: jax.Array | None, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    assert b is not None
    return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil_div(a, b) * b
