"""Tables of the commands, as plain aligned text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells, one line each, columns two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def harness_table(results: Mapping[str, Any]) -> str:
    """What the harness found, a line for each metric of a task or group.

    Not by the harness's own `make_table`: with old versions of the writer under it the headings are A, B, C, and it
    forks processes in which JAX has threads.
    """
    return aligned([("task", "version", "shots", "filter", "metric", "value", ""), *_rows(results)])


def _rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for task, found in results["results"].items():
        version, shots = (str(results.get(part, {}).get(task, "")) for part in ("versions", "n-shot"))
        for full_name, value in found.items():
            metric, comma, name_filter = full_name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            better = results.get("higher_is_better", {}).get(task, {}).get(metric)
            arrow = {True: " ↑", False: " ↓"}.get(better, "")
            error = found.get(f"{metric}_stderr,{name_filter}")
            spread = f"± {_number(error)}" if isinstance(error, int | float) else ""
            yield task, version, shots, name_filter, metric + arrow, _number(value), spread


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.5g}"
