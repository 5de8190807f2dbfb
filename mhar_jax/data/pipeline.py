"""From a config to batches: which corpus, which split, which order.

Tokenised corpora (prepared shards, or text tokenised at the start) go through `packing`; raw text larger than
`data.tokenize_at_start_mb` goes through `streams`. Both give the same global batches on any number of processes.
"""

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from mhar_jax.config import Config
from mhar_jax.data.corpus import MemoryTokens, RawText, TokenCorpus, load_text
from mhar_jax.data.files import is_prepared
from mhar_jax.data.packing import PackedTokens
from mhar_jax.data.shards import open_prepared
from mhar_jax.data.split import held_out, is_held_out
from mhar_jax.data.streams import TextStream
from mhar_jax.data.synthetic import SyntheticBatches
from mhar_jax.data.tokenizers import Tokenizer
from mhar_jax.errors import UserError

if TYPE_CHECKING:
    import grain

_RAISE_HELD_OUT = "raise data.held_out or give a text of its own with data.held_out_path"


def make_train_iterator(
    config: Config, tokenizer: Tokenizer | None, *, process_index: int = 0, process_count: int = 1
) -> "grain.DatasetIterator | SyntheticBatches":
    """Endless training batches {"tokens": int32 [batch_size / process_count, seq_len + 1]}.

    Process p of P gets rows [p * batch_size / P, (p + 1) * batch_size / P) of the global batch, which does not depend
    on P. `get_state` and `set_state` (JSON, see `state`) resume to the bit, also with other `data.workers`,
    `data.prefetch` or process count; Orbax checkpoints the iterator as it does any of Grain's. With
    `data.format=synthetic` the iterator is a plain object with the same methods; its tokens are below
    `model.vocab_size`, or below the tokenizer's where that is None; the tokenizer may be None otherwise.

    Raises:
      UserError: no, bad or too little text, batch_size not divisible by process_count, or far more workers than
        processors.
    """
    rows = _rows(config, process_index, process_count)
    most = max(16, 4 * (os.cpu_count() or 1))
    if config.data.workers > most:
        raise UserError(f"data.workers must be at most {most} on this host, got {config.data.workers}")
    if config.data.format == "synthetic":
        return _synthetic(config, tokenizer, rows, 0)
    tokenizer = _required(tokenizer)
    _check_vocabulary(config, tokenizer)
    corpus = _open(config, config.data.path, tokenizer)
    identity = {
        "seed": config.seed,
        "shuffle": config.data.shuffle,
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "held_out": 0.0 if config.data.held_out_path else config.data.held_out,
    }
    from mhar_jax.data.batches import packed_batches, stream_batches

    options: dict[str, Any] = {
        "batch_size": config.batch_size,
        "rows": rows,
        "workers": config.data.workers,
        "prefetch": config.data.prefetch,
    }
    if isinstance(corpus, TokenCorpus):
        packed = _packed_train(config, corpus, tokenizer)
        return packed_batches(packed, {"order": "packed", "corpus": corpus.fingerprint, **identity}, **options)
    stream = _train_stream(config, corpus, tokenizer)
    return stream_batches(
        stream,
        {"order": "streams", "corpus": _raw_fingerprint(corpus, tokenizer), **identity},
        seq_len=config.seq_len,
        **options,
    )


def make_eval_batches(
    config: Config, tokenizer: Tokenizer | None, *, process_index: int = 0, process_count: int = 1
) -> list[dict[str, np.ndarray]]:
    """This process's rows of the first `eval.batches` batches of the held-out text: always the same, never shuffled.

    The held-out documents are packed in file order like the training text. There are fewer batches where the text is
    too short for all of them, but one at least; only if it is too short even for one, that one begins the text again
    where it ends. So a number of whole batches below `eval.batches` leaves up to a batch of text unused.

    Raises:
      UserError: no held-out document, or see `make_train_iterator`.
    """
    rows = _rows(config, process_index, process_count)
    if config.data.format == "synthetic":
        batches = _synthetic(config, tokenizer, rows, 1)
        return [batches.batch(index) for index in range(config.eval.batches)]
    tokenizer = _required(tokenizer)
    _check_vocabulary(config, tokenizer)
    packed = _packed_held_out(config, tokenizer, config.eval.batches * config.batch_size * config.seq_len + 1)
    whole = (packed.tokens_per_epoch - 1) // (config.seq_len * config.batch_size)
    return [
        {"tokens": packed.windows(batch * config.batch_size + rows.start, len(rows))}
        for batch in range(max(1, min(whole, config.eval.batches)))
    ]


