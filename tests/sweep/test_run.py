"""Cells run in processes of their own, several at once, and a killed sweep goes on to the same report."""

import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from mhar_jax.sweep import run as running
from mhar_jax.sweep.cell import DONE, is_done
from mhar_jax.sweep.grid import create, make_cells, open_sweep
from mhar_jax.sweep.report import write_report
from mhar_jax.sweep.run import run_sweep

ROOT = pathlib.Path(__file__).parents[2]
FAKE = """
import json, os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
(path / "began").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "") + " " + str(time.time()))
time.sleep(float(sys.argv[2]))
if "seed=3" in path.name:
    print("error: the loss is nan", flush=True)
    sys.exit(2)
(path / "done.json").write_text("{}")
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Cells that only sleep; the sweep has five seeds, the third of which fails."""
    real = subprocess.Popen
    monkeypatch.setattr(
        running.subprocess, "Popen", lambda command, **o: real([sys.executable, "-c", FAKE, command[-1], "0.2"], **o)
    )
    grid = {"seed": ["1", "2", "3", "4", "5"]}
    return create(tmp_path / "sweep", make_cells("tiny", [], grid), grid)


def test_a_failed_cell_is_told_and_the_others_run(fake):
    said = []
    failed = run_sweep(fake, jobs=2, say=said.append)
    assert failed == ["seed=3 ended with 2: error: the loss is nan"]
    assert [is_done(fake.path(c)) for c in fake.cells] == [True, True, False, True, True]
    assert said[0] == "5 cells, 0 of them done"
    assert said[-1].startswith("[4/5]")
    for cell in fake.cells:
        (fake.path(cell) / "began").unlink()
    run_sweep(fake, say=said.append)
    assert [c.name for c in fake.cells if (fake.path(c) / "began").exists()] == ["seed=3"]  # nothing is done twice


def test_one_cell_a_device(fake):
    run_sweep(fake, devices=["4", "7"], say=lambda text: None)
    began = [(fake.path(c) / "began").read_text().split() for c in fake.cells]
    assert {device for device, _ in began} == {"4", "7"}
    for device in ("4", "7"):
        times = sorted(float(t) for d, t in began if d == device)
        assert all(b - a > 0.19 for a, b in itertools.pairwise(times))  # never two on one device


def test_an_error_while_starting_stops_what_runs(fake, monkeypatch):
    started = []
    real = running._start

    def start(path, device):
        if len(started) == 1:
            raise KeyboardInterrupt
        started.append(real(path, device))
        return started[-1]

    monkeypatch.setattr(running, "_start", start)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(fake, jobs=2, say=lambda text: None)
    assert started[0].poll() is not None


SMALL = [
    "--steps=12",
    "--batch_size=4",
    "--seq_len=16",
    "--model.num_layers=2",
    "--model.d_model=16",
    "--model.num_heads=2",
    "--model.num_kv_heads=2",
    "--model.ffn_dim=16",
    "--eval.every=2",
    "--eval.batches=2",
    "--checkpoint.every=4",
    "--log.every=4",
    "--log.tensorboard=false",
    "--optimizer.warmup_steps=2",
    "--sample.tokens=0",
    "--jobs=2",
]
COMMAND = [sys.executable, "-m", "mhar_jax.sweep", "run"]
GRID = ["--grid.model.variant=additive,attention_residuals,mhar,delta", "--grid.seed=1,2"]
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


def start(directory):
    """The sweep in a process of its own, which says what it does in log.txt of each cell."""
    return subprocess.Popen(
        [*COMMAND, str(directory), "tiny", *GRID, *SMALL],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def report(directory) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in write_report(open_sweep(directory))}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_killed_half_way_and_continued_gives_the_same_report(tmp_path, unbroken, how):
    directory = tmp_path / "killed"
    process = start(directory)
    # Killed when some cells are done and one is in the middle: it has a checkpoint and is not at its end.
    deadline = time.time() + 900
    while time.time() < deadline:
        cells = open_sweep(directory).cells if (directory / "sweep.yaml").is_file() else []
        paths = [directory / "cells" / c.name for c in cells]
        if any(is_done(p) for p in paths) and any((p / "checkpoints" / "4").exists() and not is_done(p) for p in paths):
            break
        assert process.poll() is None, "the sweep ended before it could be killed"
        time.sleep(0.02)
    os.kill(process.pid, how)
    assert process.wait(timeout=300) == {signal.SIGTERM: 130, signal.SIGKILL: -signal.SIGKILL}[how]
    done = sum(is_done(p) for p in paths)
    assert 0 < done < 8
    again = subprocess.run(
        [*COMMAND, str(directory), "--jobs=2"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert all(is_done(p) for p in paths)
    assert report(directory) == unbroken


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The report of the same sweep left alone."""
    directory = tmp_path_factory.mktemp("unbroken") / "sweep"
    process = start(directory)
    assert process.wait(timeout=1500) == 0
    contents = report(directory)
    numbers = json.loads(contents["report.json"])
    assert [len(g["runs"]) for g in numbers["groups"]] == [2, 2, 2, 2]
    assert (directory / "cells" / "variant=mhar,seed=1" / DONE).is_file()
    return contents
