"""Text to tokens in windows of one fixed shape, the last one padded and masked."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from mhar_jax.config.schema import Config
from mhar_jax.data import make_eval_batches
from mhar_jax.data.corpus import RawText, TokenCorpus, load_text
from mhar_jax.data.files import is_prepared
from mhar_jax.data.shards import open_prepared
from mhar_jax.data.tokenizers import Tokenizer
from mhar_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Windows:
    """A stretch of text as batches of equal shape. Window i predicts tokens i·T + 1 to (i + 1)·T."""

    name: str  # where the text is from
    tokens: np.ndarray  # int32 [batches, B, T + 1]
    mask: np.ndarray  # bool [batches, B, T]; False where the text has ended

    @property
    def count(self) -> int:
        """Tokens that are read and predicted."""
        return int(self.mask.sum())

    def first(self, tokens: int) -> "Windows":
        """The first batches that hold at least so many tokens."""
        per_batch = self.mask[0].size
        batches = max(1, -(-tokens // per_batch))
        return dataclasses.replace(self, tokens=self.tokens[:batches], mask=self.mask[:batches])


def read_windows(
    path: str | None, config: Config, tokenizer: Tokenizer, *, tokens: int, batch_size: int, seq_len: int
) -> Windows:
    """The first `tokens` tokens of a text (rounded up to whole batches), documents joined by the end-of-text token.

    Args:
      path: a file, glob or directory as `data.path` takes them; None: the text that the run held out.
      config: of the run, for the format of its data.
      tokens: at most about so many.

    Raises:
      UserError: nothing there, nothing readable, or fewer than two tokens.
    """
    per_batch = batch_size * seq_len
    wanted = max(1, -(-tokens // per_batch)) * per_batch + 1
    if path is None:
        name = "the run's held-out text"
        stream = _held_out(config, tokenizer)
    else:
        name = path
        stream = _documents(path, config, tokenizer)
    parts: list[np.ndarray] = []
    total = 0
    for part in stream:
        parts.append(part[: wanted - total])
        total += len(parts[-1])
        if total >= wanted:
            break
    if total < 2:
        raise UserError(
            f"the text {name} is empty: it holds {total} tokens, and at least 2 are needed to read and predict one"
        )
    flat = np.concatenate(parts).astype(np.int32)
    predictions = len(flat) - 1
    batches = -(-predictions // per_batch)
    padded = np.full(batches * per_batch + 1, tokenizer.eos_id, np.int32)
    padded[: len(flat)] = flat
    rows = np.arange(batches * batch_size) * seq_len
    windows = padded[rows[:, None] + np.arange(seq_len + 1)]
    mask = rows[:, None] + np.arange(seq_len) < predictions
    shape = (batches, batch_size)
    return Windows(name, windows.reshape(*shape, seq_len + 1), mask.reshape(*shape, seq_len))


def token_texts(ids: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """What to show for each token. Parts of a character (bytes of UTF-8) are shown by their value."""
    texts = []
    for token in ids.tolist():
        if token == tokenizer.eos_id:
            texts.append(tokenizer.eos_token)
            continue
        text = tokenizer.decode([token])
        texts.append(f"[{token}]" if not text or "\ufffd" in text else text)
    return texts


def _documents(path: str, config: Config, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Each document's tokens, an end-of-text behind each but the last of a text."""
    end = np.array([tokenizer.eos_id], np.int32)
    corpus: TokenCorpus | RawText
    if is_prepared(path, "auto"):
        corpus = open_prepared(path, tokenizer)
    else:
        data = dataclasses.replace(config.data, format=config.data.format if path == config.data.path else "auto")
        corpus = load_text(path, data, tokenizer)
    if isinstance(corpus, RawText):
        documents: Iterator[np.ndarray] = (tokenizer.encode(text) for text in corpus.documents)
    else:
        source = corpus.source
        documents = (source.read(i, 0, int(source.lengths[i])) for i in range(len(corpus)))
    for i, document in enumerate(documents):
        yield document if i == 0 else np.concatenate([end, document])


def _held_out(config: Config, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    batches = make_eval_batches(config, tokenizer)
    rows = itertools.chain.from_iterable(batch["tokens"] for batch in batches)
    for i, row in enumerate(rows):
        yield row if i == 0 else row[1:]  # windows overlap by one token
