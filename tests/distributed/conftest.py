"""Runs of train.py as several processes on this machine, over gloo."""

import dataclasses
import json
import pathlib
import socket
import subprocess
import time
from typing import Any

import pytest

from tests import commands
from tests.commands import Outcome, Processes, outcome

TINY: dict[str, Any] = {**commands.TINY, "steps": 6, "checkpoint": {"every": 2}}


@dataclasses.dataclass(frozen=True)
class Run:
    """The processes of one run, first one first."""

    processes: list[subprocess.Popen[str]]

    def wait(self, timeout: float = 240) -> list[Outcome]:
        """What each did."""
        deadline = time.monotonic() + timeout
        return [outcome(process, max(1.0, deadline - time.monotonic())) for process in self.processes]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> pathlib.Path:
    """Where compiled programs are kept for the session."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def launch(tmp_path, compiled) -> Any:
    """Starts train.py: launch(processes, "--steps=3", devices=1); `only` that one of the processes."""
    preset = tmp_path / "tiny-run.json"
    preset.write_text(json.dumps(TINY))
    with Processes() as processes:

        def run(count: int, *arguments: str, devices: int = 1, only: int | None = None) -> Run:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            found = []
            for index in range(count) if only is None else [only]:
                place = [f"--coordinator=localhost:{port}", f"--processes={count}", f"--process={index}"]
                ours = [*(place if count > 1 else []), f"--compilation_cache={compiled}"]
                found.append(processes.start([preset, *arguments, *ours], devices=devices, directory=tmp_path))
            return Run(found)

        yield run
