"""A disk that fills up: one sentence, exit code 2, and the last good checkpoint stays."""

import contextlib
import errno
import pathlib
import subprocess
import sys

import pytest

from mhar_jax.errors import UserError, writing
from mhar_jax.training.checkpoints import list_steps
from mhar_jax.training.metrics import EventFile, MetricsWriter
from tests import commands
from tests.commands import wait_for_step


def test_no_file_may_grow_any_more(here, there, tools, tmp_path):
    """In a process of its own, under a limit on the size of a file that the parameters pass and nothing else does."""
    run_dir = tmp_path / "run"
    assert here(f"--run_dir={run_dir}", "--steps=4", "--eval.every=0").code == 0
    before = tools.saved(run_dir, 4)

    more = (f"--run_dir={run_dir}", "--steps=6", "--checkpoint.every=1", "--eval.every=0")
    outcome = there(*more, file_limit=30, environment={"JAX_ENABLE_COMPILATION_CACHE": "false"})
    sentence = outcome.one_sentence()
    assert f"could not be written to {run_dir}/checkpoints" in sentence
    assert "File too large; the checkpoint of step 4 is whole" in sentence
    assert "Traceback" not in outcome.out + outcome.err
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["4"], "nothing half-made is left"
    tools.assert_same(tools.saved(run_dir, 4), before)


@contextlib.contextmanager
def small_disk(path: pathlib.Path, size: str):
    """A file system of its own."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("this user cannot mount a small file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_disk_that_fills_up(here, tools, tmp_path):
    with small_disk(tmp_path / "disk", "1500k") as disk:
        run_dir = disk / "run"
        arguments = (f"--run_dir={run_dir}", "--checkpoint.every=1", "--checkpoint.keep=8")
        sentence = here(*arguments).one_sentence()
        assert "No space left on device" in sentence
        last = list_steps(run_dir / "checkpoints")[-1]
        assert f"the checkpoint of step {last} is whole" in sentence
        assert {p.name for p in (run_dir / "checkpoints").iterdir()} == {str(s) for s in range(1, last + 1)}
        lines = tools.metrics(run_dir)

        # With room again the run goes on, and repeats no line.
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        assert here(*arguments).code == 0
        steps = [line["step"] for line in tools.metrics(run_dir) if "loss" in line]
        assert steps == list(range(1, 9))
        assert tools.metrics(run_dir)[: last + 1][1:] == lines[: last + 1][1:]


REFUSING = """
import errno, os, re, sys
real = os.mkdir
def mkdir(path, *args, **more):
    if re.search(sys.argv[1], os.fspath(path)):
        raise OSError(int(sys.argv[2]), os.strerror(int(sys.argv[2])), os.fspath(path))
    return real(path, *args, **more)
os.mkdir = mkdir
from mhar_jax.training.main import main
sys.exit(main(sys.argv[5:]))
"""


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        (r"checkpoints/3\.[^/]*$", errno.ENOSPC, "No space left on device"),
        pytest.param(r"checkpoints/3\.[^/]*/rest", errno.EACCES, "Permission denied", marks=pytest.mark.slow),
    ],
    ids=["step", "item inside it"],
)
def test_a_directory_that_cannot_be_made(start, tmp_path, name, error, words):
    """The run ends, with no thread left that waits for the directory. In a process of its own, since it is its end."""
    run_dir = tmp_path / "run"
    refusing = (sys.executable, "-c", REFUSING, name, str(error))
    more = ("--steps=5", "--checkpoint.every=1", "--eval.every=0")
    process = start(f"--run_dir={run_dir}", *more, before=refusing, environment={"PYTHONPATH": str(commands.ROOT)})
    wait_for_step(run_dir, 3, process)
    sentence = commands.outcome(process, timeout=30).one_sentence()
    assert f"{words}; the checkpoint of step 2 is whole" in sentence
    assert list_steps(run_dir / "checkpoints") == [1, 2]
    assert len(list((run_dir / "checkpoints").iterdir())) == 2, "nothing half-made is left"


@pytest.mark.slow
def test_a_disk_without_room_for_another_file(start, tmp_path):
    with small_disk(tmp_path / "disk", "64m,nr_inodes=60") as disk:
        run_dir = disk / "run"
        process = start(f"--run_dir={run_dir}", "--steps=12", "--checkpoint.every=1", "--checkpoint.keep=20")
        wait_for_step(run_dir, 1, process)
        sentence = commands.outcome(process, timeout=60).one_sentence()
        assert "could not be written" in sentence
        assert "No space left on device" in sentence


@pytest.mark.parametrize("target", ["config.yaml", "data.json", "metrics.jsonl", "routing.png", "events"])
def test_every_file_of_a_run(here, tools, tmp_path, monkeypatch, target):
    """/dev/full takes opens and refuses writes."""
    run_dir = tmp_path / "run"
    aside: dict[str, str] = {}  # what is written whole or not at all, and where it is written first
    if target == "events":
        (run_dir / "tensorboard").mkdir(parents=True)
        name = run_dir / "tensorboard" / "events.out.tfevents.0000000000.host.0"
        monkeypatch.setattr("mhar_jax.training.metrics.time.time", lambda: 0)
        monkeypatch.setattr("mhar_jax.training.metrics._second_of", lambda name: -1)  # a name that is there already
        monkeypatch.setattr("mhar_jax.training.metrics.socket.gethostname", lambda: "host")
        monkeypatch.setattr("mhar_jax.training.metrics.os.getpid", lambda: 0)
    else:
        run_dir.mkdir()
        name = run_dir / target
        aside = {"config.yaml": "config.yaml.tmp", "data.json": "data.json.tmp", "routing.png": ".routing.png"}
    (run_dir / aside[target] if target in aside else name).symlink_to("/dev/full")
    if target == "metrics.jsonl":
        monkeypatch.setattr("mhar_jax.training.metrics._keep_lines_before", lambda path, step: None)
    sentence = here(f"--run_dir={run_dir}", "--log.tensorboard=true").one_sentence()
    assert "No space left on device" in sentence
    assert str(name.parent if target == "events" else name) in sentence


def test_short_writes_are_completed(tools, tmp_path, monkeypatch):
    writer = MetricsWriter(tools.config(), tmp_path, first_step=0)
    real = writer._file

    class Trickle:
        def write(self, data):
            return real.write(data[:7])

        def close(self):
            real.close()

    writer._file = Trickle()
    writer.write(3, {"loss": 0.1 + 0.2})
    writer.close()
    assert tools.metrics(tmp_path) == [{"step": 3, "loss": 0.1 + 0.2}]


def test_an_event_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="exists"):
        EventFile(tmp_path / "file", first_step=1)
    with pytest.raises(UserError, match="events cannot be written"), writing("TensorBoard events", tmp_path):
        EventFile(tmp_path / "no" / "place", first_step=1)
