"""A benchmark's result as JSON: what was measured, on what, when, by which command, and every sample."""

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mhar_jax.errors import UserError, one_line, writing

SCHEMA = 1
Status = Literal["ok", "wrong", "unsupported", "failed"]
STATUSES = ("ok", "wrong", "unsupported", "failed")
KINDS = ("routing", "training", "decode", "compile")
CPU_NOTE = (
    "This is a CPU: its times say nothing about a GPU or a TPU, and those of pallas_tpu and triton here are of an "
    "interpreter and mean nothing at all."
)
# What the environment of a result must hold.
_ENVIRONMENT: dict[str, Any] = {
    "device": str,
    "platform": str,
    "device_count": int,
    "versions": dict,
    "git": dict | None,
    "date": str,
    "command": list,
}
_PACKAGES = ("mhar-jax", "jax", "jaxlib", "flax", "optax", "jax-triton", "triton", "libtpu", "numpy")


@dataclass(frozen=True)
class Row:
    """One thing measured. Without status "ok" it has no samples and no times."""

    of: dict[str, Any]  # what it is: two reports' rows with equal `of` are compared
    status: Status = "ok"
    reason: str | None = None  # why it is not ok
    samples_ms: list[float] = field(default_factory=list)  # of one call, step or token
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        """Of the samples; NaN where there are none."""
        return statistics.median(self.samples_ms) if self.samples_ms else math.nan


@dataclass(frozen=True)
class Report:
    """The rows of one command."""

    kind: str
    environment: dict[str, Any]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    copy_tb_per_s: float | None = None  # measured in the same run, bytes read and bytes written

    def save(self, path: pathlib.Path) -> None:
        """Writes the JSON, whole or not at all.

        Raises:
          UserError: it cannot be written.
        """
        text = json.dumps(_finite({"schema": SCHEMA, **asdict(self)}), indent=1, allow_nan=False) + "\n"
        with writing("the benchmark's result", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name}.part")
            aside.write_text(text, encoding="utf-8")
            aside.replace(path)


def timed(of: Mapping[str, Any], samples_ms: Sequence[float], **metrics: Any) -> Row:
    """A row with its median and quartiles among the metrics."""
    quarters = statistics.quantiles(samples_ms, method="inclusive") if len(samples_ms) > 1 else [samples_ms[0]] * 3
    spread = {"median_ms": quarters[1], "quartile_low_ms": quarters[0], "quartile_high_ms": quarters[2]}
    return Row(dict(of), samples_ms=list(samples_ms), metrics={**spread, **metrics})


def refused(of: Mapping[str, Any], status: Status, reason: Any, **metrics: Any) -> Row:
    """A row without a time."""
    return Row(dict(of), status, one_line(reason, 400), metrics=metrics)


def _finite(value: Any) -> Any:
    """JSON has neither infinity nor NaN: null instead."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load(path: str | pathlib.Path) -> Report:
    """A saved report.

    Raises:
      UserError: not there, not JSON, or not a report of this schema.
    """
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as a benchmark's result: {one_line(error)}") from None
    if (problem := problem_of(content)) is not None:
        raise UserError(f"{path} is not a result of `python -m mhar_jax.bench`: {problem}")
    rows = [Row(**row) for row in content["rows"]]
    return Report(content["kind"], content["environment"], rows, content["notes"], content["copy_tb_per_s"])


def problem_of(content: Any) -> str | None:
    """What is wrong with the JSON of a report; None if nothing is."""
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        return f"its schema must be {SCHEMA}"
    fields = {"kind": str, "environment": dict, "rows": list, "notes": list}
    for name, kind in fields.items():
        if not isinstance(content.get(name), kind):
            return f"{name} must be a {kind.__name__}"
    if content["kind"] not in KINDS:
        return f"kind must be of {', '.join(KINDS)}"
    if (problem := _environment_problem(content["environment"])) is not None:
        return problem
    if "copy_tb_per_s" not in content:
        return "it lacks copy_tb_per_s"
    for row in content["rows"]:
        if not isinstance(row, dict) or row.keys() != {"of", "status", "reason", "samples_ms", "metrics"}:
            return "a row must have of, status, reason, samples_ms and metrics"
        kinds = {"of": dict, "samples_ms": list, "metrics": dict}
        if wrong := [name for name, kind in kinds.items() if not isinstance(row[name], kind)]:
            return f"{wrong[0]} of a row must be a {kinds[wrong[0]].__name__}"
        if row["status"] not in STATUSES:
            return f"a row's status must be of {', '.join(STATUSES)}"
        if row["status"] != "ok" and (row["samples_ms"] or not row["reason"]):
            return "a row that is not ok has a reason and no samples"
        if not all(isinstance(ms, float | int) and 0 < ms < math.inf for ms in row["samples_ms"]):
            return "samples must be positive numbers"
    return None


def _environment_problem(found: Mapping[str, Any]) -> str | None:
    """What is wrong with the environment of a report; None if nothing is."""
    if missing := _ENVIRONMENT.keys() - found.keys():
        return f"its environment lacks {', '.join(sorted(missing))}"
    for name, kind in _ENVIRONMENT.items():
        if not isinstance(found[name], kind):
            return f"{name} of its environment is {one_line(repr(found[name]), 60)}"
    git = found["git"]
    if git is not None and not (isinstance(git.get("revision"), str) and "modified" in git):
        return "git of its environment lacks revision or modified"
    return None if isinstance(found["versions"].get("jax"), str) else "versions of its environment lack jax"


def environment(command: Sequence[str], revision: str | None = None) -> dict[str, Any]:
    """What the numbers belong to.

    Args:
      command: the arguments of `python -m mhar_jax.bench`.
      revision: of the source, where git cannot tell it.
    """
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "device_count": jax.device_count(),
        "host_cpus": os.cpu_count(),
        "versions": {"python": platform.python_version(), **_versions()},
        "git": {"revision": revision, "modified": None} if revision else _git(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "mhar_jax.bench", *command],
    }


def describe(found: Mapping[str, Any]) -> str:
    """The environment on one line, for people."""
    git = found["git"]
    revision = "no git revision" if git is None else git["revision"][:12] + (" (modified)" if git["modified"] else "")
    count = f"{found['device_count']} x " if found["device_count"] > 1 else ""
    return (
        f"{count}{found['device']} ({found['platform']}), jax {found['versions']['jax']}, {revision}, {found['date']}"
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git() -> dict[str, Any] | None:
    """Revision of the source tree this package is in, and whether tracked files differ from it."""
    root = pathlib.Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        ask = lambda *words: subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
        return {
            "revision": ask("rev-parse", "HEAD"),
            "modified": bool(ask("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None
