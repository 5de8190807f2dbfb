"""The wall clock jumps by hours, back and forth, while a run trains, saves and is resumed."""

import contextlib
import os
import time

import pytest

from mhar_jax.evaluation.runs import read_run
from mhar_jax.training import loop
from mhar_jax.training.checkpoints import list_steps
from mhar_jax.training.metrics import EventFile, Progress

HOUR = 3600.0
JUMPS = (5.0, -5.0, 9.0, -30.0, 2.0, -0.5)  # hours that the clock is wrong by, one after the other


@pytest.fixture
def jumping(monkeypatch):
    """The clock jumps after every step, and after every save has started; returns how often."""
    real, jumps = time.time, [0]

    def jumped() -> float:
        return real() + HOUR * JUMPS[jumps[0] % len(JUMPS)]

    def jump() -> None:
        jumps[0] += 1

    def arm():
        monkeypatch.setattr(loop, "got_further", jump)  # between two steps, and while a save goes on behind
        monkeypatch.setattr(time, "time", jumped)
        monkeypatch.setattr(time, "time_ns", lambda: int(jumped() * 1e9))
        return jumps

    return arm


def test_nothing_is_lost_when_the_clock_jumps(here, tools, tmp_path, jumping, monkeypatch):
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    arguments = ("--checkpoint.every=1", "--checkpoint.keep=2", "--log.tensorboard=true", "--eval.every=4")
    assert here(f"--run_dir={straight}", *arguments).code == 0
    jumps = jumping()
    with monkeypatch.context() as stop:
        stop.setattr(loop, "_terminated", lambda: contextlib.nullcontext(lambda step: step == 5))
        outcome = here(f"--run_dir={moved}", *arguments)
    assert outcome.code == 0, outcome.err
    assert list_steps(moved / "checkpoints") == [4, 5], "the newest are kept by step"
    for age, step in enumerate((5, 4)):  # on the disk, the newer one looks a day older
        path = moved / "checkpoints" / str(step)
        for file in (path, *path.rglob("*")):
            os.utime(file, (time.time() - HOUR * 24 * (2 - age),) * 2)
    outcome = here(f"--run_dir={moved}", *arguments)
    assert outcome.code == 0, outcome.err
    assert "resuming after step 5" in outcome.out
    assert jumps[0] > 16
    assert list_steps(moved / "checkpoints") == list_steps(straight / "checkpoints") == [7, 8]
    tools.assert_same(tools.saved(moved, 8), tools.saved(straight, 8))
    assert tools.losses(moved) == tools.losses(straight)
    rates = [line[name] for line in tools.metrics(moved) for name in ("tokens_per_s", "tflops") if name in line]
    assert rates
    assert min(rates) > 0
    files = sorted((moved / "tensorboard").iterdir())
    assert len(files) == 2
    assert files[0].stat().st_mtime_ns <= files[1].stat().st_mtime_ns, "by name the second run's file comes last"
    assert read_run(moved)


def test_names_of_event_files_go_up(tmp_path, monkeypatch):
    names = []
    for now in (1e9, 2e9, 1.5e9, 10.0):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        events = EventFile(tmp_path, first_step=1)
        events.close()
        names.append(events.path.name)
    assert names == sorted(names)
    assert len(set(names)) == 4


def test_the_bar_goes_on_when_the_clock_is_set_back(monkeypatch):
    shown = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = Progress(1000, 0)
    monkeypatch.setattr(progress._bar, "mininterval", 0.0)
    monkeypatch.setattr(progress._bar, "refresh", lambda **_: shown.append(progress._bar.format_dict))
    real = time.time
    monkeypatch.setattr("tqdm.std.time", lambda: real() - 5 * HOUR)
    for _ in range(20):
        progress.advance()
    progress.close()
    assert shown
    assert all(line["elapsed"] >= 0 for line in shown)
