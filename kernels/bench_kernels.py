"""Times the Triton kernels alone: compiled anywhere, launched from CUDA graphs on a GPU (needs CuPy there, not JAX).

    python kernels/bench_kernels.py compile DIR [--capability 90]      # here: machine code of every candidate tile
    python kernels/bench_kernels.py time DIR --out results.json         # on the GPU

For choosing tiles and for what a kernel itself reaches; kernels/bench_route.py times depth_route as a JAX program.
bfloat16, one stacked array of sources, backward without the second stage of the query's sum. Inputs are random and
rotate, so that the cache does not hold them. Outputs are checked against float64 on a few tokens at 1,024 tokens.
"""

import argparse
import json
import pathlib
import statistics
from typing import Any

# (D, H) -> tiles (sources, width, warps, stages): forward, backward
TILES: dict[tuple[int, int], tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    (512, 4): ([(2, 64, 1, 4), (4, 64, 1, 3), (1, 64, 1, 4)], [(2, 64, 1, 3), (2, 64, 1, 2), (2, 128, 2, 3)]),
    (1024, 8): ([(2, 64, 2, 3), (1, 32, 1, 4), (4, 32, 1, 1)], [(1, 64, 2, 3), (1, 32, 1, 3), (2, 64, 2, 3)]),
    (1280, 8): ([(1, 32, 1, 3), (2, 32, 1, 3), (1, 32, 1, 4)], [(1, 32, 1, 3), (2, 64, 2, 3), (4, 64, 2, 3)]),
    (2048, 8): ([(1, 64, 2, 4), (2, 64, 2, 3)], [(2, 128, 4, 3), (1, 128, 4, 3), (2, 64, 2, 3)]),
    (4096, 8): ([(1, 128, 4, 4), (2, 128, 4, 3)], [(2, 128, 4, 3), (1, 128, 4, 3), (1, 256, 8, 3)]),
    (4096, 1): ([(1, 1024, 4, 4), (2, 1024, 4, 3)], [(2, 1024, 4, 3), (1, 1024, 4, 3)]),
}
SHAPES = [(9, 8192), (25, 8192), (49, 8192), (73, 8192), (9, 1024), (25, 1024), (73, 1024)]  # sources, tokens
POOL = 6 * 2**30  # bfloat16 numbers of input


