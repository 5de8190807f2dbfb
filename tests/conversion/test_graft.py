"""Grafting keeps the original model to the bit, and says so only where it is true."""

import json
import shutil

import numpy as np
import pytest

from mhar_jax import load_model
from mhar_jax.conversion import grafting
from mhar_jax.conversion.grafting import graft
from mhar_jax.conversion.importing import import_checkpoint


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
