"""What `train.py --dry-run` says is what a run has."""

import re

import jax
import pytest

from mhar_jax.training import dry_run as module
from mhar_jax.training import main
from mhar_jax.training.memory import least_on_a_device


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


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2)])
def test_the_least_memory_is_no_more_than_what_is_held(tools, sizes):
    """A run is refused for it: state, gradients and two activations, but for what is whole on each device."""
    config = tools.config()
    trainer = tools.trainer(config, sizes)
    state = sum(map(module.bytes_on_a_device, jax.tree.leaves(trainer.shapes)))
    gradients = sum(map(module.bytes_on_a_device, jax.tree.leaves(trainer.shapes["params"])))
    rows = config.batch_size // config.optimizer.accumulate // sizes[1]
    held = state + gradients + 2 * rows * config.seq_len * config.model.d_model * 4
    least = least_on_a_device(config, trainer.mesh)
    counters = 100  # bytes
    assert 0.9 * held < least <= held
    assert sizes != (1, 1, 1) or held - counters < least


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
