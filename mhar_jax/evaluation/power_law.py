"""Compute-equivalent gain: how much more compute the baseline would need to reach another model's loss."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from mhar_jax.errors import UserError
from mhar_jax.evaluation.statistics import Estimate

WARNING = (
    "a ladder of fixed steps trains its larger models on fewer tokens a parameter, so its baseline points lie above "
    "the compute-optimal curve, the fitted curve is too flat, and the gain comes out too large"
)


class PowerLaw(NamedTuple):
    """L(C) = amplitude · (C / unit)^-exponent + floor."""

    amplitude: float
    exponent: float
    floor: float
    unit: float  # the smallest compute fitted
    residual: float  # root mean square of the fit, in nats

    def loss(self, compute: float) -> float:
        """The loss at a compute."""
        return self.amplitude * (compute / self.unit) ** -self.exponent + self.floor

    def compute(self, loss: float) -> float:
        """The compute that reaches a loss; infinite at or below the floor."""
        if loss <= self.floor:
            return math.inf
        with np.errstate(over="ignore"):
            return float(self.unit * np.exp(-np.log((loss - self.floor) / self.amplitude) / self.exponent))


def fit_power_law(
    compute: Sequence[float] | np.ndarray,
    loss: Sequence[float] | np.ndarray,
    *,
    floor: float | None = None,
    near: PowerLaw | None = None,
) -> PowerLaw:
    """Least squares of L = A·C^-alpha + E with A, alpha > 0 and 0 <= E < min(L).

    Args:
      compute: of at least three points; any unit.
      loss: nats.
      floor: E, if it is to be fixed; two points suffice then.
      near: a law to start from; None: several starts, since the valley is long and flat.

    Raises:
      UserError: too few points, or compute that is not positive or all the same.
    """
    c, y = np.asarray(compute, np.float64), np.asarray(loss, np.float64)
    need = 3 if floor is None else 2
    if c.shape != y.shape or c.size < need:
        raise UserError(f"a power law needs at least {need} points of compute and loss, got {c.size} and {y.size}")
    if c.min() <= 0 or c.min() == c.max():
        raise UserError(f"compute must be positive and differ between points, got {c.tolist()}")
    x, top = np.log(c / c.min()), y.min()

    def parts(z: np.ndarray) -> tuple[np.ndarray, float, float, float]:
        alpha = float(np.exp(z[0]))
        e = float(floor) if floor is not None else top / (1 + float(np.exp(-z[1])))  # 0 < E < min(L)
        basis = np.exp(-alpha * x)
        amplitude = max(float(basis @ (y - e) / (basis @ basis)), 1e-12)  # the best one for these two
        return amplitude * basis + e - y, amplitude, alpha, e

    starts = [(alpha, share) for alpha in (0.03, 0.1, 0.3, 1.0, 3.0) for share in (0.05, 0.5, 0.95)]
    if near is not None:
        starts = [(near.exponent, near.floor / top)]
    size = 2 if floor is None else 1
    low, high = np.array([math.log(1e-3), -12.0])[:size], np.array([math.log(30.0), 12.0])[:size]
    found = None
    for alpha, share in starts:
        share = min(max(share, 1e-5), 1 - 1e-5)
        start = np.clip([math.log(alpha), math.log(share / (1 - share))][:size], low + 1e-6, high - 1e-6)
        fit = least_squares(lambda z: parts(z)[0], start, bounds=(low, high), xtol=1e-12, ftol=1e-14, gtol=1e-14)
        if found is None or fit.cost < found.cost:
            found = fit
    assert found is not None
    residual, amplitude, exponent, e = parts(found.x)
    return PowerLaw(amplitude, exponent, float(e), float(c.min()), float(np.sqrt(np.mean(residual**2))))


class Gain(NamedTuple):
    """Compute-equivalent gains of the points of one model over a fitted baseline."""

    law: PowerLaw
    factors: list[Estimate]  # one a point; infinite where the loss is below the baseline's floor
    warning: str


def compute_equivalent_gain(
    compute: Sequence[float],
    baseline: Sequence[float],
    losses: Sequence[float],
    *,
    sigma: float,
    floor: float | None = None,
    draws: int = 300,
    level: float = 0.9,
    seed: int = 0,
) -> Gain:
    """The factor by which the baseline's compute would have to grow to reach `losses`, point by point.

    factor = C* / C with L_baseline(C*) = loss, both on the fitted law of the baseline.

    Args:
      compute: of the points.
      baseline, losses: of the two models at these computes, nats.
      sigma: standard deviation of one loss (seeds, or the rounding of a published table); every loss is drawn anew
        with it, the law fitted again, and the interval is that of the factors found.
      floor: E, if fixed.
      draws: of the interval, at `level`.

    Raises:
      UserError: see `fit_power_law`; or the baseline's loss does not fall with compute.
    """
    c, base, other = (np.asarray(v, np.float64) for v in (compute, baseline, losses))
    law = fit_power_law(c, base, floor=floor)
    least, most = base[c == c.min()].mean(), base[c == c.max()].mean()
    if not most < least:
        raise UserError(
            f"the baseline's loss does not fall with compute: {least:.4f} at {c.min():.3g} and {most:.4f} at "
            f"{c.max():.3g}, so no compute-equivalent gain can be read from it"
        )
    factor = lambda law, y: np.array([law.compute(v) / at for v, at in zip(y, c, strict=True)])
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(draws):
        again = fit_power_law(c, base + sigma * rng.standard_normal(base.shape), floor=floor, near=law)
        drawn.append(factor(again, other + sigma * rng.standard_normal(other.shape)))
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0, method="nearest")
    rows = zip(factor(law, other), low, high, strict=True)
    factors = [Estimate(float(value), float(a), float(b), level) for value, a, b in rows]
    return Gain(law, factors, WARNING)
