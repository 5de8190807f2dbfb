"""python tests/training/two_gpus.py: `mhar_1b` on two GPUs, split by fsdp, data or context, against one GPU.

Prints the relative difference of the gradients of one global batch (Adam's first moment over 1 - beta1, without
clipping), tokens/s at the same batch a GPU, and the routed model's share of additive's throughput.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from mhar_jax.bench import timing
from mhar_jax.config.load import load_config
from mhar_jax.config.schema import MeshConfig
from mhar_jax.sharding import make_mesh
from mhar_jax.training.step import make_trainer

MESHES = {"one": MeshConfig(), "fsdp=2": MeshConfig(data=1, fsdp=2), "data=2": MeshConfig(data=2)}
MESHES["context=2"] = MeshConfig(data=1, context=2)


def trainer_of(options: Any, mesh: str, variant: str, rows: int) -> Any:
    """Programs for a mesh, without a tokenizer or data."""
    fields = [*options.set, f"model.variant={variant}", f"batch_size={rows * options.accumulate}"]
    fields += [f"optimizer.accumulate={options.accumulate}"]
    config = load_config(options.preset, [*fields, "optimizer.clip_norm=none", "optimizer.warmup_steps=0"])
    config = dataclasses.replace(config, mesh=MESHES[mesh])
    return make_trainer(config, make_mesh(config.mesh, jax.devices()[: 1 if mesh == "one" else 2]))


def batch_of(trainer: Any) -> jax.Array:
    """Random tokens, the same for every mesh."""
    draw = np.random.default_rng(0).integers(0, trainer.config.model.vocab_size, trainer.batch.shape, np.int32)
    return jax.device_put(draw, trainer.batch.sharding)


Key = tuple[str, str, int]  # mesh, variant, rows of the global micro-batch


class Programs:
    """Compiled train steps, each once, and side by side: seven of 1B take half a minute each."""

    def __init__(self, options: Any, keys: Sequence[Key]):
        self.options, self.trainers = options, {key: trainer_of(options, *key) for key in keys}
        jobs = {key: partial(t.step.lower, t.shapes, t.batch) for key, t in self.trainers.items()}
        self.compiled = timing.compile_all(jobs, options.threads)
        for found in self.compiled.values():
            if isinstance(found, Exception):
                raise found

    def start(self, key: Key) -> tuple[Any, jax.Array, Any]:
        """The step, a batch, and a fresh state."""
        trainer = self.trainers[key]
        return self.compiled[key].program, batch_of(trainer), trainer.init()


def gradients(programs: Programs, mesh: str) -> dict[str, np.ndarray]:
    """Of one global batch, by parameter."""
    step, tokens, state = programs.start((mesh, "mhar", 2 * programs.options.rows))
    state, _ = step(state, tokens)
    moment = state["optimizer"][0].mu  # no clipping: AdamW alone
    leaves = jax.tree_util.tree_leaves_with_path(moment)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x, np.float64) / 0.1 for p, x in leaves}


def tokens_per_second(programs: Programs, mesh: str, variant: str) -> float:
    """Median over windows, with `rows` sequences a GPU."""
    options, rows = programs.options, rows_of(programs.options, mesh)
    step, tokens, state = programs.start((mesh, variant, rows))
    seconds = []
    for window in range(options.windows + 1):
        begin = time.perf_counter()
        for _ in range(options.steps):
            state, metrics = step(state, tokens)
        jax.block_until_ready(metrics)
        if window:
            seconds.append((time.perf_counter() - begin) / options.steps)
    config = programs.trainers[mesh, variant, rows].config
    return config.batch_size * config.seq_len / statistics.median(seconds)


def rows_of(options: Any, mesh: str) -> int:
    """Sequences of a global micro-batch, with the same number a GPU."""
    return options.rows * (1 if mesh == "one" else 2)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="mhar_1b")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a micro-batch, a GPU")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--meshes", default="fsdp=2,data=2", help=f"of {', '.join(list(MESHES)[1:])}")
    parser.add_argument("--threads", type=int, default=4, help="programs compiled at once")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="where to write what was found, as JSON")
    parser.add_argument("--set", action="append", default=[], help="override of a config field, repeatable")
    options = parser.parse_args()
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    found: dict[str, Any] = {}
    begin = time.perf_counter()
    meshes = options.meshes.split(",")
    keys = [(m, v, rows_of(options, m)) for m in ("one", *meshes) for v in ("additive", "mhar")]
    programs = Programs(options, [("one", "mhar", 2 * options.rows), *keys])
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    expected = gradients(programs, "one")
    for mesh in meshes:
        got = gradients(programs, mesh)
        norm = lambda tree: np.sqrt(sum(np.sum(x * x) for x in tree.values()))
        whole = norm({k: got[k] - v for k, v in expected.items()}) / norm(expected)
        each = {k: np.linalg.norm(got[k] - v) / max(np.linalg.norm(v), 1e-30) for k, v in expected.items()}
        worst = max(each, key=lambda k: each[k])
        found[f"gradients {mesh}"] = {"relative": float(whole), "worst": worst, "worst_relative": float(each[worst])}
        print(f"gradients, {mesh}: {whole:.2e} from one GPU's; worst {worst} {each[worst]:.2e}", flush=True)
    speeds = {(m, v): tokens_per_second(programs, m, v) for m in ("one", *meshes) for v in ("additive", "mhar")}
    for mesh in ("one", *meshes):
        additive, mhar = speeds[mesh, "additive"], speeds[mesh, "mhar"]
        scale = {v: speeds[mesh, v] / speeds["one", v] for v in ("additive", "mhar")}
        found[mesh] = {"additive": additive, "mhar": mhar, "ratio": mhar / additive, "scale": scale}
        print(
            f"{mesh:7} additive {additive:9.0f} mhar {mhar:9.0f} tokens/s, ratio {mhar / additive:.3f}, "
            f"{scale['mhar']:.2f} x one GPU (additive {scale['additive']:.2f})"
        )
    if options.out:
        given = {k: v for k, v in vars(options).items() if k != "out"}
        there = {"device": jax.devices()[0].device_kind, "devices": jax.device_count(), "jax": jax.__version__}
        document = {"date": time.strftime("%Y-%m-%d"), "environment": there, "options": given, "found": found}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
