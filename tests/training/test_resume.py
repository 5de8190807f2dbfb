"""Kill, terminate, and go on: to the bit."""

import os
import random
import re
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import pytest

from mhar_jax.training import loop
from mhar_jax.training import metrics as metrics_module
from tests.commands import wait_for_step

STEPS = 20


def test_killed_and_terminated_runs_equal_an_unbroken_one(start, there, tools, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    # Each save waits for the one before, so a kill lands inside a save more often than not.
    arguments = (f"--steps={STEPS}", "--checkpoint.every=3", "--checkpoint.keep=2")
    whole = there(f"--run_dir={straight}", *arguments)
    assert whole.code == 0, whole.err

    process = start(f"--run_dir={broken}", *arguments)
    wait_for_step(broken, 10, process)
    process.kill()  # SIGKILL
    assert process.wait() == -signal.SIGKILL
    assert not (broken / "checkpoints" / str(STEPS)).exists(), "killed too late to show anything"

    process = start(f"--run_dir={broken}", *arguments)
    wait_for_step(broken, 14, process)
    process.terminate()  # SIGTERM
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    told = r"(WARNING: the save of step \d+ was not finished, so it is dropped for the one before it\n)?"
    assert re.fullmatch(told, err), err  # as the kill fell
    assert "resuming after step" in out
    assert "stopped by a signal" in out
    assert not (broken / "checkpoints" / str(STEPS)).exists(), "terminated too late to show anything"

    rest = there(f"--run_dir={broken}", *arguments)
    assert rest.code == 0, rest.err
    tools.assert_same(tools.saved(broken, STEPS), tools.saved(straight, STEPS))
    assert tools.losses(broken) == tools.losses(straight)
    assert [line["step"] for line in tools.metrics(broken) if "loss" in line] == list(range(1, STEPS + 1))


@pytest.fixture
def signal_at(monkeypatch):
    """Sends this process a signal when the numbers of a step are written."""

    def arm(step: int) -> None:
        write = metrics_module.MetricsWriter.write

        def writing(self, at, values):
            write(self, at, values)
            if at == step and "loss" in values:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(metrics_module.MetricsWriter, "write", writing)

    return arm


def test_a_signal_while_the_run_starts(here, tmp_path, monkeypatch):
    """Before there is a state: the first step is made and saved."""
    resume = loop._resume

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return resume(*arguments)

    monkeypatch.setattr(loop, "_resume", signalled)
    stopped = here(f"--run_dir={tmp_path / 'run'}", "--eval.every=0")
    assert stopped.code == 0
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["1"]


# Documents that are tokenised at the start and packed, and documents tokenised on the fly, row by row.
@pytest.mark.parametrize("megabytes", [256, 0], ids=["packed", "streams"])
def test_terminated_run_goes_on_to_the_bit(here, tools, tmp_path, signal_at, megabytes):
    arguments = [f"--data.tokenize_at_start_mb={megabytes}", "--log.every=2"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert here(f"--run_dir={straight}", *arguments).code == 0

    signal_at(4)
    stopped = here(f"--run_dir={broken}", *arguments)
    assert stopped.code == 0
    at = [int(p.name) for p in (broken / "checkpoints").iterdir()]
    assert at in ([5], [6]), "one step is on its way when the signal comes"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    assert here(f"--run_dir={broken}", *arguments).code == 0
    tools.assert_same(tools.saved(broken, 8), tools.saved(straight, 8))
    assert tools.losses(broken) == tools.losses(straight)
    saved = tools.saved(broken, 8)
    assert saved["data"]["next_batch"] == 8
    assert {
        "rest/rng",
        "rest/step",
        "rest/optimizer/1/0/mu/embedding",
        "ema/embedding",
        "params/embedding",
    } <= saved.keys()
    if not megabytes:
        assert len(saved["data"]["rows"]) == 8


def test_a_damaged_checkpoint_costs_the_steps_after_the_one_before(here, tools, tmp_path, caplog):
    run_dir = tmp_path / "run"
    arguments = (f"--run_dir={run_dir}", "--checkpoint.every=3", "--eval.every=2")
    assert here(*arguments).code == 0
    state, losses = tools.saved(run_dir, 8), tools.losses(run_dir)
    for step, file in ((8, "meta/metadata"), (6, "data/metadata")):
        path = run_dir / "checkpoints" / str(step) / file
        path.write_bytes(path.read_bytes()[:-9])
    again = here(*arguments)
    assert again.code == 0
    assert "resuming after step 3" in again.out
    warned = [r.getMessage() for r in caplog.records if r.name == "mhar_jax"]
    assert [w.split(",")[0].rsplit("/", 1)[1] for w in warned] == ["8", "6"]
    tools.assert_same(tools.saved(run_dir, 8), state)
    assert tools.losses(run_dir) == losses, "steps 4 to 8 are there once"
    names = {p.name for p in (run_dir / "checkpoints").iterdir()}
    assert names == {"3", "6", "8", "6.damaged", "8.damaged"}


def test_a_run_that_died_before_its_first_checkpoint_starts_again(here, tools, tmp_path):
    run_dir = tmp_path / "run"
    assert here(f"--run_dir={run_dir}").code == 0
    state, losses = tools.saved(run_dir, 8), tools.losses(run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "8")
    assert here(f"--run_dir={run_dir}").code == 0
    tools.assert_same(tools.saved(run_dir, 8), state)
    assert tools.losses(run_dir) == losses, "also the evaluation before the first step is there once"


@pytest.mark.slow
def test_kills_at_any_moment(start, there, tools, tmp_path):
    """Each step is saved, so most of the kills land inside a save."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    arguments = ("--steps=60", "--checkpoint.every=1", "--checkpoint.keep=2", "--eval.every=10")
    assert there(f"--run_dir={straight}", *arguments).code == 0
    draws, metrics, kills = random.Random(0), broken / "metrics.jsonl", 0
    for _ in range(60):
        process = start(f"--run_dir={broken}", *arguments)
        size = metrics.stat().st_size if metrics.exists() else 0
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > size):
            time.sleep(0.005)
        try:
            process.wait(draws.uniform(0, 1.5))
        except subprocess.TimeoutExpired:
            process.kill()
            kills += 1
            continue
        break
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert all("was not finished, so it is dropped" in line for line in err.splitlines()), err
    assert kills > 3
    tools.assert_same(tools.saved(broken, 60), tools.saved(straight, 60))
    assert tools.losses(broken) == tools.losses(straight)


def test_a_longer_run_continues_a_finished_one(here, tools, tmp_path):
    run_dir = tmp_path / "run"
    assert here(f"--run_dir={run_dir}", "--steps=4").code == 0
    first = tools.losses(run_dir)
    again = here(f"--run_dir={run_dir}", "--steps=4")  # finished: nothing to do, nothing lost
    assert again.code == 0
    assert "resuming after step 4" in again.out
    assert tools.losses(run_dir) == first
    assert here(f"--run_dir={run_dir}", "--steps=8").code == 0
    assert tools.losses(run_dir)[: len(first)] == first
    assert [line["step"] for line in tools.metrics(run_dir) if "loss" in line] == list(range(1, 9))
    assert "past steps=4" in here(f"--run_dir={run_dir}", "--steps=4").one_sentence()
    assert tools.metrics(run_dir)[-1]["step"] == 8, "a refused run changes nothing"


def test_the_key_for_randomness_is_part_of_the_state(tools):
    state = tools.trainer(tools.config()).init()
    expected = jax.random.key_data(jax.random.split(jax.random.key(42))[1])
    np.testing.assert_array_equal(state["rng"], expected)
