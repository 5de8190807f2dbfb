"""Time by kernel, from a trace of one run."""

import glob
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Event(NamedTuple):
    """A kernel that ran."""

    name: str
    start_ns: float
    duration_ns: float
    instruction: str | None  # of the compiled program, where the trace says it


def kernel_times(run: Callable[[], Any]) -> dict[str, list[float]]:
    """Milliseconds and launches of every kernel in one run, longest first; empty where the device keeps no trace."""
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        for event in device_events(folder):
            total[event.name][0] += event.duration_ns / 1e6
            total[event.name][1] += 1
    return dict(sorted(total.items(), key=lambda item: -item[1][0]))


def device_events(folder: str, *, cpu: bool = False) -> list[Event]:
    """The kernels of the newest trace in a folder that `jax.profiler.trace` wrote, in the order in which they began.

    With `cpu`, what a CPU's threads computed for each instruction stands for kernels: enough to try what reads them.
    """
    found = []
    for path in sorted(glob.glob(f"{folder}/**/*.xplane.pb", recursive=True))[-1:]:
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            device = plane.name.startswith(("/device:GPU", "/device:TPU"))
            if not device and not (cpu and plane.name == "/host:CPU"):
                continue
            for line in plane.lines:
                if device and not (line.name.startswith("Stream") or line.name == "XLA Ops"):
                    continue
                for event in line.events:
                    name = _instruction(event)
                    if device or name is not None:
                        short = event.name if name is None or not event.name.startswith("%") else name
                        found.append(Event(short, event.start_ns, event.duration_ns, name))
    return sorted(found, key=lambda event: event.start_ns)


def _instruction(event: Any) -> str | None:
    """GPUs and CPUs say it beside the kernel's name; on a TPU the event is the instruction, "%fusion.3 = ..."."""
    for name, value in event.stats:
        if name == "hlo_op":
            return str(value)
    found = re.match(r"%([\w.\-]+) = ", event.name)
    return None if found is None else found[1]
