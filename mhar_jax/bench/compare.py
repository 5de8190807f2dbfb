"""python -m mhar_jax.bench compare A.json B.json: B's times over A's, with intervals."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mhar_jax.bench import report as reports
from mhar_jax.bench.intervals import ratio_of_medians
from mhar_jax.bench.report import Report, Row
from mhar_jax.bench.tables import name_of
from mhar_jax.command_line import parser
from mhar_jax.errors import UserError

_HARDWARE = ("device", "platform", "device_count")


def main(arguments: Sequence[str], begun: float) -> int:
    """Runs the subcommand; nothing is timed."""
    p = parser("bench compare", "Time of B over time of A for every row that both have, with 95 % bootstrap intervals.")
    p.add_argument("first", metavar="A.json", help="a result of this command")
    p.add_argument("second", metavar="B.json", help="another of the same kind")
    p.add_argument("--different-hardware", action="store_true", help="compare even so")
    options = p.parse_args(list(arguments))
    first, second = reports.load(options.first), reports.load(options.second)
    check_comparable(first, second, different_hardware=options.different_hardware)
    console = Console(width=None if Console().is_terminal else 160)
    for label, path, report in (("A", options.first, first), ("B", options.second, second)):
        console.print(f"{label} {path}: {reports.describe(report.environment)}", highlight=False, soft_wrap=True)
    table = Table("what", "A ms", "B ms", "B / A", "95 %", "")
    found = ratios(first, second)
    for row in found:
        table.add_row(
            row["what"], *(f"{row[k]:.4g}" for k in ("a_ms", "b_ms", "ratio")), row["interval"], row["verdict"]
        )
    console.print(table)
    for line in left_over(first, second):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if not found:
        raise UserError("the two results have no row with times in common")
    return 0


def check_comparable(first: Report, second: Report, *, different_hardware: bool) -> None:
    """Raises UserError for results of different kinds, or of different hardware unless that is wanted."""
    if first.kind != second.kind:
        raise UserError(f"A and B must be of one kind, got {first.kind} and {second.kind}")
    if first.kind == "compile":
        raise UserError("results of `bench compile` hold no times to compare")
    a, b = ({k: r.environment[k] for k in _HARDWARE} for r in (first, second))
    if a != b and not different_hardware:
        words = " and ".join(f"{x['device_count']} x {x['device']} ({x['platform']})" for x in (a, b))
        raise UserError(f"A and B are of different hardware, {words}; --different-hardware compares them even so")


def ratios(first: Report, second: Report) -> list[dict[str, Any]]:
    """One entry for each row that both have a time for."""
    others = {_key(row): row for row in second.rows if row.samples_ms}
    found = []
    for row in first.rows:
        other = others.get(_key(row))
        if not row.samples_ms or other is None:
            continue
        ratio = ratio_of_medians(row.samples_ms, other.samples_ms)
        known = ratio.low == ratio.low
        verdict = "B faster" if ratio.high < 1 else "B slower" if ratio.low > 1 else "no difference seen"
        found.append(
            {
                "what": name_of(row),
                "a_ms": row.median_ms,
                "b_ms": other.median_ms,
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "interval": f"{ratio.low:.3f} to {ratio.high:.3f}" if known else "–",
                "verdict": verdict if known else "one sample",
            }
        )
    return found


def left_over(first: Report, second: Report) -> list[str]:
    """What cannot be compared, one line a row."""
    with_time = [{_key(row) for row in r.rows if row.samples_ms} for r in (first, second)]
    found = []
    for label, report, others in (("A", first, with_time[1]), ("B", second, with_time[0])):
        for row in report.rows:
            if not row.samples_ms:
                found.append(f"{label} has no time ({row.status}): {name_of(row)}")
            elif _key(row) not in others:
                found.append(f"only in {label}: {name_of(row)}")
    return found


def _key(row: Row) -> str:
    return json.dumps(row.of, sort_keys=True)
