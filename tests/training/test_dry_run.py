"""What `train.py --dry-run` says is what a run has."""

import re

import jax
import pytest

from mhar_jax.training import dry_run as module
from mhar_jax.training import main


def test_numbers_are_those_of_the_state(tools, preset, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main.main([str(preset), "--dry-run", "--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2"]) == 0
    out = capfd.readouterr().out
    assert sorted(tmp_path.iterdir()) == before, "nothing is written"
    trainer = tools.trainer(tools.config(), (2, 2, 2))
    state = trainer.init()
    count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    held = sum(s.data.nbytes for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards[:1])
    assert f"parameters: {count:,} (mhar)" in out
    assert f"tokens a step: {8 * 32:,}, in 2 micro-batches" in out
    assert sum(map(module.bytes_on_a_device, jax.tree.leaves(trainer.shapes))) == held
    assert re.search(r"state +([\d.]+)\n", out)[1] == f"{held / 1e6:.3f}"
    rows = [line for line in out.splitlines() if line.startswith(("params/", "ema/", "optimizer/", "step", "rng"))]
    assert sum(float(line.split()[-1]) for line in rows) == pytest.approx(held / 1e6, abs=0.001 * len(rows))
    assert re.search(r"params/layers/\*/mlp/w_up .* fsdp, tensor ", out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology=v5e:2x2"], "--topology goes with --dry-run"),
        (["--dry_run=perhaps"], "--dry_run must be true or false"),
        (["--dry-run", "--mesh.data=3"], "needs 3 devices, and there are 8"),
    ],
)
def test_what_it_refuses(preset, capfd, arguments, words):
    assert main.main([str(preset), *arguments]) == 2
    assert words in capfd.readouterr().err
