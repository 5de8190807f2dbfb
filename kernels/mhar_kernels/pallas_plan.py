"""Tile sizes of the Pallas TPU kernels, from the shape of a call and the VMEM it would take."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mhar_kernels import tuning
from mhar_kernels.contract import RouteCall
from mhar_kernels.pallas_heads import LANES, Heads

NAME = "pallas_tpu"
# Rows of a token tile; sources of a chunk; backward sweeps over a tile: 2 if it is resident, 1 with the mix as input.
TILE = ("rows", "chunk", "sweeps")
MIB = 2**20
# v4 has 16 MiB of VMEM and every chip scopes a kernel to 16 MiB by default; the rest is the compiler's own.
SMALLEST_BUDGET = 12 * MIB
LARGEST_BUDGET = 32 * MIB
LARGEST_EXPLICIT = 100 * MIB
_MOST_ROWS = 256
_CHUNK_FEATURES = 32768  # what one unrolled loop body handles: sources of a chunk times numbers a row of each
_SPILLED = 4  # [group, D] float32 values of a loop body that the compiler keeps in VMEM, at most as seen


@dataclass(frozen=True)
class Plan:
    """How one kernel walks one call: tiles of `rows` tokens, depth in `chunks` of at most `chunk` sources.

    Chunk 0 takes what the others leave, so that all others are full. `slots` chunks of a tile are in VMEM at once.
    """

    rows: int
    chunk: int
    slots: int
    group: int  # rows of one pass of the inner loop
    num_sources: int
    resident: bool  # backward: all sources of a tile stay in VMEM, so that <d_out, mix> is a sum over them
    vmem_bytes: int

    @property
    def chunks(self) -> int:
        """M; a call with no sources but the null source has one empty chunk."""
        return max(1, -(-self.num_sources // self.chunk))

    @property
    def first(self) -> int:
        """Sources in chunk 0."""
        return self.num_sources - (self.chunks - 1) * self.chunk

    def first_source(self, index):
        """The first source of a chunk; the index may be traced."""
        if isinstance(index, int):
            return 0 if index == 0 else self.first + (index - 1) * self.chunk
        return self.first + (index - 1) * self.chunk

    def later_chunks(self, visit: Callable[[jax.Array], None]) -> None:
        """Inside a kernel: visit(index) for every chunk but chunk 0."""
        if self.chunks > 1:
            pl.loop(1, self.chunks)(visit)

    def chunk_after(self, index: int, items: int) -> int:
        """Index, within its tile, of the chunk that comes `items` later (earlier if negative)."""
        return (index + items) % self.chunks

    def for_rows(self, rows: int, sub: int) -> "Plan":
        """The same plan with smaller tiles."""
        group = next(g for g in range(min(rows, self.group), 0, -1) if rows % g == 0 and g % min(sub, self.group) == 0)
        return replace(self, rows=rows, group=group)

    @property
    def vmem_limit(self) -> int:
        """What the compiler is allowed: the buffers and room for its own temporaries."""
        return max(16 * MIB, self.vmem_bytes + 2 * MIB)


def sublanes(call: RouteCall) -> int:
    """Rows of one packed register tile: row slices are multiples of it."""
    return 8 if call.dtype == "float32" else 16


def forward_plan(call: RouteCall) -> Plan:
    """Two chunks in flight; scores, softmax and mix of a chunk in one loop body."""
    heads = Heads(call.dim, call.num_heads)

    def bytes_for(rows: int, chunk: int, slots: int) -> int:
        size = _itemsize(call)
        per_row = slots * chunk * heads.padded * size + heads.padded * 4 + 2 * heads.padded * size
        per_row += 2 * heads.padded * size * (call.has_residual + len(kept_arrays(call)))
        per_row += 2 * _lanes(2 * call.num_heads) + 3 * _entries_bytes(heads)
        per_row += (2 * call.rows + _chunks(call, chunk)) * _lanes(call.num_heads) * call.return_weights
        return rows * per_row + _constant_bytes(call, heads, rows)

    return _plan(call, heads, _overrides(call, "forward"), lambda chunks: (2,), bytes_for, resident=False)


def kept_arrays(call: RouteCall) -> tuple[str, ...]:
    """What the forward kernel writes for the backward kernel beside the output and the softmax's statistics."""
    if not call.differentiated or backward_plan(call).resident:
        return ()
    return ("mix",) * call.additive + ("rest",) * (call.dtype != "float32")


