"""How sure a ratio of medians is: bootstrap over samples."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 4999


class Ratio(NamedTuple):
    """A ratio and the interval that holds it `LEVEL` of the time."""

    value: float
    low: float
    high: float


def ratio_of_medians(first: Sequence[float], second: Sequence[float], *, paired: bool = False, seed: int = 0) -> Ratio:
    """median(second) / median(first), by the percentile bootstrap.

    A median of a dozen samples takes few values, for which the corrected (BCa) interval is not defined.

    Args:
      first, second: positive numbers.
      paired: sample i of both was taken in the same moment: resampled together.

    Returns:
      The ratio and its interval, which is NaN where there is one sample only.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    value = float(np.median(b) / np.median(a))
    if min(a.size, b.size) < 2:
        return Ratio(value, math.nan, math.nan)
    found = stats.bootstrap(
        (a, b),
        lambda x, y, axis=-1: np.median(y, axis) / np.median(x, axis),
        n_resamples=RESAMPLES,
        paired=paired,
        vectorized=True,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return Ratio(value, float(found.confidence_interval.low), float(found.confidence_interval.high))
