"""Differences between the runs of two methods, and what may be said of them."""

from mhar_jax.evaluation.statistics import mean_std
from results.replication.plan import SEEDS
from results.replication.results import Result, compared

NOT_RUN = "not run"
Results = dict[str, Result]


def of(results: Results, width: int, variant: str, *, middle: str = "") -> list[Result]:
    """The runs of a method that there are, by seed."""
    names = [f"d{width}-{variant}{middle}-s{seed}" for seed in SEEDS]
    return [results[name] for name in names if name in results]


def half_rate(results: Results, width: int) -> list[Result]:
    """The single head at half the preset's rate."""
    return of(results, width, "attention_residuals", middle="-lr-x0.5")


class Effect:
    """Paired differences of tail-means, seed by seed."""

    def __init__(self, baseline: list[Result], others: list[Result]):
        pairs = [d for c in compared(baseline, others) for d in c.differences]
        self.by_seed = [d.tail for d in pairs]
        self.noise = [d.by_evaluation.std for d in pairs]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return mean_std(self.by_seed).mean

    @property
    def apart(self) -> bool:
        """Two seeds or more agree in sign, each by more than twice what one evaluation moves the difference."""
        signs = {d > 0 for d in self.by_seed}
        clear = all(abs(d) > 2 * n for d, n in zip(self.by_seed, self.noise, strict=True))
        return len(self.by_seed) > 1 and len(signs) == 1 and clear

    def cell(self) -> str:
        """For a table: the mean, each seed, and the noise of a single evaluation."""
        if not self.by_seed:
            return NOT_RUN
        noise = f"one evaluation ±{max(self.noise):.3f}"
        if len(self.by_seed) == 1:
            return f"{self.mean:+.4f} (one seed; {noise})"
        return f"{self.mean:+.4f} ({' / '.join(f'{d:+.4f}' for d in self.by_seed)}; {noise})"

    def word(self, lower: str = "lower", higher: str = "higher") -> str:
        """What may be said of it."""
        if not self.by_seed:
            return NOT_RUN
        direction = lower if self.mean < 0 else higher
        if len(self.by_seed) == 1:
            return f"{direction} at the one seed run: not told apart"
        return f"{direction} at every seed" if self.apart else "not told apart"