def compile_all(folder: pathlib.Path, capability: int) -> None:
    """Machine code and resources of every tile."""
    from mhar_kernels.triton_resources import example, machine_code

    folder.mkdir(parents=True, exist_ok=True)
    items = []
    for (dim, heads), directions in TILES.items():
        for direction, tiles in zip(("forward", "backward"), directions, strict=True):
            for sources, width, warps, stages in tiles:
                tile = dict(sources=sources, width=width, warps=warps, stages=stages)
                call = example(2, dim, heads, stacked=True, tile=tuple(tile.items()), differentiated=False)
                binary, found = machine_code(call, direction, capability)
                name = f"{direction}_{dim}_{heads}_{sources}_{width}_{warps}_{stages}.cubin"
                (folder / name).write_bytes(binary)
                resident = min(65536 // (-(-found.registers // 8) * 256 * warps), 64 // warps, 32)
                resident = max(1, min(resident, 227 * 1024 // (found.shared + 1024)))
                item = dict(file=name, direction=direction, dim=dim, heads=heads, tile=tile, resident=resident)
                items.append(item | dict(registers=found.registers, shared=found.shared, spilled=found.spilled))
                print(items[-1], flush=True)
    (folder / "items.json").write_text(json.dumps(items))


class Card:
    """The GPU, a pool of random bfloat16 numbers on it, and timing."""

    def __init__(self) -> None:
        import cupy

        self.cp: Any = cupy
        self.random = cupy.random.default_rng(0)
        self.pool = cupy.empty(POOL, cupy.uint16)
        for i in range(0, POOL, 2**27):
            part = self.random.standard_normal(2**27, dtype=cupy.float32).view(cupy.uint32)
            self.pool[i : i + 2**27] = ((part + 0x8000) >> 16).astype(cupy.uint16)
        self.grads = cupy.full(POOL // 2, 0x7FC0, cupy.uint16)  # not a number, until written
        self.multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
        cupy.cuda.Device().synchronize()
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def milliseconds(self, launch, count: int) -> float:
        """Median of five replays of a graph of `count` launches, a launch."""
        cp, stream, times = self.cp, self.stream, []
        with stream:
            launch(0)
            launch(1)
            stream.synchronize()
            stream.begin_capture()
            for i in range(count):
                launch(i)
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            for _ in range(5):
                begin, end = cp.cuda.Event(), cp.cuda.Event()
                begin.record(stream)
                graph.launch(stream)
                end.record(stream)
                end.synchronize()
                times.append(cp.cuda.get_elapsed_time(begin, end) / count)
        return statistics.median(times)

    def copy_bandwidth(self) -> float:
        """TB/s of a kernel that copies 2 GiB, 16 bytes a lane, counting bytes read and bytes written."""
        source = r"""extern "C" __global__ void copy(const uint4* a, uint4* b, long n) {
            long i = blockIdx.x * (long)blockDim.x + threadIdx.x, s = (long)gridDim.x * blockDim.x;
            for (; i + 3 * s < n; i += 4 * s) {
                uint4 x = a[i], y = a[i + s], z = a[i + 2 * s], w = a[i + 3 * s];
                b[i] = x; b[i + s] = y; b[i + 2 * s] = z; b[i + 3 * s] = w;
            }
        }"""
        kernel, n = self.cp.RawKernel(source, "copy"), 2**30

        def launch(i: int) -> None:
            arguments = (self.pool[(i % 4) * n :], self.grads[(i % 2) * n :], self.cp.int64(n // 8))
            kernel((self.multiprocessors * 16,), (256,), arguments, stream=self.stream)

        return 2 * n * 2 / self.milliseconds(launch, 10) / 1e9


def time_all(folder: pathlib.Path, out: str | None) -> None:
    """Every tile at every shape."""
    card = Card()
    copy, rows = card.copy_bandwidth(), []
    print(f"copy {copy:.2f} TB/s", flush=True)
    for item in json.loads((folder / "items.json").read_text()):
        module = card.cp.cuda.function.Module()
        module.load_file(str(folder / item["file"]))
        kernel = module.get_function(f"depth_route_{item['direction']}")
        for sources, tokens in SHAPES:
            for waves in (1, 2, 1000):  # of resident programs; 1000 stands for one token a program
                programs = min(tokens, card.multiprocessors * item["resident"] * waves)
                if waves == 1000 and item["direction"] == "backward":
                    continue
                ms = _time(card, kernel, item, sources, tokens, programs)
                moved = sources + 1 if item["direction"] == "forward" else 2 * sources + 1
                share = moved * tokens * item["dim"] * 2 / ms / 1e9 / copy
                rows.append(dict(item, sources=sources, tokens=tokens, programs=programs, ms=ms, of_copy=share))
        best = max((r for r in rows if r["file"] == item["file"]), key=lambda r: r["of_copy"])
        print(item["file"], f"at best {best['of_copy']:.2f} of copy: {best['sources']} x {best['tokens']}", flush=True)
    if out:
        pathlib.Path(out).write_text(json.dumps({"copy_TB_per_s": copy, "rows": rows}))


def _time(card: Card, kernel: Any, item: dict, n: int, tokens: int, programs: int) -> float:
    cp, dim, heads = card.cp, item["dim"], item["heads"]
    size, row = n * tokens * dim, tokens * dim
    sets, grad_sets = max(1, min(8, POOL // size)), max(1, min(8, POOL // 2 // size))
    query = card.random.standard_normal(dim, dtype=cp.float32) * cp.float32((heads / dim) ** 0.5)
    outs = [cp.full((tokens, dim), 0x7FC0, cp.uint16) for _ in range(sets)]
    lses = [cp.zeros((tokens, heads), cp.float32) for _ in range(sets)]
    rest = cp.zeros((tokens, dim), cp.int16)
    partial = cp.zeros((programs, dim), cp.float32)
    counts = (cp.int32(tokens), cp.int32(n))
    scratch = (cp.uint64(0), cp.uint64(0))  # two pointers that Triton adds and these kernels do not use

    def launch(i: int) -> None:
        sources = card.pool[(i % sets) * size :]
        if item["direction"] == "forward":
            arguments: tuple[Any, ...] = (sources, query, *counts, outs[i % sets], lses[i % sets])
        else:
            d_out, grads = card.pool[(1 + i % 2) * row :], card.grads[(i % grad_sets) * size :]
            arguments = (sources, query, d_out, outs[i % sets], rest, lses[i % sets], *counts, grads, partial)
        threads = (32 * item["tile"]["warps"],)
        kernel((1, programs), threads, (*arguments, *scratch), shared_mem=item["shared"], stream=card.stream)

    cp.cuda.Device().synchronize()
    ms = card.milliseconds(launch, 10 if size < 2**28 else 4)
    if item["direction"] == "forward" and tokens == 1024:
        _check(card, query, outs[0], n, tokens, dim, heads)
    return ms


def _check(card: Card, query: Any, out: Any, n: int, tokens: int, dim: int, heads: int) -> None:
    """The first set's mix against float64, on four tokens."""
    cp, some = card.cp, [0, 1, tokens // 2, tokens - 1]
    wide = lambda x: (x.astype(cp.uint32) << 16).view(cp.float32).astype(cp.float64)
    s = wide(card.pool[: n * tokens * dim].reshape(n, tokens, dim)[:, some]).reshape(n, 4, heads, -1)
    r = 1 / cp.sqrt((s**2).mean((2, 3)) + 1e-6)
    logits = r[..., None] * (s * query.astype(cp.float64).reshape(heads, -1)).sum(-1)
    weights = cp.exp(logits - logits.max(0))
    mix = ((weights / weights.sum(0))[..., None] * s).sum(0).reshape(4, dim)
    error = float(cp.linalg.norm(wide(out[some]) - mix) / cp.linalg.norm(mix))
    assert error < 3e-3, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["compile", "time"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.action == "compile":
        compile_all(options.folder, options.capability)
    else:
        time_all(options.folder, options.out)


if __name__ == "__main__":
    main()
