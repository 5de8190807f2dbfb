"""Rows of raw text too large to be tokenised at the start: each row of the batch is a stream of documents of its own.

All documents of all epochs, each epoch in an order drawn from (seed, epoch), are numbered on and on. Row r of the
global batch packs numbers r, r + batch_size, r + 2 * batch_size, ..., leaving out held-out documents, each followed by
one end-of-text; its windows are seq_len + 1 tokens from every seq_len-th one on. So a row depends on its number and not
on the process that makes it, and the place in it is two numbers: the document and the token in it where the next window
starts. What a window leaves of a document is not saved but tokenised again.
"""

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
    """One row of the batch.

    Args:
      stream: where documents come from.
      step: rows of the global batch.
      document, token: number of the document, and the token of it, where the first window starts.
    """

    def __init__(self, stream: TextStream, step: int, document: int, token: int):
        self._stream = stream
        self._step = step
        self.position = (document, token)  # where the next window starts
        self._tokens: np.ndarray | None = None  # of the document there

    def window(self, seq_len: int) -> np.ndarray:
        """The next window, int32 [seq_len + 1]."""
        number, start = self.position
        if self._tokens is None:
            number, self._tokens = self._find(number)
        parts, missing = [], seq_len + 1
        while True:
            part = self._tokens[start : start + missing]
            parts.append(part)
            missing -= len(part)
            if not missing:
                # The last token is predicted here and is the first input of the next window.
                self.position = (number, start + len(part) - 1)
                return np.concatenate(parts)
            number, self._tokens = self._find(number + self._step)
            start = 0

    def _find(self, number: int) -> tuple[int, np.ndarray]:
        """The first document of the row from a number on that is not held out."""
        # More misses than chance allows: the row meets held-out documents only, which a fixed order can bring about.
        for _ in range(1000 + 100 * len(self._stream.documents)):
            tokens = self._stream.encode(number)
            if tokens is not None:
                return number, tokens
            number += self._step
        raise UserError(
            f"a row of the batch meets held-out documents only, with {len(self._stream.documents)} documents "
            "in a fixed order; set data.shuffle=true or raise data.tokenize_at_start_mb"
        )
