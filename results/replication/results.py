"""The committed results: one JSON for each run, read as `mhar_jax.compare` reads run directories."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from mhar_jax.config.load import make_config, to_yaml
from mhar_jax.errors import UserError
from mhar_jax.evaluation.runs import Comparison, Evaluation, Run, compare_runs, reasons_against_pairing
from results.replication.plan import Planned, plan

RUNS = pathlib.Path(__file__).parent / "runs"


@dataclasses.dataclass(frozen=True)
class Result:
    """A run of the plan that has been made."""

    planned: Planned
    values: dict[str, Any]  # the JSON
    run: Run

    @property
    def speed(self) -> float | None:
        """Median tokens a second while it trained; None where it was never read."""
        found = self.values["tokens_per_s"]
        return None if found is None else float(found["median"])

    @property
    def train_seconds(self) -> float | None:
        """All steps at the median speed: compilation, evaluations and saves are left out."""
        config = self.run.config
        return None if self.speed is None else config.steps * config.batch_size * config.seq_len / self.speed

    @property
    def diverged(self) -> str | None:
        """What the run said when its loss stopped being a number; None for a run that ended."""
        return self.values.get("diverged")


def read_results(directory: pathlib.Path = RUNS) -> dict[str, Result]:
    """Results by name, in the order of the plan.

    Raises:
      UserError: a file is no result, or is of no run of the plan.
    """
    known = {run.name: run for run in plan()}
    found: dict[str, Result] = {}
    for file in sorted(directory.glob("*.json")):
        if file.stem not in known:
            raise UserError(f"{file} is of no run of the plan; its runs are listed by results.replication.run --list")
        try:
            found[file.stem] = _read(known[file.stem], json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is not the result of a run ({error})") from None
    return {name: found[name] for name in known if name in found}


def _read(planned: Planned, values: dict[str, Any]) -> Result:
    evaluations = [Evaluation(e["step"], e["val_loss"], e["val_tokens"]) for e in values["evaluations"]]
    run = Run(planned.name, make_config(values["config"]), evaluations, values["data"]["fingerprint"])
    return Result(planned, values, run)


def compared(baseline: Iterable[Result], others: Iterable[Result]) -> list[Comparison]:
    """`others` against `baseline`, each of one method, seed by seed; only pairs that saw the same batches.

    Raises:
      UserError: a pair is not paired, by `compare`'s rules or by the tokens of its batches.
    """
    first, second = [r for r in baseline if not r.diverged], [r for r in others if not r.diverged]
    by_name = {r.planned.name: r for r in (*first, *second)}
    seeds = {r.planned.seed for r in first} & {r.planned.seed for r in second}
    pair_up: Callable[[list[Result]], list[Run]] = lambda rs: [r.run for r in rs if r.planned.seed in seeds]
    if not seeds:
        return []
    comparisons = compare_runs([*pair_up(first), *pair_up(second)])
    for comparison in comparisons:
        for d in comparison.differences:
            reasons = list(reasons_against_pairing(d.first, d.second))
            mine, yours = (by_name[run.path].values["batches"] for run in (d.first, d.second))
            if mine != yours:
                reasons.append("the tokens of their batches differ")
            if reasons:
                raise UserError(f"{d.first.path} and {d.second.path} are not paired: {'; '.join(reasons)}")
    return comparisons


def write_run_directories(results: Iterable[Result], target: pathlib.Path) -> None:
    """Run directories (without checkpoints) for `python -m mhar_jax.compare`."""
    for result in results:
        directory = target / result.planned.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(to_yaml(result.run.config), encoding="utf-8")
        (directory / "data.json").write_text(json.dumps(result.values["data"], indent=1) + "\n", encoding="utf-8")
        lines = [*result.values["train"], *result.values["evaluations"]]
        lines.sort(key=lambda line: (line["step"], "val_loss" in line))
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
