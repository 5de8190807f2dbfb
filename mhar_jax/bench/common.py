"""What the subcommands share: options, and what is done with a result."""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mhar_jax.bench import report as reports
from mhar_jax.errors import UserError, writing
from mhar_jax.platforms import prefer_present_hardware


@dataclass(frozen=True)
class Clock:
    """Since when a command runs, and when it is to begin nothing new; readings of `time.monotonic`."""

    begun: float
    deadline: float | None = None  # None: never

    def seconds(self) -> float:
        """Since then."""
        return round(time.monotonic() - self.begun, 1)

    def over(self) -> bool:
        """Whether it is too late to begin."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def say(self, text: str) -> None:
        """What begins now, and when that is."""
        print(f"{self.seconds():6.1f} s  {text}", flush=True)


def add_common(p: argparse.ArgumentParser) -> None:
    """--out and --revision."""
    p.add_argument("--out", metavar="DIR", help="write the JSON, the table (Markdown) and the pictures there")
    p.add_argument("--revision", metavar="TEXT", help="revision of the source to record where git cannot tell it")


def names(text: str | None, option: str, known: Sequence[str] | None = None) -> list[str]:
    """A comma-separated list.

    Raises:
      UserError: empty, a name twice, or one that is not known.
    """
    found = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not found or len(set(found)) < len(found):
        raise UserError(f"--{option} must be different names separated by commas, got {text!r}")
    for name in found:
        if known is not None and name not in known:
            raise UserError(f"--{option} must be of {', '.join(known)}, got {name!r}")
    return found


LARGEST = 2**31 - 1  # of sizes: as of those in a config


def integers(text: str, option: str) -> list[int]:
    """A comma-separated list of positive integers.

    Raises:
      UserError: it is not one.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1 or max(found) > LARGEST:
        raise UserError(f"--{option} must be positive integers separated by commas, of 31 bits, got {text!r}")
    return found


def overrides(given: Sequence[str]) -> dict[str, list[str]]:
    """What `--set` says, as part of what a row is of: with other fields it is another thing."""
    return {"set": sorted(given)} if given else {}


def at_least(option: str, value: int, least: int) -> None:
    """Raises UserError below, and beyond 31 bits."""
    if value < least:
        raise UserError(f"--{option} must be at least {least}, got {value}")
    if value > LARGEST:
        raise UserError(f"--{option} must be at most {LARGEST}, got {value}")


def start() -> list[str]:
    """Chooses the platform; says what the machine's times are worth. The notes of the report."""
    prefer_present_hardware()
    import jax

    notes = [reports.CPU_NOTE] if jax.default_backend() == "cpu" else []
    for note in notes:
        print(note, file=sys.stderr)
    return notes


def check_out(out: str | None, what: str = "the benchmark's result") -> None:
    """Makes the folder and tries it, before minutes of measuring.

    Raises:
      UserError: it cannot be made or written to.
    """
    if out is not None:
        with writing(what, out):
            pathlib.Path(out).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out).close()


def keep(report: reports.Report, out: str | None) -> None:
    """Writes what has been measured so far, in case the command is ended before the rest."""
    if out:
        note = "not complete: the command had not ended"
        dataclasses.replace(report, notes=[*report.notes, note]).save(pathlib.Path(out) / f"{report.kind}.json")


def finish(report: reports.Report, out: str | None, wall_seconds: Mapping[str, float]) -> int:
    """Prints the table and the notes, writes the files. 1 if a row is wrong or failed, else 0.

    Args:
      report: of one part.
      out: a folder, or None for no files.
      wall_seconds: of the part, and of all before it or around it.
    """
    from mhar_jax.bench import figures, tables

    report = dataclasses.replace(report, environment={**report.environment, "wall_seconds": dict(wall_seconds)})
    tables.show(report)
    if out:
        folder = pathlib.Path(out)
        path = folder / f"{report.kind}.json"
        report.save(path)
        written = [path, tables.write_markdown(report, folder), *figures.draw(report, folder)]
        print("wrote " + ", ".join(str(p) for p in written))
    return int(any(row.status in ("wrong", "failed") for row in report.rows))
