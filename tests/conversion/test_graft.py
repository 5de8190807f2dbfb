"""Grafting keeps the original model to the bit, and says so only where it is true."""

import json
import shutil

import numpy as np
import pytest

from mhar_jax import load_model
from mhar_jax.config.load import make_config, to_dict
from mhar_jax.conversion import grafting
from mhar_jax.conversion.grafting import graft
from mhar_jax.conversion.importing import import_checkpoint
from mhar_jax.training.checkpoints import checkpoint_meta, read_meta


@pytest.fixture(scope="module")
def original(tools, tmp_path_factory):
    """tiny-llama31, imported."""
    out = tmp_path_factory.mktemp("original") / "run"
    import_checkpoint(tools.fixtures / "tiny-llama31", out)
    return out


def test_delta_block_deviates_by_nothing(tools, run, original, tmp_path):
    outcome = run("graft", original, tmp_path / "out", "--variant=delta_block", "--num-blocks=2", "--routing-heads=4")
    assert "largest logit deviation in float32: 0 (" in outcome.out
    assert "largest logit deviation in bfloat16: 0 (" in outcome.out
    assert outcome.err == ""
    model, config = load_model(tmp_path / "out")
    assert (config.model.variant, config.model.num_blocks, config.model.heads_of_depth) == ("delta_block", 2, 4)
    before, after = tools.read(original), tools.parameters(model)
    assert {k[1] for k in after.keys() - before.keys()} == {"query", "norm_scale", "null_source", "gate"}
    tools.assert_same({k: after[k] for k in before}, before)
    assert not after["routing", "query"].any()
    assert not after["routing", "gate"].any()
    assert (after["routing", "norm_scale"] == 1).all()
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["routing"]["variant"] == "delta_block"
    assert record["before"]["kind"] == "import"


@pytest.mark.exhaustive
def test_an_open_gate_is_seen(original, tmp_path, monkeypatch):
    """The comparison can fail: one gate a little open moves the logits."""
    fresh = grafting.fresh_routing

    def open_one(model):
        for path, value in fresh(model):
            yield (
                path,
                np.where(np.arange(value.shape[0]) == 3, np.float32(1e-3), value) if path[1] == "gate" else value,
            )

    monkeypatch.setattr(grafting, "fresh_routing", open_one)
    done = graft(original, tmp_path / "out", variant="delta_block", num_blocks=2, sample_tokens=16)
    assert done.deviation is not None
    assert all(0 < value < done.deviation.logits[dtype] for dtype, value in done.deviation.largest.items())


@pytest.mark.slow
def test_delta_deviates_by_nothing(run, original, tmp_path):
    outcome = run("graft", original, tmp_path / "out", "--variant=delta")
    assert "largest logit deviation in float32: 0 (" in outcome.out
    assert "largest logit deviation in bfloat16: 0 (" in outcome.out
    assert outcome.err == ""


@pytest.mark.parametrize("arguments", [["--variant=mhar"], ["--variant=attention_residuals"], ["--no-gate"]])
def test_what_is_not_the_original_is_said(run, original, tmp_path, arguments):
    outcome = run("graft", original, tmp_path / "out", "--sample-tokens=0", *arguments)
    assert outcome.code == 0
    assert "is not the original model at the start" in outcome.err
    assert load_model(tmp_path / "out")[1].model.variant in (*arguments[0].split("="), "delta_block")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--routing-heads=7"], "routing_heads must divide d_model"),
        (["--variant=attention_residuals", "--routing-heads=2"], "attention_residuals has one routing head"),
        (["--variant=mhar", "--no-gate"], "--no-gate and --no-null-source belong to delta and delta_block"),
        (["--num-blocks=0"], "num_blocks"),
        (["--sample-tokens=-5"], "--sample-tokens must be at least 0, got -5"),
        (["--data=-1"], "error: mesh axes must be positive, at most one of them -1"),
        (["--tensor=0"], "error: mesh axes must be positive, at most one of them -1"),
    ],
)
def test_what_cannot_be(run, original, tmp_path, arguments, message):
    assert message in run("graft", original, tmp_path / "out", *arguments).one_sentence()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_grafted(tools, run, tmp_path):
    routed = tools.fixtures / "tiny-mhar-qwen3"
    assert "only an additive model can be grafted" in run("graft", routed, tmp_path / "out").one_sentence()
    assert "is none of them" in run("graft", tmp_path, tmp_path / "out").one_sentence()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "holds no checkpoint" in run("graft", tmp_path / "run", tmp_path / "out").one_sentence()
    shutil.rmtree(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_averages_of_bfloat16_parameters_are_not_rounded(tools, original, tmp_path):
    """Averaged weights are float32 whatever param_dtype is; the graft's parameters are then float32 too."""
    averaged = shutil.copytree(original, tmp_path / "averaged")
    checkpoint = averaged / "checkpoints" / "0"
    (checkpoint / "params").rename(checkpoint / "ema")
    meta = dict(read_meta(checkpoint))
    fields = to_dict(make_config(meta["config"]))
    fields["model"]["param_dtype"], fields["optimizer"]["ema"] = "bfloat16", 0.9
    checksums = {f"ema/{name.removeprefix('params/')}": value for name, value in meta["checksums"].items()}
    meta = checkpoint_meta(0, fields, meta["data_fingerprint"], None, checksums)
    (checkpoint / "meta" / "metadata").write_text(json.dumps(meta))
    done = graft(averaged, tmp_path / "out", variant="delta_block", num_blocks=2, sample_tokens=16)
    assert done.config.model.param_dtype == "float32"
    assert done.deviation is not None
    assert done.deviation.largest == {"float32": 0.0, "bfloat16": 0.0}
    before, after = tools.read(averaged), tools.read(tmp_path / "out")
    tools.assert_same({path: after[path] for path in before}, before)


def test_a_damaged_record(run, original, tmp_path):
    damaged = shutil.copytree(original, tmp_path / "damaged")
    for text, words in (("{broken", "conversion.json is not JSON"), ("[]", "conversion.json must be a JSON object")):
        (damaged / "conversion.json").write_text(text)
        assert words in run("graft", damaged, tmp_path / "out", "--num-blocks=2").one_sentence()
    assert [p.name for p in tmp_path.iterdir()] == ["damaged"]
