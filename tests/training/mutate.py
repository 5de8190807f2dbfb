"""python tests/training/mutate.py --count 1000: configs with random mistakes; each runs, or is refused in one sentence.

A mutation changes one to three fields of a tiny run: another type, sign or size, a name with a letter too many, a
section for a value. A config that passes every check is taken as far as the run directory, and of these one in ten is
trained for one step. Exit code 1 where a config ends in a traceback, or a refused one leaves something behind.
"""

import argparse
import contextlib
import copy
import dataclasses
import io
import json
import os
import pathlib
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from typing import Any

TINY: dict[str, Any] = {
    "steps": 1,
    "batch_size": 4,
    "seq_len": 16,
    "seed": 1,
    "init_from": None,
    "model": {
        "variant": "mhar",
        "num_layers": 1,
        "d_model": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": None,
        "ffn_dim": 48,
        "context": 32,
        "qk_norm": True,
        "routing_heads": None,
        "num_blocks": 1,
        "init_std": 0.02,
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": 384,
        "compute_dtype": "float32",
        "remat": "none",
        "loss_chunk": 64,
    },
    "data": {"path": None, "format": "auto", "tokenizer": "bytes", "held_out": 0.05, "shuffle": True, "prefetch": 2},
    "optimizer": {"peak_lr": 1e-3, "warmup_steps": 1, "beta1": 0.9, "clip_norm": 1.0, "accumulate": 1, "ema": 0.0},
    "mesh": {"data": -1, "fsdp": 1, "context": 1, "tensor": 1},
    "eval": {"every": 0, "batches": 1},
    "checkpoint": {"every": 0, "keep": 1, "resume": True},
    "log": {"every": 1, "tensorboard": False, "profile_steps": None},
    "sample": {"tokens": 0, "prompt": "x", "temperature": 0.8},
}
NUMBERS = (0, -1, -7, 1, 2, 3, 5, 7, 12, 33, 0.5, -0.5, 1e-30, 1e30, 2**31, 2**63, 10**30, float("nan"), float("inf"))
OTHERS = (
    None,
    True,
    False,
    "",
    "x",
    "no",
    "1e",
    "bytes",
    "mhar",
    "\0",
    [],
    [1],
    {},
    {"a": 1},
    "12",
    "nowhere/file.txt",
)


class Reached(Exception):
    """All checks passed."""


@dataclasses.dataclass
class Findings:
    """What became of the configs."""

    ends: Counter
    failures: list[str]


def mutated(draws: random.Random) -> dict[str, Any]:
    """The tiny run with one to three mistakes."""
    config = copy.deepcopy(TINY)
    for _ in range(draws.choice((1, 1, 2, 3))):
        section = draws.choice([config, *(v for v in config.values() if isinstance(v, dict))])
        name = draws.choice(list(section) or ["steps"])
        kind = draws.random()
        if kind < 0.1:
            where = draws.randrange(len(name) + 1)
            section[name[:where] + draws.choice("_sx1") + name[where:]] = section.pop(name)
        elif kind < 0.65:
            section[name] = draws.choice(NUMBERS)
        elif kind < 0.75 and isinstance(section[name], int | float):
            section[name] = -section[name]
        elif kind < 0.8:
            section[draws.choice(list(config))] = section[name]
        else:
            section[name] = draws.choice(OTHERS)
    return config


def check(count: int, seed: int, directory: pathlib.Path, train_every: int = 10) -> Findings:
    """Takes configs through the command's main in this process, below `directory`."""
    from mhar_jax.training import loop, main

    draws, found, passed = random.Random(seed), Findings(Counter(), []), 0
    prepare = loop.prepare_run_dir
    train = False

    def stop(*args: Any, **options: Any) -> Any:
        if train:
            return prepare(*args, **options)
        raise Reached

    here = pathlib.Path.cwd()
    loop.prepare_run_dir = stop
    try:
        os.chdir(directory)
        for number in range(count):
            config = mutated(draws)
            run_dir = directory / f"run-{number}"
            config.setdefault("run_dir", str(run_dir))
            file = directory / "mutated.json"
            file.write_text(json.dumps(config))
            before = {p.name for p in directory.iterdir()}
            # Another model's parameters are read after the run directory is made.
            train = passed % train_every == train_every - 1 or config.get("init_from") is not None
            error = io.StringIO()
            try:
                with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
                    code = main.main([str(file)])
                end = "refused" if code == 2 else "trained" if code == 0 else f"code {code}"
            except Reached:
                end, passed = "passed", passed + 1
            except BaseException as failure:
                end = "traceback"
                last = "".join(traceback.format_exception(failure)[-2:]).strip()
                found.failures.append(f"{number}: {last}\n  {json.dumps(config)}")
            passed += end == "trained"
            found.ends[end] += 1
            if end == "refused":
                told = [line for line in error.getvalue().strip().splitlines() if not line.startswith("WARNING")]
                if len(told) != 1 or not told[0].startswith("error: "):
                    found.failures.append(f"{number}: not one sentence: {told}\n  {json.dumps(config)}")
                left = {p.name for p in directory.iterdir()} - before
                if train and "training stops" in told[0] and (run_dir / "metrics.jsonl").exists():
                    found.ends["of these, stopped while training"] += (
                        1  # a loss of infinity: its run directory is whole
                    )
                elif left:
                    found.failures.append(f"{number}: left {left}\n  {json.dumps(config)}")
    finally:
        loop.prepare_run_dir = prepare
        os.chdir(here)
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        found = check(options.count, options.seed, pathlib.Path(directory))
    print("\n".join(found.failures))
    print(f"{options.count} configs from seed {options.seed}: {dict(found.ends)}, {len(found.failures)} failures")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
