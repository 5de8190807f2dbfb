"""Exports: bit-exact there and back, read by the `safetensors` package and by stock transformers."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mhar_jax import load_model
from mhar_jax.config.schema import ROUTED_VARIANTS
from mhar_jax.conversion import exporting, sources
from mhar_jax.conversion.sources import open_source
from mhar_jax.huggingface.config import describe, model_config
from model_helpers import tiny

NAMES = ("tiny-qwen3", "tiny-llama31", "tiny-mhar-qwen3", "tiny-delta-block-llama")
# A Python with PyTorch and transformers; by default this one, which usually has neither.
TRANSFORMERS_PYTHON = os.environ.get("MHAR_TRANSFORMERS_PYTHON", sys.executable)


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(tools, run, tmp_path, name):
    """import, export, import: every tensor to the bit, and the second export is the first byte for byte."""
    assert run("import", tools.fixtures / name, tmp_path / "run").code == 0
    assert run("export", tmp_path / "run", tmp_path / "hf").code == 0
    given, exported = (load_file(d / "model.safetensors") for d in (tools.fixtures / name, tmp_path / "hf"))
    tools.assert_same(exported, given)
    assert run("import", tmp_path / "hf", tmp_path / "again").code == 0
    tools.assert_same(tools.read(tmp_path / "again"), tools.read(tmp_path / "run"))
    assert run("export", tmp_path / "again", tmp_path / "hf2").code == 0
    assert tools.same_files(tmp_path / "hf", tmp_path / "hf2")
    configs = [
        model_config(json.loads((d / "config.json").read_text())) for d in (tools.fixtures / name, tmp_path / "hf")
    ]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("variant", ROUTED_VARIANTS)
def test_configs_of_routed_models_there_and_back(variant):
    kept = {"compute_dtype": "bfloat16", "loss_chunk": 2048}
    for changes in ({}, {"qk_norm": False, "tie_embeddings": False}):
        config = tiny(
            variant, head_dim=8, routing_heads=1 if variant == "attention_residuals" else 4, **changes, **kept
        )
        described = describe(config, dtype="float32")
        assert described["model_type"] == ("qwen3_attnres" if config.qk_norm else "llama_attnres")
        again = model_config(json.loads(json.dumps(described)), num_blocks=config.num_blocks)
        assert again == config
    ungated = tiny("delta", head_dim=8, routing_heads=4, gate=False, null_source=False, **kept)
    assert model_config(describe(ungated, dtype="float32"), num_blocks=ungated.num_blocks) == ungated


def test_blocks_with_one_head_are_not_the_mode_without_a_final_site(tools, run, tmp_path):
    """The published code's `block` has the site before the final norm that its `block_mh` lacks."""
    for heads, mode in ((1, "block"), (2, "block_mh")):
        source, out = tmp_path / f"{mode}-source", tmp_path / mode
        tools.random_hf(tiny("block_mhar", num_layers=2, routing_heads=heads), source)
        assert run("export", source, out).code == 0
        assert json.loads((out / "config.json").read_text())["attnres_mode"] == mode
        assert ("no routing site before the final norm" in (out / "README.md").read_text()) == (heads > 1)
        assert open_source(out).model == open_source(source).model


def test_shards(tools, run, tmp_path):
    source = tools.fixtures / "tiny-llama31"
    assert "3 safetensors files" in run("export", source, tmp_path / "hf", "--max-shard-gb", 0.0003).out
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    given, found = load_file(source / "model.safetensors"), {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / "hf" / file)
        assert all(index["weight_map"][name] == file for name in part)
        found |= part
    tools.assert_same(found, given)
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in given.values())
    tools.assert_same(tools.read(tmp_path / "hf"), tools.read(source))


def test_a_narrower_dtype_is_said(tools, run, tmp_path):
    import ml_dtypes

    source = tools.fixtures / "tiny-qwen3"
    outcome = run("export", source, tmp_path / "hf", "--dtype", "bfloat16")
    given, found = (load_file(d / "model.safetensors") for d in (source, tmp_path / "hf"))
    tools.assert_same(found, {k: v.astype(ml_dtypes.bfloat16) for k, v in given.items()})
    largest = max(float(np.abs(found[k].astype(np.float32) - v).max()) for k, v in given.items())
    assert f"rounding changed values by up to {largest:g}" in outcome.out
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_special_tokens_that_only_config_json_names(tools, run, tmp_path):
    """Where stock code looks first, generation_config.json, they are after any way through here."""
    source = shutil.copytree(tools.fixtures / "tiny-llama31", tmp_path / "source")
    (source / "generation_config.json").unlink()
    described = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(described | {"eos_token_id": [2, 3], "pad_token_id": None}))
    assert run("import", source, tmp_path / "run").code == 0
    assert run("graft", tmp_path / "run", tmp_path / "graft", "--sample-tokens=0").code == 0
    for name in ("source", "run", "graft"):
        assert run("export", tmp_path / name, tmp_path / f"{name}-hf").code == 0
        for file in ("config.json", "generation_config.json"):
            found = json.loads((tmp_path / f"{name}-hf" / file).read_text())
            assert (found["bos_token_id"], found["eos_token_id"]) == (1, [2, 3])
            assert "pad_token_id" not in found


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "7", "{", '{"eos_token_id": "x", "bos_token_id": [[1]]}'])
def test_generation_settings_that_are_none(tools, run, tmp_path, text):
    """They go along as they are, and config.json takes nothing from them."""
    source = shutil.copytree(tools.fixtures / "tiny-llama31", tmp_path / "source")
    (source / "generation_config.json").write_text(text)
    assert run("export", source, tmp_path / "new" / "hf").code == 0
    assert (tmp_path / "new" / "hf" / "generation_config.json").read_text() == text
    assert "eos_token_id" not in json.loads((tmp_path / "new" / "hf" / "config.json").read_text())


