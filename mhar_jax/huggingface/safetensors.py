"""The safetensors format: a header that is checked before anything is allocated, and tensors read and written in turn.

A file is 8 bytes (length of the header, little-endian), the header (JSON: tensor name to dtype, shape and the range of
its bytes) and the bytes of all tensors without gaps. The package of that name maps whole files into memory and wants
all tensors at once to write; models larger than the host's memory need neither.
"""

import collections
import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mhar_jax.errors import UserError

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER = 100_000_000  # bytes; the format's own limit
MOST_DIMENSIONS = 16  # of a tensor
MOST_AT_ONCE = 64 << 20  # bytes written at a time


class Entry(NamedTuple):
    """One tensor of a file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by name.

    Raises:
      UserError: the file cannot be read, or its header does not describe its bytes exactly.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = _header_length(path, file.read(8), size)
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    try:
        described = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path}: the header must be JSON, and is not: {reason}") from None
    if not isinstance(described, dict):
        raise UserError(f"{path}: the header must map tensor names to tensors, got {type(described).__name__}")
    described.pop("__metadata__", None)
    entries = {}
    for name, tensor in described.items():
        with _about(path, name):
            entries[name] = _entry(tensor, 8 + length, size)
    _check_ranges(path, entries, 8 + length, size)
    return entries


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise UserError(f"{path} must begin with 8 bytes, the length of its header, and has only {len(prefix)}")
    length = int.from_bytes(prefix, "little")
    if length > MOST_HEADER:
        raise UserError(f"{path}: the header must have at most {MOST_HEADER} bytes, and claims {length}")
    if 8 + length > size:
        raise UserError(f"{path} is cut off: the header claims {length} bytes, and {size - 8} follow")
    return length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise ValueError(f"the name {counts.most_common(1)[0][0]!r} is there twice")
    return found


@contextlib.contextmanager
def _about(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(f"{path}: tensor {name} {error}") from None


def _entry(tensor: Any, start: int, size: int) -> Entry:
    """One tensor of the header; ValueError says what is wrong with it."""
    if not isinstance(tensor, dict) or not {"dtype", "shape", "data_offsets"} <= tensor.keys():
        raise ValueError("must be given by dtype, shape and data_offsets, and is not")
    if not isinstance(tensor["dtype"], str) or tensor["dtype"] not in DTYPES:
        raise ValueError(f"must have dtype {', '.join(DTYPES)}, got {tensor['dtype']!r}")
    shape, offsets = tensor["shape"], tensor["data_offsets"]
    if not _whole_numbers(shape):
        raise ValueError(f"must have a shape of whole numbers, got {shape!r:.80}")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise ValueError(f"must have two data_offsets, got {offsets!r:.80}")
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"must have at most {MOST_DIMENSIONS} dimensions, got {len(shape)}")
    entry = Entry(DTYPES[tensor["dtype"]], tuple(shape), start + offsets[0])
    if start + offsets[1] > size:
        raise ValueError(f"ends at byte {start + offsets[1]}, past the end of the file at {size}")
    if entry.nbytes > size:
        raise ValueError(f"has shape {shape!r:.80} of {tensor['dtype']}, more than the {size} bytes of the whole file")
    if offsets[1] - offsets[0] != entry.nbytes:
        raise ValueError(
            f"has {offsets[1] - offsets[0]} bytes, and {tensor['dtype']} {list(shape)} needs {entry.nbytes}"
        )
    return entry


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_ranges(path: Path, entries: Mapping[str, Entry], start: int, size: int) -> None:
    """Tensors lie one behind the other, from the header to the end of the file."""
    before, end = "the header", start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset < end:
            raise UserError(f"{path}: the bytes of tensor {name} overlap those of {before}")
        if entry.offset > end:
            raise UserError(f"{path}: {entry.offset - end} bytes between {before} and tensor {name} belong to nothing")
        before, end = f"tensor {name}", entry.offset + entry.nbytes
    if end != size:
        raise UserError(f"{path}: {size - end} bytes behind {before} belong to nothing")


def read_tensor(path: Path, entry: Entry) -> np.ndarray:
    """A tensor in its stored dtype; its memory is the only one taken.

    Raises:
      UserError: the file has changed or cannot be read.
    """
    count = math.prod(entry.shape)
    raw = np.dtype(f"u{entry.dtype.itemsize}")
    try:
        values = np.fromfile(path, raw, count, offset=entry.offset)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if values.size != count:
        raise UserError(f"{path} was cut off while it was read")
    return values.view(entry.dtype).reshape(entry.shape)


class Planned(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]


def write_file(path: Path, plan: Sequence[Planned], tensors: Iterator[np.ndarray]) -> None:
    """Writes the tensors of the plan, which `tensors` gives in its order, each asked for after the one before.

    Tensors may be views and of another dtype; they are laid out and rounded in slices.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for planned in plan:
        end = offset + math.prod(planned.shape) * planned.dtype.itemsize
        header[planned.name] = {
            "dtype": NAMES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for tensors at multiples of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for planned, tensor in zip(plan, tensors, strict=True):
            assert tensor.shape == planned.shape, (planned, tensor.shape)
            for part in row_slices(planned.shape, planned.dtype.itemsize):
                with np.errstate(over="ignore"):  # the caller names what becomes infinite
                    piece = np.ascontiguousarray(tensor[part]).astype(planned.dtype, copy=False)
                file.write(piece.tobytes())


def row_slices(shape: tuple[int, ...], itemsize: int, multiple: int = 1) -> Iterator[Any]:
    """Indices that cut an array into groups of `multiple` rows, as many as MOST_AT_ONCE bytes hold."""
    if not shape:
        yield ...
        return
    row = max(math.prod(shape[1:]) * itemsize, 1)
    step = max(MOST_AT_ONCE // (row * multiple), 1) * multiple
    for first in range(0, shape[0], step):
        yield slice(first, min(first + step, shape[0]))
