"""GGUF files: a model written in llama.cpp's layout gives the same logits, and its tokenizer the same tokens."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhar_jax.errors import UserError
from mhar_jax.huggingface.gguf import load_gguf, rotary_halves
from mhar_jax.huggingface.gguf_tokenizer import gguf_tokenizer
from mhar_jax.loading import load_model
from model_helpers import TOKENS, build, jit, relative, scramble, tiny

gguf = pytest.importorskip("gguf", reason="the GGUF reader is part of the extra `hf`")

OURS = {
    "attn_norm": ("attention", "norm"),
    "attn_q": ("attention", "w_q"),
    "attn_k": ("attention", "w_k"),
    "attn_v": ("attention", "w_v"),
    "attn_output": ("attention", "w_o"),
    "ffn_norm": ("mlp", "norm"),
    "ffn_gate": ("mlp", "w_gate"),
    "ffn_up": ("mlp", "w_up"),
    "ffn_down": ("mlp", "w_down"),
}


def llama_order(weight, heads):
    """llama.cpp's `permute` of its converter, by the statement: row (h, half, i) goes to (h, i, half)."""
    size = weight.shape[0] // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for half in range(2):
            for i in range(size // 2):
                out[head * size + 2 * i + half] = weight[head * size + half * (size // 2) + i]
    return out


def write(path, model, *, quantise=False, tokens=None, **fields):
    config = model.config
    writer = gguf.GGUFWriter(path, fields.pop("architecture", "llama"))
    for name, value in (
        ("block_count", config.num_layers),
        ("context_length", config.context),
        ("embedding_length", config.d_model),
        ("feed_forward_length", config.ffn_dim),
        ("attention.head_count", config.num_heads),
        ("attention.head_count_kv", config.num_kv_heads),
    ):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.norm_eps)
    writer.add_float32("llama.rope.freq_base", config.rope_theta)
    for name, value in fields.items():
        writer.add_string(name.replace("__", "."), value)

    def add(name, value):
        value = np.ascontiguousarray(value, np.float32)
        if quantise and value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)

    add("token_embd.weight", model.embedding[...])
    add("output_norm.weight", model.final_norm[...])
    if not config.tie_embeddings:
        add("output.weight", model.head[...].T)
    for i, layer in enumerate(model.layers):
        for theirs, (part, name) in OURS.items():
            value = np.asarray(getattr(getattr(layer, part), name)[...]).T  # [out, in] there
            if theirs in ("attn_q", "attn_k"):
                value = llama_order(value, config.num_heads if theirs == "attn_q" else config.num_kv_heads)
            add(f"blk.{i}.{theirs}.weight", value)
    if tokens is not None:
        vocabulary, merges, types, kind = tokens
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(kind)
        writer.add_token_list(vocabulary)
        writer.add_token_merges(merges)
        writer.add_token_types(types)
        writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model):
    graph, state = nnx.split(model)
    return np.asarray(jit(lambda s, t: nnx.merge(graph, s)(t))(state, jnp.asarray(TOKENS)))


def llama(**changes):
    return scramble(build(tiny("additive", qk_norm=False, num_layers=2, d_model=64, ffn_dim=96, **changes)))


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_file(tmp_path, tied):
    model = llama(tie_embeddings=tied, norm_eps=1e-5, rope_theta=1e5, context=100)
    again, config = load_gguf(write(tmp_path / "model.gguf", model), compute_dtype="float32")
    assert dataclasses.replace(config, head_dim=None, init_std=0.2, num_blocks=2, loss_chunk=10) == model.config
    assert relative(logits(again), logits(model)) < 1e-6  # the same numbers, and no rounding between


def test_quantised_weights_are_near(tmp_path):
    model = llama()
    path = write(tmp_path / "model.gguf", model, quantise=True)
    again, config = load_model(path)
    assert config.model.variant == "additive"
    w, v = (np.asarray(m.layers[1].mlp.w_up[...]) for m in (again, model))
    assert 0 < relative(w, v) < 0.1  # four bits: 16 levels between the least and the greatest of 32 weights


def test_rotary_order_is_undone():
    weight = np.random.default_rng(0).normal(size=(24, 5))
    np.testing.assert_array_equal(rotary_halves(llama_order(weight, 3), 3), weight)
    assert not np.array_equal(llama_order(weight, 3), weight)


BYTE_CHARACTERS = ["!", "a", "b", "c", "Ġ", "1", "2"]


def test_tokenizer_of_a_file(tmp_path):
    vocabulary = ["<|end|>", *BYTE_CHARACTERS, "ab", "Ġab", "12"]
    merges = ["a b", "Ġ ab", "1 2"]
    types = [3] + [1] * (len(vocabulary) - 1)
    for kind, digits in (("smollm", ["1", "2"]), ("gpt-2", ["12"])):
        path = write(tmp_path / f"{kind}.gguf", llama(), tokens=(vocabulary, merges, types, kind))
        tokenizer = gguf_tokenizer(path)
        expected = [vocabulary.index(t) for t in ["ab", "Ġab", "c", *digits, "!"]]
        assert tokenizer.encode("ab abc12!").tolist() == expected
        assert tokenizer.decode([*expected, 0]) == "ab abc12!"
        assert (tokenizer.eos_token, tokenizer.eos_id, tokenizer.vocab_size) == ("<|end|>", 0, len(vocabulary))
        assert 0 not in tokenizer.encode("<|end|>")  # text is only text
    path = write(tmp_path / "other.gguf", llama(), tokens=(vocabulary, merges, types, "llama-bpe"))
    with pytest.raises(
        UserError, match="must be gpt2 with splitting smollm, gpt-2, gpt2, default, got gpt2 with llama"
    ):
        gguf_tokenizer(path)


def test_what_is_refused(tmp_path):
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not a model")
    with pytest.raises(UserError, match="cannot be read as GGUF"):
        load_model(junk)
    with pytest.raises(UserError, match="the architecture must be 'llama', got 'bert'"):
        load_gguf(write(tmp_path / "bert.gguf", llama(), architecture="bert"))
    with pytest.raises(UserError, match="scaled rotary positions"):
        load_gguf(write(tmp_path / "scaled.gguf", llama(), llama__rope__scaling__type="linear"))
    with pytest.raises(UserError, match=r"the field tokenizer\.ggml\.model is missing"):
        gguf_tokenizer(write(tmp_path / "bare.gguf", llama()))
