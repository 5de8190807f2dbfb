"""Rows of raw text too large to be tokenised at the start: each row of the batch is a stream of documents of its own.

All documents of all epochs, each epoch in an order drawn from (seed, epoch), are numbered on and on. Row r of the
global batch packs numbers r, r + batch_size, r + 2 * batch_size, ..., leaving out held-out documents, each followed by
one end-of-text; its windows are seq_len + 1 tokens from every seq_len-th one on. So a row depends on its number and not
on the process that makes it, and the place in it is two numbers: the document and the token in it where the next window
starts. What a window leaves of a document is not saved but tokenised again.
"""

import collections
from collections.abc import Sequence

import numpy as np

from mhar_jax.data.packing import EpochCache, epoch_order
from mhar_jax.data.readers import Documents
from mhar_jax.data.split import is_held_out
from mhar_jax.data.tokenizers import Tokenizer
from mhar_jax.errors import UserError


class TextStream:
    """The endless numbering of documents, tokenised when asked.

    Args:
      documents: text by index.
      tokenizer: encodes them.
      held_out_share: documents of this share of hashes are left out; 0: none.
      seed, shuffle: order of the documents in every epoch.
    """

    def __init__(
        self,
        documents: Sequence[str] | Documents,
        tokenizer: Tokenizer,
        *,
        held_out_share: float,
        seed: int,
        shuffle: bool,
    ):
        self.documents = documents
        self.tokenizer = tokenizer
        self.held_out_share = held_out_share
        self._seed = seed
        self._shuffle = shuffle
        self._order = EpochCache(self._make_order, keep=4)

    def _make_order(self, epoch: int) -> np.ndarray:
        return epoch_order(len(self.documents), self._seed, epoch, self._shuffle)

    def encode(self, number: int) -> np.ndarray | None:
        """Tokens of a document with its end-of-text, int32; None if it is held out."""
        epoch, place = divmod(number, len(self.documents))
        text = self.documents[int(self._order(epoch)[place])]
        if is_held_out(text, self.held_out_share):
            return None
        return np.append(self.tokenizer.encode(text), np.int32(self.tokenizer.eos_id))


class Row:
    """One row of the batch: where its next window starts, and the tokens already made from there on."""

    def __init__(self, stream: TextStream, step: int, document: int, token: int):
        self._stream = stream
        self._step = step
        self._next = document  # number of the next document to tokenise
        self._skip = token  # tokens of it that earlier windows used
        self._pieces: collections.deque[tuple[int, np.ndarray]] = collections.deque()
        self._start = token  # of the window, in the first piece
        self._ready = 0  # tokens from the start on
        self.position = (document, token)

    def window(self, seq_len: int) -> np.ndarray:
        """The next window, int32 [seq_len + 1]."""
        while self._ready < seq_len + 1:
            self._append()
        parts, start, missing = [], self._start, seq_len + 1
        for _, piece in self._pieces:
            part = piece[start : start + missing]
            parts.append(part)
            start, missing = 0, missing - len(part)
            if not missing:
                break
        self._start += seq_len
        self._ready -= seq_len
        while self._start >= len(self._pieces[0][1]):
            self._start -= len(self._pieces.popleft()[1])
        self.position = (self._pieces[0][0], self._start)
        return np.concatenate(parts)

    def _append(self) -> None:
        # More misses than chance allows: the row meets held-out documents only, which a fixed order can bring about.
        for _ in range(1000 + 100 * len(self._stream.documents)):
            number = self._next
            tokens = self._stream.encode(number)
            self._next += self._step
            if tokens is not None:
                self._pieces.append((number, tokens))
                self._ready += len(tokens) - self._skip
                self._skip = 0
                return
        raise UserError(
            f"a row of the batch meets held-out documents only, with {len(self._stream.documents)} documents "
            "in a fixed order; set data.shuffle=true or raise data.tokenize_at_start_mb"
        )
