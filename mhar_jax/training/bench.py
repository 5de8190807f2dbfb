"""python -m mhar_jax.training.bench: what a train step costs, variant beside variant.

Every variant takes the same micro-batch of random tokens without accumulation. Variants are timed in turns, windows of
several steps each, so that a slow moment of the machine hits all of them; the first is the baseline.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from typing import Any

from mhar_jax.command_line import VARIANTS, parser
from mhar_jax.config.load import load_config
from mhar_jax.config.schema import Config, ModelConfig
from mhar_jax.errors import UserError, command
from mhar_jax.platforms import prefer_present_hardware

# The paper's micro-batches (sequences a GPU), by preset.
MICRO_BATCHES = {"mhar_100m": 8, "mhar_350m": 4, "mhar_1b": 2}


def _parser() -> argparse.ArgumentParser:
    p = parser("training.bench", "Time train steps of several variants of a preset, on random tokens.")
    p.add_argument("--shapes", metavar="PRESETS", default="mhar_100m", help=f"of {', '.join(MICRO_BATCHES)}, or others")
    p.add_argument("--variants", default="additive,mhar", help=f"the first is the baseline; of {', '.join(VARIANTS)}")
    p.add_argument("--set", metavar="F=V", action="append", default=[], help="override of a config field, repeatable")
    p.add_argument("--steps", metavar="INT", type=int, default=8, help="steps a window")
    p.add_argument(
        "--windows", metavar="INT", type=int, default=5, help="windows of each variant, after one to warm up"
    )
    p.add_argument("--out", metavar="FILE", help="write the rows as JSON lines")
    return p


@command
def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark; wrong input is one line on standard error and exit code 2."""
    options = _parser().parse_args(arguments)
    variants = options.variants.split(",")
    if unknown := [v for v in variants if v not in VARIANTS]:
        raise UserError(f"--variants must be of {', '.join(VARIANTS)}, got {unknown[0]!r}")
    if options.steps < 1 or options.windows < 1:
        raise UserError(f"--steps and --windows must be at least 1, got {options.steps} and {options.windows}")
    shapes = options.shapes.split(",")
    prefer_present_hardware()
    import jax

    configs = {shape: _configs(shape, variants, options.set, jax.device_count()) for shape in shapes}
    device = jax.devices()[0]
    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
    found: list[dict[str, Any]] = []
    for shape, by_variant in configs.items():
        found += (rows := _measure(shape, by_variant, options.steps, options.windows))
        for row in rows:
            print(
                f"{row['shape']:10} {row['variant']:20} {row['ms']:9.2f} ms {row['tokens_per_s']:10.0f} tokens/s "
                f"{row['tflops']:6.1f} TFLOP/s {row['peak_gb']:7.2f} GB  compile {row['compile_s']:5.1f} s  "
                f"throughput {row['ratio']:.3f} of {variants[0]}",
                flush=True,
            )
        gc.collect()
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)


def _configs(shape: str, variants: list[str], overrides: list[str], devices: int) -> dict[str, Config]:
    base = load_config(shape, ["data.format=synthetic", "optimizer.accumulate=1", *overrides])
    given = {override.split("=")[0].removeprefix("--") for override in overrides}
    if "batch_size" not in given and shape in MICRO_BATCHES:
        base = dataclasses.replace(base, batch_size=MICRO_BATCHES[shape] * devices)
    if base.batch_size % devices:
        raise UserError(f"batch_size must be a multiple of the {devices} devices, got {base.batch_size}")
    model = dataclasses.replace(base.model, vocab_size=base.model.vocab_size or 151_936)  # Qwen3's
    return {v: dataclasses.replace(base, model=_with_variant(model, v)) for v in variants}


def _with_variant(model: ModelConfig, variant: Any) -> ModelConfig:
    return dataclasses.replace(model, variant=variant)


def _measure(shape: str, configs: dict[str, Config], steps: int, windows: int) -> list[dict[str, Any]]:
    import jax
    import numpy as np

    from mhar_jax.models.counting import train_flops_per_token
    from mhar_jax.sharding import make_mesh
    from mhar_jax.training.step import make_trainer

    states: dict[str, Any] = {}
    programs: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for variant, config in configs.items():
        trainer = make_trainer(config, make_mesh(config.mesh))
        states[variant] = trainer.init()
        rng = np.random.default_rng(0)
        size = trainer.batch.shape
        vocabulary = config.model.vocab_size
        batches = [
            jax.device_put(rng.integers(0, vocabulary, size, np.int32), trainer.batch.sharding) for _ in range(4)
        ]
        begin = time.monotonic()
        program = trainer.step.lower(states[variant], batches[0]).compile()
        rows[variant] = {"compile_s": time.monotonic() - begin, "samples_ms": []}
        memory = program.memory_analysis()
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        tokens = config.batch_size * config.seq_len
        rows[variant] |= {"peak_gb": (peak - memory.alias_size_in_bytes) / 1e9, "tokens": tokens}
        rows[variant]["flops"] = train_flops_per_token(config.model, config.seq_len) * tokens
        programs[variant] = (program, batches)
    for window in range(windows + 1):
        for variant, (program, batches) in programs.items():
            begin = time.perf_counter()
            for i in range(steps):
                states[variant], metrics = program(states[variant], batches[i % len(batches)])
            jax.block_until_ready(metrics)
            if window:
                rows[variant]["samples_ms"].append((time.perf_counter() - begin) / steps * 1e3)
    baseline = statistics.median(next(iter(rows.values()))["samples_ms"])
    device = jax.devices()[0].device_kind
    result = []
    for variant, row in rows.items():
        ms = statistics.median(row["samples_ms"])
        speed = {"ms": ms, "tokens_per_s": row.pop("tokens") / ms * 1e3, "tflops": row.pop("flops") / ms / 1e9}
        facts = {"shape": shape, "variant": variant, "device": device, "jax": jax.__version__}
        result.append({**facts, **speed, "ratio": baseline / ms, **row})
    return result


if __name__ == "__main__":
    sys.exit(main())
