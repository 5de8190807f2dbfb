"""A look at the header of a GGUF file before the `gguf` package reads it.

The package believes what the header says: a list of 2**50 items in a file of 50 bytes keeps it busy until the memory is
gone. Layout: the specification of GGUF in the repository of ggml (docs/gguf.md).
"""

import mmap
import struct
from pathlib import Path

MOST_ITEMS = 5_000_000  # of a list: a vocabulary and its merges have some 100,000
MOST_DEPTH = 2  # of lists in lists
MOST_DIMENSIONS = 8  # of a tensor; ggml has 4
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value of each type
_STRING, _LIST = 8, 9


def check_header(path: Path) -> None:
    """Walks over all fields and tensors of the header.

    Raises:
      ValueError: it does not fit into the file, or is not GGUF.
      OSError: the file cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        walk = _Walk(data, "<")
        version = walk.number("I")
        if version & 0xFFFF == 0:  # written on a machine of the other byte order
            walk = _Walk(data, ">")
            version = walk.number("I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, and 2 and 3 are known")
        tensors, fields = walk.number("Q"), walk.number("Q")
        for count, what, one in ((fields, "fields", walk.field), (tensors, "tensors", walk.tensor)):
            if count * walk.LEAST > len(data):
                raise ValueError(f"it claims {count} {what} in {len(data)} bytes")
            seen = set()
            for _ in range(count):
                name = one()
                if name in seen:
                    raise ValueError(f"it has two {what} of the name {name.decode(errors='replace')!r:.80}")
                seen.add(name)


class _Walk:
    LEAST = 8 + 4  # bytes of a field or tensor: the length of its name, and a type

    def __init__(self, data: mmap.mmap, order: str):
        self._data, self._order, self._place = data, order, 4

    def number(self, kind: str) -> int:
        first = self._skip(struct.calcsize(f"{self._order}{kind}"))
        (value,) = struct.unpack_from(f"{self._order}{kind}", self._data, first)
        return value

    def field(self) -> bytes:
        name = self._string()
        self._value(self.number("I"), name)
        return name

    def tensor(self) -> bytes:
        name, dimensions = self._string(), self.number("I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"tensor {name.decode(errors='replace')!r:.80} claims {dimensions} dimensions")
        self._skip(8 * dimensions + 4 + 8)  # the shape, the type and the offset
        return name

    def _string(self) -> bytes:
        length = self.number("Q")
        first = self._skip(length)
        return self._data[first : first + length]

    def _value(self, kind: int, name: bytes, depth: int = 0) -> None:
        if kind in _SIZES:
            self._skip(_SIZES[kind])
        elif kind == _STRING:
            self._skip(self.number("Q"))
        elif kind == _LIST and depth < MOST_DEPTH:
            kind, count = self.number("I"), self.number("Q")
            if count > MOST_ITEMS:
                where = f"the list of the field {name.decode(errors='replace')!r:.80}"
                raise ValueError(f"{where} must have at most {MOST_ITEMS} items, and claims {count}")
            if kind in _SIZES:
                self._skip(_SIZES[kind] * count)
                return
            for _ in range(count):
                self._value(kind, name, depth + 1)
        else:
            raise ValueError(f"the field {name.decode(errors='replace')!r:.80} has an unknown type, {kind}")

    def _skip(self, count: int) -> int:
        """Steps over so many bytes, which must be there; gives where they begin."""
        first = self._place
        if count > len(self._data) - first:
            raise ValueError(f"it is cut off: {count} bytes are claimed at byte {first} of {len(self._data)}")
        self._place = first + count
        return first
