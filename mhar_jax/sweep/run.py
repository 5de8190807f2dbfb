"""Runs the cells of a sweep that are not done, several at a time, each in a process of its own."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mhar_jax.errors import UserError
from mhar_jax.sweep.cell import is_done
from mhar_jax.sweep.grid import Cell, Sweep

Say = Callable[[str], None]


def run_sweep(sweep: Sweep, *, jobs: int = 1, devices: Sequence[str] = (), say: Say = print) -> list[str]:
    """Runs what is left; returns a sentence for each cell that failed.

    A cell that fails does not stop the others. Stopped itself (by an interrupt or SIGTERM), it stops its cells, which
    save and are continued by the next call.

    Args:
      jobs: cells at once, where no devices are named.
      devices: numbers of accelerators; one cell a device at a time, which sees no other.
    """
    waiting = [cell for cell in sweep.cells if not is_done(sweep.path(cell))]
    done = len(sweep.cells) - len(waiting)
    say(f"{len(sweep.cells)} cells, {done} of them done")
    slots: list[str | None] = list(devices) or [None] * jobs
    running: dict[int, tuple[Cell, subprocess.Popen[bytes]]] = {}
    failed: list[str] = []
    with _interruptible():
        try:
            while waiting or running:
                for slot, device in enumerate(slots):
                    if waiting and slot not in running:
                        cell = waiting.pop(0)
                        running[slot] = cell, _start(sweep.path(cell), device)
                for slot, (cell, process) in list(running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[slot]
                    done += code == 0
                    if code:
                        failed.append(f"{cell.name} ended with {code}: {_last_line(sweep.path(cell) / 'log.txt')}")
                    say(f"[{done}/{len(sweep.cells)}] {cell.name}{'' if code == 0 else f' failed ({code})'}")
                time.sleep(0.1)
        finally:
            for _, process in running.values():
                process.send_signal(signal.SIGTERM)
            for _, process in running.values():
                process.wait()
    return failed


def _start(path: pathlib.Path, device: str | None) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if device is not None:  # whichever platform there is reads its own
        environment |= {
            "CUDA_VISIBLE_DEVICES": device,
            "ROCR_VISIBLE_DEVICES": device,
            "TPU_VISIBLE_CHIPS": device,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": "1,1,1",
        }
    root = str(pathlib.Path(__file__).parent.parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (root, environment.get("PYTHONPATH")) if p)
    command = [sys.executable, "-m", "mhar_jax.sweep.cell", str(path)]
    try:
        with (path / "log.txt").open("ab") as log:
            # A group of its own: an interrupt from the keyboard reaches the sweep, which tells its cells.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
    except OSError as error:
        raise UserError(f"the cell {path} cannot be started: {error.strerror}") from None


def _last_line(path: pathlib.Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM is as good as an interrupt from the keyboard."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
