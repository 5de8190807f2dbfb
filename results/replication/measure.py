"""One run of the plan, in a process of its own: trains it, measures its weights, writes one JSON without them.

    python -m results.replication.measure NAME RUN_DIR OUT.json [--commit=HASH] [--field=value ...]

Ends with 3 where a signal stopped the training; the same command continues it.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import logging
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mhar_jax.config.load import make_config, read_file, to_dict
from mhar_jax.config.schema import Config, MeshConfig
from mhar_jax.errors import UserError, command
from mhar_jax.platforms import prefer_present_hardware
from results.replication.plan import planned

FORMAT = 1
PROBE_TOKENS = 16384
DIGESTED = 32  # first batches whose tokens are hashed
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "triton", "jax-triton")


def measure(name: str, run_dir: pathlib.Path, commit: str | None, seconds: float) -> dict[str, Any]:
    """Everything that the report needs of a finished run but what its weights show, as JSON values."""
    import jax

    config = make_config(read_file(run_dir / "config.yaml"))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations = [line for line in lines if "val_loss" in line]
    train = [line for line in lines if "loss" in line]
    speeds = [line["tokens_per_s"] for line in train if "tokens_per_s" in line]
    device = jax.devices()[0]
    run = planned(name)
    return {
        "format": FORMAT,
        "name": name,
        "stage": run.stage,
        "command": f"python -m results.replication.run --only={name}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or _commit(),
        "hardware": {"device": device.device_kind, "devices": jax.device_count(), "platform": device.platform},
        "versions": {"python": platform.python_version(), **_versions()},
        "config": {**to_dict(config), "run_dir": f"runs/replication/{name}"},
        "data": json.loads((run_dir / "data.json").read_text(encoding="utf-8")),
        "batches": batches_digest(config),
        "evaluations": [short(line) for line in evaluations],
        "train": [short({k: line[k] for k in ("step", "loss", "grad_norm", "lr")}) for line in train],
        "tokens_per_s": short({"median": statistics.median(speeds), "lowest": min(speeds), "highest": max(speeds)})
        if speeds
        else None,
        "memory_peak_bytes": max(
            (line["memory_peak_bytes"] for line in train if "memory_peak_bytes" in line), default=None
        ),
        # Of all processes that trained it: starts, compilation, evaluations and saves too.
        "wall_s": round(seconds, 1),
    }


def batches_digest(config: Config) -> dict[str, Any]:
    """A hash of the tokens of the first training batches and of all held-out ones: equal for paired runs."""
    from mhar_jax.data import load_tokenizer, make_eval_batches, make_train_iterator

    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eos_token)
    iterator = make_train_iterator(config, tokenizer)
    train = hashlib.blake2b(digest_size=16)
    for _ in range(DIGESTED):
        train.update(np.ascontiguousarray(next(iterator)["tokens"], "<i4").data)
    iterator.close()
    held_out = hashlib.blake2b(digest_size=16)
    for batch in make_eval_batches(config, tokenizer):
        held_out.update(np.ascontiguousarray(batch["tokens"], "<i4").data)
    return {"first_batches": DIGESTED, "train": train.hexdigest(), "held_out": held_out.hexdigest()}


def weights(run_dir: pathlib.Path, config: Config) -> dict[str, Any]:
    """What is lost with the weights: the probe with its null and the routing, or how hyper-connections have moved."""
    import jax

    from mhar_jax.inference import open_checkpoint
    from mhar_jax.inspect.probe import probe
    from mhar_jax.inspect.statistics import measure_routing
    from mhar_jax.inspect.text import read_windows
    from mhar_jax.inspect.walk import Walk
    from mhar_jax.sharding import make_mesh

    if config.model.variant == "additive":
        return {}
    mesh = make_mesh(MeshConfig(data=1), jax.local_devices()[:1])
    checkpoint = open_checkpoint(run_dir, mesh=mesh)
    if config.model.variant == "hyper_connections":
        return {"hyper_connections": hyper_connections(checkpoint.model.hyper.arrays())}
    walk = Walk(checkpoint.model)
    windows = read_windows(
        None,
        checkpoint.config,
        checkpoint.tokenizer,
        tokens=PROBE_TOKENS,
        batch_size=max(1, 4096 // config.seq_len),
        seq_len=config.seq_len,
    )
    routing = measure_routing(walk, windows)
    narrowest = config.model.d_model // config.model.heads_of_depth
    return {
        "probe": short(probe(walk, windows, slices=min(4, narrowest), draws=8).as_dict()),
        "routing": {
            "sites": routing.sites,
            "columns": routing.columns,
            "weight": short(routing.weight.tolist(), 4),
            "normalized_entropy": short(routing.normalized_entropy.tolist(), 4),
            "loss": short(routing.loss),
            "tokens": routing.tokens,
        },
        "query_norms": short(
            [np.linalg.norm(np.asarray(walk.query(i)), axis=-1).tolist() for i in range(len(walk.shapes))]
        ),
    }


def hyper_connections(arrays: dict[str, Any]) -> dict[str, Any]:
    """The connections and how far they are from where they start (`mhar_jax.models.sites.HyperParameters`)."""
    found = {name: np.asarray(arrays[name], np.float64) for name in ("read", "carry", "write")}
    sublayers, streams = found["read"].shape
    identity = np.eye(streams)
    start = {
        "read": identity[np.arange(sublayers) % streams],
        "carry": np.broadcast_to(identity, (sublayers, streams, streams)),
        "write": np.ones((sublayers, streams)),
    }
    moved = {name: np.abs(found[name] - start[name]) for name in found}
    return {
        "values": short({name: value.tolist() for name, value in found.items()}, 4),
        "mean_change": short({name: float(value.mean()) for name, value in moved.items()}),
        "largest_change": short({name: float(value.max()) for name, value in moved.items()}),
        "least_moved_sublayer": short(
            {name: float(value.reshape(sublayers, -1).max(axis=1).min()) for name, value in moved.items()}
        ),
    }


def short(value: Any, digits: int = 6) -> Any:
    """JSON values with floats of so many significant digits, and null for what is not a number."""
    if isinstance(value, dict):
        return {k: short(v, digits) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [short(v, digits) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if np.isfinite(value) else None
    return value


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _spent(run_dir: pathlib.Path, seconds: float) -> float:
    """Seconds of all processes so far, this one's added."""
    file = run_dir / "seconds.txt"
    total = seconds + (float(file.read_text()) if file.is_file() else 0)
    file.write_text(f"{total:.1f}\n")
    return total


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 3 where a signal came before the end."""
    began = time.monotonic()
    name, directory, out, *rest = sys.argv[1:] if arguments is None else arguments
    commit = next((a.partition("=")[2] for a in rest if a.startswith("--commit=")), None)
    overrides = [a.removeprefix("--") for a in rest if not a.startswith("--commit=")]
    run_dir = pathlib.Path(directory)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    for noisy in ("absl", "orbax", "jax"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    prefer_present_hardware()  # before JAX looks for devices
    from mhar_jax.evaluation.runs import read_run
    from mhar_jax.training.compiling import watch_compiling
    from mhar_jax.training.loop import train

    config = planned(name).config([*overrides, f"run_dir={run_dir}"])
    run_dir.mkdir(parents=True, exist_ok=True)
    diverged = None
    try:
        with watch_compiling() as compiling:
            train(config)
        if read_run(run_dir).evaluations[-1].step != config.steps:
            return 3
    except UserError as error:
        if "so training stops" not in str(error):
            raise
        diverged = str(error)  # a run that diverges is a result: its curve up to there is kept
    finally:
        total = _spent(run_dir, time.monotonic() - began)
    result = measure(name, run_dir, commit, total)
    result["diverged"] = diverged
    began = time.monotonic()
    with watch_compiling() as compiling_weights:
        result["weights"] = {} if diverged else weights(run_dir, config)
    result["weights_s"] = round(time.monotonic() - began, 1)  # beside wall_s
    compiled = {"training": compiling, "weights": compiling_weights}
    result["compiling"] = {name: short(dataclasses.asdict(found), 3) for name, found in compiled.items()}
    aside = pathlib.Path(f"{out}.tmp")
    aside.write_text(json.dumps(result, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")
    aside.replace(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
