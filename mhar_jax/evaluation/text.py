"""Loss, bits per byte and perplexity of texts by a sliding window in which every token is predicted exactly once."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mhar_jax.data.tokenizers import Tokenizer
from mhar_jax.errors import UserError
from mhar_jax.evaluation.scoring import Scorer


class Window(NamedTuple):
    """Tokens start..stop of [end-of-text, *document] are read; the last `scored` of them are predicted and counted."""

    start: int
    stop: int
    scored: int


def sliding_windows(num_tokens: int, window: int, stride: int) -> list[Window]:
    """Windows over a document of `num_tokens` tokens with one end-of-text in front.

    Each has at most `window` tokens of context and predicts, after the first one, the next `stride` tokens from as much
    context as fits. With stride = window these are the windows of the lm-evaluation-harness.
    """
    if not 1 <= stride <= window:
        raise UserError(f"the stride must be from 1 to the window of {window} tokens, got {stride}")
    windows, done = [], 0
    while done < num_tokens:
        stop = min(done + (stride if done else window), num_tokens)
        windows.append(Window(max(0, stop - window), stop + 1, stop - done))
        done = stop
    return windows


@dataclasses.dataclass(frozen=True)
class TextScore:
    """One document's."""

    nll: float  # nats, summed over its tokens
    tokens: int
    num_bytes: int  # of its UTF-8
    words: int  # separated by white space


@dataclasses.dataclass(frozen=True)
class TextReport:
    """Of a set of documents. The end-of-text after a document is not predicted; the one before it is read."""

    documents: list[TextScore]

    def total(self, name: str) -> float:
        """The sum of a field over documents."""
        return math.fsum(getattr(d, name) for d in self.documents)

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.total("nll") / self.total("tokens")

    @property
    def perplexity(self) -> float:
        """exp(loss): of a token, so it depends on the tokenizer."""
        return _exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.total("nll") / math.log(2) / self.total("num_bytes")

    @property
    def byte_perplexity(self) -> float:
        """2 ** bits_per_byte, as the lm-evaluation-harness has it."""
        return _exp(self.bits_per_byte * math.log(2))

    @property
    def word_perplexity(self) -> float:
        """exp(nats a word), as the lm-evaluation-harness has it."""
        return _exp(self.total("nll") / self.total("words"))


def _exp(nats: float) -> float:
    """Infinite where it overflows: a page without white space is one long word."""
    return math.inf if nats > 709 else math.exp(nats)


def score_documents(
    scorer: Scorer,
    tokenizer: Tokenizer,
    documents: Sequence[str],
    *,
    window: int,
    stride: int,
    prefix: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> TextReport:
    """Scores each document on its own, after the token `prefix` (None: end-of-text).

    Raises:
      UserError: no text, a window beyond the model's context, or a bad stride.
    """
    encoded = tokenizer.encode_batch(list(documents))
    first = tokenizer.eos_id if prefix is None else prefix
    scores = score_token_documents(scorer, encoded, first, window=window, stride=stride, progress=progress)
    return TextReport(
        [
            TextScore(nll, len(ids), len(text.encode()), len(re.split(r"\s+", text)))
            for nll, ids, text in zip(scores, encoded, documents, strict=True)
        ]
    )


def score_token_documents(
    scorer: Scorer,
    documents: Sequence[np.ndarray],
    prefix: int,
    *,
    window: int,
    stride: int,
    progress: Callable[[int], None] | None = None,
) -> list[float]:
    """The summed negative log-likelihood of each document's tokens, in nats; `prefix` is read before the first."""
    if window > scorer.config.context:
        raise UserError(f"the window must be at most the model's context of {scorer.config.context}, got {window}")
    if not sum(len(ids) for ids in documents):
        raise UserError("there is no text to score")
    pieces: list[np.ndarray] = []
    places: list[tuple[int, int]] = []  # document, tokens scored
    for number, ids in enumerate(documents):
        whole = np.concatenate([[prefix], ids])
        for at in sliding_windows(len(ids), window, stride):
            pieces.append(whole[at.start : at.stop])
            places.append((number, at.scored))
    totals: list[list[float]] = [[] for _ in documents]
    for (number, scored), found in zip(places, scorer(pieces, progress), strict=True):
        totals[number].append(-math.fsum(found.logprobs[-scored:].tolist()))
    return [math.fsum(parts) for parts in totals]
