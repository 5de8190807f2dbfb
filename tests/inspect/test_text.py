"""Text becomes windows of one shape; what is behind its end does not count."""

import numpy as np
import pytest

from mhar_jax.config import Config
from mhar_jax.data import load_tokenizer
from mhar_jax.errors import UserError
from mhar_jax.inspect.text import read_windows, token_texts

BYTES = load_tokenizer("bytes")


def windows(path, **changes):
    options = {"tokens": 1000, "batch_size": 2, "seq_len": 5} | changes
    return read_windows(str(path), Config(), BYTES, **options)


def test_every_token_is_predicted_once_and_padding_does_not_count(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij\n\nklmnopqrstuvw")
    w = windows(text)
    stream = [*b"abcdefghij", BYTES.eos_id, *b"klmnopqrstuvw"]
    assert w.tokens.shape == (3, 2, 6)
    assert w.count == len(stream) - 1
    predicted = w.tokens[..., 1:][w.mask]
    assert predicted.tolist() == stream[1:]
    assert w.tokens[..., :-1][w.mask].tolist() == stream[:-1]
    assert (w.tokens[..., 1:][~w.mask] == BYTES.eos_id).all()
    assert w.first(11).tokens.shape == (2, 2, 6)
    assert w.first(1).count == 10


def test_only_so_many_tokens_are_read(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "' + "x" * 1000 + '"}\n' * 1)
    w = windows(text, tokens=21)
    assert w.count == 30  # whole batches
    assert w.mask.all()


def test_the_runs_own_held_out_text_is_the_default():
    config = Config(batch_size=2, seq_len=16)
    w = read_windows(None, config, BYTES, tokens=64, batch_size=4, seq_len=16)
    from mhar_jax.data import make_eval_batches

    first = np.concatenate([b["tokens"] for b in make_eval_batches(config, BYTES)[:2]])
    np.testing.assert_array_equal(w.tokens[0], first)
    assert w.name == "the run's held-out text"


def test_too_little_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("x")
    with pytest.raises(UserError, match="is empty: it holds 1 tokens, and at least 2 are needed"):
        windows(text)


def test_tokens_are_shown_as_text():
    ids = np.array([*"né".encode(), BYTES.eos_id, 10])
    assert token_texts(ids, BYTES) == ["n", "[195]", "[169]", "<|endoftext|>", "\n"]
