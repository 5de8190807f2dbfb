"""The directory that `prepare` writes: ArrayRecord shards of token ids and an index.

index.json                          PreparedIndex
lengths.npy, hashes.npy             uint32 tokens and uint64 text hash of every document
tokens-00000-of-00004.array_record  a record for each document: its ids, little-endian, without end-of-text
tokenizer.json                      copy of the tokenizer, unless it is the built-in bytes
"""

import bisect
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from mhar_jax.data.corpus import TokenCorpus, corpus_fingerprint
from mhar_jax.data.files import INDEX_NAME
from mhar_jax.data.tokenizers import Tokenizer, load_tokenizer
from mhar_jax.errors import UserError

FORMAT_VERSION = 1
LENGTHS_NAME = "lengths.npy"
HASHES_NAME = "hashes.npy"
# One record a chunk, so that reading a document decodes nothing else.
WRITER_OPTIONS = "group_size:1,zstd:3"


@dataclass(frozen=True)
class Shard:
    """A file of consecutive documents."""

    file: str
    documents: int
    tokens: int
    bytes: int  # size of the file


@dataclass(frozen=True)
class PreparedIndex:
    """What index.json holds."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    format_version: int
    tokenizer: str  # as it was given to `prepare`
    tokenizer_fingerprint: str
    eos_token: str  # not stored after the documents: packing adds it
    eos_id: int
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    documents: int
    tokens: int  # without end-of-text
    lengths_file: str
    hashes_file: str
    shards: tuple[Shard, ...]

    def save(self, directory: Path) -> None:
        """Writes index.json."""
        (directory / INDEX_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n")


def load_index(directory: Path) -> PreparedIndex:
    """Reads index.json and checks that the files it names are there and as long as when they were written.

    Raises:
      UserError: naming the file that is missing, cut or not what it should be.
    """
    path = directory / INDEX_NAME
    try:
        content = json.loads(path.read_bytes())
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != FORMAT_VERSION:
            raise UserError(f"{path}: format version {version} is not {FORMAT_VERSION}; run prepare again")
        index = TypeAdapter(PreparedIndex).validate_python(content)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is not the index of prepared shards ({where}: {first['msg']})") from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not the index of prepared shards ({error})") from error
    for shard in index.shards:
        file = directory / shard.file
        if not file.is_file():
            raise UserError(f"the shard {file} is missing; run prepare again")
        if file.stat().st_size != shard.bytes:
            raise UserError(
                f"the shard {file} is damaged: it has {file.stat().st_size} bytes and had {shard.bytes}; "
                "run prepare again"
            )
    return index


def _load_column(directory: Path, name: str, documents: int, dtype: str) -> np.ndarray:
    path = directory / name
    try:
        column = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}); run prepare again") from error
    if column.shape != (documents,) or column.dtype != np.dtype(dtype):
        raise UserError(
            f"{path} is damaged: it holds {column.dtype} {list(column.shape)} and must hold {dtype} [{documents}]; "
            "run prepare again"
        )
    return column


class ShardTokens:
    """A `TokenSource` of a prepared directory. A document is read as a whole; the last one is kept."""

    def __init__(self, directory: Path, index: PreparedIndex):
        from grain.sources import ArrayRecordDataSource

        self.lengths = np.array(_load_column(directory, index.lengths_file, index.documents, "<u4"))
        self._files = [directory / shard.file for shard in index.shards]
        self._ends = list(itertools.accumulate(shard.documents for shard in index.shards))
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        # The counts spare opening every file at the start.
        self._records = ArrayRecordDataSource(
            [f"{file}[0:{shard.documents}]" for file, shard in zip(self._files, index.shards, strict=True)]
        )
        self._last: tuple[int, np.ndarray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}

    def document(self, index: int) -> np.ndarray:
        """All tokens of a document.

        Raises:
          UserError: naming the damaged shard.
        """
        last = self._last
        if last is not None and last[0] == index:
            return last[1]
        file = self._files[bisect.bisect_right(self._ends, index)]
        try:
            record = self._records[index]
        except Exception as error:  # the reader raises RuntimeError, IndexError or ValueError
            reason = " ".join(str(error).split())
            raise UserError(f"the shard {file} is damaged ({reason}); run prepare again") from error
        if len(record) != int(self.lengths[index]) * self._dtype.itemsize:
            raise UserError(
                f"the shard {file} is damaged: document {index} has {len(record)} bytes for {self.lengths[index]} "
                "tokens; run prepare again"
            )
        tokens = np.frombuffer(record, self._dtype)
        self._last = (index, tokens)
        return tokens

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1 of a document."""
        return self.document(document)[start:stop]


def open_prepared(path: str, tokenizer: Tokenizer) -> TokenCorpus:
    """The corpus of a prepared directory.

    Raises:
      UserError: damaged, or prepared with another tokenizer or end-of-text.
    """
    directory = Path(path)
    index = load_index(directory)
    if index.tokenizer_fingerprint != tokenizer.fingerprint:
        own = "bytes" if index.tokenizer == "bytes" else directory / "tokenizer.json"
        raise UserError(
            f"data.tokenizer: {path} was prepared with the tokenizer {index.tokenizer} and data.tokenizer is "
            f"{tokenizer.spec}, which is another one; set data.tokenizer={own}"
        )
    if index.eos_id != tokenizer.eos_id:
        raise UserError(
            f"data.eos_token: {path} was prepared for the end-of-text {index.eos_token} and the run's is "
            f"{tokenizer.eos_token}; set data.eos_token={index.eos_token}"
        )
    hashes = np.array(_load_column(directory, index.hashes_file, index.documents, "<u8"))
    return TokenCorpus(path, ShardTokens(directory, index), hashes, corpus_fingerprint(hashes, tokenizer))


def own_tokenizer(path: str, index: PreparedIndex) -> Tokenizer:
    """The tokenizer that a directory was prepared with, from its own copy."""
    if index.tokenizer == "bytes":
        return load_tokenizer("bytes")
    return load_tokenizer(str(Path(path) / "tokenizer.json"), index.eos_token)
