"""The pictures of a report."""

import math
import pathlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from mhar_jax.bench.report import Report, Row, describe
from mhar_jax.errors import writing
from mhar_jax.inspect.maps import LINES, styled

_MARKS = {"forward": "o", "forward_backward": "s"}
_BESIDE: Any = {"fontsize": 6, "loc": "upper left", "bbox_to_anchor": (1.01, 1)}  # the picture is cut to what is drawn
_WORDS = {"forward": "forward", "forward_backward": "forward + backward"}


def draw(report: Report, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes the pictures that apply to a report, as PNG; their paths.

    Raises:
      UserError: one cannot be written.
    """
    written = []
    with styled():
        for name, figure in _pictures(report):
            path = folder / f"{name}.png"
            with writing("a picture", path):
                figure.savefig(path, dpi=130, bbox_inches="tight")
            written.append(path)
    return written


def _pictures(report: Report) -> Iterator[tuple[str, Figure]]:
    rows = [row for row in report.rows if row.status == "ok"]
    sites = [row for row in rows if row.of.get("what") == "site"]
    if report.kind == "routing" and sites:
        yield "routing_sources", sources(report, sites)
    if report.kind == "routing" and rows:
        yield "routing_roofline", roofline(report, rows)
    if report.kind == "training" and rows:
        yield "training_ratios", ratios(report, rows)


def sources(report: Report, rows: list[Row]) -> Figure:
    """Time of a single site against its number of sources, a panel a width; dashed, the bytes at copy bandwidth."""
    panels: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        panels[row.of["dim"], row.of["heads"], row.of["tokens"], row.of["delta"]].append(row)
    figure = Figure(figsize=(3.6 * len(panels) + 0.6, 4.2))
    names = sorted({(r.of["implementation"], r.of["layout"]) for r in rows})
    for axes, ((dim, heads, tokens, delta), found) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for which, mark in _MARKS.items():
            for k, name in enumerate(names):
                line = sorted(
                    (r for r in found if r.of["pass"] == which and (r.of["implementation"], r.of["layout"]) == name),
                    key=lambda r: r.of["sources"],
                )
                if line:
                    axes.plot(
                        [r.of["sources"] for r in line],
                        [r.median_ms for r in line],
                        marker=mark,
                        color=LINES[k % len(LINES)],
                        linestyle="-" if which == "forward" else "-.",
                        markersize=4,
                        label=f"{' '.join(name)}, {_WORDS[which]}",
                    )
            if report.copy_tb_per_s:
                of = {
                    r.of["sources"]: r.metrics["bytes"] / report.copy_tb_per_s / 1e9
                    for r in found
                    if r.of["pass"] == which
                }
                axes.plot(sorted(of), [of[n] for n in sorted(of)], color="#555555", linestyle="--", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = sorted({r.of["sources"] for r in found})
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
        axes.set_xlabel("sources")
        axes.set_title(f"D {dim}, H {heads}, {tokens} tokens{', delta' if delta else ''}", fontsize=8)
        axes.grid(alpha=0.25, linewidth=0.5)
    figure.axes[0].set_ylabel("ms")
    figure.axes[-1].legend(**_BESIDE)
    figure.suptitle(
        f"One routing site. Dashed: its bytes at copy bandwidth.\n{describe(report.environment)}", fontsize=8
    )
    figure.tight_layout()
    return figure


def roofline(report: Report, rows: list[Row]) -> Figure:
    """Arithmetic a second against arithmetic a byte: under the slope of the copy bandwidth measured in the same run."""
    figure = Figure(figsize=(6.6, 4.6))
    axes = figure.subplots()
    names = sorted({(r.of["implementation"], r.of["layout"]) for r in rows})
    for which, mark in _MARKS.items():
        for k, name in enumerate(names):
            found = [r for r in rows if r.of["pass"] == which and (r.of["implementation"], r.of["layout"]) == name]
            if found:
                x = [r.metrics["flops"] / r.metrics["bytes"] for r in found]
                y = [r.metrics["flops"] / r.median_ms / 1e9 for r in found]
                label = f"{' '.join(name)}, {_WORDS[which]}"
                axes.plot(x, y, mark, color=LINES[k % len(LINES)], markersize=4, alpha=0.8, label=label)
    intensity = [r.metrics["flops"] / r.metrics["bytes"] for r in rows]
    if report.copy_tb_per_s:
        ends = [min(intensity) / 1.5, max(intensity) * 1.5]
        slope = [e * report.copy_tb_per_s for e in ends]
        axes.plot(ends, slope, color="#555555", linewidth=0.9, label=f"copy: {report.copy_tb_per_s:.2f} TB/s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP a byte that must move")
    axes.set_ylabel("TFLOP/s reached")
    axes.legend(**_BESIDE)
    axes.grid(alpha=0.25, linewidth=0.5, which="both")
    axes.set_title(f"Roofline of depth routing.\n{describe(report.environment)}", fontsize=8)
    return figure


def ratios(report: Report, rows: list[Row]) -> Figure:
    """Throughput of each variant against the baseline of the same run, with its interval."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.of["preset"]].append(row)
    names = list(dict.fromkeys(_variant(row) for row in rows))
    figure = Figure(figsize=(1.4 + 1.1 * len(rows), 4.2))
    axes = figure.subplots()
    width = 0.8 / len(names)
    for i, found in enumerate(groups.values()):
        for row in found:
            k = names.index(_variant(row))
            ratio, interval = row.metrics["ratio"], row.metrics.get("ratio_interval")
            place = i + (k - (len(names) - 1) / 2) * width
            bars = [[max(0.0, ratio - interval[0])], [max(0.0, interval[1] - ratio)]] if interval else None
            axes.bar(place, ratio, width * 0.92, yerr=bars, color=LINES[k % len(LINES)], capsize=3)
            if math.isfinite(ratio):
                axes.text(place, 0.03, f"{ratio:.3f}", ha="center", fontsize=7, color="white", fontweight="bold")
    for k, name in enumerate(names):
        axes.bar(0, 0, color=LINES[k % len(LINES)], label=name)
    axes.axhline(1, color="#555555", linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(f"throughput / {_variant(rows[0])}")
    axes.legend(**_BESIDE)
    axes.set_title(f"Train step, tokens a second.\n{describe(report.environment)}", fontsize=7)
    return figure


def _variant(row: Row) -> str:
    implementation = row.of.get("implementation")
    return row.of["variant"] + (f" ({implementation})" if implementation else "")
