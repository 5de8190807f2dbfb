"""python tests/training/mutate.py --count 1000: configs with random mistakes; each runs, or is refused in one sentence.

A mutation changes one to three fields of a tiny run: another type, sign or size, up to 10^40, a name with a letter too
many, a section for a value. A config that passes every check is taken as far as the run directory; of these one in ten
is trained for two steps at most, and every second that has a number above a hundred. The process has 12 GB of memory,
and each config two minutes, ten where it trains. Exit code 1 where a config ends in a traceback or too late, or a
refused one leaves something behind.
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
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
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
        "hyper_streams": 2,
        "init_std": 0.02,
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": 384,
        "compute_dtype": "float32",
        "remat": "none",
        "loss_chunk": 64,
    },
    "data": {
        "path": None,
        "format": "auto",
        "tokenizer": "bytes",
        "held_out": 0.05,
        "shuffle": True,
        "tokenize_at_start_mb": 256,
        "workers": 0,
        "prefetch": 2,
    },
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
    "mhar_headwise",
    "hyper_connections",
    "synthetic",
    "\0",
    [],
    [1],
    {},
    {"a": 1},
    "12",
    "nowhere/file.txt",
)


MEMORY = 12 * 10**9  # bytes that the command's process may have mapped
SECONDS = 120  # that a config may take to be refused, and five times as many to train and save hundreds of millions


DEEP = 32  # layers; more of them are traced and compiled in minutes, as they should be


class Reached(Exception):
    """All checks passed."""


class TooSlow(BaseException):
    """A config took longer than it may."""


@dataclasses.dataclass
class Findings:
    """What became of the configs."""

    ends: Counter
    failures: list[str]


def any_number(draws: random.Random, value: Any) -> int | float:
    """A number of any size: near a power of 2 or 10, a product, a multiple of the value that is there, or a float."""
    kind = draws.randrange(5)
    if kind == 0:
        number: int | float = 2 ** draws.randrange(65) + draws.choice((-1, 0, 0, 1))
    elif kind == 1:
        number = 10 ** draws.randrange(41) + draws.choice((-1, 0, 0, 1))
    elif kind == 2:
        number = round(10 ** draws.uniform(0, 5)) * round(10 ** draws.uniform(0, 5))
    elif kind == 3 and type(value) is int:
        number = value * 2 ** draws.randrange(1, 41)
    else:
        number = 10 ** draws.uniform(-330, 308)
    return -number if draws.random() < 0.1 else number


def grown(draws: random.Random) -> dict[str, Any]:
    """The tiny run with one or two whole numbers that are multiples of its own, and a context that is long enough."""
    config = copy.deepcopy(TINY)
    sections = [config, *(v for v in config.values() if isinstance(v, dict) and v is not config["mesh"])]
    fields = [(s, name) for s in sections for name, value in s.items() if type(value) is int]
    for section, name in draws.sample(fields, draws.choice((1, 2))):
        section[name] = max(1, section[name]) * draws.choice((2, 3, 10)) ** draws.randrange(1, 20)
    config["model"]["context"] = max(config["model"]["context"], config["seq_len"])
    return config


def mutated(draws: random.Random) -> dict[str, Any]:
    """The tiny run with one to three mistakes."""
    if draws.random() < 0.2:
        return grown(draws)
    config = copy.deepcopy(TINY)
    for _ in range(draws.choice((1, 1, 2, 3))):
        section = draws.choice([config, *(v for v in config.values() if isinstance(v, dict) and v)])
        name = draws.choice(list(section))
        kind = draws.random()
        if kind < 0.1:
            where = draws.randrange(len(name) + 1)
            section[name[:where] + draws.choice("_sx1") + name[where:]] = section.pop(name)
        elif kind < 0.35:
            section[name] = draws.choice(NUMBERS)
        elif kind < 0.65:
            section[name] = any_number(draws, section[name])
        elif kind < 0.75 and isinstance(section[name], int | float):
            section[name] = -section[name]
        elif kind < 0.8:
            section[draws.choice(list(config))] = section[name]
        else:
            section[name] = draws.choice(OTHERS)
    return config


def is_large(config: Any, tiny: Any = TINY) -> bool:
    """Whether a number above a hundred stands where the tiny run has another value."""
    if isinstance(config, dict):
        return any(
            is_large(value, tiny.get(name) if isinstance(tiny, dict) else None) for name, value in config.items()
        )
    return type(config) in (int, float) and config > 100 and config != tiny


@contextlib.contextmanager
def in_time(seconds: int) -> Iterator[None]:
    """Raises TooSlow inside after so long, as soon as Python runs."""

    def stop(*_: Any) -> None:
        raise TooSlow(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def two_steps() -> Iterator[Callable[[int], bool]]:
    """Stands for the loop's wait for SIGTERM, and has every run end after two steps at most, saved."""
    yield lambda step: step >= 2


