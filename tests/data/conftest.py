"""Small corpora, a small tokenizer.json and configs for the data tests."""

import json
import random
from pathlib import Path

import pytest
import tokenizers

from mhar_jax.config import Config
from mhar_jax.config.schema import DataConfig, EvalConfig


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """120 distinct documents of 1 to 31 words, one of 701, all different."""
    draw = random.Random(0)
    words = ["ab", "cé", "dog", "eel", "日本", "fox", "g", "hat"]
    documents = [f"{i} " + " ".join(draw.choices(words, k=draw.randint(0, 30))) for i in range(120)]
    documents[17] = "17 " + " ".join(draw.choices(words, k=700))
    return [d.strip() for d in documents]


@pytest.fixture(scope="session")
def corpus_path(texts, tmp_path_factory) -> Path:
    """The texts as JSON lines in two files."""
    directory = tmp_path_factory.mktemp("corpus")
    for name, part in (("a.jsonl", texts[:50]), ("b.jsonl", texts[50:])):
        (directory / name).write_text("".join(json.dumps({"text": t}) + "\n" for t in part), encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def tokenizer_path(texts, tmp_path_factory) -> Path:
    """A byte-level BPE with two special tokens, and settings that cut and fill up inputs, which must be ignored."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    model.enable_truncation(4)
    model.enable_padding(length=8)
    model.save(str(path))
    return path


@pytest.fixture
def make_config(corpus_path):
    """A config for the small corpus; keywords of the run, of `data` and of `eval`."""

    def make(*, eval_batches: int = 4, seed: int = 3, batch_size: int = 4, seq_len: int = 16, **data) -> Config:
        data = {"path": str(corpus_path), "held_out": 0.2, **data}
        return Config(
            seed=seed,
            batch_size=batch_size,
            seq_len=seq_len,
            data=DataConfig(**data),
            eval=EvalConfig(batches=eval_batches),
        )

    return make
