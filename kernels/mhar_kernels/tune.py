"""Rebuilds the tuned tile table of a kernel backend on this machine's chip.

    python -m mhar_kernels.tune [--widths 1280x8 ...] [--sources 9 25 73] [--tokens 8192 1024] [--dtype bfloat16]

For each direction and width (D x H), every candidate tile is timed over every number of sources and tokens asked for,
and the candidate that loses least on average against the best of each shape is written for all of them: one entry a
width, so that a model whose sites read 1, 2, ..., N sources compiles few kernels. `--each` writes the best of each
shape instead. Entries of other chips and widths stay as they are.
"""

import argparse
import datetime
import importlib.metadata
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from mhar_kernels import kernel_call, tuning
from mhar_kernels.contract import RouteArrays, RouteCall, RouteSaved
from mhar_kernels.target import current_platform

WIDTHS = ["512x4", "1024x8", "1280x8", "2048x8", "4096x8", "4096x1"]
SAMPLES = 5
_ROTATED_BYTES = 4e8  # of sources in one timed program: several times a GPU's cache
Times = dict[tuple[int, int], dict[tuple[tuple[str, int], ...], float]]  # (sources, tokens) -> tile -> ms


def time_program(run: Callable[[], Any], calls: int) -> list[float]:
    """Milliseconds a call of a program that holds `calls` of them, SAMPLES times, queued so that the host is hidden."""
    jax.block_until_ready(run())
    begin = time.perf_counter()
    jax.block_until_ready(run())
    once = time.perf_counter() - begin
    repeats = max(2, min(40, int(0.03 / once)))
    samples = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        for _ in range(repeats):
            last = run()
        jax.block_until_ready(last)
        samples.append((time.perf_counter() - begin) / repeats / calls * 1e3)
    return samples


def candidates(heuristic: dict[str, int]) -> Iterator[dict[str, int]]:
    """Tiles around the heuristic of one direction of one backend."""
    yield from _triton_candidates(heuristic) if "warps" in heuristic else _pallas_candidates(heuristic)


