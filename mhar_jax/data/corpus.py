"""A corpus: tokens and hash of every document, or raw text where it is too large for that."""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mhar_jax.config.schema import DataConfig
from mhar_jax.data.files import list_files
from mhar_jax.data.packing import TokenSource
from mhar_jax.data.readers import Documents, open_documents
from mhar_jax.data.split import document_hash
from mhar_jax.data.tokenizers import Tokenizer

_BATCH_CHARACTERS = 1 << 22  # encoded at once


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned type for ids below vocab_size: uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class TokenCorpus:
    """Tokenised documents."""

    name: str  # for messages
    source: TokenSource
    hashes: np.ndarray  # uint64 [documents], of the texts
    fingerprint: str  # hash of the documents in order, the tokenizer and the end-of-text

    def __len__(self) -> int:
        return len(self.hashes)


@dataclass(frozen=True)
class RawText:
    """Text that is tokenised on the fly."""

    name: str  # for messages
    documents: Documents


class MemoryTokens:
    """A `TokenSource` of one flat array."""

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray):
        self.lengths = lengths
        self._tokens = tokens
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1 of a document; a view."""
        begin = int(self._starts[document])
        return self._tokens[begin + start : begin + stop]


def corpus_fingerprint(hashes: np.ndarray, tokenizer: Tokenizer) -> str:
    """Equal for two runs that see the same documents in the same order as the same tokens."""
    digest = hashlib.blake2b(np.ascontiguousarray(hashes, "<u8").data, digest_size=16)
    digest.update(f"{tokenizer.fingerprint} {tokenizer.eos_id}".encode())
    return digest.hexdigest()


def encode_documents(
    documents: Documents, tokenizer: Tokenizer, start: int, stop: int
) -> Iterator[tuple[list[np.ndarray], list[int]]]:
    """Tokens and hashes of documents start..stop-1, some megabytes of text at a time."""
    texts: list[str] = []
    characters = 0
    for index in range(start, stop):
        texts.append(documents[index])
        characters += len(texts[-1])
        if characters >= _BATCH_CHARACTERS or index == stop - 1:
            yield tokenizer.encode_batch(texts), [document_hash(text) for text in texts]
            texts, characters = [], 0


def load_text(path: str | None, data: DataConfig, tokenizer: Tokenizer) -> TokenCorpus | RawText:
    """Opens text files, and tokenises them into memory if there are at most `data.tokenize_at_start_mb` megabytes.

    The newest two corpora are kept for the next caller while their files do not change.

    Raises:
      UserError: see `readers.open_documents`; of tokenised text, also for any bad document.
    """
    stamp = tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f, _ in list_files(path, data.format))
    return _load_text(path, data.format, data.text_field, data.tokenize_at_start_mb, tokenizer, stamp)


@functools.lru_cache(maxsize=2)  # the training text and the held-out text
def _load_text(
    path: str | None, file_format: str, text_field: str, megabytes: int, tokenizer: Tokenizer, stamp: tuple
) -> TokenCorpus | RawText:
    del stamp  # only tells changed files apart
    documents = open_documents(path, file_format, text_field)
    name = path or "the embedded text"
    if documents.num_bytes > megabytes * 1_000_000:
        return RawText(name, documents)
    dtype = token_dtype(tokenizer.vocab_size)
    tokens, lengths, hashes = [], [], []
    for encoded, batch_hashes in encode_documents(documents, tokenizer, 0, len(documents)):
        tokens.append(np.concatenate(encoded).astype(dtype))
        lengths += [len(e) for e in encoded]
        hashes += batch_hashes
    all_hashes = np.array(hashes, np.uint64)
    source = MemoryTokens(np.concatenate(tokens), np.array(lengths, np.int64))
    return TokenCorpus(name, source, all_hashes, corpus_fingerprint(all_hashes, tokenizer))