def test_new_parents_go_when_the_export_fails(tools, run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "model_card", full)
    (tmp_path / "there").mkdir()
    for out in ("new/a/hf", "there/hf"):
        assert "No space left" in run("export", tools.fixtures / "tiny-qwen3", tmp_path / out).one_sentence()
    assert [p.name for p in tmp_path.rglob("*")] == ["there"]


def test_paths_with_two_dots(tools, run, tmp_path, monkeypatch):
    """TensorStore refuses them; `..` of a link is the parent of what it points to."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert run("import", tools.fixtures / "tiny-qwen3", "../run").code == 0
    assert run("graft", "../run", "../../a/graft", "--sample-tokens=0", "--num-blocks=2").code == 0
    assert load_model("../graft")[1].model.variant == "delta_block"
    assert run("export", tmp_path / "link" / ".." / "graft", "../b/../hf").code == 0
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["b", "graft", "hf", "run"]
    assert "is there already" in run("export", "../run", "..").one_sentence()


def test_the_model_card(tools, run, tmp_path):
    for name, words in (
        ("tiny-qwen3", ["Qwen3", "`transformers` loads it"]),
        ("tiny-delta-block-llama", ["`delta_block`", "2 routing heads, 4 blocks, with a null source", "differ from"]),
    ):
        assert run("export", tools.fixtures / name, tmp_path / name).code == 0
        card = (tmp_path / name / "README.md").read_text()
        assert all(word in card for word in words), card
        assert str(tmp_path) not in card


def test_what_has_no_layout(tools, run, tmp_path, monkeypatch):
    found = sources.open_source(tools.fixtures / "tiny-qwen3")
    found.parameters.config = tiny("hyper_connections")
    monkeypatch.setattr(exporting, "open_source", lambda _: found)
    assert "no published layout" in run("export", "anything", tmp_path / "hf").one_sentence()
    assert "--max-shard-gb must be above 0" in run("export", "x", "y", "--max-shard-gb=0").one_sentence()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama31"])
def test_stock_transformers(tools, run, tmp_path, name):
    """Its own code, on what we exported, gives the given logits and greedy continuation."""
    has = subprocess.run([TRANSFORMERS_PYTHON, "-c", "import torch, transformers"], capture_output=True, check=False)
    if has.returncode:
        pytest.skip(f"{TRANSFORMERS_PYTHON} has no PyTorch and transformers (MHAR_TRANSFORMERS_PYTHON names another)")
    source = shutil.copytree(tools.fixtures / name, tmp_path / "source")
    (source / "generation_config.json").unlink()
    described = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(described | {"eos_token_id": [2, 3]}))
    assert run("import", source, tmp_path / "run").code == 0
    assert run("export", tmp_path / "run", tmp_path / "hf").code == 0
    expected = np.load(tools.fixtures / name / "expected.npz")
    np.save(tmp_path / "tokens.npy", expected["input_ids"])
    program = Path(__file__).parent / "transformers_logits.py"
    arguments = [TRANSFORMERS_PYTHON, program, tmp_path / "hf", tmp_path / "tokens.npy", tmp_path / "out.npz"]
    offline = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(arguments, check=True, capture_output=True, env=offline)
    found = np.load(tmp_path / "out.npz")
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=2e-5)
    np.testing.assert_array_equal(found["greedy"], expected["greedy"])
    assert found["special"].tolist() == [1, 2, 3]  # only config.json of the source names them


def test_no_other_tokenizer_than_the_runs_own(tools, run, tmp_path, monkeypatch):
    """data.tokenizer names one by a relative path that is gone: the working directory's is another model's."""
    source = shutil.copytree(tools.fixtures / "tiny-qwen3", tmp_path / "source")
    (source / "generation_config.json").unlink()
    assert run("import", source, tmp_path / "run").code == 0
    real = sources.open_source

    def gone(path):
        found = real(path)
        data = dataclasses.replace(found.run.data, tokenizer="gone")
        return dataclasses.replace(found, run=dataclasses.replace(found.run, data=data))

    monkeypatch.setattr(exporting, "open_source", gone)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "tokenizer.json").write_text("another")
    monkeypatch.chdir(tmp_path / "here")
    assert run("export", tmp_path / "run", tmp_path / "hf").code == 0
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    Path("gone").mkdir()
    Path("gone/tokenizer.json").write_text("its own")
    assert run("export", tmp_path / "run", tmp_path / "again").code == 0
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "its own"
