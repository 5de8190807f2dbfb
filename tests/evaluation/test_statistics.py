"""Numbers with known answers: the paper's, textbooks', and closed forms."""

import math

import numpy as np
import pytest
from scipy import stats

from mhar_jax.errors import UserError
from mhar_jax.evaluation.power_law import compute_equivalent_gain, fit_power_law
from mhar_jax.evaluation.statistics import (
    bootstrap_ratio,
    items_needed,
    mcnemar,
    mcnemar_of_items,
    mean_std,
    paired_bootstrap,
    size_note,
    standard_error,
    tail_mean,
)


def test_the_papers_p_values():
    """PAPER.md: GSM8K 123 against 81 discordant items, p = 0.004; GPQA 27 against 13, p = 0.038."""
    assert round(mcnemar(123, 81).p, 3) == 0.004
    assert round(mcnemar(27, 13).p, 3) == 0.038
    assert mcnemar(81, 123).p == mcnemar(123, 81).p


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (0, 5, 2 / 2**5),  # two-sided: twice the one tail
        (1, 9, 2 * (1 + 10) / 2**10),
        (2, 8, 2 * (1 + 10 + 45) / 2**10),
        (4, 4, 1.0),
        (0, 0, 1.0),
        (0, 1, 1.0),
    ],
)
def test_mcnemar_by_counting_coin_tosses(b, c, p):
    assert mcnemar(b, c).p == pytest.approx(p, rel=1e-12)


def test_mcnemar_of_items_counts_discordant_items():
    first, second = [1, 1, 1, 0, 0, 1, 0], [1, 0, 0, 1, 0, 0, 0]
    assert mcnemar_of_items(first, second) == mcnemar(3, 1)
    with pytest.raises(ValueError, match="0 or 1"):
        mcnemar_of_items([0.5, 1], [0, 1])
    with pytest.raises(ValueError, match="equally long"):
        mcnemar_of_items([1], [0, 1])


def test_tail_mean_is_of_the_last_eleven():
    losses = [9.0, *range(11)]
    assert tail_mean(losses) == 5.0
    assert tail_mean([1.0, 2.0]) == 1.5
    with pytest.raises(ValueError, match="no evaluation"):
        tail_mean([])


def test_mean_and_standard_deviation_over_seeds():
    """Three seeds: n - 1 in the denominator."""
    found = mean_std([-0.069, -0.071, -0.073])
    assert found.mean == pytest.approx(-0.071)
    assert found.std == pytest.approx(0.002)
    assert found.count == 3
    assert math.isnan(mean_std([1.0]).std)


def test_paired_bootstrap_sees_what_an_unpaired_one_would_not():
    rng = np.random.default_rng(0)
    a = rng.normal(0, 10, 300)  # items differ far more than the two runs
    b = a + 0.5 + rng.normal(0, 1, 300)
    found = paired_bootstrap(a, b)
    assert found.value == pytest.approx(np.mean(b - a))
    assert 0.3 < found.low < found.value < found.high < 0.7
    normal = stats.t.interval(0.95, 299, np.mean(b - a), stats.sem(b - a))
    np.testing.assert_allclose([found.low, found.high], normal, atol=0.02)
    assert paired_bootstrap([1.0, 2.0], [1.5, 2.5]).low == 0.5  # nothing to resample


def test_bootstrap_of_a_ratio_weighs_documents_by_their_tokens():
    nll, tokens = np.array([10.0, 300.0, 20.0, 55.0]), np.array([10, 100, 10, 50])
    found = bootstrap_ratio(nll, tokens)
    assert found.value == pytest.approx(385 / 170)
    assert found.low < found.value < found.high


def test_an_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        sample = rng.exponential(1.0, 40)
        found = bootstrap_ratio(sample, np.ones(40), resamples=300, seed=trial)
        hits += found.low <= 1.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99  # 0.95, less for skew, give or take three standard errors of 0.015


def test_sample_sizes():
    assert standard_error(0.5, 100) == pytest.approx(0.05)
    # Two proportions, Fleiss: (1.96 + 0.8416)^2 * 2 * 0.25 / 0.03^2 = 4,361
    assert items_needed(3, 0.5) == 4361
    note = size_note(0.35, 200)
    assert "200 items: 35.0 % ± 3.4 points" in note
    assert "is noise" in note
    assert "± 0.0" not in size_note(1.0, 20)
    # Nothing right of ten: the share is the measured one, and only its error is of (0 + 2) / (10 + 4).
    assert "10 items: 0.0 % ± 11.1 points (standard error with two right and two wrong items added)" in size_note(0, 10)
    assert "20 items: 100.0 % ± " in size_note(1.0, 20)