def _triton_candidates(heuristic: dict[str, int]) -> Iterator[dict[str, int]]:
    """More or fewer rows together, half or twice the warps, pipelines of other depths."""
    widths = {w: max(1, heuristic["width"] * w // heuristic["warps"]) for w in (1, 2, 4, 8, 16)}
    warps = [w for w in widths if heuristic["warps"] / 2 <= w <= heuristic["warps"] * 2]
    for w, sources, stages in itertools.product(warps, (1, 2, 4), (1, 3, 4)):
        programs = max(1, heuristic["programs"] * heuristic["warps"] // w)
        yield {"sources": sources, "width": widths[w], "warps": w, "ahead": 1, "stages": stages, "programs": programs}


def _pallas_candidates(heuristic: dict[str, int]) -> Iterator[dict[str, int]]:
    """Smaller and larger tiles of tokens, fewer and more sources a chunk."""
    rows, chunk = heuristic["rows"], heuristic["chunk"]
    for r, c in itertools.product((rows // 2, rows, rows * 2), sorted({1, chunk // 2, chunk, chunk * 2})):
        if r >= 8 and c >= 1:
            yield {**heuristic, "rows": r, "chunk": c}


def measure(backend: Any, call: RouteCall, direction: str, tiles: list[dict[str, int]]) -> dict[Any, float]:
    """Median milliseconds of each tile that compiles, for one direction of one call with stacked sources."""
    size = call.num_sources * call.tokens * call.dim * 2
    calls = int(max(2, min(8, _ROTATED_BYTES // size)))
    keys = jax.random.split(jax.random.key(0), calls)
    shape = (call.num_sources, call.tokens, call.dim)
    normal = jax.jit(lambda k: jax.random.normal(k, shape).astype(call.dtype))
    stacks = [normal(k) for k in keys]
    queries = [jax.random.normal(k, (call.dim,)) * (call.num_heads / call.dim) ** 0.5 for k in keys]
    low = jnp.zeros((call.dim,)) if call.dtype == "float32" else None
    arrays = [RouteArrays(s, q, low, None, None, None) for s, q in zip(stacks, queries, strict=True)]
    forward = [backend.forward(call, a) for a in arrays]
    saved = [RouteSaved(f.out if f.mix is None else f.mix, f.lse, None) for f in forward]
    cotangents = [f.out for f in forward]

    def build(tile: dict[str, int]):
        chosen = RouteCall(**{**call.__dict__, "tile": tuple(sorted(tile.items()))})

        def program(arrays, saved, cotangents):
            if direction == "forward":
                return [backend.forward(chosen, a).out for a in arrays]
            each = zip(arrays, saved, cotangents, strict=True)
            return [backend.backward(chosen, a, s, d, None) for a, s, d in each]

        try:
            return jax.jit(program).lower(arrays, saved, cotangents).compile()
        except Exception as error:  # a tile too large for the chip is no candidate
            print(f"  {tile}: {str(error).splitlines()[0][:100]}")
            return None

    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(build, tiles))
    found = {}
    for tile, program in zip(tiles, programs, strict=True):
        if program is not None:
            run = lambda program=program: program(arrays, saved, cotangents)
            found[tuple(tile.items())] = statistics.median(time_program(run, calls))
    return found


def fastest(times: dict[Any, float]) -> dict[str, int]:
    """The tile with the least time."""
    return dict(min(times, key=lambda tile: times[tile]))


def least_loss(times: Times) -> dict[str, int]:
    """The tile with the least mean loss against the best of each shape, of those timed on every shape."""
    everywhere = set.intersection(*(set(t) for t in times.values()))
    loss = lambda tile: statistics.fmean(t[tile] / min(t.values()) for t in times.values())
    return dict(min(everywhere, key=loss))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", default=WIDTHS, metavar="DxH", help="default: %(default)s")
    parser.add_argument("--sources", nargs="+", type=int, default=[9, 25, 73], help="default: %(default)s")
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 1024], help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="storage dtype; default: %(default)s")
    parser.add_argument("--backend", choices=["triton", "pallas_tpu"], help="default: this machine's own")
    parser.add_argument("--each", action="store_true", help="write the best tile of each shape")
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    parser.add_argument(
        "--interpret", action="store_true", help="under the interpreter: to try this program, not to tune"
    )
    options = parser.parse_args(arguments)
    name = options.backend or ("pallas_tpu" if current_platform() == "tpu" else "triton")
    backend: Any = kernel_call.load(name)
    entries: dict[str, dict[str, int]] = {}
    for width, direction in itertools.product(options.widths, ("forward", "backward")):
        dim, heads = map(int, width.split("x"))
        times: Times = {}
        for n, tokens in itertools.product(options.sources, options.tokens):
            call = RouteCall(
                num_sources=n,
                tokens=tokens,
                dim=dim,
                num_heads=heads,
                dtype=options.dtype,
                stacked=True,
                has_null=False,
                has_residual=False,
                has_gate=False,
                return_weights=False,
                eps=1e-6,
                interpret=options.interpret,
                tile=None,
                platform=current_platform(),
                differentiated=True,
            )
            reason = backend.unsupported(call)
            if reason is not None:
                parser.error(f"{name} cannot run {width} here: {reason}")
            heuristic = dict(backend.heuristic(call, direction)._asdict())
            times[n, tokens] = measure(backend, call, direction, [heuristic, *candidates(heuristic)])
            tile, ms = fastest(times[n, tokens]), min(times[n, tokens].values())
            print(f"{direction} {width} {n} sources {tokens} tokens: {ms:.4f} ms with {tile}", flush=True)
        fixed = {"dim": dim, "num_heads": heads, "dtype": options.dtype}
        if options.each:
            for (n, tokens), t in times.items():
                key = tuning.bucketed(direction, sources=n, tokens=tokens, **fixed)
                entries[tuning.spell(key)] = fastest(t)
        else:
            key = tuning.bucketed(direction, sources=1, tokens=1, **fixed)
            entries[tuning.spell({**key, "sources": "any", "tokens": "any"})] = least_loss(times)
    for spelled, entry in entries.items():
        print(spelled, entry)
    if not options.dry_run:
        print(f"wrote {write(name, entries)}")


def write(backend: str, entries: dict[str, dict[str, int]]) -> str:
    """Merges entries for this machine's chip into the backend's table; its path."""
    path = tuning.TABLES / f"{backend}.json"
    content = json.loads(path.read_text()) if path.exists() else {"measured": {}, "tiles": {}}
    device = jax.devices()[0].device_kind
    content["tiles"].setdefault(device, {}).update(entries)
    content["measured"][device] = {
        "date": datetime.date.today().isoformat(),
        **_versions("triton" if backend == "triton" else "libtpu"),
        "jax": jax.__version__,
        "how": "python -m mhar_kernels.tune",
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    tuning.table.cache_clear()
    return str(path)


def _versions(package: str) -> dict[str, str]:
    try:
        return {package: importlib.metadata.version(package)}
    except importlib.metadata.PackageNotFoundError:
        return {}


if __name__ == "__main__":
    main()