def check(
    count: int, seed: int, directory: pathlib.Path, *, train_every: int = 10, large_every: int = 2, say: Any = None
) -> Findings:
    """Takes configs through the command's main in this process, below `directory`.

    Args:
      train_every: of so many that pass all checks one is trained.
      large_every: and of so many with large numbers.
    """
    import jax

    from mhar_jax.training import loop, main

    draws, found, passed, large = random.Random(seed), Findings(Counter(), []), 0, 0
    prepare, terminated = loop.prepare_run_dir, loop._terminated
    train = False

    def stop(*args: Any, **options: Any) -> Any:
        if train:
            return prepare(*args, **options)
        raise Reached

    here = pathlib.Path.cwd()
    loop.prepare_run_dir, loop._terminated = stop, two_steps
    try:
        os.chdir(directory)
        for number in range(count):
            config = mutated(draws)
            layers = (config.get("model") or {}).get("num_layers") if isinstance(config.get("model"), dict) else None
            if type(layers) is int and DEEP < layers <= 1000:
                found.ends["deep, not tried"] += 1
                continue
            run_dir = directory / f"run-{number}"
            config.setdefault("run_dir", str(run_dir))
            file = directory / "mutated.json"
            file.write_text(json.dumps(config))
            before = {p.name for p in directory.iterdir()}
            # Another model's parameters are read after the run directory is made.
            train = passed % train_every == train_every - 1 or config.get("init_from") is not None
            large += is_large(config)
            train = train or (is_large(config) and large % large_every == 0)
            error = io.StringIO()
            begun = time.monotonic()
            try:
                with (
                    in_time(5 * SECONDS if train else SECONDS),
                    contextlib.redirect_stderr(error),
                    contextlib.redirect_stdout(io.StringIO()),
                ):
                    code = main.main([str(file)])
                end = "refused" if code == 2 else "trained" if code == 0 else f"code {code}"
            except Reached:
                end, passed = "passed", passed + 1
            except BaseException as failure:
                end = "traceback"
                last = "".join(traceback.format_exception(failure)[-2:]).strip()
                found.failures.append(f"{number}: {last}\n  {json.dumps(config)}")
            finally:
                jax.clear_caches()
            if end == "trained":
                passed += 1
                shutil.rmtree(run_dir, ignore_errors=True)  # gigabytes, of the largest
            found.ends[end] += 1
            if say is not None and (end == "traceback" or end == "trained" or time.monotonic() - begun > 5):
                told = found.failures[-1] if end == "traceback" else error.getvalue().strip()[:200]
                say(f"{number}: {end} in {time.monotonic() - begun:.0f} s {told}; {_changes(config)}")
            if end == "refused":
                told = [line for line in error.getvalue().strip().splitlines() if not line.startswith("WARNING")]
                if len(told) != 1 or not told[0].startswith("error: "):
                    found.failures.append(f"{number}: not one sentence: {told}\n  {json.dumps(config)}")
                left = {p.name for p in directory.iterdir()} - before
                if train and "training stops" in told[0] and (run_dir / "metrics.jsonl").exists():
                    # A loss of infinity: its run directory is whole.
                    found.ends["of these, stopped while training"] += 1
                elif left:
                    found.failures.append(f"{number}: left {left}\n  {json.dumps(config)}")
    finally:
        loop.prepare_run_dir, loop._terminated = prepare, terminated
        os.chdir(here)
    return found


def _changes(config: Any, tiny: Any = TINY, name: str = "") -> str:
    """The fields that differ from the tiny run."""
    if not (isinstance(config, dict) and isinstance(tiny, dict)):
        return "" if config == tiny else f"{name}={config!r} "
    return "".join(_changes(v, tiny.get(k), f"{name}.{k}".lstrip(".")) for k, v in config.items() if k != "run_dir")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    say = lambda line: print(line, file=sys.__stdout__, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        found = check(options.count, options.seed, pathlib.Path(directory), say=say)
    print("\n".join(found.failures))
    print(f"{options.count} configs from seed {options.seed}: {dict(found.ends)}, {len(found.failures)} failures")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
