"""Runs what is left of the plan, most wanted first, within a time limit.

    python -m results.replication.run [--seconds=540] [--devices=0,1] [--only=NAME,...] [--out=DIR] ...

Each run is a process (`measure`) with a run directory of its own. What has a result, here or in `--out`, is skipped;
what is under way when the time is up is stopped by a signal, saves, and is continued by the next call that finds its
run directory. `--list` shows the plan.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from mhar_jax.config.load import make_config
from mhar_jax.errors import UserError, command
from results.replication.plan import Planned, comparable, plan

ROOT = pathlib.Path(__file__).parent.parent.parent
RUNS = pathlib.Path(__file__).parent / "runs"  # the committed results
_GRACE = 25.0  # seconds before the limit at which runs are told to save
_WORTH = 75.0  # seconds that must be left to begin or continue a run: less is spent on its start


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run; see `--help`."""

    out: pathlib.Path
    work: pathlib.Path
    seconds: float | None
    devices: tuple[str | None, ...]
    fitting: bool
    keep_weights: bool
    commit: str | None
    overrides: tuple[str, ...]


def result_of(run: Planned, options: Options) -> pathlib.Path | None:
    """The file of a run's result where there is one and it is of the run that the plan means.

    Raises:
      UserError: a committed result is of another config, which the report would mix up.
    """
    committed = [] if options.overrides else [RUNS]  # with overrides, those are other runs
    for directory in (options.out, options.work / "done", *committed):
        file = directory / f"{run.name}.json"
        if not file.is_file():
            continue
        found = make_config(json.loads(file.read_text(encoding="utf-8"))["config"])  # with fields that came later
        if comparable(found) != comparable(run.config(options.overrides)):
            raise UserError(f"{file} is of another config than the plan's {run.name}; move it away, or undo the change")
        return file
    return None


def expected(run: Planned, options: Options) -> float:
    """Seconds that what is left of a run takes: at the speed of a like one, where there is one, else a guess."""
    speed = None
    for directory in (RUNS, options.work / "done", options.out):
        for file in sorted(directory.glob(f"d{run.width}-{run.variant}-*.json")):  # pilots come before whole runs
            measured = json.loads(file.read_text(encoding="utf-8"))["tokens_per_s"]
            speed = measured["median"] if measured else speed
    metrics = options.work / run.name / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.is_file() else []
    done = max((int(m[1]) for line in lines if (m := re.match(r'{"step": (\d+)', line))), default=0)
    left = 1 - done / run.config(options.overrides).steps
    return run.overhead + (run.seconds(options.overrides, speed) - run.overhead) * left


def run_all(runs: Sequence[Planned], options: Options, *, say: Callable[[str], None] = print) -> int:
    """Runs until all have a result or the time is up; returns how many processes failed.

    Args:
      runs: in the order to run them.
      options: how.
      say: takes each line for the user.
    """
    end = None if options.seconds is None else time.monotonic() + options.seconds
    left: Callable[[], float] = lambda: float("inf") if end is None else end - time.monotonic()
    waiting = [run for run in runs if result_of(run, options) is None]
    say(f"{len(runs)} runs, {len(runs) - len(waiting)} of them done")
    running: dict[int, tuple[Planned, subprocess.Popen[bytes], float]] = {}
    failed = 0
    told = False
    try:
        while running or (waiting and left() > _WORTH):
            for slot, device in enumerate(options.devices):
                if slot in running or left() <= _WORTH:
                    continue
                run = next((r for r in waiting if not options.fitting or expected(r, options) < left() - _GRACE), None)
                if run is not None:
                    waiting.remove(run)
                    running[slot] = run, _start(run, device, options), time.monotonic()
                    say(f"{run.name}: begins, about {expected(run, options):.0f} s expected, {left():.0f} s left")
            if not running:
                break  # nothing fits
            if left() < _GRACE and not told:
                told = True
                for _, process, _ in running.values():
                    process.send_signal(signal.SIGTERM)
            if left() < 0:
                for _, process, _ in running.values():
                    process.kill()
            for slot, (run, process, began) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[slot]
                failed += _finish(run, process.returncode, time.monotonic() - began, options, say)
            time.sleep(0.2)
    finally:
        for _, process, _ in running.values():
            process.send_signal(signal.SIGTERM)
        for _, process, _ in running.values():
            process.wait()
    open_ = [run.name for run in runs if result_of(run, options) is None]
    say(f"{len(runs) - len(open_)} of {len(runs)} runs done" + (f"; next: {open_[0]}" if open_ else ""))
    return failed


