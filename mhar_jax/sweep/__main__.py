"""Command line: `python -m mhar_jax.sweep run DIR ...`, `python -m mhar_jax.sweep report DIR`."""

import pathlib
import sys
from collections.abc import Sequence

from mhar_jax.config.load import describe_fields
from mhar_jax.errors import UserError, command

USAGE = """\
usage: python -m mhar_jax.sweep run DIR [PRESET or FILE] --grid.FIELD=A,B ... [--FIELD=VALUE ...]
                                        [--jobs=N | --devices=0,1,...]
       python -m mhar_jax.sweep report DIR [--baseline="variant=additive"]

run     trains every combination of the grid's values, each in a process and a run directory DIR/cells/NAME of its own;
        run again, it continues what is not done (`run DIR` alone suffices). At one seed all cells see the same batches.
report  writes DIR/report: tables and pictures (HTML, Markdown, JSON, PNG, SVG) of the cells that are done.

  --grid.FIELD strings     values of a config field, separated by commas; e.g. --grid.model.variant=additive,mhar
                           --grid.model.routing_heads=1,2,4 --grid.optimizer.peak_lr=5e-4,1e-3 --grid.seed=1,2,3
  --FIELD value            the same for every cell, as for train.py; PRESET is a file of configs/ (default: tiny)
  --jobs int = 1           cells at once
  --devices numbers = none run one cell a device at a time, on these accelerators
  --baseline string = none group that others are compared with; none: the additive variant, else the first group

Fields:
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command: 0, 1 where a cell failed, 2 for wrong input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or "-h" in given or "--help" in given:
        print(USAGE + "\n".join(f"  {f.name} {f.type} = {f.default}\n      {f.text}" for f in describe_fields()))
        return 0
    action, *rest = given
    if action not in ("run", "report"):
        raise UserError(f"the first argument must be run or report, got {action!r}")
    if not rest or rest[0].startswith("--"):
        raise UserError(f"{action} needs a directory: python -m mhar_jax.sweep {action} DIR")
    directory = pathlib.Path(rest[0]).expanduser()
    own, grid, others = _split(rest[1:])
    return (_run if action == "run" else _report)(directory, own, grid, others)


def _run(directory: pathlib.Path, own: dict[str, str], grid: dict[str, list[str]], others: list[str]) -> int:
    from mhar_jax.sweep.grid import create, make_cells, open_sweep
    from mhar_jax.sweep.run import run_sweep
    from mhar_jax.training.main import parse

    if "baseline" in own:
        raise UserError("--baseline belongs to report")
    if "jobs" in own and "devices" in own:
        raise UserError("give --jobs or --devices, not both")
    jobs = own.get("jobs", "1")
    if not jobs.isdecimal() or int(jobs) < 1:
        raise UserError(f"--jobs must be a positive integer, got {jobs!r}")
    devices = own["devices"].split(",") if "devices" in own else []
    if not all(d.isdecimal() for d in devices) or len(set(devices)) < len(devices):
        raise UserError(f"--devices must be different numbers separated by commas, got {own['devices']!r}")
    if grid or others:
        if not grid:
            raise UserError("a sweep needs at least one --grid.FIELD=VALUE,VALUE")
        file, overrides = parse(others)
        sweep = create(directory, make_cells(file, overrides, grid), grid)
    else:
        sweep = open_sweep(directory)
    failed = run_sweep(sweep, jobs=int(jobs), devices=devices, say=lambda text: print(text, flush=True))
    for sentence in failed:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if failed else 0


def _report(directory: pathlib.Path, own: dict[str, str], grid: dict[str, list[str]], others: list[str]) -> int:
    from mhar_jax.sweep.grid import open_sweep
    from mhar_jax.sweep.report import write_report

    if grid or others or own.keys() - {"baseline"}:
        raise UserError("report takes a directory and --baseline only")
    files = write_report(open_sweep(directory), baseline=own.get("baseline"))
    print(next(f for f in files if f.name == "report.md").read_text(encoding="utf-8"))
    print(f"report: {files[0]}")
    return 0


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """Options of the sweep, the grid, and what is for the config."""
    own: dict[str, str] = {}
    grid: dict[str, list[str]] = {}
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, separator, value = argument.removeprefix("--").partition("=")
        ours = argument.startswith("--") and (name in ("jobs", "devices", "baseline") or name.startswith("grid."))
        if not ours:
            others.append(argument)
            continue
        if not separator:
            value = next(rest, "")
            if not value or value.startswith("--"):
                raise UserError(f"--{name} needs a value, as --{name}=VALUE")
        field = name.removeprefix("grid.")
        if field in grid or name in own:
            raise UserError(f"--{name} is given twice")
        if name.startswith("grid."):
            grid[field] = [v.strip() for v in value.split(",")]
        else:
            own[name] = value
    return own, grid, others


if __name__ == "__main__":
    sys.exit(main())
