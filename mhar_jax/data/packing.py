"""Packing as arithmetic: any window of an endless stream of documents, from the documents' lengths.

Epoch e is every document once, in an order drawn from (seed, e), each followed by one end-of-text. The epochs follow
each other without a gap. Window i is the seq_len + 1 tokens from token i * seq_len on, so every token is predicted
exactly once, and batch k is windows k * batch_size to (k + 1) * batch_size - 1. A batch is a function of the documents,
seed, batch_size, seq_len and k: not of processes, workers or what was read before.
"""

import collections
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class TokenSource(Protocol):
    """Tokenised documents of known length."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, without end-of-text; an integer array [documents]."""

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1 of a document, an integer array."""


class EpochCache:
    """The newest few results of a function of the epoch; safe to call from several threads."""

    def __init__(self, make: Callable[[int], Any], keep: int = 2):
        self._make = make
        self._keep = keep
        self._reset()

    def _reset(self) -> None:
        self._values: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_keep": self._keep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __call__(self, epoch: int) -> Any:
        with self._lock:
            if epoch not in self._values:
                self._values[epoch] = self._make(epoch)
                while len(self._values) > self._keep:
                    self._values.popitem(last=False)
            self._values.move_to_end(epoch)
            return self._values[epoch]


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order of `count` documents in an epoch: an integer array [count].

    Documents sorted by raw draws of a bit generator: numpy promises that those never change, and does not promise it
    for `permutation`. It costs one sort an epoch.
    """
    dtype = np.uint32 if count < 2**32 else np.int64
    if not shuffle:
        return np.arange(count, dtype=dtype)
    draws = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(count)
    return np.argsort(draws, kind="stable").astype(dtype)


class PackedTokens:
    """Random access to the windows of the endless stream.

    Args:
      source: the tokenised documents.
      documents: indices of those that belong to the stream, [at least one].
      eos_id: token that follows every document.
      seq_len: tokens predicted in a window; a window has one more.
      seed, shuffle: order of the documents in every epoch; shuffle=False keeps that of `documents`.
    """

    def __init__(
        self,
        source: TokenSource,
        documents: np.ndarray,
        *,
        eos_id: int,
        seq_len: int,
        seed: int = 0,
        shuffle: bool = True,
    ):
        if not len(documents):
            raise ValueError("documents must not be empty")
        self._source = source
        self._documents = np.asarray(documents)
        self._eos_id = eos_id
        self._seq_len = seq_len
        self._seed = seed
        self._shuffle = shuffle
        self.tokens_per_epoch = int(source.lengths[self._documents].sum(dtype=np.int64)) + len(self._documents)
        self._epoch = EpochCache(self._make_epoch)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents in order, and the token position after each one's end-of-text."""
        documents = self._documents[epoch_order(len(self._documents), self._seed, epoch, self._shuffle)]
        return documents, np.cumsum(self._source.lengths[documents].astype(np.int64) + 1)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1 of the stream, int32 [stop - start]."""
        out = np.full(stop - start, self._eos_id, np.int32)
        position = start
        while position < stop:
            epoch, offset = divmod(position, self.tokens_per_epoch)
            documents, ends = self._epoch(epoch)
            until = min(self.tokens_per_epoch, offset + stop - position)
            first = int(np.searchsorted(ends, offset, side="right"))
            last = int(np.searchsorted(ends, until, side="left")) + 1
            for document, end in zip(documents[first:last].tolist(), ends[first:last].tolist(), strict=True):
                begin = end - 1 - int(self._source.lengths[document])
                read_from, read_to = max(offset, begin), min(until, end - 1)  # without the end-of-text
                if read_from < read_to:
                    piece = self._source.read(document, read_from - begin, read_to - begin)
                    at = position - start + read_from - offset
                    out[at : at + len(piece)] = piece
            position += until - offset
        return out

    def windows(self, first: int, count: int) -> np.ndarray:
        """Windows first..first+count-1, int32 [count, seq_len + 1]."""
        flat = self.tokens(first * self._seq_len, (first + count) * self._seq_len + 1)
        return np.lib.stride_tricks.sliding_window_view(flat, self._seq_len + 1)[:: self._seq_len].copy()

    def __getitem__(self, index: int) -> np.ndarray:
        """Window `index`, int32 [seq_len + 1]."""
        return self.windows(index, 1)[0]
