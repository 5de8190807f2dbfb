"""Times the routing of a whole model (depth_stack with sublayers that return their input), forward and backward.

    python kernels/bench_stack.py --out results.json [--shapes 100m 350m 1b] [--blocks 4 8] [--profile]

Each sample is the device's throughput over several runs of one jitted program, queued without waiting. `floor` is the
rows that the schedule moves (`mhar_kernels/traffic.py`) at the copy bandwidth of the same run. `--profile` adds the
time of each kernel from a trace. A shallow stack of the same width is first compared with plain jnp.
"""

import argparse
import functools
import glob
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict

import jax
import jax.numpy as jnp

from bench_route import copy_bandwidth, environment
from mhar_kernels import depth_stack, stages_triton, traffic
from mhar_kernels.tune import time_program

SHAPES = {  # sites, tokens, width, heads
    "100m": (25, 16_384, 512, 4),
    "350m": (49, 4_096, 1024, 8),
    "1b": (73, 2_048, 1280, 8),
    "100m-h1": (25, 16_384, 512, 1),
    "350m-h1": (49, 4_096, 1024, 1),
    "1b-h1": (73, 2_048, 1280, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file of the results")
    parser.add_argument("--shapes", nargs="*", default=["100m", "350m", "1b"], choices=SHAPES)
    parser.add_argument("--blocks", nargs="*", type=int, help="block sizes S; default: as chosen by itself")
    parser.add_argument("--implementations", nargs="*", default=["triton"])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    copy = copy_bandwidth()
    report = {"environment": environment(), "copy_TB_per_s": copy, "rows": []}
    print(json.dumps(report["environment"]), f"copy {copy:.2f} TB/s", flush=True)
    for shape in options.shapes:
        for implementation in options.implementations:
            for block in options.blocks or [traffic.best_block_size(SHAPES[shape][0], stages_triton.COSTS)]:
                row = measure(shape, implementation, block, copy, options.profile)
                report["rows"].append(row)
                print(line(row), flush=True)
                if options.out:
                    with open(options.out, "w") as f:
                        json.dump(report, f, indent=1)


def measure(shape: str, implementation: str, block: int, copy: float, profile: bool) -> dict:
    """One row of the table."""
    sites, tokens, dim, heads = SHAPES[shape]
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, dim), jnp.bfloat16)
    queries = jax.random.normal(keys[1], (sites, dim)) * 2 * (heads / dim) ** 0.5
    cotangent = jax.random.normal(keys[2], (tokens, dim), jnp.bfloat16)

    def run(x, queries, implementation):
        sublayer = lambda p, h: h
        return depth_stack(
            [sublayer] * (sites - 1),
            [None] * (sites - 1),
            x,
            queries,
            num_heads=heads,
            block_size=block,
            implementation=implementation,
        )

    errors = check(dim, heads, implementation)
    forward = jax.jit(functools.partial(run, implementation=implementation))

    @jax.jit
    def both(x, queries, cotangent):
        out, vjp = jax.vjp(functools.partial(run, implementation=implementation), x, queries)
        return out, vjp(cotangent)

    row = {"shape": shape, "sites": sites, "tokens": tokens, "dim": dim, "heads": heads}
    row |= {"block": block, "implementation": implementation, "errors": errors}
    moved = {"forward": traffic.forward_rows(sites, block), "forward_backward": sum(traffic.rows(sites, block))}
    for name, f, operands in (
        ("forward", forward, (x, queries)),
        ("forward_backward", both, (x, queries, cotangent)),
    ):
        begin = time.monotonic()
        compiled = f.lower(*operands).compile()
        row[f"{name}_compile_s"] = round(time.monotonic() - begin, 2)
        row[f"{name}_peak_MB"] = compiled.memory_analysis().temp_size_in_bytes / 1e6
        samples = time_program(functools.partial(compiled, *operands), 1)
        row[f"{name}_ms"] = statistics.median(samples)
        row[f"{name}_samples_ms"] = samples
        row[f"{name}_floor_ms"] = moved[name] * tokens * dim * 2 / copy / 1e9
    size = sites * tokens * dim
    row["history_copies"] = copies(compiled.as_text(), size)
    if profile:
        row["kernels_ms"] = kernel_times(lambda: jax.block_until_ready(compiled(x, queries, cotangent)))
    return row


def check(dim: int, heads: int, implementation: str) -> list[float]:
    """‖a − b‖ / ‖b‖ of values and of two gradients, against plain jnp, of a shallow stack on a few tokens."""
    sites, keys = 9, jax.random.split(jax.random.key(1), 3)
    x, cotangent = jax.random.normal(keys[0], (2, 64, dim), jnp.bfloat16)
    queries = jax.random.normal(keys[1], (sites, dim)) * 2 * (heads / dim) ** 0.5
    biases = list(jax.random.normal(keys[2], (sites - 1, dim), jnp.bfloat16))  # so that sources differ

    @functools.partial(jax.jit, static_argnames="implementation")
    def both(x, queries, implementation):
        add = lambda p, h: h + p
        options = {"num_heads": heads, "block_size": 3, "implementation": implementation}
        out, vjp = jax.vjp(lambda x, q: depth_stack([add] * (sites - 1), biases, x, q, **options), x, queries)
        return out, *vjp(cotangent)

    pairs = zip(both(x, queries, implementation), both(x, queries, "xla"), strict=True)
    return [error(a, b) for a, b in pairs]


def copies(text: str, size: int) -> int:
    """Copies of history-sized bfloat16 arrays in a compiled program."""
    found = 0
    for shape in re.findall(r"= bf16\[([\d,]+)\]\S* copy\(", text):
        count = 1
        for part in shape.split(","):
            count *= int(part)
        found += count >= size
    return found


def kernel_times(run) -> dict[str, list[float]]:
    """Milliseconds and number of launches of every kernel in one run, from a trace."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        path = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)[0]
        total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for trace_line in plane.lines:
                if not trace_line.name.startswith("Stream"):
                    continue
                for event in trace_line.events:
                    total[event.name][0] += event.duration_ns / 1e6
                    total[event.name][1] += 1
    return dict(sorted(total.items(), key=lambda kv: -kv[1][0]))


def error(a: jax.Array, b: jax.Array) -> float:
    """‖a − b‖ / ‖b‖."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def line(row: dict) -> str:
    """One row for people."""
    text = (
        f"{row['implementation']:6s} {row['shape']:8s} S {row['block']:2d}  forward {row['forward_ms']:.3f} ms "
        f"(floor {row['forward_floor_ms']:.2f})  forward+backward {row['forward_backward_ms']:.3f} ms "
        f"(floor {row['forward_backward_floor_ms']:.2f})  {row['forward_backward_peak_MB']:.0f} MB  compile "
        f"{row['forward_compile_s']:.0f} {row['forward_backward_compile_s']:.0f} s  copies {row['history_copies']}  "
        f"errors {' '.join(f'{e:.1e}' for e in row['errors'])}"
    )
    for name, (ms, count) in list(row.get("kernels_ms", {}).items())[:12]:
        text += f"\n    {ms:8.3f} ms {count:5d} x  {name}"
    return text


if __name__ == "__main__":
    main()
