"""GGUF files that are wrong, or say less than others, and what becomes of their special tokens."""

import json
import struct

import pytest

from mhar_jax.huggingface.gguf import open_gguf
from tests.conversion.gguf_model import TOKENS, write_model

pytest.importorskip("gguf", reason="the GGUF reader is part of the extra `hf`")

GGML, LLAMA = "tokenizer.ggml.", "llama."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({GGML + "eos_token_id": 258}, ["eos_token_id must be the id of one of 258 tokens, got 258"]),
        ({GGML + "eos_token_id": "end"}, ["eos_token_id must be the id", "got 'end'"]),
        ({GGML + "bos_token_id": 2**32 - 1}, ["bos_token_id must be the id"]),
        ({LLAMA + "embedding_length": "wide"}, ["llama.embedding_length must be a whole number", "got 'wide'"]),
        ({LLAMA + "attention.layer_norm_rms_epsilon": "small"}, ["epsilon must be a finite number", "got 'small'"]),
        ({LLAMA + "attention.layer_norm_rms_epsilon": float("nan")}, ["must be a finite number above 0, got nan"]),
        ({LLAMA + "attention.head_count": [3, 3]}, ["head_count must be a whole number", "got [3, 3]"]),
        ({LLAMA + "attention.head_count_kv": [3, 3]}, ["head_count_kv must be a whole number"]),
        ({LLAMA + "attention.head_count": 10**9}, ["head_count must be at most llama.embedding_length = 24, got 1"]),
        ({"tokenizer.chat_template": 7}, ["tokenizer.chat_template must be text, got 7"]),
        ({LLAMA + "feed_forward_length": 40}, ["tensor blk.0.ffn_gate.weight must have shape [40, 24] by its config"]),
        ({LLAMA + "block_count": 0}, ["block_count must be a whole number"]),
        ({LLAMA + "rope.freq_base": "fast"}, ["freq_base must be a finite number"]),
        ({LLAMA + "context_length": None}, ["the field llama.context_length is missing"]),
        ({LLAMA + "expert_count": 4}, ["experts are not read, and the file has 4"]),
        ({LLAMA + "rope.scaling.type": "linear"}, ["scaled rotary positions (llama.rope.scaling.type)"]),
        ({LLAMA + "rope.scaling.factor": 4.0}, ["scaled rotary positions (llama.rope.scaling.factor)"]),
        ({LLAMA + "rope.scale_linear": 4.0}, ["scaled rotary positions (llama.rope.scale_linear)"]),
        ({LLAMA + "rope.dimension_count": 4}, ["llama.rope.dimension_count must be 8, as a head is wide, got 4"]),
        ({LLAMA + "attention.value_length": 4}, ["llama.attention.value_length must be 8"]),
    ],
)
def test_wrong_fields(run, tmp_path, changes, words):
    file = write_model(tmp_path / "model.gguf", changes)
    sentence = run("import", file, tmp_path / "out").one_sentence()
    assert all(word in sentence for word in words), sentence
    assert list(tmp_path.iterdir()) == [file]


def test_two_names_of_one_tensor(run, tmp_path):
    """llama.cpp's, and the Hugging Face name that it becomes."""
    file = write_model(tmp_path / "model.gguf", more={"model.norm": (24,)})
    sentence = run("import", file, tmp_path / "out").one_sentence()
    assert "the tensors output_norm.weight and model.norm.weight are both model.norm.weight" in sentence
    assert list(tmp_path.iterdir()) == [file]


def test_fields_that_change_nothing(tmp_path):
    fields = {"expert_count": 0, "rope.dimension_count": 8, "rope.scaling.factor": 1.0, "rope.scaling.type": "none"}
    file = write_model(tmp_path / "model.gguf", {LLAMA + name: value for name, value in fields.items()})
    assert open_gguf(file).config == open_gguf(write_model(tmp_path / "plain.gguf")).config


UINT32, STRING, LIST = 4, 8, 9


