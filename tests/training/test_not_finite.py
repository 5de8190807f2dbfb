"""A step that is not finite: skipped to the bit, or the end of the run; either way it is named, with its data."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhar_jax.config import load_config
from mhar_jax.training import loop


@pytest.fixture
def spoil(monkeypatch):
    """At these steps (from 1) a norm is infinite while the step is made, so its loss and gradients are not finite."""

    def arm(*steps: int) -> None:
        make = loop.make_trainer

        def make_spoiled(*args):
            trainer = make(*args)

            class Step:
                trace = trainer.step.trace

                def __call__(self, state, tokens):
                    if int(jax.device_get(state["step"])) + 1 not in steps:
                        return trainer.step(state, tokens)
                    norm = jnp.copy(state["params"]["final_norm"])
                    bad = {**state, "params": {**state["params"], "final_norm": norm * jnp.inf}}
                    new, metrics = trainer.step(bad, tokens)
                    return {**new, "params": {**new["params"], "final_norm": norm}}, metrics

            return dataclasses.replace(trainer, step=Step())

        monkeypatch.setattr(loop, "make_trainer", make_spoiled)

    return arm


def test_a_skipped_step_leaves_only_the_counters_changed(tools):
    config = tools.config(optimizer={"not_finite": "skip"})
    trainer = tools.trainer(config)
    state = trainer.init()
    state, _ = trainer.step(state, tools.tokens(trainer))  # moments that are not 0
    bad = {**state, "params": {**state["params"], "embedding": state["params"]["embedding"] * jnp.nan}}
    before = {k: np.array(v) for k, v in tools.flat(bad).items()}
    after, metrics = trainer.step(bad, tools.tokens(trainer))
    assert not np.isfinite(float(metrics["loss"]))
    for name, value in tools.flat(after).items():
        counter = name == "step" or name.endswith("count")
        assert value.tobytes() == (before[name] + 1 if counter else before[name]).tobytes(), name


def test_finite_steps_are_those_of_the_other_policy(tools):
    states = []
    for policy in ("stop", "skip"):
        trainer = tools.trainer(tools.config(optimizer={"not_finite": policy}))
        states.append(tools.flat(trainer.step(trainer.init(), tools.tokens(trainer))[0]))
    stop, skip = states
    assert stop.keys() == skip.keys()
    for name, value in stop.items():  # two programs: equal arithmetic may be fused, and rounded, at other places
        if isinstance(value, np.ndarray) and value.dtype == np.float32:
            assert np.linalg.norm(value - skip[name]) <= 1e-5 * max(np.linalg.norm(value), 1e-6), name


def test_a_run_skips_and_says_which_data(here, spoil, tools, tmp_path, caplog):
    spoil(3, 4)
    run_dir = tmp_path / "run"
    assert here(f"--run_dir={run_dir}", "--optimizer.not_finite=skip").code == 0
    told = [r.getMessage() for r in caplog.records if r.name == "mhar_jax"]
    assert [t.split(" is ")[1].split(",")[0].split(" (")[0] for t in told] == ["nan at step 3", "nan at step 4"]
    assert "batch 2 of the data, sequences 16 to 23 in its order" in told[0]
    lines = [line for line in tools.metrics(run_dir) if "lr" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["step"] for line in lines if line.get("skipped")] == [3, 4]
    assert all("loss" not in line for line in lines if line.get("skipped"))
    assert load_config(run_dir / "config.yaml").optimizer.not_finite == "skip"


def test_a_run_stops_and_says_which_data(here, spoil, tmp_path):
    spoil(3)
    sentence = here(f"--run_dir={tmp_path / 'run'}").one_sentence()
    assert "at step 3 (batch 2 of the data, sequences 16 to 23 in its order)" in sentence
    assert "optimizer.not_finite=skip" in sentence


def test_too_many_in_a_row_stop_the_run(here, spoil, tools, tmp_path):
    spoil(*range(3, 30))
    run_dir = tmp_path / "run"
    more = ("--optimizer.not_finite=skip", "--steps=30", "--eval.every=0", "--checkpoint.every=2")
    sentence = here(f"--run_dir={run_dir}", *more).one_sentence()
    assert "at step 12 " in sentence
    assert "at the 9 steps before, all skipped" in sentence
