"""Where numbers go while training: JSON lines, TensorBoard, Weights & Biases, and a progress bar."""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import socket
import struct
import sys
import time
from typing import Any

from tqdm import tqdm

from mhar_jax.config.load import to_dict
from mhar_jax.config.schema import Config
from mhar_jax.errors import UserError, writing


def check_wandb(config: Config) -> None:
    """Raises UserError if Weights & Biases is asked for and not installed; nothing needs to be written to know."""
    if config.log.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise UserError("log.wandb_project needs the package wandb; install mhar-jax[wandb] or leave it out")


class MetricsWriter:
    """Writes one line of `metrics.jsonl` a call, and the same numbers to the other outputs that are on."""

    def __init__(self, config: Config, run_dir: pathlib.Path, *, first_step: int):
        """Lines from `first_step` on (0: the evaluation before any step) are about to be repeated, and are dropped.

        Raises:
          UserError: an output cannot be written.
        """
        self.path = run_dir / "metrics.jsonl"
        self._tensorboard: EventFile | None = None
        self._wandb: Any = None
        if config.log.tensorboard:
            with writing("TensorBoard events", run_dir / "tensorboard"):
                self._tensorboard = EventFile(run_dir / "tensorboard", first_step=first_step)
        with contextlib.ExitStack() as undo:
            if self._tensorboard is not None:
                undo.callback(self._tensorboard.close)
            with writing("metrics", self.path):
                _keep_lines_before(self.path, first_step)
                self._file = self.path.open("ab", buffering=0)
            undo.pop_all()
        if config.log.wandb_project is not None:
            import wandb

            self._wandb = wandb.init(project=config.log.wandb_project, dir=str(run_dir), config=to_dict(config))

    def write(self, step: int, values: dict[str, float]) -> None:
        """One object with `step` and `values`; handed to the operating system when this returns.

        Raises:
          UserError: an output cannot be written.
        """
        line = json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n"
        with writing("metrics", self.path):
            _write_all(self._file, line)
        if self._tensorboard is not None:
            with writing("TensorBoard events", self._tensorboard.path):
                self._tensorboard.write(step, values)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        """Releases every output; what was written is there already."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


class EventFile:
    """TensorBoard scalars, written where they are made.

    tensorboardX's own SummaryWriter hands them to a thread, which dies on a full disk, after which the next call waits
    for it for ever.
    """

    def __init__(self, directory: pathlib.Path, *, first_step: int):
        """Earlier files' scalars from `first_step` on are hidden: they are about to be written again."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory.mkdir(exist_ok=True)
        now, earlier = time.time(), [_second_of(p.name) for p in directory.glob("events.out.tfevents.*")]
        # TensorBoard reads the files by name: the newest must come last, whatever the clock did since the others.
        second = max([int(now), *(n + 1 for n in earlier)])
        self.path = directory / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = self.path.open("ab", buffering=0)
        start = Event(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START))
        try:
            for event in (Event(wall_time=now, file_version="brain.Event:2"), start):
                self._append(event)
        except OSError:
            self._file.close()
            raise

    def write(self, step: int, values: dict[str, float]) -> None:
        """One scalar for each value."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _append(self, event: Any) -> None:
        """One record of the TFRecord format: length, its checksum, data, its checksum."""
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        _write_all(self._file, length + checksums[0] + data + checksums[1])


class NoMetrics:
    """The writer of all processes but the first."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Progress:
    """A bar on a terminal; off one, a line at each report."""

    def __init__(self, total: int, done: int, *, quiet: bool = False):
        """`quiet`: nothing at all (processes but the first)."""
        self._terminal = sys.stderr.isatty() and not quiet
        self._quiet = quiet
        self._bar = tqdm(total=total, initial=done, disable=not self._terminal, dynamic_ncols=True, unit="step")
        if self._terminal:  # tqdm reads the wall clock: set back, it would show nothing until the old time is reached
            self._bar._time = time.monotonic
            self._bar.start_t = self._bar.last_print_t = time.monotonic()

    def advance(self) -> None:
        """One step is done."""
        self._bar.update(1)

    def report(self, step: int, values: dict[str, float]) -> None:
        """Shows the numbers of a step."""
        shown = {k: f"{v:.4g}" for k, v in values.items() if k in ("loss", "val_loss", "lr", "tokens_per_s", "mfu")}
        if self._terminal:
            self._bar.set_postfix(shown)
        else:
            self.say(f"step {step}: " + ", ".join(f"{k} {v}" for k, v in shown.items()))

    def say(self, message: str) -> None:
        """A line of its own, above the bar.

        Raises:
          UserError: standard output cannot be written (a full disk, a closed pipe).
        """
        if self._quiet:
            return
        with writing("progress", "standard output"):
            if self._terminal:
                self._bar.write(message)
            else:
                print(message, flush=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


def _second_of(name: str) -> int:
    """The time in an event file's name, in seconds; -1 where it has none."""
    part = name.removeprefix("events.out.tfevents.").partition(".")[0]
    return int(part) if part.isdecimal() else -1


def _write_all(file: io.FileIO, data: bytes) -> None:
    while data:  # a write into a nearly full disk can be a short one; the next says why
        data = data[file.write(data) :]


def holds_metrics(path: pathlib.Path) -> bool:
    """Whether a file begins like a metrics.jsonl of a run (or is empty)."""
    with path.open("rb") as file:
        first = file.readline(1 << 16)
    return not first or _step_of(first.decode("utf-8", errors="replace")) is not None


def _keep_lines_before(path: pathlib.Path, step: int) -> None:
    """Drops the lines from a step on, and one that a kill cut short."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line + "\n" for line in lines if (at := _step_of(line)) is not None and at < step]
    aside = path.with_suffix(".jsonl.tmp")
    aside.write_text("".join(kept), encoding="utf-8")
    os.replace(aside, path)


def _step_of(line: str) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
