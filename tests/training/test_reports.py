"""What a run says about itself, and when it stops itself."""

import dataclasses
import importlib.machinery
import json
import struct
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from mhar_jax.errors import UserError
from mhar_jax.evaluation.runs import read_run
from mhar_jax.routing_map import RoutingPictures
from mhar_jax.training import hardware, loop, reports
from mhar_jax.training.checkpoints import list_steps
from mhar_jax.training.metrics import EventFile, MetricsWriter, NoMetrics, Progress
from mhar_jax.training.reports import Clock, Reports


@pytest.fixture
def poisoned(monkeypatch):
    """Runs whose parameters turn to NaN after a step: that step's loss is the last finite one."""

    def arm(after: int) -> None:
        make = loop.make_trainer

        def make_poisoned(*args):
            trainer = make(*args)

            class Step:
                trace = trainer.step.trace

                def __call__(self, state, tokens):
                    state, metrics = trainer.step(state, tokens)
                    if int(jax.device_get(state["step"])) == after:
                        state = {**state, "params": jax.tree.map(lambda x: x * jnp.nan, state["params"])}
                    return state, metrics

            return dataclasses.replace(trainer, step=Step())

        monkeypatch.setattr(loop, "make_trainer", make_poisoned)

    return arm


@pytest.mark.parametrize(
    ("arguments", "words", "kept"),
    [
        (["--log.every=4", "--eval.every=0"], "the loss is nan at step 4", []),
        (["--log.every=100", "--eval.every=0", "--checkpoint.every=2"], "the loss is nan at step 4", [2]),
        (["--log.every=100", "--eval.every=0", "--checkpoint.every=3"], "the state after step 3", []),
        (["--log.every=100", "--eval.every=3", "--eval.ema=false"], "the held-out loss is nan after step 3", []),
    ],
    ids=["log", "between-logs", "before-its-loss", "held-out"],
)
def test_nan_stops_with_a_sentence_and_is_never_saved(here, poisoned, tools, tmp_path, arguments, words, kept):
    poisoned(after=3)
    run_dir = tmp_path / "run"
    sentence = here(f"--run_dir={run_dir}", *arguments).one_sentence()
    assert words in sentence
    assert list_steps(run_dir / "checkpoints") == kept
    assert max(line["step"] for line in tools.metrics(run_dir)) <= 3, "strict JSON, and nothing after"


@pytest.mark.parametrize(("name", "words"), [("loss", "the loss is inf"), ("grad_norm", "the gradient norm is nan")])
def test_each_number_that_must_be_finite(tools, name, words):
    made = Reports(tools.trainer(tools.config()), NoMetrics(), Progress(1, 0, quiet=True), Clock())
    numbers = {"loss": 1.0, "grad_norm": 1.0, "z": 1.0, "lr": 1.0}
    made.add(1, {**numbers, name: jnp.float32("inf" if name == "loss" else "nan")})
    with pytest.raises(UserError, match=f"{words} at step 1"):
        made.flush()


def test_numbers_are_read_one_step_late_and_in_bulk(tools, monkeypatch):
    """Nothing is read between the written steps, and a written step is read when the next is on its way."""
    reads, written = [], []
    monkeypatch.setattr(reports.jax, "device_get", lambda held: (reads.append([s for s, _ in held]), held)[1])
    monkeypatch.setattr(reports.jax, "block_until_ready", lambda x: x)
    writer = types.SimpleNamespace(write=lambda step, values: written.append(step))
    config = tools.config(log={"every": 4})
    made = Reports(tools.trainer(config), writer, Progress(1, 0, quiet=True), Clock())
    for step in range(1, 8):
        made.add(step, {"loss": 1.0, "grad_norm": 1.0, "z": 1.0, "lr": 1.0})
        assert written == [s for s in (1, 4) if s < step]
    assert reads == [[1], [2, 3, 4]]
    made.flush()
    assert reads[-1] == [5, 6, 7]
    assert written == [1, 4]


