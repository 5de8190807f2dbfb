"""A report as a table, for the terminal and as Markdown."""

import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from mhar_jax.bench.report import Report, Row, describe
from mhar_jax.errors import writing


@dataclass(frozen=True)
class Column:
    """A heading, and a row's entry under it."""

    heading: str
    entry: Callable[[Row], str]
    left: bool = False


def _of(heading: str, name: str) -> Column:
    return Column(heading, lambda row: _text(row.of.get(name)), left=True)


def _metric(heading: str, name: str, form: str = "{:.3g}", scale: float = 1.0) -> Column:
    def entry(row: Row) -> str:
        value = row.metrics.get(name)
        return "–" if value is None else form.format(value * scale)

    return Column(heading, entry)


def _milliseconds(row: Row) -> str:
    if row.status != "ok":
        return row.status.upper()
    return f"{row.metrics['median_ms']:.4g}" if "median_ms" in row.metrics else "–"


def _spread(row: Row) -> str:
    low, high = row.metrics.get("quartile_low_ms"), row.metrics.get("quartile_high_ms")
    return "–" if low is None or high is None else f"{low:.4g} to {high:.4g}"


_TIME = (Column("ms", _milliseconds), Column("quartiles", _spread))
_COST = (_metric("peak GB", "peak_bytes", "{:.3f}", 1e-9), _metric("compile s", "compile_s", "{:.1f}"))
COLUMNS: dict[str, tuple[Column, ...]] = {
    "routing": (
        _of("preset", "preset"),
        Column("what", lambda r: f"{r.of['sites']} sites" if "sites" in r.of else f"{r.of['sources']} sources", True),
        Column("D, H, T", lambda r: f"{r.of['dim']}, {r.of['heads']}, {r.of['tokens']}", True),
        Column("pass", lambda r: "fwd" if r.of["pass"] == "forward" else "fwd + bwd", True),
        _of("implementation", "implementation"),
        Column("layout", lambda r: r.of["layout"] + (f" {r.of['block']}" if r.of.get("block") else ""), True),
        *_TIME,
        _metric("GB moved", "bytes", "{:.3g}", 1e-9),
        _metric("TB/s", "tb_per_s", "{:.2f}"),
        _metric("of copy", "of_copy", "{:.2f}"),
        *_COST,
        _metric("error", "error", "{:.1e}"),
    ),
    "training": (
        _of("preset", "preset"),
        _of("variant", "variant"),
        _of("implementation", "implementation"),
        *_TIME,
        _metric("tokens/s", "tokens_per_s", "{:,.0f}"),
        _metric("TFLOP/s", "tflops", "{:.1f}"),
        _metric("MFU", "mfu", "{:.3f}"),
        *_COST,
        _metric("error", "error", "{:.1e}"),
        _metric("throughput ratio", "ratio", "{:.3f}"),
        Column("95 %", lambda r: _interval(r.metrics.get("ratio_interval"))),
    ),
    "decode": (
        _of("preset", "preset"),
        Column("what", lambda r: _generation(r.of), True),
        _of("variant", "variant"),
        _of("implementation", "implementation"),
        *_TIME,
        _metric("first run s", "first_run_s", "{:.1f}"),
        _metric("time ratio", "ratio", "{:.3f}"),
        Column("95 %", lambda r: _interval(r.metrics.get("ratio_interval"))),
    ),
    "compile": (
        _of("preset", "preset"),
        _of("topology", "topology"),
        Column("fits", lambda r: "yes" if r.status == "ok" else "NO", True),
        _metric("GB a chip", "total_bytes", "{:.2f}", 1e-9),
        _metric("of", "chip_bytes", "{:.1f}", 1e-9),
        _metric("model TFLOP", "model_flops", "{:.3g}", 1e-12),
        _metric("GB moved", "bytes", "{:.3g}", 1e-9),
        _metric("collectives", "collective_count", "{:.0f}"),
        _metric("GB sent", "network_bytes", "{:.3g}", 1e-9),
        _metric("estimate ms", "estimate_ms", "{:.3g}"),
        Column("bound by", lambda r: _text(r.metrics.get("bound_by")), True),
        _metric("compile s", "compile_s", "{:.0f}"),
    ),
}


def show(report: Report) -> None:
    """Prints the table, then the reasons of rows without a time, kernels where they were traced, and the notes."""
    console = Console(width=None if Console().is_terminal else 200)
    table = Table(title=f"{report.kind}: {describe(report.environment)}", title_justify="left")
    columns = COLUMNS[report.kind]
    for column in columns:
        table.add_column(column.heading, justify="left" if column.left else "right", overflow="fold")
    for row in report.rows:
        table.add_row(*(c.entry(row) for c in columns), style=None if row.status == "ok" else "red")
    console.print(table)
    for line in after(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def after(report: Report) -> list[str]:
    """What stands below the table."""
    seconds = report.environment.get("wall_seconds", {})  # results of before have none
    parts = ", ".join(f"{name} {value:g}" for name, value in seconds.items())
    found = [f"wall seconds of the command: {parts}"] if parts else []
    for row in report.rows:
        if row.status != "ok":
            found.append(f"{row.status}: {name_of(row)}: {row.reason}")
        for kernel, (ms, count) in list(row.metrics.get("kernels_ms", {}).items())[:12]:
            found.append(f"{name_of(row)}: {ms:8.4f} ms {count:5g} x {kernel}")
    return found + [f"note: {note}" for note in report.notes]


def name_of(row: Row) -> str:
    """A row in words."""
    skipped = ("dtype", "delta", "heads")
    return " ".join(_text(v) for k, v in row.of.items() if k not in skipped and v is not None)


def write_markdown(report: Report, folder: pathlib.Path) -> pathlib.Path:
    """The table as `KIND.md`; its path.

    Raises:
      UserError: it cannot be written.
    """
    columns = COLUMNS[report.kind]
    lines = [f"{describe(report.environment)}: `{' '.join(report.environment['command'])}`", ""]
    if report.copy_tb_per_s is not None:
        lines[0] += f", copy {report.copy_tb_per_s:.2f} TB/s"
    lines.append("| " + " | ".join(c.heading for c in columns) + " |")
    lines.append("|" + "---|" * len(columns))
    lines += ["| " + " | ".join(c.entry(row) for c in columns) + " |" for row in report.rows]
    lines += ["", *(f"- {line}" for line in after(report))]
    path = folder / f"{report.kind}.md"
    with writing("the benchmark's table", path):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _text(value: Any) -> str:
    return "–" if value is None else str(value)


def _interval(value: Any) -> str:
    return "–" if value is None else f"{value[0]:.3f} to {value[1]:.3f}"


def _generation(of: dict[str, Any]) -> str:
    return f"prefill {of['batch']} x {of['tokens']}" if of["kind"] == "prefill" else f"decode, batch {of['batch']}"
