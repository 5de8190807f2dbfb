"""Time by kernel, from a trace of one run."""

import glob
import tempfile
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax


def kernel_times(run: Callable[[], Any]) -> dict[str, list[float]]:
    """Milliseconds and launches of every kernel in one run, longest first; empty where the device keeps no trace."""
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
            for plane in jax.profiler.ProfileData.from_file(path).planes:
                if not plane.name.startswith(("/device:GPU", "/device:TPU")):
                    continue
                for line in plane.lines:
                    if line.name.startswith("Stream") or line.name == "XLA Ops":
                        for event in line.events:
                            total[event.name][0] += event.duration_ns / 1e6
                            total[event.name][1] += 1
    return dict(sorted(total.items(), key=lambda item: -item[1][0]))
