"""Hugging Face directories: logits of the given fixtures, and what is refused."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from mhar_jax.errors import UserError
from mhar_jax.huggingface import load_huggingface
from mhar_jax.huggingface.config import model_config
from mhar_jax.huggingface.keys import key_table
from model_helpers import VARIANTS, build, jit, tiny

FIXTURES = Path(__file__).parent.parent / "fixtures" / "hf"
NAMES = ("tiny-qwen3", "tiny-llama31", "tiny-mhar-qwen3", "tiny-delta-block-llama")


def logits_of(model, tokens):
    graph, state = nnx.split(model)
    return np.asarray(jit(lambda s, t: nnx.merge(graph, s)(t))(state, tokens))


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_the_fixtures(name):
    model, config = load_huggingface(FIXTURES / name, compute_dtype="float32")
    expected = np.load(FIXTURES / name / "expected.npz")
    logits = logits_of(model, expected["input_ids"])
    # float32 on both sides; seen 1e-6 to 5e-6
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-5)
    assert config.variant == {"tiny-mhar-qwen3": "mhar", "tiny-delta-block-llama": "delta_block"}.get(name, "additive")
    assert (config.rope_scaling is not None) == ("llama" in name)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama31"])
def test_greedy_continuation_of_the_fixtures(name):
    model, _ = load_huggingface(FIXTURES / name, compute_dtype="float32")
    expected = np.load(FIXTURES / name / "expected.npz")["greedy"]
    graph, state = nnx.split(model)
    step = jit(lambda s, t: nnx.merge(graph, s)(t))
    row = np.zeros_like(expected)
    row[0, :8] = expected[0, :8]
    for t in range(8, row.shape[1]):
        row[0, t] = np.argmax(step(state, row)[0, t - 1])
    np.testing.assert_array_equal(row, expected)


def ours_to_theirs(model, config, directory: Path, described: dict, dtype=np.float32):
    """Writes a model by the key table, the other way round."""
    state = {path: np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model))}
    tensors = {}
    for key in key_table(config):
        value = state[key.path]
        tensors[key.name] = np.array(key.theirs(value if key.row is None else value[key.row]), dtype, order="C")
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(described))


def describe(config) -> dict:
    mode = {
        "attention_residuals": "full",
        "mhar": "full_mh",
        "mhar_headwise": "full_hw",
        "block_mhar": "block_mh",
        "delta": "delta",
        "delta_block": "delta_block",
    }[config.variant]
    return {
        "model_type": "qwen3_attnres",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attnres_mode": mode,
        "attnres_num_heads": config.heads_of_depth,
        "attnres_num_blocks": config.num_blocks,
        "attnres_use_null_source": config.null_source,
        "attnres_gate_type": "learnable_alpha" if config.gate else "none",
    }


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("additive", "hyper_connections")])
@pytest.mark.parametrize("tied", [True, False])
def test_key_table_covers_every_parameter_and_is_its_own_inverse(tmp_path, variant, tied):
    config = tiny(variant, tie_embeddings=tied)
    model = build(config)
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        leaf[...] = np.random.default_rng(abs(hash(path)) % 2**32).normal(size=leaf.shape).astype(np.float32)
    ours_to_theirs(model, config, tmp_path, describe(config))
    again, found = load_huggingface(tmp_path)
    assert found.variant == variant
    assert found.heads_of_depth == config.heads_of_depth
    mine, theirs = (dict(nnx.to_flat_state(nnx.state(m))) for m in (model, again))
    assert mine.keys() == theirs.keys()
    for path, leaf in mine.items():
        np.testing.assert_array_equal(theirs[path][...], leaf[...])


def test_bfloat16_tensors(tmp_path):
    config = tiny("mhar")
    model = build(config)
    ours_to_theirs(model, config, tmp_path, describe(config), ml_dtypes.bfloat16)
    again, _ = load_huggingface(tmp_path)
    assert again.embedding.dtype == np.float32
    rounded = np.asarray(model.embedding[...]).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(again.embedding[...], rounded)


@pytest.fixture
def directory(tmp_path):
    for file in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURES / "tiny-mhar-qwen3" / file, tmp_path / file)
    return tmp_path


def edit_tensors(directory, edit):
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory, **changes):
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(described | changes))


def test_shards_with_an_index(directory):
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    (directory / "model.safetensors").unlink()
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({n: tensors[n] for n in members}, directory / file)
    index = {"weight_map": {n: file for file, members in parts.items() for n in members}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    whole, _ = load_huggingface(FIXTURES / "tiny-mhar-qwen3")
    sharded, _ = load_huggingface(directory)
    np.testing.assert_array_equal(sharded.embedding[...], whole.embedding[...])

    save_file({n: tensors[n] for n in [*parts["b.safetensors"], names[0]]}, directory / "b.safetensors")
    with pytest.raises(UserError, match=f"{names[0]} is in two files"):
        load_huggingface(directory)
    (directory / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"b\.safetensors, which is not there"):
        load_huggingface(directory)
    index["weight_map"][names[0]] = "../a.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="own directory"):
        load_huggingface(directory)


def test_missing_unknown_and_misshaped_tensors_are_named(directory):
    edit_tensors(directory, lambda t: t.update({"model.layers.0.extra": np.zeros(3, np.float32)}))
    with pytest.raises(UserError, match=r"no place for: model\.layers\.0\.extra"):
        load_huggingface(directory)
    edit_tensors(directory, lambda t: t.pop("model.layers.0.extra"))
    edit_tensors(directory, lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight must have shape \[64\] by its config, got \[3\]"):
        load_huggingface(directory)
    edit_tensors(directory, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"misses tensors: model\.norm\.weight"):
        load_huggingface(directory)
    (directory / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match="is cut off: the header claims 8 bytes, and 2 follow"):
        load_huggingface(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds neither"):
        load_huggingface(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type must be one of"),
        ({"attnres_mode": "sideways"}, "attnres_mode must be one of"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"hidden_size": None}, "the key hidden_size is missing"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "the key factor is missing"),
        ({"attnres_num_heads": 7}, "routing_heads must divide d_model"),
        ({"attnres_mode": "delta", "attnres_gate_type": "sigmoid"}, "attnres_gate_type must be"),
    ],
)
def test_configs_that_are_refused(directory, changes, message):
    edit_config(directory, **changes)
    with pytest.raises(UserError, match=message):
        load_huggingface(directory)


def test_not_a_directory_of_a_model(tmp_path):
    with pytest.raises(UserError, match=r"config\.json, and has none"):
        load_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_huggingface(tmp_path)


def test_older_rotary_keys():
    described = json.loads((FIXTURES / "tiny-llama31" / "config.json").read_text())
    new = model_config(described)
    rope = described.pop("rope_parameters")
    described |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert model_config(described) == new
    above = described | {"original_max_position_embeddings": 16}  # before the section's, as in stock code
    assert model_config(above).rope_scaling.original_context == 16