def backward_plan(call: RouteCall) -> Plan:
    """With all sources of a tile in VMEM (resident), or a chunk at a time.

    A resident tile needs nothing from the forward pass. Otherwise that also writes what rounding took from the mix,
    and the backward kernel reads mix and rest. Tiles are resident where heads are wide and the smallest tile fits:
    narrow heads would spend more time on broadcasting the kept scores than on reading two more rows; 129 sources of
    width 4,096 do not fit. Depends on shape and tile alone, since the forward pass must know.
    """
    heads = Heads(call.dim, call.num_heads)
    overrides = _overrides(call, "backward")

    def bytes_for(rows: int, chunk: int, slots: int, resident: bool) -> int:
        size = _itemsize(call)
        per_row = slots * chunk * heads.padded * size + 2 * heads.padded * size
        per_row += 2 * _lanes(2 * call.num_heads) + (3 + call.has_null) * _entries_bytes(heads)
        if resident:
            per_row += max(1, call.num_sources) * _lanes(3 * call.num_heads + 1) + 2 * _lanes(call.num_heads)
            per_row += _entries_bytes(heads)
        else:
            per_row += 2 * heads.padded * 4  # mix and rest, or a float32 mix
        per_row += 2 * (call.rows + 1) * _lanes(call.num_heads) * call.return_weights
        accumulators = 2 * 8 * 4 * (heads.padded * (1 + call.has_null) + 2 * LANES)
        return rows * per_row + accumulators + _constant_bytes(call, heads, rows)

    resident = overrides["sweeps"] == 2
    if not overrides["sweeps"]:
        chunk = _chunk(call, heads, overrides)
        fits = bytes_for(sublanes(call), chunk, _chunks(call, chunk) + 2, True) <= SMALLEST_BUDGET
        resident = fits and (heads.on_matrix_unit or heads.width >= 256)

    def slots(chunks: int) -> tuple[int, ...]:
        # One chunk is worked on, one stored, one loaded; a resident tile adds its other chunks, or twice as many.
        return (2 * chunks + 1, chunks + 2) if resident else (3,)

    return _plan(call, heads, overrides, slots, functools.partial(bytes_for, resident=resident), resident=resident)


def _overrides(call: RouteCall, direction: str) -> dict[str, int]:
    """What the caller or the tuned table fixes; 0 where the heuristic decides."""
    key = tuning.bucketed(
        direction,
        dim=call.dim,
        num_heads=call.num_heads,
        sources=call.rows,
        tokens=call.tokens,
        dtype=call.dtype,
    )
    explicit = None if call.tile is None else dict(call.tile)
    return tuning.choose(NAME, _device_kind(call), key, dict.fromkeys(TILE, 0), explicit)


