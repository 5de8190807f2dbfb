"""Bytes and tokenizer.json."""

import json
import pickle

import numpy as np
import pytest

from mhar_jax.data import load_tokenizer
from mhar_jax.errors import UserError


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    ids = tokenizer.encode("aé")
    assert ids.dtype == np.int32
    assert ids.tolist() == [97, 195, 169]
    assert tokenizer.decode(ids) == "aé"
    assert tokenizer.decode([195, 256, 300, -1, 97]) == "\N{REPLACEMENT CHARACTER}a"
    assert [e.tolist() for e in tokenizer.encode_batch(["", "b"])] == [[], [98]]
    assert tokenizer == load_tokenizer("bytes", "<|endoftext|>")


def test_tokenizer_json(tokenizer_path, texts):
    tokenizer = load_tokenizer(str(tokenizer_path))
    assert tokenizer.eos_token == "<|endoftext|>"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (0, 300)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text  # neither cut nor filled up, in spite of the file's settings
        assert ids.dtype == np.int32
        assert tokenizer.eos_id not in ids  # which is what the file fills up with
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert tokenizer.decode([0, 299, 300, 10**12, -5]) == tokenizer.decode([299])
    tokenizer.decode(range(300))


def test_written_out_special_tokens_are_text(tokenizer_path):
    tokenizer = load_tokenizer(str(tokenizer_path))
    text = "a<|endoftext|>b<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


def test_directory_end_token_and_fingerprint(tokenizer_path, tmp_path):
    first = load_tokenizer(str(tokenizer_path))
    chat = load_tokenizer(str(tokenizer_path.parent), "<|im_end|>")
    assert chat.eos_id == 1
    assert chat.fingerprint == first.fingerprint != "bytes"
    content = json.loads(tokenizer_path.read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=3))
    moved = load_tokenizer(str(tmp_path))
    assert moved.fingerprint == first.fingerprint
    content["model"]["vocab"]["zzz"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path)).fingerprint != first.fingerprint
    again = pickle.loads(pickle.dumps(first))
    assert again == first
    assert again.encode("a<|endoftext|>").tolist() == first.encode("a<|endoftext|>").tolist()
    assert again.encode("x" * 100).tolist() == first.encode("x" * 100).tolist()
    assert hash(again) == hash(first)


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>", "<eos>"])
def test_usual_names_are_found(tokenizer_path, tmp_path, name):
    content = tokenizer_path.read_text().replace("<|endoftext|>", name).replace("<|im_end|>", "<other>")
    (tmp_path / "tokenizer.json").write_text(content)
    assert load_tokenizer(str(tmp_path)).eos_token == name


def test_errors(tokenizer_path, tmp_path):
    def message(*arguments):
        with pytest.raises(UserError) as info:
            load_tokenizer(*arguments)
        assert "\n" not in str(info.value)
        return str(info.value)

    path = tmp_path / "tokenizer.json"
    assert f"there is no file {path}" in message(str(path))
    assert f"there is no file {path}" in message(str(tmp_path))
    path.write_text("[1")
    assert f"{path} is not a Hugging Face tokenizer.json" in message(str(path))
    path.write_text('{"a": 1}')
    assert "has no field 'model'" in message(str(path))
    path.write_text('{"model": 1}')
    assert f"{path} is not a Hugging Face tokenizer.json" in message(str(path))
    path.write_text(tokenizer_path.read_text().replace("<|endoftext|>", "<a>").replace("<|im_end|>", "<b>"))
    assert "no end-of-text token <|endoftext|>, <|im_end|>, </s>, <|end_of_text|>, <eos>" in message(str(path))
    assert "no end-of-text token <c>" in message(str(path), "<c>")
    assert load_tokenizer(str(path), "<a>").eos_id == 0
    assert "the bytes tokenizer has only <|endoftext|>, got '</s>'" in message("bytes", "</s>")
