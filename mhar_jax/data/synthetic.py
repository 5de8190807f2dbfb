"""Uniformly random tokens, for benchmarks: the interface of the real iterators, without Grain."""

from typing import Any

import numpy as np

from mhar_jax.data.state import check_identity


class SyntheticBatches:
    """Endless batches {"tokens": int32 [rows, seq_len + 1]}; batch k depends on the seed and k only.

    Args:
      vocab_size: tokens are drawn from [0, vocab_size).
      batch_size: rows of the global batch.
      seq_len: tokens predicted in a row; a row has one more.
      rows: the rows of the global batch that this process makes.
      seed, stream: of the draws; another stream gives other batches.
    """

    def __init__(self, vocab_size: int, batch_size: int, seq_len: int, rows: range, seed: int, stream: int = 0):
        self._shape = (batch_size, seq_len + 1)
        self._rows = rows
        self._seeds = (seed, stream)
        self._vocab_size = vocab_size
        self._identity = {
            "order": "synthetic",
            "vocab_size": vocab_size,
            "seed": seed,
            "stream": stream,
            "batch_size": batch_size,
            "seq_len": seq_len,
        }
        self._next_batch = 0

    def batch(self, index: int) -> dict[str, np.ndarray]:
        """Batch `index`."""
        generator = np.random.default_rng((*self._seeds, index))
        tokens = generator.integers(0, self._vocab_size, self._shape, dtype=np.int32)
        return {"tokens": tokens[self._rows.start : self._rows.stop]}

    def __iter__(self) -> "SyntheticBatches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        self._next_batch += 1
        return self.batch(self._next_batch - 1)

    def get_state(self) -> dict[str, Any]:
        """See `state`."""
        return {"identity": dict(self._identity), "next_batch": self._next_batch}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state.

        Raises:
          UserError: the state is of other data.
        """
        check_identity(state, self._identity)
        self._next_batch = int(state["next_batch"])

    def start_prefetch(self) -> None:
        """Does nothing: a batch is made when asked for."""

    def close(self) -> None:
        """Does nothing: there is nothing to release."""
