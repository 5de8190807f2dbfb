"""Two evaluations of the same items: an exact test where items are right or wrong, else a paired bootstrap."""

import dataclasses
import math
from collections.abc import Iterator

from mhar_jax.evaluation.items import Item, Results, Weighted
from mhar_jax.evaluation.statistics import (
    Estimate,
    McNemar,
    bootstrap_ratio,
    mcnemar_of_items,
    paired_bootstrap,
    size_note,
)

_ONE = "there is one item, which says nothing about others"
_DECIDING = ("num_fewshot", "window", "stride", "prefix_token")


def reasons_against_pairing(a: Results, b: Results) -> list[str]:
    """Why the items of two evaluations are not the same questions, one short clause each."""
    reasons = [
        f"{name} is {a.settings.get(name)} and {b.settings.get(name)}"
        for name in _DECIDING
        if a.settings.get(name) != b.settings.get(name)
    ]
    mine, yours = (_by_place(results) for results in (a, b))
    if not mine or not yours:
        return [*reasons, "there are no items"]
    for results, places in ((a, mine), (b, yours)):
        if twice := len(results.items) - len(places):
            reasons.append(f"{twice} items of {results.checkpoint} are there twice")
    if only := mine.keys() ^ yours.keys():
        reasons.append(f"{len(only)} items are in one of them only, for instance {' '.join(map(str, min(only)))}")
    elif other := [place for place, item in mine.items() if item.content != yours[place].content]:
        reasons.append(f"{len(other)} items are other questions, for instance {' '.join(map(str, other[0]))}")
    return reasons


@dataclasses.dataclass(frozen=True)
class ItemComparison:
    """One metric of one task."""

    task: str
    metric: str
    count: int
    first: float  # means; of weighted items, nats per weight
    second: float
    test: McNemar | None = None  # where every item is 0 or 1
    difference: Estimate | None = None  # else
    refusal: str | None = None  # else: why there is no test

    @property
    def p(self) -> float | None:
        """Two-sided p-value of the exact test."""
        return None if self.test is None else self.test.p

    def sentence(self) -> str:
        """The result on one line."""
        if self.refusal is not None:
            return f"{self.task} {self.metric}: {self.refusal}, so there is no test"
        name = f"{self.task} {self.metric}: {self.first:.4f} to {self.second:.4f}"
        if self.test is not None:
            right = f"{self.test.only_second} against {self.test.only_first} discordant items"
            verdict = f"{name}, {right}, exact McNemar p = {self.test.p:.2g}"
            return (
                verdict if self.test.p < 0.05 else f"{verdict}: not significant. {size_note(self.second, self.count)}"
            )
        assert self.difference is not None
        d = self.difference
        verdict = "" if d.low > 0 or d.high < 0 else ": not significant"
        return (
            f"{name}, difference {d.value:+.4f}, {d.low:+.4f} to {d.high:+.4f} in {100 * d.level:.0f} % of paired "
            f"bootstraps over {self.count} items{verdict}"
        )


def compare_items(a: Results, b: Results) -> Iterator[ItemComparison]:
    """Every metric that both have, task by task; the items must be the same (`reasons_against_pairing`)."""
    mine, yours = (_by_place(results) for results in (a, b))

    def test(task: str, metric: str, places: list[tuple[str, int]]) -> ItemComparison:
        first, second = ([of[place].metrics[metric] for place in places] for of in (mine, yours))
        bad = [
            (results.checkpoint, place)
            for results, values in ((a, first), (b, second))
            for place, value in zip(places, values, strict=True)
            if not all(map(math.isfinite, value if isinstance(value, tuple) else (value,)))
        ]
        no_test = lambda why: ItemComparison(task, metric, len(places), math.nan, math.nan, refusal=why)
        if bad:
            (checkpoint, (_, number)), count = bad[0], len(bad)
            return no_test(f"{count} values are not finite, for instance item {number} of {checkpoint}")
        x, y = ([-v.log_likelihood for v in values if isinstance(v, Weighted)] for values in (first, second))
        if x or y:
            weights, others = ([v.weight for v in vs if isinstance(v, Weighted)] for vs in (first, second))
            if len(weights) < len(places) or weights != others:
                return no_test("the two count other words or bytes")
            if not min(weights) > 0:
                return no_test("some items have no words or bytes")
            if len(places) < 2:
                return no_test(_ONE)
            means = sum(x) / sum(weights), sum(y) / sum(weights)
            gap = bootstrap_ratio([v - u for u, v in zip(x, y, strict=True)], weights)
            unit = "word" if metric.startswith("word") else "byte"
            return ItemComparison(task, f"{metric} (nats a {unit})", len(places), *means, difference=gap)
        x, y = ([v for v in values if not isinstance(v, Weighted)] for values in (first, second))
        means = sum(x) / len(x), sum(y) / len(y)
        if {*x, *y} <= {0.0, 1.0}:
            return ItemComparison(task, metric, len(places), *means, test=mcnemar_of_items(x, y))
        if len(places) < 2:
            return no_test(_ONE)
        return ItemComparison(task, metric, len(places), *means, difference=paired_bootstrap(x, y))

    for task in dict.fromkeys(item.task for item in a.items):
        places = [place for place in mine if place[0] == task]
        for metric in mine[places[0]].metrics:
            if all(metric in of[place].metrics for of in (mine, yours) for place in places):
                yield test(task, metric, places)


def _by_place(results: Results) -> dict[tuple[str, int], Item]:
    return {(item.task, item.number): item for item in results.items}