def describe_data(config: Config, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What a run reads, as JSON values.

    Keys: source; order ("packed", "streams" or "synthetic"); documents, tokens, tokens_per_epoch (tokens and an
    end-of-text for each document) of the training split; held_out_documents, held_out_tokens (with end-of-text);
    vocab_size; tokenizer; fingerprint (equal if two runs see the same documents as the same tokens in the same order);
    held_out_fingerprint (of the text of data.held_out_path, None without one). Numbers of tokens are None for text
    tokenised on the fly, its fingerprints cover large files by samples (`fingerprints`), and `documents` then counts
    both splits.
    """
    if config.data.format == "synthetic":
        vocab_size = _synthetic_vocabulary(config, tokenizer)
        unknown = dict.fromkeys(
            (
                "documents",
                "tokens",
                "tokens_per_epoch",
                "held_out_documents",
                "held_out_tokens",
                "tokenizer",
                "held_out_fingerprint",
            )
        )
        name = "uniformly random tokens"
        return {"source": name, "order": "synthetic", **unknown, "vocab_size": vocab_size, "fingerprint": "synthetic"}
    tokenizer = _required(tokenizer)
    corpus = _open(config, config.data.path, tokenizer)
    facts: dict[str, Any] = {"source": corpus.name}
    if isinstance(corpus, TokenCorpus):
        train = _packed_train(config, corpus, tokenizer)
        documents = len(_train_documents(config, corpus))
        facts |= {
            "order": "packed",
            "documents": documents,
            "tokens": train.tokens_per_epoch - documents,
            "tokens_per_epoch": train.tokens_per_epoch,
        }
    else:
        facts |= {"order": "streams", "documents": len(corpus.documents), "tokens": None, "tokens_per_epoch": None}
    facts |= {"held_out_documents": None, "held_out_tokens": None}
    held = corpus if config.data.held_out_path is None else _open(config, config.data.held_out_path, tokenizer)
    if isinstance(held, TokenCorpus):
        packed = _packed_held_out(config, tokenizer, None)
        facts["held_out_documents"] = len(_held_out_documents(config, held))
        facts["held_out_tokens"] = packed.tokens_per_epoch
    return facts | {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.spec,
        "fingerprint": _fingerprint(corpus, tokenizer),
        "held_out_fingerprint": None if config.data.held_out_path is None else _fingerprint(held, tokenizer),
    }


def _rows(config: Config, process_index: int, process_count: int) -> range:
    if config.batch_size % process_count:
        raise UserError(
            f"batch_size must be divisible by the number of processes, got batch_size={config.batch_size} and "
            f"{process_count} processes"
        )
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in [0, {process_count}), got {process_index}")
    share = config.batch_size // process_count
    return range(process_index * share, (process_index + 1) * share)


def _required(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValueError("a tokenizer is needed unless data.format is synthetic")
    return tokenizer


def _check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
    rows = config.model.vocab_size
    if rows is not None and rows < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size must be at least the tokenizer's {tokenizer.vocab_size}, got {rows}; "
            "leave it out or raise it"
        )


def _open(config: Config, path: str | None, tokenizer: Tokenizer) -> TokenCorpus | RawText:
    if is_prepared(path, config.data.format):
        assert path is not None
        return open_prepared(path, tokenizer)
    return load_text(path, config.data, tokenizer)


def _train_documents(config: Config, corpus: TokenCorpus) -> np.ndarray:
    if config.data.held_out_path is not None:
        return np.arange(len(corpus))
    return np.flatnonzero(~held_out(corpus.hashes, config.data.held_out))


def _held_out_documents(config: Config, corpus: TokenCorpus) -> np.ndarray:
    if config.data.held_out_path is not None:
        return np.arange(len(corpus))
    return np.flatnonzero(held_out(corpus.hashes, config.data.held_out))


def _packed_train(config: Config, corpus: TokenCorpus, tokenizer: Tokenizer) -> PackedTokens:
    documents = _train_documents(config, corpus)
    available = int(corpus.source.lengths[documents].sum(dtype=np.int64)) + len(documents)
    _check_train_size(config, corpus.name, available)
    return PackedTokens(
        corpus.source,
        documents,
        eos_id=tokenizer.eos_id,
        seq_len=config.seq_len,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )


def _check_train_size(config: Config, name: str, available: int) -> None:
    if available < config.seq_len + 1:
        raise UserError(
            f"data.path: the training split of {name} is shorter than one sequence: {available} tokens, and seq_len="
            f"{config.seq_len} needs {config.seq_len + 1}; give more text or lower seq_len"
        )


def _train_stream(config: Config, corpus: RawText, tokenizer: Tokenizer) -> TextStream:
    stream = TextStream(
        corpus.documents,
        tokenizer,
        held_out_share=0.0 if config.data.held_out_path is not None else config.data.held_out,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    available = 0
    for text in corpus.documents:
        if not is_held_out(text, stream.held_out_share):
            available += len(tokenizer.encode(text)) + 1
        if available > config.seq_len:
            break
    _check_train_size(config, corpus.name, available)
    return stream


def _packed_held_out(config: Config, tokenizer: Tokenizer, enough: int | None) -> PackedTokens:
    """The held-out stream in file order; of raw text, the first documents that hold `enough` tokens."""
    path = config.data.path if config.data.held_out_path is None else config.data.held_out_path
    corpus = _open(config, path, tokenizer)
    if isinstance(corpus, TokenCorpus):
        source, documents = corpus.source, _held_out_documents(config, corpus)
    else:
        found, total = [], 0
        for text in corpus.documents:
            if config.data.held_out_path is None and not is_held_out(text, config.data.held_out):
                continue
            found.append(tokenizer.encode(text))
            total += len(found[-1]) + 1
            if enough is not None and total >= enough:
                break
        source = MemoryTokens(
            np.concatenate(found or [np.empty(0, np.int32)]), np.array([len(f) for f in found], np.int64)
        )
        documents = np.arange(len(found))
    if not len(documents):
        raise UserError(f"data.held_out: no document of {corpus.name} is held out; {_RAISE_HELD_OUT}")
    return PackedTokens(source, documents, eos_id=tokenizer.eos_id, seq_len=config.seq_len, shuffle=False)


def _raw_fingerprint(corpus: RawText, tokenizer: Tokenizer) -> str:
    documents = corpus.documents
    tokens = f"{tokenizer.fingerprint}-{tokenizer.eos_id}"
    return f"{documents.listing_fingerprint()}-{tokens}-{documents.content_fingerprint()}"


def _fingerprint(corpus: TokenCorpus | RawText, tokenizer: Tokenizer) -> str:
    return corpus.fingerprint if isinstance(corpus, TokenCorpus) else _raw_fingerprint(corpus, tokenizer)


def _synthetic_vocabulary(config: Config, tokenizer: Tokenizer | None) -> int:
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    return _required(tokenizer).vocab_size


def _synthetic(config: Config, tokenizer: Tokenizer | None, rows: range, stream: int) -> SyntheticBatches:
    return SyntheticBatches(
        _synthetic_vocabulary(config, tokenizer), config.batch_size, config.seq_len, rows, config.seed, stream
    )
