"""python -m mhar_jax.generation.bench: what depth routing costs in prefill and decode, against the additive model.

Decode is timed as one compiled loop of greedy steps on the device, so that no dispatch from the host hides or adds
anything. The variants are timed in turns, so that a slow moment of the machine hits all of them.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from mhar_jax.command_line import VARIANTS, parser
from mhar_jax.config.load import load_config
from mhar_jax.config.schema import ModelConfig
from mhar_jax.errors import UserError, command
from mhar_jax.platforms import prefer_present_hardware


def _parser() -> argparse.ArgumentParser:
    p = parser("generation.bench", "Time prefill and decode of several variants of one shape; random weights.")
    p.add_argument("--shape", metavar="PRESET", default="mhar_1b", help="config whose model section is timed")
    p.add_argument("--set", metavar="F=V", action="append", default=[], help="override of a config field, repeatable")
    p.add_argument("--variants", default="additive,mhar", help=f"the first is the baseline; of {', '.join(VARIANTS)}")
    p.add_argument("--batches", default="1,64", help="batch sizes of decode")
    p.add_argument("--prefill", default="8x1024", help="batch and length of prefill")
    p.add_argument("--prompt", metavar="INT", type=int, default=512, help="tokens in the cache before decode")
    p.add_argument("--steps", metavar="INT", type=int, default=128, help="tokens decoded in one timing")
    p.add_argument("--repeats", metavar="INT", type=int, default=7, help="timings of each; the median counts")
    p.add_argument("--implementation", metavar="NAME", help="of depth_route; None: the best for the device")
    p.add_argument("--profile", metavar="DIR", help="trace one timing of each into this directory")
    p.add_argument("--out", metavar="FILE", help="write the rows as JSON lines")
    return p


@command
def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark; wrong input is one line on standard error and exit code 2."""
    options = _parser().parse_args(arguments)
    variants = options.variants.split(",")
    if unknown := [v for v in variants if v not in VARIANTS]:
        raise UserError(f"--variants must be of {', '.join(VARIANTS)}, got {unknown[0]!r}")
    try:
        batches = [int(b) for b in options.batches.split(",")]
        rows, length = map(int, options.prefill.split("x"))
    except ValueError:
        raise UserError(
            f"--batches must be like 1,64 and --prefill like 8x1024, got {options.batches!r} and {options.prefill!r}"
        ) from None
    base = load_config(options.shape, options.set).model
    need = max(length, options.prompt + options.steps)
    changes = {"vocab_size": base.vocab_size or 151936, "context": max(base.context, need), "remat": "none"}
    changes |= {"routing_implementation": options.implementation, "param_dtype": base.compute_dtype}
    base = dataclasses.replace(base, **changes)
    prefer_present_hardware()
    import jax

    device = jax.devices()[0]
    print(
        f"{device.device_kind} ({device.platform}), jax {jax.__version__}, shape {options.shape}, {base.compute_dtype}"
    )
    found: list[dict[str, Any]] = []
    work = [("prefill", rows, length), *(("decode", b, options.prompt) for b in batches)]
    for kind, batch, tokens in work:
        timed = {
            v: _prepare(kind, batch, tokens, options.steps, dataclasses.replace(base, variant=v)) for v in variants
        }
        seconds: dict[str, list[float]] = {v: [] for v in variants}
        for _ in range(options.repeats):
            for v in variants:
                seconds[v].append(_time(timed[v]))
        if options.profile:
            for v in variants:
                with jax.profiler.trace(f"{options.profile}/{kind}-{batch}-{v}"):
                    timed[v]()
        per = 1 if kind == "prefill" else options.steps
        first = statistics.median(seconds[variants[0]])
        for v in variants:
            median = statistics.median(seconds[v])
            row = {
                "kind": kind,
                "batch": batch,
                "tokens": tokens,
                "variant": v,
                "ms": 1e3 * median / per,
                "least_ms": 1e3 * min(seconds[v]) / per,
                "ratio": median / first,
                "device": device.device_kind,
                "jax": jax.__version__,
            }
            found.append(row)
            what = f"prefill {batch} x {tokens}" if kind == "prefill" else f"decode batch {batch}, a token"
            print(f"{what:28} {v:20} {row['ms']:10.3f} ms   {row['ratio']:.3f} x", flush=True)
        del timed
        gc.collect()
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)


def _prepare(kind: str, batch: int, tokens: int, steps: int, config: ModelConfig) -> Callable[[], Any]:
    """Something to time, compiled and run once; it returns when the device is done."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from mhar_jax.config.schema import MeshConfig
    from mhar_jax.inference import PlacedModel
    from mhar_jax.models import build_model
    from mhar_jax.sharding import make_mesh

    model = build_model(config, rngs=nnx.Rngs(0))  # not in one jit: small programs, one a shape
    placed = PlacedModel.of(model, make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    assert config.vocab_size is not None
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (batch, tokens)), jnp.int32)
    counts = jnp.full((batch,), tokens, jnp.int32)
    slots = tokens if kind == "prefill" else tokens + steps
    prefill = placed.jit("prefill", lambda model, t, n: model.prefill(t, n, slots=slots))
    if kind == "prefill":
        run = lambda: jax.block_until_ready(prefill(prompts, counts))
    else:
        logits, cache = prefill(prompts, counts)

        def loop(model, first, cache):
            def step(carry, _):
                token, cache = carry
                logits, cache = model.extend(token[:, None], cache)
                return (jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), cache), None

            return jax.lax.scan(step, (first, cache), None, length=steps)[0][0]

        decode = placed.jit("decode", loop)
        first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        run = lambda: jax.block_until_ready(decode(first, cache))
    run()
    return run


def _time(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
