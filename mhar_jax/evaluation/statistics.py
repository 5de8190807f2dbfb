"""What a difference between two runs is worth: paired differences, exact tests, intervals, and how many items it takes.

Everything here is arithmetic on numbers that exist already; nothing knows about models.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

TAIL = 11  # evaluations of the paper's tail-mean (arXiv 2607.27230): steps 15,000 to 20,000, one every 500


class Estimate(NamedTuple):
    """A number and an interval that covers the truth `level` of the time."""

    value: float
    low: float
    high: float
    level: float = 0.95


class MeanStd(NamedTuple):
    """Of independent repetitions, for instance seeds."""

    mean: float
    std: float  # with n - 1 in the denominator; NaN for one
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


def tail_mean(losses: Sequence[float], count: int = TAIL) -> float:
    """Mean of the last `count` evaluations, or of all where there are fewer."""
    if not len(losses):
        raise ValueError("there is no evaluation to average")
    return float(np.mean(np.asarray(losses, np.float64)[-count:]))


def mean_std(values: Sequence[float]) -> MeanStd:
    """Mean and standard deviation over repetitions."""
    array = np.asarray(values, np.float64)
    return MeanStd(float(array.mean()), float(array.std(ddof=1)) if array.size > 1 else math.nan, array.size)


class McNemar(NamedTuple):
    """The exact paired test of two right-or-wrong results on the same items."""

    only_first: int  # items that only the first got right
    only_second: int
    p: float  # two-sided


def mcnemar(only_first: int, only_second: int) -> McNemar:
    """Exact McNemar test: under no difference, the discordant items fall either way like a fair coin."""
    discordant = only_first + only_second
    p = float(stats.binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0
    return McNemar(only_first, only_second, p)


def mcnemar_of_items(first: Sequence[float], second: Sequence[float]) -> McNemar:
    """`mcnemar` of per-item results, 0 or 1, in the same order."""
    a, b = _paired(first, second)
    if not set(np.unique([a, b])) <= {0.0, 1.0}:
        raise ValueError("McNemar's test needs results that are 0 or 1")
    return mcnemar(int(np.sum((a == 1) & (b == 0))), int(np.sum((a == 0) & (b == 1))))


def paired_bootstrap(
    first: Sequence[float], second: Sequence[float], *, level: float = 0.95, resamples: int = 9999, seed: int = 0
) -> Estimate:
    """Mean of second - first over items, with a bootstrap interval (BCa) over items.

    Where all differences are equal there is nothing to resample, and the interval is that one number.
    """
    a, b = _paired(first, second)
    return bootstrap_mean(b - a, level=level, resamples=resamples, seed=seed)


def bootstrap_mean(
    values: Sequence[float] | np.ndarray, *, level: float = 0.95, resamples: int = 9999, seed: int = 0
) -> Estimate:
    """Mean over items with a bootstrap interval (BCa)."""
    array = np.asarray(values, np.float64)
    return bootstrap_ratio(array, np.ones_like(array), level=level, resamples=resamples, seed=seed)


def bootstrap_ratio(
    numerators: Sequence[float] | np.ndarray,
    denominators: Sequence[float] | np.ndarray,
    *,
    level: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> Estimate:
    """sum(numerators) / sum(denominators) over items, for instance nats a token, with a bootstrap interval (BCa).

    A sum that is not finite has no interval (NaN).
    """
    a, b = _paired(numerators, denominators)
    ratio = lambda a, b, axis: a.sum(axis=axis) / b.sum(axis=axis)
    value = float(ratio(a, b, 0))
    if not math.isfinite(value):
        return Estimate(value, math.nan, math.nan, level)
    if np.ptp(a / b) == 0:
        return Estimate(value, value, value, level)
    found = stats.bootstrap(
        (a, b),
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        confidence_level=level,
        method="BCa" if a.size > 2 else "percentile",
        batch=max(1, 10_000_000 // a.size),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(value, float(found.low), float(found.high), level)


def standard_error(share: float, items: int) -> float:
    """Of an accuracy `share` measured on `items` independent items."""
    return math.sqrt(share * (1 - share) / items)


def items_needed(points: float, share: float = 0.5, *, level: float = 0.95, power: float = 0.8) -> int:
    """Items for two unpaired accuracies near `share` that differ by `points` percentage points to be told apart.

    The usual normal approximation: (z_level + z_power)² · 2 · share · (1 - share) / difference².
    """
    z = stats.norm.ppf(0.5 + level / 2) + stats.norm.ppf(power)
    return math.ceil(z**2 * 2 * share * (1 - share) / (points / 100) ** 2)


def size_note(share: float, items: int) -> str:
    """What an accuracy on so many items can and cannot show, in one sentence."""
    # Where no spread was seen, which is not to say that there is none, the error is that of two more items either way.
    smoothed = share in (0.0, 1.0)
    spread = (share * items + 2) / (items + 4) if smoothed else share
    error = 100 * standard_error(spread, items)
    points = max(1, round(1.96 * math.sqrt(2) * error))
    kind = "standard error with two right and two wrong items added" if smoothed else "standard error"
    return (
        f"{items} items: {100 * share:.1f} % ± {error:.1f} points ({kind}), so a difference of about {points} "
        f"points or less between two models is noise unless a paired test says otherwise; to see 3 points takes "
        f"{items_needed(3, spread):,} items"
    )


def _paired(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(f"paired results must be two equally long lists, got shapes {a.shape} and {b.shape}")
    return a, b
