"""python tests/training/crash.py --kills 50: a tiny run under random SIGKILLs ends as an unbroken one does, to the bit.

Of the kills, about half are aimed into the writing of a checkpoint (its temporary directory is there), some fall while
the program starts, the rest while it trains. Prints one line a kill and where it fell; exit code 1 where something
differs.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
KINDS = ("save", "save", "step", "start")

RUN = {
    "seq_len": 32,
    "batch_size": 4,
    "model": {"num_layers": 1, "d_model": 32, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 48, "context": 64},
    "optimizer": {"warmup_steps": 3, "ema": 0.9},
    "eval": {"every": 50, "batches": 1},
    "checkpoint": {"every": 1, "keep": 2},
    "log": {"every": 1, "tensorboard": False},
    "sample": {"tokens": 0},
}


@dataclasses.dataclass
class Lives:
    """What a run went through."""

    kills: collections.Counter  # by where they fell
    differences: list[str]


def crash(directory: pathlib.Path, *, kills: int, steps: int, seed: int, say=print) -> Lives:
    """Runs both runs below `directory` and compares them."""
    (directory / "run.json").write_text(json.dumps(RUN))
    straight, broken = directory / "straight", directory / "broken"
    whole = _start(directory, straight, steps)
    out, err = whole.communicate()
    if whole.returncode:
        raise SystemExit(f"the unbroken run failed: {err}{out}")
    draws, fell = random.Random(seed), collections.Counter()
    while True:
        process = _start(directory, broken, steps)
        wanted = draws.choice(KINDS) if fell.total() < kills else None
        if wanted is None or not _reached(process, broken, wanted, draws):
            out, err = process.communicate()
            if process.returncode:
                raise SystemExit(f"after {fell.total()} kills the run failed with {process.returncode}: {err}{out}")
            break
        process.kill()
        out, err = process.communicate()
        if process.returncode == 0:  # it was over before the kill came
            break
        if "Traceback" in err:
            raise SystemExit(f"the run failed before it was killed: {err}")
        unfinished = any((broken / "checkpoints").glob("*tmp*"))
        fell["inside a save" if unfinished else "elsewhere"] += 1
        say(f"kill {fell.total()} ({wanted}): {'inside a save' if unfinished else 'elsewhere'}, step {_last(broken)}")
    return Lives(fell, _differences(straight, broken, steps))


def _start(directory: pathlib.Path, run_dir: pathlib.Path, steps: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(ROOT / "train.py"), str(directory / "run.json"), f"--run_dir={run_dir}"]
    command += [f"--steps={steps}", f"--compilation_cache={directory / 'compiled'}"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _reached(process: subprocess.Popen[str], run_dir: pathlib.Path, wanted: str, draws: random.Random) -> bool:
    """Waits for the moment to kill; False where the process ended before."""
    if wanted == "start":
        return _slept(process, draws.uniform(0, 4))
    before = _last(run_dir)
    while process.poll() is None:
        if wanted == "step" and _last(run_dir) > before:
            return _slept(process, draws.uniform(0, 0.3))
        if wanted == "save" and _last(run_dir) > before and any((run_dir / "checkpoints").glob("*tmp*")):
            return _slept(process, draws.uniform(0, 0.02))
        time.sleep(0.001)
    return False


def _slept(process: subprocess.Popen[str], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _last(run_dir: pathlib.Path) -> int:
    """The newest whole checkpoint."""
    try:
        return max((int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit()), default=0)
    except OSError:
        return 0


def _differences(a: pathlib.Path, b: pathlib.Path, steps: int) -> list[str]:
    import jax
    import orbax.checkpoint as ocp

    found = []
    for item in ("params", "ema", "rest"):
        trees = []
        for run_dir in (a, b):
            path = run_dir / "checkpoints" / str(steps) / item
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                tree = reader.metadata(path).item_metadata.tree
                kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
                trees.append(reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=kinds)))
        pairs = zip(*map(jax.tree_util.tree_leaves_with_path, trees), strict=True)
        for (where, x), (_, y) in pairs:
            if np.asarray(x).tobytes() != np.asarray(y).tobytes():
                found.append(f"{item}{jax.tree_util.keystr(where)}")
    data = [(d / "checkpoints" / str(steps) / "data" / "metadata").read_text() for d in (a, b)]
    if data[0] != data[1]:
        found.append("the state of the data")
    lines = [[json.loads(line) for line in (d / "metrics.jsonl").read_text().splitlines()] for d in (a, b)]
    numbers = [[(x["step"], x.get("loss"), x.get("val_loss")) for x in run] for run in lines]
    if numbers[0] != numbers[1]:
        found.append("the losses in metrics.jsonl")
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, help="default: 8 a kill, so that the run outlives them")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        steps = options.steps or 8 * options.kills
        lives = crash(pathlib.Path(directory), kills=options.kills, steps=steps, seed=options.seed)
    told = ", ".join(f"{n} {where}" for where, n in sorted(lives.kills.items()))
    print(
        f"{lives.kills.total()} kills ({told}), {steps} steps: " + ("; ".join(lives.differences) or "equal to the bit")
    )
    return 1 if lives.differences or lives.kills.total() < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