def header(*, version=3, tensors=0, fields=1, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def named(kind, rest):
    return struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind) + rest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header(rest=named(LIST, struct.pack("<IQ", UINT32, 2**50))), "at most 5000000 items, and claims 11258999"),
        (header(rest=named(LIST, struct.pack("<IQ", STRING, 2**50))), "at most 5000000 items, and claims 11258999"),
        (header(rest=named(LIST, struct.pack("<IQ", UINT32, 1000))), "4000 bytes are claimed at byte 49 of 49"),
        (header(rest=named(LIST, struct.pack("<IQ", LIST, 1) * 9)), "unknown type, 9"),
        (header(rest=named(STRING, struct.pack("<Q", 2**60))), "is cut off"),
        (header(rest=named(UINT32, b"1234") * 2, fields=2), "two fields of the name 'a'"),
        (header(rest=named(99, b"")), "unknown type, 99"),
        (header(fields=2**60), "it claims 1152921504606846976 fields in 24 bytes"),
        (header(fields=0, tensors=2**40), "it claims 1099511627776 tensors in 24 bytes"),
        (header(fields=0, tensors=1, rest=named(2**31, b"")), "2147483648 dimensions"),
        (header(version=1), "its version is 1"),
        (b"GGUX" + bytes(100), "does not begin with GGUF"),
        (b"", "cannot be read as GGUF"),
    ],
)
def test_headers_that_promise_too_much(run, tmp_path, content, words):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert words in run("import", file, tmp_path / "out").one_sentence()
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({GGML + "token_type": [3]}, r"token_type must have one entry a token, 258, got 1"),
        ({GGML + "token_type": 3}, r"token_type must be a list of int, got 3"),
        ({GGML + "merges": [1, 2]}, r"merges must be a list of str"),
        ({GGML + "tokens": "abc"}, r"tokens must be a list of str, got 'abc'"),
        ({GGML + "merges": ["ab"]}, r"the tokenizer cannot be made"),
        ({GGML + "eos_token_id": None}, r"eos_token_id is missing"),
    ],
)
def test_wrong_tokenizers(tmp_path, changes, words):
    from mhar_jax.errors import UserError
    from mhar_jax.huggingface.gguf_tokenizer import gguf_tokenizer

    with pytest.raises(UserError, match=words):
        gguf_tokenizer(write_model(tmp_path / "model.gguf", changes))


def test_a_file_with_a_wrong_tokenizer_is_imported_without_it(run, tmp_path):
    file = write_model(tmp_path / "model.gguf", {GGML + "token_type": [3]})
    assert "no tokenizer.json came along" in run("import", file, tmp_path / "out").out
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 0}


def test_kv_heads_are_the_heads_where_none_are_named(tools, tmp_path):
    short = open_gguf(write_model(tmp_path / "short.gguf", {LLAMA + "attention.head_count_kv": None}))
    whole = open_gguf(write_model(tmp_path / "whole.gguf"))
    assert short.config == whole.config
    tools.assert_same(*({p: found.read(p).copy() for p in found.paths} for found in (short, whole)))


def test_special_tokens_and_chat_template_reach_the_export(run, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    ids = {GGML + "bos_token_id": 5, GGML + "padding_token_id": 7, "tokenizer.chat_template": template}
    file = write_model(tmp_path / "model.gguf", ids)
    assert run("import", file, tmp_path / "out").code == 0
    assert run("export", tmp_path / "out", tmp_path / "hf").code == 0
    assert run("export", file, tmp_path / "straight").code == 0
    for place in (tmp_path / "hf", tmp_path / "straight"):
        files = {n: json.loads((place / f"{n}.json").read_text()) for n in ("config", "generation_config")}
        for found in files.values():
            assert [found[f"{n}_token_id"] for n in ("bos", "eos", "pad")] == [5, 0, 7]
        tokenizer = json.loads((place / "tokenizer_config.json").read_text())
        assert [tokenizer[f"{n}_token"] for n in ("bos", "eos", "pad")] == [TOKENS[5], TOKENS[0], TOKENS[7]]
        assert tokenizer["chat_template"] == template