def test_steps_without_a_log_line_do_not_pile_up(tools, monkeypatch):
    config = tools.config(log={"every": 10_000}, steps=1_000_000)
    made = Reports(tools.trainer(tools.config()), NoMetrics(), Progress(1, 0, quiet=True), Clock())
    made._config = config
    for step in range(1, 500):
        made.add(step, {"loss": 1.0, "grad_norm": 1.0, "z": 1.0, "lr": 1.0})
        assert len(made._held) <= reports._HELD


def test_the_clock_leaves_out_compilation_and_pauses(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(reports.time, "perf_counter", lambda: now[0])
    clock = Clock()
    clock.start()
    now[0] += 50  # the first step compiles
    assert clock.seconds_per_step(1) is None
    now[0] += 6
    with clock.paused(pending=()):
        now[0] += 1000
    now[0] += 2
    assert clock.seconds_per_step(5) == 2.0
    now[0] += 3
    assert clock.seconds_per_step(6) == 3.0


def test_utilisation_only_for_known_chips(tools, monkeypatch):
    kind = lambda name: hardware.peak_flops(types.SimpleNamespace(device_kind=name))
    assert kind("NVIDIA H200") == kind("NVIDIA H100 80GB HBM3") == 989e12
    for unknown in ("cpu", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 NVL", "TPU v5x", ""):
        assert kind(unknown) is None

    def fields(peak):
        lines = []
        monkeypatch.setattr(reports, "peak_flops", lambda device: peak)
        clock = types.SimpleNamespace(seconds_per_step=lambda step: 0.5)
        writer = types.SimpleNamespace(write=lambda step, values: lines.append(values))
        made = Reports(tools.trainer(tools.config()), writer, Progress(1, 0, quiet=True), clock)
        made.add(1, {"loss": 1.0, "grad_norm": 1.0, "z": 1.0, "lr": 1.0})
        made.flush()
        return lines[0]

    assert "mfu" not in fields(None)
    line = fields(1e9)
    assert line["tokens_per_s"] == 8 * 32 / 0.5
    assert line["mfu"] == pytest.approx(line["tflops"] * 1e12 / 1e9)


def test_memory_where_it_is_reported(monkeypatch):
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 5, "peak_bytes_in_use": 7})
    monkeypatch.setattr(hardware.jax, "local_devices", lambda: [device])
    assert hardware.memory_in_use() == {"memory_bytes": 5, "memory_peak_bytes": 7}
    device.memory_stats = lambda: None
    assert hardware.memory_in_use() == {}


