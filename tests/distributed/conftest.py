"""Runs of train.py as several processes on this machine, over gloo."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# 1 layer, D 32, 2 routing heads, float32, on the embedded text as bytes: 8 sequences of 32 tokens a step.
TINY: dict[str, Any] = {
    "steps": 6,
    "batch_size": 8,
    "seq_len": 32,
    "model": {
        "num_layers": 1,
        "d_model": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 48,
        "context": 64,
        "compute_dtype": "float32",
        "init_std": 0.1,
    },
    "optimizer": {"warmup_steps": 3},
    "eval": {"every": 4, "batches": 1},
    "checkpoint": {"every": 2},
    "log": {"every": 1, "tensorboard": False},
    "sample": {"tokens": 0},
}


@dataclasses.dataclass(frozen=True)
class Run:
    """The processes of one run, first one first."""

    processes: list[subprocess.Popen[str]]

    def wait(self, timeout: float = 240) -> list[tuple[int, str, str]]:
        """Exit code, standard output and standard error of each."""
        deadline = time.monotonic() + timeout
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            found.append((process.returncode, out, err))
        return found


def losses(run_dir: pathlib.Path) -> list[tuple[int, str, float]]:
    """(step, name, value) of every number that the devices made."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], n, line[n]) for line in lines for n in ("loss", "val_loss", "grad_norm", "lr") if n in line]


def wait_for_step(run_dir: pathlib.Path, step: int, run: Run) -> None:
    """Until metrics.jsonl has a line of a step."""
    path, needle = run_dir / "metrics.jsonl", f'{{"step": {step}, '
    while all(process.poll() is None for process in run.processes):
        if path.exists() and needle in path.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"the run ended before step {step}: {run.wait()}")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> pathlib.Path:
    """Where compiled programs are kept for the session."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def launch(tmp_path, compiled) -> Any:
    """Starts train.py: launch(processes, "--steps=3", devices=1)."""
    preset = tmp_path / "tiny-run.json"
    preset.write_text(json.dumps(TINY))
    running: list[subprocess.Popen[str]] = []

    def run(count: int, *arguments: str, devices: int = 1) -> Run:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        }
        found = []
        for index in range(count):
            place = [f"--coordinator=localhost:{port}", f"--processes={count}", f"--process={index}"]
            command = [sys.executable, str(ROOT / "train.py"), str(preset), *arguments, *(place if count > 1 else [])]
            command.append(f"--compilation_cache={compiled}")
            found.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
                )
            )
        running.extend(found)
        return Run(found)

    yield run
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


Launch = Callable[..., Run]
