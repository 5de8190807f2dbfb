"""Hugging Face directories and GGUF files become run directories that everything reads."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from mhar_jax import load_model
from mhar_jax.config.schema import MeshConfig
from mhar_jax.conversion import writer
from mhar_jax.conversion.importing import import_checkpoint
from mhar_jax.conversion.sources import open_source
from mhar_jax.errors import UserError
from mhar_jax.huggingface import safetensors
from mhar_jax.inference import open_checkpoint
from mhar_jax.sharding import make_mesh
from mhar_jax.training.checksums import examine, part_checksum
from model_helpers import tiny

NAMES = ("tiny-qwen3", "tiny-llama31", "tiny-mhar-qwen3", "tiny-delta-block-llama")


@pytest.mark.parametrize("name", NAMES)
def test_fixtures(tools, run, tmp_path, name):
    """Parameters equal to the bit (test_huggingface.py has the logits of the directories themselves)."""
    assert "wrote" in run("import", tools.fixtures / name, tmp_path / "out").out
    tools.assert_same(*(tools.parameters(load_model(p)[0]) for p in (tmp_path / "out", tools.fixtures / name)))
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["kind"] == "import"
    assert record["stored"] == ["float32"]


@pytest.fixture(scope="module")
def llama(tools, tmp_path_factory):
    """tiny-llama31, imported for 4 devices of fsdp and 2 of tensor."""
    out = tmp_path_factory.mktemp("llama") / "out"
    import_checkpoint(tools.fixtures / "tiny-llama31", out, fsdp=4, tensor=2)
    return out


def test_orbax_reads_it_and_writes_the_same_description(llama, tmp_path):
    item = llama / "checkpoints" / "0" / "params"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(item).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        arrays = reader.restore(item, args=ocp.args.PyTreeRestore(restore_args=kinds))
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
        writer.save(tmp_path / "theirs", args=ocp.args.StandardSave(jax.tree.map(jax.numpy.asarray, arrays)))
    ours, theirs = (json.loads((d / "_METADATA").read_text()) for d in (item, tmp_path / "theirs"))
    assert ours == theirs
    by_path = {path: np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(load_model(llama)[0]))}
    np.testing.assert_array_equal(arrays["layers"]["2"]["mlp"]["w_up"], by_path["layers", 2, "mlp", "w_up"])


def test_a_mesh_reads_its_shards(llama):
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2), jax.devices())
    model, _ = load_model(llama, mesh)
    w = model.layers[0].mlp.w_up[...]
    assert w.sharding.spec == P("fsdp", "tensor")
    np.testing.assert_array_equal(w, load_model(llama)[0].layers[0].mlp.w_up[...])
    # One piece on disk for each of the 4 x 2 shards.
    import tensorstore as ts

    from mhar_jax.conversion.writer import parameter_store

    store = ts.open(parameter_store(llama / "checkpoints" / "0" / "params", "layers.0.mlp.w_up"), open=True).result()
    assert store.chunk_layout.write_chunk.shape == w.sharding.shard_shape(w.shape)


def test_a_mesh_reads_hugging_face_directories_too(tools):
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2), jax.devices())
    model, _ = load_model(tools.fixtures / "tiny-llama31", mesh)
    assert model.layers[0].mlp.w_up[...].sharding.spec == P("fsdp", "tensor")
    whole = load_model(tools.fixtures / "tiny-llama31")[0]
    np.testing.assert_array_equal(model.layers[0].mlp.w_up[...], whole.layers[0].mlp.w_up[...])


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_checksums_of_parts_add_up(shape, dtype):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    whole = examine({"x": jax.numpy.asarray(x)}).checksums["x"]
    flat = x.reshape(-1)
    parts = part_checksum(flat[:2]) + part_checksum(flat[2:], 2)
    assert whole == parts % 2**32 == part_checksum(x)


def test_logits_of_an_import(tools, llama):
    """float32 on both sides; seen 1.4e-6."""
    expected = np.load(tools.fixtures / "tiny-llama31" / "expected.npz")
    np.testing.assert_allclose(tools.logits(llama, expected["input_ids"]), expected["logits"], atol=2e-5)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_tensors_keep_their_values(tools, run, tmp_path, dtype):
    parameters = tools.random_hf(tiny("mhar", num_layers=1), tmp_path / "hf", dtype)
    assert run("import", tmp_path / "hf", tmp_path / "out").code == 0
    tools.assert_same(tools.read(tmp_path / "out"), parameters)


def test_bfloat16_parameters(tools, run, tmp_path):
    parameters = tools.random_hf(tiny("additive", num_layers=1), tmp_path / "hf")
    assert "in bfloat16" in run("import", tmp_path / "hf", tmp_path / "out", "--param-dtype", "bfloat16").out
    rounded = {k: v.astype(ml_dtypes.bfloat16) for k, v in parameters.items()}
    tools.assert_same(tools.read(tmp_path / "out"), rounded)
    tools.assert_same(tools.parameters(load_model(tmp_path / "out")[0]), rounded)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_embeddings": False, "head_dim": 6},
        {"qk_norm": False, "num_kv_heads": 4},
        {"num_heads": 2, "num_kv_heads": 1, "head_dim": 20, "qk_norm": False, "tie_embeddings": False},
    ],
)
def test_shapes(tools, run, tmp_path, changes):
    """Tied or not, any head width, grouped or not, with and without q/k-norm."""
    config = tiny("additive", num_layers=1, **changes)
    parameters = tools.random_hf(config, tmp_path / "hf")
    assert run("import", tmp_path / "hf", tmp_path / "out").code == 0
    again, loaded = load_model(tmp_path / "out")
    tools.assert_same(tools.parameters(again), parameters)
    assert loaded.model.qk_norm == config.qk_norm


def test_a_tied_head_that_is_there_twice(tools, run, tmp_path):
    parameters = tools.random_hf(tiny("additive", num_layers=1), tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    assert run("import", tmp_path / "hf", tmp_path / "out").code == 0
    tools.assert_same(tools.read(tmp_path / "out"), parameters)
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    assert "lm_head.weight is not equal to" in run("import", tmp_path / "hf", tmp_path / "second").one_sentence()
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    sentence = run("import", tmp_path / "hf", tmp_path / "third").one_sentence()
    assert "misses tensors: model.embed_tokens.weight" in sentence


def test_the_tokenizer_travels(tools, run, tmp_path):
    from tokenizers import Tokenizer, models

    source = shutil.copytree(tools.fixtures / "tiny-qwen3", tmp_path / "hf")
    Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a")).save(str(source / "tokenizer.json"))
    (source / "merges.txt").write_text("a b\n")
    (source / "code.py").write_text("raise SystemExit")
    assert run("import", source, tmp_path / "out").code == 0
    assert run("graft", tmp_path / "out", tmp_path / "graft", "--sample-tokens=0").code == 0
    assert run("export", tmp_path / "graft", tmp_path / "exported").code == 0
    for place in (tmp_path / "out", tmp_path / "graft", tmp_path / "exported"):
        for file in ("tokenizer.json", "merges.txt", "generation_config.json"):
            assert (place / file).read_bytes() == (source / file).read_bytes()
        assert not (place / "code.py").exists()
    opened = open_checkpoint(tmp_path / "graft")
    assert opened.tokenizer.vocab_size == 2
    exported = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert exported["eos_token_id"] == json.loads((source / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize(
    "axes", [["--fsdp=0"], ["--tensor=-1"], [f"--tensor={2**31}"], ["--fsdp=65536", "--tensor=32768"]]
)
def test_axes_that_cannot_be(tools, run, tmp_path, axes):
    sentence = run("import", tools.fixtures / "tiny-qwen3", tmp_path / "o", *axes).one_sentence()
    assert "must be from 1 to 2147483647" in sentence
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_touched(tools, run, tmp_path):
    (tmp_path / "out").mkdir()
    assert run("import", tools.fixtures / "tiny-qwen3", tmp_path / "out").code == 0  # an empty directory is nothing
    before = sorted(tmp_path.rglob("*"))
    assert "is there already" in run("import", tools.fixtures / "tiny-qwen3", tmp_path / "out").one_sentence()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_import_is_refused(llama, run, tmp_path):
    copy = shutil.copytree(llama, tmp_path / "copy")
    largest = max((copy / "checkpoints" / "0" / "params" / "d").iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert run("export", copy, tmp_path / "hf").code == 2
    assert not (tmp_path / "hf").exists()
    (copy / "checkpoints" / "0" / "meta" / "metadata").write_text("{}")
    assert "damaged" in run("export", copy, tmp_path / "hf").one_sentence()
    with pytest.raises(UserError, match="no readable checkpoint"):
        load_model(copy)


def test_a_changed_parameter_differs_from_its_checksum(llama, tmp_path):
    import tensorstore as ts

    from mhar_jax.conversion.writer import parameter_store

    copy = shutil.copytree(llama, tmp_path / "copy")
    spec = parameter_store(copy / "checkpoints" / "0" / "params", "final_norm")
    ts.open(spec, open=True).result()[3].write(7.0).result()
    with pytest.raises(UserError, match="final_norm differs from its checksum"):
        open_source(copy).parameters.read(("final_norm",))


def test_a_killed_import_leaves_nothing_at_its_place(tools, run, tmp_path):
    """Killed without warning; the next import clears what lies beside, and succeeds."""
    program = (
        "import sys, time; from mhar_jax.conversion import importing\n"
        "def stop(*a): print('here', flush=True); time.sleep(60)\n"
        "importing.CheckpointWriter.finish = stop\n"
        f"importing.import_checkpoint({str(tools.fixtures / 'tiny-qwen3')!r}, {str(tmp_path / 'out')!r})"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'kernels'}"}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.unfinished-")
    assert run("import", tools.fixtures / "tiny-qwen3", tmp_path / "out").code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_write_leaves_nothing(tools, run, tmp_path, monkeypatch):
    from mhar_jax.conversion import importing

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importing, "record", full)
    assert "No space left on device" in run("import", tools.fixtures / "tiny-qwen3", tmp_path / "out").one_sentence()
    assert list(tmp_path.iterdir()) == []


def test_arrays_larger_than_a_slice(tools, run, tmp_path, monkeypatch):
    """With slices of 4 KiB instead of 64 MiB everything is written in many parts, there and back."""
    monkeypatch.setattr(safetensors, "MOST_AT_ONCE", 4096)
    monkeypatch.setattr(writer, "MOST_AT_ONCE", 4096)
    source = tools.fixtures / "tiny-llama31"
    assert run("import", source, tmp_path / "out", "--tensor=2").code == 0
    import tensorstore as ts

    store = ts.open(writer.parameter_store(tmp_path / "out" / "checkpoints" / "0" / "params", "embedding"), open=True)
    assert store.result().chunk_layout.write_chunk.shape == (16, 64)  # 4 KiB; 16 rows divide a shard's 160
    tools.assert_same(*(tools.parameters(load_model(p)[0]) for p in (tmp_path / "out", source)))
    assert run("export", tmp_path / "out", tmp_path / "hf").code == 0
    tools.assert_same(*(load_file(p / "model.safetensors") for p in (tmp_path / "hf", source)))


@pytest.mark.parametrize(
    ("rows", "most", "expected"),
    [(7, 10, 7), (0, 10, 1), (96, 50, 48), (97, 50, 50), (100, 7, 5), (128256, 4096, 4008)],
)
def test_rows_of_a_piece(rows, most, expected):
    """A divisor where there is a large one; else the most that fit."""
    assert writer._rows_of_a_piece(rows, most) == expected