def read_events(path):
    """The events of a TensorBoard file: each record is its length, a checksum, the data, a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    content, events = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = Event()
        event.ParseFromString(content[12 : 12 + length])
        events.append(event)
        content = content[16 + length :]
    return events


def test_a_run_writes_every_number_everywhere(here, tools, tmp_path):
    run_dir = tmp_path / "run"
    outcome = here(f"--run_dir={run_dir}", "--log.tensorboard=true", "--log.every=2", "--log.profile_steps=[2,3]")
    assert (outcome.code, outcome.err) == (0, "")
    assert {p.name for p in run_dir.iterdir()} >= {
        "config.yaml",
        "data.json",
        "metrics.jsonl",
        "checkpoints",
        "routing.png",
        "tensorboard",
    }
    assert json.loads((run_dir / "data.json").read_text())["source"] == "the embedded text"
    assert read_run(run_dir).fingerprint is not None
    lines = tools.metrics(run_dir)
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == [1, 2, 4, 6, 8]
    assert {"loss", "z", "grad_norm", "lr"} <= trained[0].keys()
    assert all({"tokens_per_s", "tflops"} <= line.keys() for line in trained[1:])
    assert not any("mfu" in line for line in trained), "no figure for an unknown chip"
    held_out = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in held_out] == [0, 4, 8]
    for line in held_out:
        assert 0 < line["depth_entropy"] <= 1 + 1e-5
        assert 0 < line["depth_newest_mass"] < 1
        assert line["val_tokens"] == 8 * 32
    # Zero queries weigh 1/2 and 1/3 at the two sites that have a choice.
    assert held_out[0]["depth_newest_mass"] == pytest.approx((1 / 2 + 1 / 3) / 2, rel=1e-5)

    (file,) = (run_dir / "tensorboard").iterdir()
    first, start, *scalars = read_events(file)
    assert first.file_version == "brain.Event:2"
    assert start.step == 0
    found = {(e.step, v.tag): v.simple_value for e in scalars for v in e.summary.value}
    expected = {(line["step"], k): v for line in lines for k, v in line.items() if k != "step"}
    assert found == pytest.approx(expected, rel=1e-6)
    assert list((run_dir / "profile").rglob("*.xplane.pb")), "a trace"
    assert "step 8: loss" in outcome.out
    assert "routing.png" in outcome.out


def test_every_evaluation_draws_the_routing(here, tools, monkeypatch, tmp_path):
    run_dir, submitted = tmp_path / "run", []
    original = RoutingPictures.submit

    def submit(pictures, routing):
        submitted.append(routing.newest_mass)
        original(pictures, routing)

    monkeypatch.setattr(RoutingPictures, "submit", submit)
    assert here(f"--run_dir={run_dir}").code == 0
    masses = [line["depth_newest_mass"] for line in tools.metrics(run_dir) if "val_loss" in line]
    assert submitted == masses
    assert len(masses) == 3
    picture = (run_dir / "routing.png").read_bytes()
    (run_dir / "routing.png").unlink()
    assert here(f"--run_dir={run_dir}").code == 0, "a run that died between its last checkpoint and its last picture"
    assert (run_dir / "routing.png").read_bytes() == picture


def test_event_records_are_those_of_the_library(tmp_path):
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter

    events = EventFile(tmp_path / "ours", first_step=11)
    events.write(11, {"loss": 1.5})
    events.close()
    made = read_events(events.path)
    assert made[1].step == 11
    assert made[1].session_log.status == 1, "START hides what earlier files have from this step on"
    theirs = RecordWriter(str(tmp_path / "theirs"))
    for event in made:
        assert isinstance(event, Event)
        theirs.write(event.SerializeToString())
    theirs.close()
    assert (tmp_path / "theirs").read_bytes() == events.path.read_bytes()


def test_lines_of_repeated_steps_are_dropped(tools, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n\xff\n{"step": 3, "loss": 1.0}\n{"step": 2, "lo'
    )
    MetricsWriter(tools.config(), tmp_path, first_step=3).close()
    assert tools.metrics(tmp_path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]


def test_weights_and_biases(tools, tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end")
    )
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    fake.init = lambda **settings: (calls.append(settings), run)[1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = MetricsWriter(tools.config(log={"wandb_project": "p"}), tmp_path, first_step=0)
    writer.write(1, {"loss": 2.0})
    writer.close()
    assert calls[0]["project"] == "p"
    assert calls[0]["config"]["seed"] == 42
    assert calls[1:] == [(1, {"loss": 2.0}), "end"]


def test_progress_is_a_bar_on_a_terminal_only(capfd, monkeypatch):
    bar = Progress(10, 0)
    bar.advance()
    bar.report(1, {"loss": 2.0, "grad_norm": 1.0})
    bar.say("hello")
    bar.close()
    assert capfd.readouterr() == ("step 1: loss 2\nhello\n", "")

    silent = Progress(10, 0, quiet=True)
    silent.advance()
    silent.report(1, {"loss": 2.0})
    silent.close()
    assert capfd.readouterr() == ("", "")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = Progress(10, 4)
    bar.report(5, {"loss": 2.0})
    bar.advance()
    bar.close()
    out, err = capfd.readouterr()
    assert "step" in err
    assert "loss=2" in err
    assert out == ""
