"""What the cells of a sweep measured, and how much of it is noise."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from mhar_jax.evaluation.statistics import TAIL, MeanStd, mean_std, tail_mean
from mhar_jax.sweep.grid import Cell, are_paired, describe

WINDOW = 0.75  # the tail-mean looks no further back than this share of the steps: in the paper, step 15,000 of 20,000


@dataclasses.dataclass(frozen=True)
class Run:
    """A cell that is done."""

    cell: Cell
    steps: np.ndarray  # int: of the evaluations
    losses: np.ndarray  # held-out loss, nats a token
    tail: float  # the mean of the last evaluations
    tail_count: int  # how many those are

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.cell.config.seed


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ in the seed only."""

    values: tuple[tuple[str, Any], ...]
    runs: list[Run]

    @property
    def name(self) -> str:
        """Its values as words."""
        return describe(self.values)

    @property
    def tail(self) -> MeanStd:
        """Mean and standard deviation of the tail-means over seeds."""
        return mean_std([run.tail for run in self.runs])

    def value(self, field: str) -> Any:
        """The value of a grid field; None where it is not in the grid or the variant has none."""
        return dict(self.values).get(field)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Tail-means of one group minus another's, seed by seed."""

    mean: float
    std: float  # over seeds; NaN for one
    seeds: int
    low: float  # 95 % interval of the mean (Student's t over seeds); NaN for one seed
    high: float

    @property
    def resolved(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0

    @property
    def verdict(self) -> str:
        """What the noise lets one say."""
        if not self.seeds:
            return "not paired: no seed in common on the same data"
        if self.seeds == 1:
            return "not resolved: one seed says nothing about the noise"
        if self.resolved:
            return "resolved: " + ("worse" if self.mean > 0 else "better")
        return "not resolved: the interval holds 0"


def read_validation(path: pathlib.Path) -> list[tuple[int, float]]:
    """Step and held-out loss of every evaluation of a run directory, in order; a repeated step counts once."""
    file = path / "metrics.jsonl"
    found: dict[int, float] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []:
        try:
            values = json.loads(line)
            found[int(values["step"])] = float(values["val_loss"])
        except (ValueError, KeyError, TypeError):
            continue
    return sorted(found.items())


def read_run(cell: Cell, path: pathlib.Path) -> Run | None:
    """The run of a cell; None where it has not been evaluated at its last step."""
    validation = read_validation(path)
    if not validation or validation[-1][0] != cell.config.steps:
        return None
    steps, losses = np.array([s for s, _ in validation]), np.array([x for _, x in validation])
    count = min(TAIL, int((steps >= WINDOW * cell.config.steps).sum()))
    return Run(cell, steps, losses, tail_mean(losses.tolist(), count), count)


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Runs by their values without the seed, in the order of the grid."""
    found: dict[tuple[tuple[str, Any], ...], list[Run]] = {}
    for run in runs:
        found.setdefault(run.cell.group, []).append(run)
    return [Group(values, sorted(members, key=lambda r: r.seed)) for values, members in found.items()]


def difference(group: Group, other: Group, *, comparisons: int = 1) -> Difference:
    """`group` minus `other`, over the seeds for which the runs are paired.

    The interval is at 95 % for all of so many comparisons together (Bonferroni).
    """
    pairs = [
        run.tail - base.tail
        for run in group.runs
        for base in other.runs
        if are_paired(run.cell.config, base.cell.config)
    ]
    n = len(pairs)
    if not n:
        return Difference(math.nan, math.nan, 0, math.nan, math.nan)
    mean, std, _ = mean_std(pairs)
    half = float(stats.t.ppf(1 - 0.025 / comparisons, n - 1)) * std / math.sqrt(n) if n > 1 else math.nan
    return Difference(mean, std, n, mean - half, mean + half)


@dataclasses.dataclass(frozen=True)
class HeadCurve:
    """The loss against the number of routing heads, everything else equal."""

    rest: tuple[tuple[str, Any], ...]  # the other values of these groups
    groups: list[Group]  # by rising H
    heads: list[int]
    best: int  # index of the lowest tail-mean
    against_best: list[Difference]  # each minus the best, at 95 % for all of them together

    @property
    def verdict(self) -> str:
        """Whether the curve is a U, as far as the noise lets one say."""
        worse = [h for h, d in zip(self.heads, self.against_best, strict=True) if d.resolved and d.mean > 0]
        open_ = [
            h
            for i, (h, d) in enumerate(zip(self.heads, self.against_best, strict=True))
            if i != self.best and not d.resolved
        ]
        words = f"lowest at H = {self.heads[self.best]}"
        if worse:
            words += f"; worse than that beyond the noise: H = {', '.join(map(str, worse))}"
        if open_:
            words += f"; not told apart from it: H = {', '.join(map(str, open_))}"
        inside = 0 < self.best < len(self.heads) - 1
        ends = inside and self.heads[0] in worse and self.heads[-1] in worse
        if len(self.heads) < 3:
            return words + ". Fewer than three values of H show no shape."
        if ends:
            return words + ". A U: resolved, both ends are worse than a point between them."
        if inside:
            return words + ". A U: not resolved, an end is not told apart from the lowest point."
        return words + ". No U: the lowest point is at an end of the range."


def head_curves(groups: Sequence[Group]) -> list[HeadCurve]:
    """One for each setting of the other fields that has runs at two values of H or more."""
    field = "model.routing_heads"
    found: dict[tuple[tuple[str, Any], ...], list[Group]] = {}
    for group in groups:
        if group.value(field) is not None:
            rest = tuple((name, value) for name, value in group.values if name != field)
            found.setdefault(rest, []).append(group)
    curves = []
    for rest, members in found.items():
        if len(members) < 2:
            continue
        members = sorted(members, key=lambda g: g.value(field))
        best = int(np.argmin([g.tail.mean for g in members]))
        # The lowest is chosen after the fact, which flatters it: one interval for all comparisons together.
        against = [difference(g, members[best], comparisons=len(members) - 1) for g in members]
        curves.append(HeadCurve(rest, members, [int(g.value(field)) for g in members], best, against))
    return curves


def best_by_variant(groups: Sequence[Group]) -> dict[str, Group]:
    """For each variant the group with the lowest tail-mean, as the paper reports its best learning rate."""
    best: dict[str, Group] = {}
    for group in groups:
        variant = group.runs[0].cell.config.model.variant
        if variant not in best or group.tail.mean < best[variant].tail.mean:
            best[variant] = group
    return best
