"""From config to batches: evaluation, description, synthetic tokens, and what a user gets to read."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from mhar_jax.config import Config
from mhar_jax.config.schema import DataConfig, ModelConfig
from mhar_jax.data import describe_data, load_tokenizer, make_eval_batches, make_train_iterator
from mhar_jax.data.corpus import TokenCorpus, load_text
from mhar_jax.data.split import is_held_out
from mhar_jax.errors import UserError

TOKENIZER = load_tokenizer("bytes")
ORDERS = pytest.mark.parametrize("at_start_mb", [256, 0], ids=["packed", "streams"])


def error_of(function, config, tokenizer=TOKENIZER, **keywords):
    with pytest.raises(UserError) as info:
        function(config, tokenizer, **keywords)
    assert "\n" not in str(info.value)
    return str(info.value)


def held_out_stream(texts, share=0.2):
    return [token for text in texts if is_held_out(text, share) for token in [*text.encode(), 256]]


@ORDERS
def test_evaluation_is_the_held_out_text_in_order(make_config, texts, at_start_mb):
    stream = held_out_stream(texts)
    config = make_config(eval_batches=6, tokenize_at_start_mb=at_start_mb)
    batches = make_eval_batches(config, TOKENIZER)
    assert len(batches) == 6
    inputs = np.stack([b["tokens"] for b in batches])[..., :-1].ravel()
    assert inputs.tolist() == stream[: 6 * 4 * 16]
    assert batches[0]["tokens"].dtype == np.int32
    assert batches[0]["tokens"].shape == (4, 17)
    again = make_eval_batches(dataclasses.replace(config, seed=99), TOKENIZER)
    parts = [make_eval_batches(config, TOKENIZER, process_index=p, process_count=2) for p in range(2)]
    for batch, same, first, second in zip(batches, again, *parts, strict=True):
        np.testing.assert_array_equal(batch["tokens"], same["tokens"])
        np.testing.assert_array_equal(batch["tokens"], np.concatenate([first["tokens"], second["tokens"]]))


@ORDERS
def test_evaluation_of_short_text(make_config, texts, at_start_mb):
    stream = held_out_stream(texts)
    config = make_config(eval_batches=10_000, tokenize_at_start_mb=at_start_mb)
    batches = make_eval_batches(config, TOKENIZER)
    assert len(batches) == (len(stream) - 1) // (4 * 16)  # whole ones only
    last = batches[-1]["tokens"][-1, -1]
    assert last == stream[len(batches) * 64]
    # Too short for one batch: it begins again.
    long = make_config(seq_len=1024, eval_batches=10_000, tokenize_at_start_mb=at_start_mb)
    (batch,) = make_eval_batches(long, TOKENIZER)
    assert batch["tokens"][:, :-1].ravel().tolist() == np.resize(stream, 4096).tolist()


@ORDERS
def test_held_out_text_of_its_own(make_config, texts, tmp_path, at_start_mb):
    (tmp_path / "held.txt").write_text("alpha\n\nbeta")
    config = make_config(held_out_path=str(tmp_path / "held.txt"), shuffle=False, tokenize_at_start_mb=at_start_mb)
    (batch,) = make_eval_batches(config, TOKENIZER)
    assert batch["tokens"][0, :11].tolist() == [*b"alpha", 256, *b"beta", 256]
    iterator = make_train_iterator(config, TOKENIZER)
    assert (
        next(iterator)["tokens"][0].tolist() == [*texts[0].encode(), 256, *texts[1].encode()][:17]
    )  # all is trained on
    iterator.close()
    facts = describe_data(config, TOKENIZER)
    assert facts["documents"] == len(texts)


def test_the_split_is_disjoint_and_whole(make_config, texts):
    facts = describe_data(make_config(), TOKENIZER)
    train = [t for t in texts if not is_held_out(t, 0.2)]
    assert facts["documents"] == len(train)
    assert facts["held_out_documents"] == len(texts) - len(train) > 5
    assert facts["tokens"] == sum(len(t.encode()) for t in train)
    assert facts["tokens_per_epoch"] == facts["tokens"] + len(train)
    assert facts["held_out_tokens"] == len(held_out_stream(texts))
    assert facts["order"] == "packed"
    assert (facts["vocab_size"], facts["tokenizer"]) == (257, "bytes")


def test_fingerprint_follows_documents_and_tokenizer(make_config, tokenizer_path, tmp_path):
    def fingerprint(tokenizer=TOKENIZER, **data):
        return describe_data(make_config(**data), tokenizer)["fingerprint"]

    (tmp_path / "a.txt").write_text("\n\n".join(f"document {i}" for i in range(40)))
    (tmp_path / "b.txt").write_text("\n\n".join(f"document {i}" for i in reversed(range(40))))
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    found = {
        fingerprint(path=paths[0]),
        fingerprint(path=paths[1]),
        fingerprint(load_tokenizer(str(tokenizer_path)), path=paths[0]),
        fingerprint(load_tokenizer(str(tokenizer_path), "<|im_end|>"), path=paths[0]),
    }
    assert len(found) == 4
    assert fingerprint(path=paths[0]) in found
    raw = fingerprint(path=paths[0], tokenize_at_start_mb=0)
    assert raw not in found
    (tmp_path / "a.txt").write_text("\n\n".join(f"DOCUMENT {i}" for i in range(40)))  # as many bytes and documents
    assert fingerprint(path=paths[0], tokenize_at_start_mb=0) != raw


@pytest.mark.parametrize("megabytes", [0, 100])
def test_a_held_out_text_of_its_own_has_a_fingerprint(make_config, tmp_path, megabytes):
    held = tmp_path / "held.txt"
    options = {"held_out_path": str(held), "tokenize_at_start_mb": megabytes}

    def described(text):
        held.write_text(text)
        return describe_data(make_config(**options), TOKENIZER)

    one, other = described("a document\n\nanother"), described("a DOCUMENT\n\nanother")
    assert one["fingerprint"] == other["fingerprint"]
    assert one["held_out_fingerprint"] != other["held_out_fingerprint"]
    assert describe_data(make_config(), TOKENIZER)["held_out_fingerprint"] is None


def test_description_of_raw_text(make_config, texts):
    facts = describe_data(make_config(tokenize_at_start_mb=0), TOKENIZER)
    assert facts["order"] == "streams"
    assert facts["documents"] == len(texts)
    assert facts["tokens"] is facts["tokens_per_epoch"] is facts["held_out_tokens"] is None
    assert facts.keys() == describe_data(make_config(), TOKENIZER).keys()


def test_text_is_tokenised_once_while_it_does_not_change(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo")
    data = DataConfig()
    first = load_text(str(path), data, TOKENIZER)
    assert load_text(str(path), data, TOKENIZER) is first
    path.write_text("one\n\ntwo\n\nthree")
    second = load_text(str(path), data, TOKENIZER)
    assert isinstance(second, TokenCorpus)
    assert len(second) == 3


def test_embedded_text_is_the_default():
    config = Config(batch_size=2, seq_len=64)
    iterator = make_train_iterator(config, TOKENIZER)
    assert next(iterator)["tokens"].shape == (2, 65)
    iterator.close()
    assert len(make_eval_batches(config, TOKENIZER)) == 16
    facts = describe_data(config, TOKENIZER)
    assert facts["tokens"] > 1_000_000
    # Literal: the default run must not change unnoticed.
    assert facts["fingerprint"] == "fdda48c08e306a2f95487a62f169efe4"


def synthetic(**keywords):
    model = ModelConfig(vocab_size=keywords.pop("vocab_size", 100))
    return Config(batch_size=4, seq_len=8, seed=1, model=model, data=DataConfig(format="synthetic"), **keywords)


def test_synthetic_tokens():
    iterator = make_train_iterator(synthetic(), None)
    values = [next(iterator)["tokens"] for _ in range(50)]
    everything = np.stack(values)
    assert everything.shape == (50, 4, 9)
    assert everything.dtype == np.int32
    assert (everything.min(), everything.max()) == (0, 99)
    state = iterator.get_state()
    again = make_train_iterator(synthetic(), None)
    again.set_state(state)
    np.testing.assert_array_equal(next(again)["tokens"], next(iterator)["tokens"])
    halves = [make_train_iterator(synthetic(), None, process_index=p, process_count=2) for p in range(2)]
    for value in values[:5]:
        np.testing.assert_array_equal(np.concatenate([next(half)["tokens"] for half in halves]), value)
    evaluation = make_eval_batches(synthetic(), None)
    assert len(evaluation) == 16
    assert (evaluation[0]["tokens"] != values[0]).any()
    other = make_train_iterator(synthetic(vocab_size=50), None)
    with pytest.raises(UserError, match="vocab_size was 100 and is 50"):
        other.set_state(state)
    assert make_train_iterator(synthetic(vocab_size=None), TOKENIZER).get_state()["identity"]["vocab_size"] == 257
    with pytest.raises(ValueError, match="tokenizer is needed"):
        make_train_iterator(synthetic(vocab_size=None), None)
    assert describe_data(synthetic(), None)["order"] == "synthetic"


def test_synthetic_tokens_need_no_grain():
    program = """
