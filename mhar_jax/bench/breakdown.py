"""Where the time of a generation step goes: groups of kernels and the gaps between them, as a table."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from mhar_jax.bench.instructions import GROUPS, Program
from mhar_jax.bench.profile import Event
from mhar_jax.bench.report import Report, Row

_COLUMNS = (*GROUPS, "idle")


class Breakdown(NamedTuple):
    """Of one run, in milliseconds of `per` of it; `groups` and `idle` add up to `span`."""

    span: float  # from the begin of the first kernel to the end of the last
    idle: float  # no kernel ran
    groups: dict[str, float]
    kernels: dict[str, tuple[float, float]]  # "group: name" -> milliseconds and launches, longest first
    launches: float


def break_down(events: Sequence[Event], program: Program, per: int = 1) -> Breakdown:
    """Divides the time of a trace among groups of kernels.

    Where kernels overlap, time belongs to the one that began first.

    Args:
      events: in the order in which they began.
      program: what ran.
      per: tokens that one run generates.
    """
    groups = dict.fromkeys(GROUPS, 0.0)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    begin = end = None
    idle = launches = 0.0
    for event in events:
        group = program.group(event.name, event.instruction)
        if group is None:
            continue
        if end is None:
            begin = end = event.start_ns
        idle += max(0.0, event.start_ns - end)
        stop = event.start_ns + event.duration_ns
        own = max(0.0, stop - max(end, event.start_ns))
        end = max(end, stop)
        groups[group] += own
        entry = kernels[f"{group}: {event.name}"]
        entry[0] += own
        entry[1] += 1
        launches += 1
    scale = 1e-6 / per
    span = 0.0 if begin is None or end is None else end - begin
    by_time = sorted(kernels.items(), key=lambda item: -item[1][0])
    return Breakdown(
        span * scale,
        idle * scale,
        {name: ns * scale for name, ns in groups.items()},
        {name: (ns * scale, count / per) for name, (ns, count) in by_time},
        launches / per,
    )


def metrics(found: Breakdown) -> dict[str, Any]:
    """For a row of a report."""
    groups = {**found.groups, "idle": found.idle}
    return {
        "profile": {"span_ms": found.span, "groups_ms": groups, "launches": found.launches},
        "kernels_ms": {name: list(entry) for name, entry in list(found.kernels.items())[:40]},
    }


def markdown(report: Report) -> list[str]:
    """The table of the rows that were traced, each followed by what it takes more than its baseline; [] for none."""
    rows = [row for row in report.rows if "profile" in row.metrics]
    if not rows:
        return []
    lines = [
        "Milliseconds of a prefill, or of a decoded token, by what ran, from a trace of one run. `timed` is the median "
        "without a trace; what tracing adds is mostly in `idle`, the gaps between kernels.",
        "",
        "| what | variant | timed | traced | " + " | ".join(_COLUMNS) + " | kernels |",
        "|---|---|" + "---|" * (len(_COLUMNS) + 3),
    ]
    baselines: dict[Any, Row] = {}
    for row in rows:
        base = baselines.setdefault((row.of["kind"], row.of["batch"]), row)
        *times, launches = _numbers(row)
        lines.append(_line([_what(row), row.of["variant"], *(f"{ms:.3f}" for ms in times), f"{launches:.0f}"]))
        if base is not row:
            *more, launches = (a - b for a, b in zip(_numbers(row), _numbers(base), strict=True))
            name = f"more than {base.of['variant']}"
            lines.append(_line(["", name, *(f"{ms:+.3f}" for ms in more), f"{launches:+.0f}"]))
    return lines


def _what(row: Row) -> str:
    size = f"{row.of['batch']} x {row.of['tokens']}" if row.of["kind"] == "prefill" else f"batch {row.of['batch']}"
    return f"{row.of['kind']} {size}"


def _numbers(row: Row) -> list[float]:
    """Timed, traced, every column, and kernels."""
    found = row.metrics["profile"]
    times = (found["groups_ms"][name] for name in _COLUMNS)
    return [row.metrics["median_ms"], found["span_ms"], *times, found["launches"]]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
