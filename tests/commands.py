"""Commands as tests run them, what they did, and what a run has written."""

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# 1 layer, D 32, 2 routing heads, float32, on the embedded text as bytes: 14,000 parameters, 8 sequences of 32 tokens.
TINY: dict[str, Any] = {
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
    "log": {"every": 1, "tensorboard": False},
    "sample": {"tokens": 0},
}


class Outcome(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    def one_sentence(self) -> str:
        """The one line of standard error of a command that was refused."""
        assert self.code == 2, self
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0]


def captured(main: Callable[[list[str]], int], capture: Any, *arguments: Any) -> Outcome:
    """Runs a command's main in this process; `capture` is pytest's capsys or capfd."""
    capture.readouterr()
    code = main([str(a) for a in arguments])
    return Outcome(code, *capture.readouterr())


class Processes:
    """Processes of train.py, which do not outlive the test: a context manager."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def start(
        self,
        arguments: Sequence[Any],
        *,
        devices: int = 1,
        environment: Mapping[str, str] = {},
        before: Sequence[str] = (),
        directory: pathlib.Path | None = None,
    ) -> subprocess.Popen[str]:
        """Starts one on simulated CPU devices, quickly compiled; `before` is what runs the command."""
        ours = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        }
        process = subprocess.Popen(
            [*before, sys.executable, str(ROOT / "train.py"), *map(str, arguments)],
            env={**ours, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=directory,
        )
        self._started.append(process)
        return process


def outcome(process: subprocess.Popen[str], timeout: float = 300) -> Outcome:
    """Waits for a process to end."""
    out, err = process.communicate(timeout=timeout)
    return Outcome(process.returncode, out, err)


def metrics(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, strictly read."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} in JSON")) for line in lines]


def losses(run_dir: pathlib.Path) -> list[tuple[int, str, float]]:
    """(step, name, value) of every number that the devices made, in the order of the file."""
    names = ("loss", "val_loss", "grad_norm", "lr")
    return [(line["step"], name, line[name]) for line in metrics(run_dir) for name in names if name in line]


def wait_for_step(run_dir: pathlib.Path, step: int, *processes: subprocess.Popen[str]) -> None:
    """Until metrics.jsonl has a line of a step."""
    path, needle = run_dir / "metrics.jsonl", f'{{"step": {step}, '
    while all(process.poll() is None for process in processes):
        if path.exists() and needle in path.read_text():
            return
        time.sleep(0.002)
    raise AssertionError(f"the run ended before step {step}: {[outcome(process) for process in processes]}")
