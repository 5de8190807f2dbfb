"""Host memory of an import, on synthetic checkpoints with the shapes of Llama-3.1-8B and fewer layers.

    python tests/conversion/import_memory.py WORK --layers 1 2 4

Writes each checkpoint in bfloat16 (about 2.1 GB, and 0.44 GB a layer), imports it in a process of its own, and prints
the largest resident size of that process. WORK is emptied again.
"""

import argparse
import itertools
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import time

import ml_dtypes
import numpy as np

from mhar_jax.config.schema import ModelConfig
from mhar_jax.huggingface.config import describe
from mhar_jax.huggingface.keys import key_table
from mhar_jax.huggingface.safetensors import Planned, write_file

EIGHT_B = {
    "variant": "additive",
    "vocab_size": 128256,
    "num_layers": 32,
    "d_model": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "ffn_dim": 14336,
    "qk_norm": False,
    "tie_embeddings": False,
}


def write_checkpoint(directory: pathlib.Path, layers: int, **changes: int) -> int:
    """Writes random tensors in bfloat16; gives the bytes of the largest."""
    config = ModelConfig(**(EIGHT_B | {"num_layers": layers} | changes))
    draw = np.random.default_rng(0)
    block = (draw.standard_normal(1 << 20, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    plan = [Planned(key.name, block.dtype, key.shape) for key in key_table(config)]
    tensors = (np.resize(block, planned.shape) for planned in plan)
    directory.mkdir(parents=True)
    write_file(directory / "model.safetensors", plan, tensors)
    (directory / "config.json").write_text(json.dumps(describe(config, dtype="bfloat16")))
    return max(int(np.prod(planned.shape)) * 2 for planned in plan)


def measure(source: pathlib.Path, out: pathlib.Path) -> dict[str, float]:
    """Imports in a new process: its largest resident bytes before and after, and seconds."""
    program = [sys.executable, __file__, "--import", str(source), str(out)]
    answer = subprocess.run(program, check=True, capture_output=True, text=True)
    return json.loads(answer.stdout.splitlines()[-1])


def import_here(source: str, out: str) -> None:
    """What the process of `measure` does."""
    from mhar_jax.conversion.importing import import_checkpoint

    resident = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    before, begun = resident(), time.monotonic()
    done = import_checkpoint(source, out)
    seconds = time.monotonic() - begun
    print(json.dumps({"before": before, "peak": resident(), "seconds": seconds, "parameters": done.parameters}))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    peaks = []
    for layers in options.layers:
        source, out = options.work / f"hf-{layers}", options.work / f"run-{layers}"
        largest = write_checkpoint(source, layers)
        found = measure(source, out)
        size = (source / "model.safetensors").stat().st_size
        limit = 1.5 * largest + 2 * 2**30
        peaks.append((size, found["peak"]))
        print(
            f"{layers} layers, {found['parameters']:,} parameters, {size / 1e9:.2f} GB: peak {found['peak'] / 1e9:.2f} GB "
            f"({found['before'] / 1e9:.2f} before), limit {limit / 1e9:.2f} GB, {found['seconds']:.0f} s",
            flush=True,
        )
        shutil.rmtree(source)
        shutil.rmtree(out)
    for (size, peak), (more, higher) in itertools.pairwise(peaks):
        print(f"slope: {(higher - peak) / (more - size):+.4f} bytes of memory a byte of checkpoint")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--import"]:
        import_here(*sys.argv[2:])
    else:
        main()