def test_sums_that_are_not_finite_have_no_interval():
    found = bootstrap_ratio([1.0, np.nan, 2.0], [1.0, 1.0, 1.0])
    assert np.isnan([found.value, found.low, found.high]).all()


COMPUTE = np.array([1.0, 3.0, 10.0, 40.0])


def test_a_power_law_is_found_again():
    loss = 2.0 * COMPUTE**-0.3 + 1.5
    for scale in (1.0, 1e21):  # any unit
        law = fit_power_law(COMPUTE * scale, loss)
        assert law.exponent == pytest.approx(0.3, rel=1e-4)
        assert law.floor == pytest.approx(1.5, rel=1e-4)
        assert law.amplitude == pytest.approx(2.0, rel=1e-4)
        assert law.compute(law.loss(7 * scale)) == pytest.approx(7 * scale)
    assert law.compute(1.4) == math.inf
    fixed = fit_power_law(COMPUTE[:2], loss[:2], floor=1.5)
    assert fixed.exponent == pytest.approx(0.3, rel=1e-4)


def test_gain_is_the_factor_of_compute():
    """A model that reaches at C what the baseline reaches at 1.4 C."""
    law = lambda c: 2.0 * c**-0.3 + 1.5
    gain = compute_equivalent_gain(COMPUTE, law(COMPUTE), law(1.4 * COMPUTE), sigma=0.002, draws=60)
    for factor in gain.factors:
        assert factor.value == pytest.approx(1.4, rel=1e-3)
        assert factor.low < 1.4 < factor.high
    assert gain.factors[-1].high - gain.factors[-1].low > gain.factors[0].high - gain.factors[0].low
    exact = compute_equivalent_gain(COMPUTE, law(COMPUTE), law(1.4 * COMPUTE), sigma=0.0, draws=3)
    assert exact.factors[0].high == pytest.approx(1.4, rel=1e-3)
    assert "too large" in gain.warning


def test_points_that_give_no_law():
    with pytest.raises(UserError, match="at least 3 points"):
        fit_power_law([1, 2], [3, 2])
    with pytest.raises(UserError, match="positive and differ"):
        fit_power_law([1, 1, 1], [3, 2, 1])


# ---- PAPER.md's table (version 1): 1.27 / 1.49 / 1.38 through three baseline points whose compute it does not give.

BASELINE, MHAR, PRINTED = (3.336, 3.290, 3.175), (3.287, 3.210, 3.111), (1.27, 1.49, 1.38)
# 6 N tokens and PaLM's 6 N + 12 L d T, relative to the 100M run: 64 x 2048 tokens a step there, 32 x 1024 above it.
MATRICES = np.array([115.5e6, 533.1e6, 1079.2e6])  # with the tied head, PAPER.md's shapes
ATTENTION = np.array([12 * 12 * 512 * 2048, 12 * 24 * 1024 * 1024, 12 * 36 * 1280 * 1024])
TOKENS = np.array([64 * 2048, 32 * 1024, 32 * 1024]) * 20000.0


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (6 * MATRICES * TOKENS, (1.17, 1.48, math.inf)),
        ((6 * MATRICES + ATTENTION) * TOKENS, (1.04, 1.14, math.inf)),
    ],
)
def test_the_usual_counts_of_compute_do_not_give_the_printed_gains(compute, expected):
    """The fit is exact, and MHAR's loss at 1B lies below the floor it finds."""
    gain = compute_equivalent_gain(compute, BASELINE, MHAR, sigma=0.0005, draws=2)
    assert gain.law.residual < 1e-4
    np.testing.assert_allclose([f.value for f in gain.factors], expected, atol=0.02)


def test_the_printed_gains_come_from_compute_that_the_table_does_not_give():
    """Relative compute of 1 : 1.25 : 2.22 gives all three within the rounding of losses and gains."""
    gain = compute_equivalent_gain((1, 1.25, 2.22), BASELINE, MHAR, sigma=0.0005, draws=40)
    for factor, printed in zip(gain.factors, PRINTED, strict=True):
        assert factor.low - 0.005 <= printed <= factor.high + 0.005
