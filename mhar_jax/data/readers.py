"""Random access to the documents of text, JSON lines and parquet files, holding offsets rather than text in memory."""

import abc
import bisect
import collections
import hashlib
import itertools
import json
import mmap
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mhar_jax.data.files import list_files
from mhar_jax.data.fingerprints import hash_content
from mhar_jax.errors import UserError

_BLANK_LINES = re.compile(rb"\n(?:[ \t\r\f\v]*\n)+")
_LEADING_BLANK_LINES = re.compile(rb"(?:[ \t\r\f\v]*\n)+")
_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 24  # bytes looked at at once while a file is indexed


class DocumentFile(abc.ABC):
    """The documents of one file."""

    path: Path
    num_bytes: int  # of text, about

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> str:
        """Document `index`; a UserError names the file and place of a bad one."""


class TextFile(DocumentFile):
    """Plain text: a document is a block of lines between blank lines."""

    def __init__(self, path: Path):
        self.path = path
        starts: list[int] = []
        ends: list[int] = []
        with _mapped(path) as content:
            self.num_bytes = len(content)
            position = len(_BOM) if content[: len(_BOM)] == _BOM else 0
            if leading := _LEADING_BLANK_LINES.match(content, position):
                position = leading.end()
            for gap in _BLANK_LINES.finditer(content, position):
                starts.append(position)
                ends.append(gap.start())
                position = gap.end()
            if content[position:].strip():
                starts.append(position)
                ends.append(len(content))
        self._spans = np.array([starts, ends], np.int64).T

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> str:
        start, end = self._spans[index].tolist()
        return _decode(_read(self.path, start, end).rstrip(), self.path, start).replace("\r\n", "\n")


class JsonLinesFile(DocumentFile):
    """JSON lines: a document is the field `text_field` of the object on a line. Empty lines are skipped."""

    def __init__(self, path: Path, text_field: str):
        self.path = path
        self.text_field = text_field
        newlines = []
        with _mapped(path) as content:
            self.num_bytes = len(content)
            for position in range(0, len(content), _CHUNK):
                chunk = np.frombuffer(content[position : position + _CHUNK], np.uint8)
                newlines.append(np.flatnonzero(chunk == ord("\n")) + position)
            breaks = np.concatenate([*newlines, [self.num_bytes]]).astype(np.int64)
            spans = np.stack([np.concatenate([[0], breaks[:-1] + 1]), breaks], axis=1)
            length = spans[:, 1] - spans[:, 0]
            empty = length == 0
            for line in np.flatnonzero(length == 1).tolist():
                empty[line] = content[int(spans[line, 0])] == ord("\r")
        self._spans = spans[~empty]

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> str:
        start, end = self._spans[index].tolist()
        raw = _read(self.path, start, end)
        line = _decode(raw, self.path, start).removeprefix("\ufeff")
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{self._place(start)}: the line is not JSON ({error})") from error
        if not isinstance(value, dict):
            raise UserError(f"{self._place(start)}: the line must hold an object, got {type(value).__name__}")
        if self.text_field not in value:
            raise UserError(
                f"{self._place(start)}: there is no field {self.text_field!r}, only {', '.join(value) or 'none'}; "
                "set data.text_field"
            )
        text = value[self.text_field]
        if not isinstance(text, str):
            raise UserError(f"{self._place(start)}: field {self.text_field!r} must be text, got {type(text).__name__}")
        if "\\u" in line:  # only an escape can make half a surrogate pair
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise UserError(
                    f"{self._place(start)}: field {self.text_field!r} is not valid text ({error})"
                ) from error
        return text

    def _place(self, start: int) -> str:
        with _mapped(self.path) as content:
            before = sum(content[p : min(p + _CHUNK, start)].count(b"\n") for p in range(0, start, _CHUNK))
        return f"{self.path}, line {before + 1}"


