"""Log-likelihoods of many token sequences: sorted by length, padded to few shapes, batched."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mhar_jax.errors import UserError
from mhar_jax.generation.sampling import NOT_A_NUMBER
from mhar_jax.inference import PlacedModel, bucket


class Scores(NamedTuple):
    """Of the tokens of one sequence from its second on, each given all before it."""

    logprobs: np.ndarray  # float32 [n - 1], nats
    best: np.ndarray  # bool [n - 1]: the token was the likeliest one


class Scorer:
    """Scores sequences with one compiled program for each bucket of lengths."""

    def __init__(self, placed: PlacedModel, *, batch_tokens: int = 8192):
        """`batch_tokens`: tokens of a batch, padding included; a batch has one row at least."""
        self.config = placed.config
        self.placed = placed
        self._batch_tokens = batch_tokens
        self._score = placed.jit("score", lambda model, tokens, targets: model.score(tokens, targets))

    def __call__(self, sequences: Sequence[np.ndarray], progress: Callable[[int], None] | None = None) -> list[Scores]:
        """Scores, in the order of `sequences`; arguments and errors as for `batches`.

        `progress` is called with the number of sequences of each batch once it is done.
        """
        found: dict[int, Scores] = {}
        for batch in self.batches(sequences):
            found |= batch
            if progress is not None:
                progress(len(batch))
        return [found[i] for i in range(len(sequences))]

    def batches(self, sequences: Sequence[np.ndarray]) -> Iterator[dict[int, Scores]]:
        """Scores by index in `sequences`, as they are made.

        Args:
          sequences: integer arrays [n], 2 <= n <= context + 1.

        Raises:
          UserError: a sequence that is too short or too long, a token outside the vocabulary, a model that gives NaN.
        """
        for sequence in sequences:
            self._check(sequence)
        # The longest first: memory that does not suffice shows at once.
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        while order:
            length = bucket(len(sequences[order[0]]) - 1, self.config.context)
            batch = self.placed.rows(max(1, self._batch_tokens // length))
            shorter = self._shorter(length)
            take = [i for i in order[:batch] if len(sequences[i]) - 1 > shorter]
            order = order[len(take) :]
            tokens = np.zeros((batch, length + 1), np.int32)
            for row, i in enumerate(take):
                tokens[row, : len(sequences[i])] = sequences[i]
            logprobs, best = map(np.asarray, self._score(tokens[:, :-1], tokens[:, 1:]))
            counts = [len(sequences[i]) - 1 for i in take]
            if any(np.isnan(logprobs[r, :n]).any() for r, n in enumerate(counts)):
                raise UserError(NOT_A_NUMBER)
            yield {i: Scores(logprobs[r, :n], best[r, :n]) for r, (i, n) in enumerate(zip(take, counts, strict=True))}

    def _shorter(self, length: int) -> int:
        """Lengths up to here belong to a smaller bucket than `length`."""
        low = length
        while low > 0 and bucket(low, self.config.context) == length:
            low -= 1
        return low

    def _check(self, sequence: np.ndarray) -> None:
        if len(sequence) < 2 or len(sequence) > self.config.context + 1:
            raise UserError(
                f"a scored sequence must have 2 to {self.config.context + 1} tokens (the context and the token after "
                f"it), got {len(sequence)}"
            )
        assert self.config.vocab_size is not None
        if sequence.min() < 0 or sequence.max() >= self.config.vocab_size:
            token = sequence.max() if sequence.max() >= self.config.vocab_size else sequence.min()
            raise UserError(f"token {token} is outside the model's vocabulary of {self.config.vocab_size} tokens")
