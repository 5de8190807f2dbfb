"""The held-out text of a run, as training evaluates it and document by document."""

import math
from collections.abc import Iterator

import numpy as np

from mhar_jax.config.schema import Config
from mhar_jax.data import make_eval_batches
from mhar_jax.data.files import is_prepared, list_files
from mhar_jax.data.readers import open_documents
from mhar_jax.data.shards import open_prepared
from mhar_jax.data.split import held_out, is_held_out
from mhar_jax.data.tokenizers import Tokenizer
from mhar_jax.errors import UserError
from mhar_jax.inference import PlacedModel


def training_loss(placed: PlacedModel, config: Config, tokenizer: Tokenizer) -> tuple[float, int]:
    """`val_loss` as the training loop computes it: the first eval.batches packed batches, nats a token, and its tokens.

    Raises:
      UserError: the run's text is not there any more, or has no held-out document.
    """
    sums = placed.jit("loss", lambda model, tokens: model.loss(tokens[:, :-1], tokens[:, 1:])[1])
    nll, tokens = [], 0
    for batch in make_eval_batches(config, tokenizer):
        found = sums(batch["tokens"])
        nll.append(float(found["nll"]))
        tokens += int(found["tokens"])
    return math.fsum(nll) / tokens, tokens


def held_out_documents(config: Config, tokenizer: Tokenizer, limit: int | None = None) -> list[str]:
    """The held-out documents of a run, in file order, at most `limit`.

    Raises:
      UserError: the run reads no text, its text is not there any more, or no document is held out.
    """
    if config.data.format == "synthetic":
        raise UserError("the run was trained on random tokens, so it has no held-out text; name a text with --text")
    found: list[str] = []
    for text in _held_out(config, tokenizer):
        if limit is not None and len(found) == limit:
            break
        found.append(text)
    if not found:
        raise UserError("no document of the run's text is held out; name a text with --text")
    return found


def _held_out(config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    data = config.data
    path = data.path if data.held_out_path is None else data.held_out_path
    if is_prepared(path, data.format):
        assert path is not None
        corpus = open_prepared(path, tokenizer)
        every = data.held_out_path is not None
        chosen = range(len(corpus)) if every else np.flatnonzero(held_out(corpus.hashes, data.held_out)).tolist()
        for i in chosen:
            yield tokenizer.decode(corpus.source.read(i, 0, int(corpus.source.lengths[i])).tolist())
        return
    documents = open_documents(path, data.format, data.text_field)
    for i in range(len(documents)):
        text = documents[i]
        if data.held_out_path is not None or is_held_out(text, data.held_out):
            yield text


def read_documents(
    path: str, file_format: str, text_field: str, *, limit: int | None = None, whole_files: bool = False
) -> list[str]:
    """The documents of a text file, glob or directory, at most `limit`; `whole_files`: each file is one document.

    Raises:
      UserError: see `data.readers.open_documents`; or a file that is not UTF-8.
    """
    if whole_files:
        files = [file for file, _ in list_files(path, "text")][:limit]
        try:
            return [file.read_text(encoding="utf-8-sig") for file in files]
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    documents = open_documents(path, file_format, text_field)
    count = len(documents) if limit is None else min(limit, len(documents))
    return [documents[i] for i in range(count)]
