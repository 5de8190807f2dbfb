"""python tests/training/two_gpus.py: `mhar_1b` on two GPUs, split by fsdp, data or context, against one GPU.

Prints the relative difference of the gradients of one global batch (Adam's first moment over 1 - beta1, without
clipping), tokens/s at the same batch a GPU, and the routed model's share of additive's throughput.
"""

import argparse
import dataclasses
import json
import statistics
import time
from typing import Any

import jax
import numpy as np

from mhar_jax.config.load import load_config
from mhar_jax.config.schema import MeshConfig
from mhar_jax.sharding import make_mesh
from mhar_jax.training.step import make_trainer

MESHES = {"one": MeshConfig(), "fsdp=2": MeshConfig(data=1, fsdp=2), "data=2": MeshConfig(data=2)}
MESHES["context=2"] = MeshConfig(data=1, context=2)


def trainer_of(options: Any, mesh: str, variant: str, rows: int) -> Any:
    """Programs for a mesh, without a tokenizer or data."""
    fields = [*options.set, f"model.variant={variant}", f"batch_size={rows}", "optimizer.accumulate=1"]
    config = load_config(options.preset, [*fields, "optimizer.clip_norm=none", "optimizer.warmup_steps=0"])
    config = dataclasses.replace(config, mesh=MESHES[mesh])
    return make_trainer(config, make_mesh(config.mesh, jax.devices()[: 1 if mesh == "one" else 2]))


def batch_of(trainer: Any) -> jax.Array:
    """Random tokens, the same for every mesh."""
    draw = np.random.default_rng(0).integers(0, trainer.config.model.vocab_size, trainer.batch.shape, np.int32)
    return jax.device_put(draw, trainer.batch.sharding)


def gradients(options: Any, mesh: str) -> dict[str, np.ndarray]:
    """Of one global batch, by parameter."""
    trainer = trainer_of(options, mesh, "mhar", 2 * options.rows)
    state, _ = trainer.step(trainer.init(), batch_of(trainer))
    moment = state["optimizer"][0].mu  # no clipping: AdamW alone
    leaves = jax.tree_util.tree_leaves_with_path(moment)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x, np.float64) / 0.1 for p, x in leaves}


def tokens_per_second(options: Any, mesh: str, variant: str) -> float:
    """Median over windows, with `rows` sequences a GPU."""
    trainer = trainer_of(options, mesh, variant, options.rows * (1 if mesh == "one" else 2))
    state, tokens, seconds = trainer.init(), batch_of(trainer), []
    for window in range(options.windows + 1):
        begin = time.perf_counter()
        for _ in range(options.steps):
            state, metrics = trainer.step(state, tokens)
        jax.block_until_ready(metrics)
        if window:
            seconds.append((time.perf_counter() - begin) / options.steps)
    return trainer.config.batch_size * trainer.config.seq_len / statistics.median(seconds)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="mhar_1b")
    parser.add_argument("--rows", type=int, default=2, help="sequences a GPU")
    parser.add_argument("--meshes", default="fsdp=2,data=2", help=f"of {', '.join(list(MESHES)[1:])}")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="override of a config field, repeatable")
    options = parser.parse_args()
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    found: dict[str, Any] = {}
    expected = gradients(options, "one")
    meshes = options.meshes.split(",")
    for mesh in meshes:
        got = gradients(options, mesh)
        norm = lambda tree: np.sqrt(sum(np.sum(x * x) for x in tree.values()))
        whole = norm({k: got[k] - v for k, v in expected.items()}) / norm(expected)
        each = {k: np.linalg.norm(got[k] - v) / max(np.linalg.norm(v), 1e-30) for k, v in expected.items()}
        worst = max(each, key=lambda k: each[k])
        found[f"gradients {mesh}"] = {"relative": float(whole), "worst": worst, "worst_relative": float(each[worst])}
        print(f"gradients, {mesh}: {whole:.2e} from one GPU's; worst {worst} {each[worst]:.2e}", flush=True)
    speeds = {(m, v): tokens_per_second(options, m, v) for m in ("one", *meshes) for v in ("additive", "mhar")}
    for mesh in ("one", *meshes):
        additive, mhar = speeds[mesh, "additive"], speeds[mesh, "mhar"]
        scale = {v: speeds[mesh, v] / speeds["one", v] for v in ("additive", "mhar")}
        found[mesh] = {"additive": additive, "mhar": mhar, "ratio": mhar / additive, "scale": scale}
        print(
            f"{mesh:7} additive {additive:9.0f} mhar {mhar:9.0f} tokens/s, ratio {mhar / additive:.3f}, "
            f"{scale['mhar']:.2f} x one GPU (additive {scale['additive']:.2f})"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
