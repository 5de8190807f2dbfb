"""Times depth_route on this machine's accelerator beside `xla` and a plain copy, and checks it against float64.

    python kernels/bench_route.py --out results.json [--shapes 9x1280x8 ...] [--tokens 8192 1024]

A shape is sources x D x heads. Each sample is the device's throughput over many calls: one jitted program holds several
calls on different inputs (so that the cache does not hold them and nothing is merged), and programs are queued without
waiting. Bandwidth counts the bytes that must move: forward, each source in and the mix out; backward, each source and
dO in, each source gradient out. `copy` reads and writes one large array.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import statistics
import time

import jax
import jax.numpy as jnp

from mhar_kernels import depth_route
from mhar_kernels.tune import time_program

SHAPES = [(24, 4096, 1)]
SHAPES += [(n, d, h) for d, h in ((512, 4), (1024, 8), (1280, 8), (2048, 8), (4096, 8)) for n in (9, 25, 49, 73)]
SET_BYTES = 6e9  # of sources in one program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file of the results")
    parser.add_argument("--shapes", nargs="*", help="sources x D x heads, as 9x1280x8; default: the issue's table")
    parser.add_argument("--tokens", nargs="*", type=int, default=[8192, 1024])
    parser.add_argument("--forms", nargs="*", default=["stacked", "separate"], choices=["stacked", "separate"])
    parser.add_argument("--implementations", nargs="*", default=["triton", "xla"])
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new shapes after this long")
    options = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in options.shapes] if options.shapes else SHAPES
    start = time.monotonic()
    rows: list[dict] = []
    copy = copy_bandwidth()
    report = {"environment": environment(), "copy_TB_per_s": copy, "rows": rows}
    print(json.dumps(report["environment"]), f"copy {copy:.2f} TB/s", flush=True)
    for tokens in options.tokens:
        for n, dim, heads in shapes:
            for implementation in options.implementations:
                for form in options.forms if implementation != "xla" else ["stacked"]:
                    if time.monotonic() - start > options.seconds:
                        break
                    row = measure(n, dim, heads, tokens, implementation, form, copy)
                    rows.append(row)
                    print(line(row), flush=True)
                    if options.out:
                        with open(options.out, "w") as f:
                            json.dump(report, f, indent=1)


def measure(n: int, dim: int, heads: int, tokens: int, implementation: str, form: str, copy: float) -> dict:
    """One row of the table: forward alone, and forward with backward."""
    size = n * tokens * dim * 2
    calls = int(max(2, min(24, SET_BYTES // (3 * size))))
    keys = jax.random.split(jax.random.key(n * dim), calls)
    make = jax.jit(lambda k: jax.random.normal(k, (n, tokens, dim), jnp.bfloat16))
    sources = [make(k) for k in keys]
    if form == "separate":
        split = jax.jit(lambda s: tuple(s[i] for i in range(n)))
        sources = [split(s) for s in sources]
    queries = [jax.random.normal(k, (dim,)) * (heads / dim) ** 0.5 for k in keys]
    cotangents = [jax.random.normal(k, (tokens, dim), jnp.bfloat16) for k in keys]
    route = lambda s, q: depth_route(s, q, num_heads=heads, implementation=implementation)

    @jax.jit
    def forward(sources, queries, _):
        return [route(s, q) for s, q in zip(sources, queries, strict=True)]

    @jax.jit
    def both(sources, queries, cotangents):
        results = []
        for s, q, d in zip(sources, queries, cotangents, strict=True):
            out, vjp = jax.vjp(route, s, q)
            results.append((out, vjp(d)))
        return results

    row = {"sources": n, "dim": dim, "heads": heads, "tokens": tokens, "implementation": implementation, "form": form}
    for name, f, moved in (("forward", forward, n + 1), ("forward_backward", both, 3 * n + 2)):
        begin = time.monotonic()
        compiled = f.lower(sources, queries, cotangents).compile()
        row[f"{name}_compile_s"] = round(time.monotonic() - begin, 2)
        samples = time_program(functools.partial(compiled, sources, queries, cotangents), calls)
        ms = statistics.median(samples)
        row[f"{name}_ms"] = ms
        row[f"{name}_samples_ms"] = samples
        row[f"{name}_of_copy"] = moved * tokens * dim * 2 / ms / 1e9 / copy
    return row


def copy_bandwidth() -> float:
    """TB/s of reading one 4 GiB array and writing another: the better of XLA's copy and an elementwise kernel."""
    x = jnp.ones((2**30,), jnp.uint32)
    programs = [jax.jit(jnp.copy), jax.jit(lambda x: x ^ 1)]
    return max(2 * x.nbytes / statistics.median(time_program(functools.partial(f, x), 1)) / 1e9 for f in programs)


def environment() -> dict[str, str]:
    """What the numbers belong to."""
    found = {"device": jax.devices()[0].device_kind, "date": datetime.date.today().isoformat()}
    for package in ("jax", "jaxlib", "jax-triton", "triton", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def line(row: dict) -> str:
    """One row for people."""
    return (
        f"{row['implementation']:7s} {row['form']:8s} N {row['sources']:3d} D {row['dim']:4d} H {row['heads']} "
        f"T {row['tokens']:5d}  forward {row['forward_ms']:.4f} ms {row['forward_of_copy']:.2f}  "
        f"forward+backward {row['forward_backward_ms']:.4f} ms {row['forward_backward_of_copy']:.2f}  "
        f"compile {row['forward_compile_s']:.1f} {row['forward_backward_compile_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