def _start(run: Planned, device: str | None, options: Options) -> subprocess.Popen[bytes]:
    run_dir = options.work / run.name
    run_dir.mkdir(parents=True, exist_ok=True)
    (options.work / "done").mkdir(exist_ok=True)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        p for p in (str(ROOT), str(ROOT / "kernels"), environment.get("PYTHONPATH")) if p
    )
    # Runs of one shape and variant have the same programs whatever their seed.
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(options.work / "compiled"))
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # small ones are many
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    arguments = [sys.executable, "-m", "results.replication.measure", run.name, str(run_dir)]
    arguments += [str(options.work / "done" / f"{run.name}.json"), *(f"--{o}" for o in options.overrides)]
    if options.commit:
        arguments.append(f"--commit={options.commit}")
    with (run_dir / "log.txt").open("ab") as log:
        # A group of its own: an interrupt from the keyboard reaches us, and we tell the runs.
        return subprocess.Popen(
            arguments,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def _finish(run: Planned, code: int, seconds: float, options: Options, say: Callable[[str], None]) -> bool:
    """Hands the result over; returns whether the run failed."""
    run_dir, result = options.work / run.name, options.work / "done" / f"{run.name}.json"
    log = (run_dir / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    if code == 0 and result.is_file():
        options.out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(result, options.out / result.name)
        if not options.keep_weights:
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        values = json.loads(result.read_text(encoding="utf-8"))
        speed = (values["tokens_per_s"] or {}).get("median", float("nan"))
        last = values["evaluations"][-1]["val_loss"] if values["evaluations"] else float("nan")
        say(f"{run.name}: done in {seconds:.0f} s, {speed:,.0f} tokens/s, held-out loss {last:.4f}")
        return False
    if code == 3 or -code in (signal.SIGTERM, signal.SIGKILL):
        at = next((line for line in reversed(log) if line.startswith(("step", "stopped"))), "before its first step")
        say(f"{run.name}: stopped after {seconds:.0f} s, to be continued ({at})")
        return False
    say(f"{run.name}: FAILED ({code}) after {seconds:.0f} s; the end of its log:")
    for line in log[-12:]:
        say(f"    {line[:400]}")
    return True


def _list(runs: Sequence[Planned], options: Options) -> None:
    total = 0.0
    for run in runs:
        done = result_of(run, options) is not None
        seconds = expected(run, options)
        total += 0 if done else seconds
        print(f"{'done' if done else f'{seconds:5.0f} s':8} {run.stage:14} {run.name}")
    print(f"left: about {total / 60:.0f} minutes of one H200, as far as one can tell beforehand")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command: 0, 1 where a run failed, 2 for wrong input."""
    p = argparse.ArgumentParser(prog="python -m results.replication.run", description=__doc__.splitlines()[0])
    p.add_argument("--seconds", type=float, help="stop cleanly within so many seconds; default: when all is done")
    p.add_argument("--devices", help="numbers of GPUs, one run on each at a time; default: one run, on what there is")
    p.add_argument("--only", help="names or beginnings of names, separated by commas; default: the whole plan")
    p.add_argument("--stage", help="stages of the plan, separated by commas; default: all")
    p.add_argument("--out", type=pathlib.Path, default=RUNS, help="where results go (default: the committed ones)")
    p.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/replication"), help="run directories")
    p.add_argument("--fitting", action="store_true", help="begin only runs that should end within --seconds")
    p.add_argument("--keep-weights", action="store_true", help="keep the checkpoint of a run that is done")
    p.add_argument("--commit", help="of the code, where there is no git to ask")
    p.add_argument("--list", action="store_true", help="show the plan and what is left of it")
    p.add_argument("--set", action="append", default=[], metavar="F=V", help="override a field in all runs; repeatable")
    o = p.parse_args(arguments)
    if o.fitting and o.seconds is None:
        raise UserError("--fitting needs --seconds")
    runs = plan()
    if o.only:
        runs = [r for r in runs if any(r.name.startswith(name) for name in o.only.split(","))]
    if o.stage:
        runs = [r for r in runs if r.stage in o.stage.split(",")]
    if not runs:
        raise UserError(f"no run of the plan matches --only={o.only} --stage={o.stage}; --list shows their names")
    options = Options(
        out=o.out,
        work=o.work.absolute(),
        seconds=o.seconds,
        devices=tuple(o.devices.split(",")) if o.devices else (None,),
        fitting=o.fitting,
        keep_weights=o.keep_weights,
        commit=o.commit,
        overrides=tuple(o.set),
    )
    if o.list:
        _list(runs, options)
        return 0
    return 1 if run_all(runs, options, say=lambda text: print(text, flush=True)) else 0


if __name__ == "__main__":
    sys.exit(main())