class ParquetFile(DocumentFile):
    """Parquet: a document is a row of the column `text_field`. A row group is decoded as a whole, a few are kept."""

    _kept = 4  # row groups

    def __init__(self, path: Path, text_field: str):
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        self.text_field = text_field
        try:
            with pq.ParquetFile(path) as file:
                schema, metadata = file.schema_arrow, file.metadata
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"data.path: {path} cannot be read as parquet ({_one_line(error)})") from error
        if text_field not in schema.names:
            raise UserError(
                f"{path}: there is no column {text_field!r}, only {', '.join(schema.names)}; set data.text_field"
            )
        kind = schema.field(text_field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise UserError(f"{path}: column {text_field!r} must hold text, got {kind}")
        groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
        self._ends = list(itertools.accumulate(g.num_rows for g in groups))
        self.num_bytes = sum(
            column.total_uncompressed_size
            for g in groups
            for column in (g.column(c) for c in range(g.num_columns))
            if column.path_in_schema == text_field
        )
        self._reset()

    def _reset(self) -> None:
        self._cache: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_cache", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> str:
        group = bisect.bisect_right(self._ends, index)
        row = index - (self._ends[group - 1] if group else 0)
        text = self._column(group)[row].as_py()
        if text is None:
            raise UserError(f"{self.path}, row {index}: column {self.text_field!r} is null")
        return text

    def _column(self, group: int):
        import pyarrow as pa
        import pyarrow.parquet as pq

        with self._lock:
            if group not in self._cache:
                try:
                    with pq.ParquetFile(self.path) as file:
                        column = file.read_row_group(group, columns=[self.text_field]).column(0)
                    column.validate(full=True)  # invalid UTF-8
                except (pa.ArrowException, OSError) as error:
                    raise UserError(f"{self.path}, row group {group}: cannot be read ({_one_line(error)})") from error
                self._cache[group] = column
                while len(self._cache) > self._kept:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(group)
            return self._cache[group]


class Documents:
    """The documents of several files, one after the other."""

    def __init__(self, files: list[DocumentFile]):
        self.files = files
        self._ends = list(itertools.accumulate(len(f) for f in files))
        self.num_bytes = sum(f.num_bytes for f in files)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = bisect.bisect_right(self._ends, index)
        return self.files[file][index - (self._ends[file - 1] if file else 0)]

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def listing_fingerprint(self) -> str:
        """Hash of the files' names, sizes and numbers of documents, not of their content."""
        listing = [(f.path.name, f.path.stat().st_size, len(f)) for f in self.files]
        return hashlib.blake2b(json.dumps(listing).encode(), digest_size=16).hexdigest()

    def content_fingerprint(self) -> str:
        """Hash of the files' content, of large files by samples (`fingerprints.hash_content`)."""
        content = [hash_content(f.path) for f in self.files]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def open_documents(path: str | None, file_format: str, text_field: str) -> Documents:
    """The documents of a file, glob or directory (see `files.list_files`); None: the embedded text.

    Raises:
      UserError: nothing to read, a file that is not what it seems, or no document at all.
    """
    documents = Documents([_open(file, kind, text_field) for file, kind in list_files(path, file_format)])
    if not len(documents):
        raise UserError(f"data.path: {path} holds no document")
    return documents


def _open(file: Path, kind: str, text_field: str) -> DocumentFile:
    try:
        if kind == "text":
            return TextFile(file)
        if kind == "jsonl":
            return JsonLinesFile(file, text_field)
        return ParquetFile(file, text_field)
    except OSError as error:
        raise UserError(f"data.path: {file} cannot be read ({error.strerror})") from error


class _mapped:
    """A file mapped into memory for reading; b"" for an empty file, which cannot be mapped."""

    def __init__(self, path: Path):
        self._path = path
        self._map: mmap.mmap | None = None

    def __enter__(self) -> mmap.mmap | bytes:
        with open(self._path, "rb") as file:
            if file.seek(0, 2) == 0:
                return b""
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map

    def __exit__(self, *_) -> None:
        if self._map is not None:
            self._map.close()


def _read(path: Path, start: int, end: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        parts = []
        while start < end and (part := file.read(end - start)):  # a raw read may stop early
            parts.append(part)
            start += len(part)
    return b"".join(parts)


def _decode(raw: bytes, path: Path, start: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: invalid UTF-8 at byte {start + error.start} ({error.reason})") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