def _plan(
    call: RouteCall,
    heads: Heads,
    overrides: dict[str, int],
    slots_of: Callable[[int], tuple[int, ...]],
    bytes_for: Callable[[int, int, int], int],
    *,
    resident: bool,
) -> Plan:
    chunk, sub, budget = _chunk(call, heads, overrides), sublanes(call), _budget(call)
    choices = slots_of(_chunks(call, chunk))
    rows = overrides["rows"]
    if rows == 0:
        # Several tiles, so that the first load and the last compute are short and two cores can share the work.
        ceiling = max(sub, min(_MOST_ROWS, _power_of_two_below(call.tokens // 8)))
        options = [sub * 2**i for i in range(10) if sub * 2**i <= ceiling]
        rows = sub
        for slots in choices:
            fitting = [r for r in options if bytes_for(r, chunk, slots) <= budget]
            if fitting and fitting[-1] >= min(2 * sub, ceiling):
                rows = fitting[-1]
                break
        for smaller in (rows // 2, rows // 4):  # rows that divide the tokens leave no ragged tile
            if call.tokens % rows and smaller >= sub and call.tokens % smaller == 0:
                rows = smaller
    slots = next((s for s in choices if bytes_for(rows, chunk, s) <= budget), choices[-1])
    return Plan(
        rows=rows,
        chunk=chunk,
        slots=slots,
        group=_group_rows(rows, sub, heads.padded),
        num_sources=call.num_sources,
        resident=resident,
        vmem_bytes=bytes_for(rows, chunk, slots),
    )


def _chunk(call: RouteCall, heads: Heads, overrides: dict[str, int]) -> int:
    """Equal chunks of at most 8 sources: a loop body is unrolled over them, so fewer where rows are long, and where
    heads are narrow (or pairs are made) and each source needs many registers."""
    if overrides["chunk"]:
        return max(1, min(overrides["chunk"], call.num_sources))
    most = max(
        1,
        min(
            4 if call.dtype == "float32" or heads.width < 256 else 8,
            _CHUNK_FEATURES // (heads.padded + _entries_bytes(heads) // 4),
        ),
    )
    if call.interpret:
        most = 1  # there, the size of the program is the time it takes
    return max(1, -(-call.num_sources // _chunks(call, most)))


def _chunks(call: RouteCall, chunk: int) -> int:
    return max(1, -(-call.num_sources // chunk))


def _budget(call: RouteCall) -> int:
    if _device_kind(call) is None:
        return SMALLEST_BUDGET
    return max(SMALLEST_BUDGET, min(LARGEST_BUDGET, pltpu.get_tpu_info().vmem_capacity_bytes // 2))


def capacity(call: RouteCall) -> int:
    """Bytes of VMEM that a tile may take; ahead of time, when the chip is not known, those of the chips that have most.

    The smallest chip, v4, has 16 MiB, which a few shapes exceed with the smallest tile: the widest, with many heads.
    """
    if _device_kind(call) is None:
        return LARGEST_EXPLICIT
    return min(LARGEST_EXPLICIT, pltpu.get_tpu_info().vmem_capacity_bytes - MIB // 2)


def _constant_bytes(call: RouteCall, heads: Heads, rows: int) -> int:
    """What does not grow with the tile: parameters, and the compiler's temporaries of one group of rows."""
    parameters = 2 * 8 * heads.padded * 4 * (2 + call.has_null)
    temporaries = _SPILLED * _group_rows(rows, sublanes(call), heads.padded) * heads.padded * 4
    return parameters + temporaries + 2 * heads.group * LANES * 2 * heads.on_matrix_unit


def _group_rows(rows: int, sub: int, padded: int) -> int:
    """Enough rows in flight to hide latency, few enough that a [rows, D] value is at most some 32 registers."""
    group = rows
    while group * padded > 32768 and group % (2 * sub) == 0:
        group //= 2
    return group


def _itemsize(call: RouteCall) -> int:
    return 4 if call.dtype == "float32" else 2


def _entries_bytes(heads: Heads) -> int:
    """Bytes a row of scratch memory for entries."""
    arrays, _, width = heads.entries_shape(1)
    return arrays * _lanes(width)


def _lanes(width: int) -> int:
    """Bytes of one float32 row, padded to whole lane tiles."""
    return -(-width // LANES) * LANES * 4


def _power_of_two_below(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _device_kind(call: RouteCall) -> str | None:
    """The chip's name where the call will run on this process's own TPU; None when compiling ahead of time."""
    if call.platform != "tpu" or jax.default_backend() != "tpu":
        return None
    return jax.devices()[0].device_kind