import sys
for name in ("grain", "pyarrow", "array_record", "tokenizers"):
    sys.modules[name] = None
from mhar_jax.config import Config
from mhar_jax.config.schema import DataConfig, ModelConfig
from mhar_jax.data import describe_data, make_eval_batches, make_train_iterator
config = Config(batch_size=2, seq_len=4, model=ModelConfig(vocab_size=10), data=DataConfig(format="synthetic"))
print(next(make_train_iterator(config, None))["tokens"].shape, len(make_eval_batches(config, None)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 5) 16\n"


@ORDERS
def test_errors_about_the_text(make_config, tmp_path, at_start_mb):
    def error(function, **options):
        return error_of(function, make_config(tokenize_at_start_mb=at_start_mb, **options))

    path = tmp_path / "a.txt"
    path.write_text("")
    assert error(make_train_iterator, path=str(path)) == f"data.path: {path} holds no document"
    path.write_text("\n\n".join(f"{i}" for i in range(9)))
    message = error(make_train_iterator, path=str(path), seq_len=64)
    assert f"the training split of {path} is shorter than one sequence: " in message
    assert "seq_len=64 needs 65; give more text or lower seq_len" in message
    message = error(make_eval_batches, path=str(path), held_out=1e-9)
    assert message == (
        f"data.held_out: no document of {path} is held out; raise data.held_out or give a text of its own with "
        "data.held_out_path"
    )
    message = error(make_train_iterator, path=str(path), held_out=1 - 1e-12)
    assert "is shorter than one sequence: 0 tokens" in message
    assert "no file or directory" in error(make_train_iterator, path=str(tmp_path / "none"))
    assert "no file or directory" in error(make_eval_batches, held_out_path=str(tmp_path / "none"))


def test_errors_about_the_run(make_config):
    message = error_of(make_train_iterator, make_config(batch_size=6), process_count=4)
    assert message == "batch_size must be divisible by the number of processes, got batch_size=6 and 4 processes"
    config = dataclasses.replace(make_config(), model=ModelConfig(vocab_size=100))
    assert "model.vocab_size must be at least the tokenizer's 257, got 100" in error_of(make_train_iterator, config)
    with pytest.raises(ValueError, match="process_index"):
        make_train_iterator(make_config(), TOKENIZER, process_index=2, process_count=2)
