"""Ablations equal models that really lack what is ablated, computed in float64 without any walk."""

import numpy as np
import pytest
from inspect_helpers import TOKENS, WINDOWS, edited_logits, float64, known, sequence_losses

from forward_oracle import forward
from mhar_jax.inspect.ablation import _mean_and_error, ablate
from mhar_jax.inspect.text import Windows

TARGETS = TOKENS.reshape(-1, 12)[:, 1:]
FLAT = TOKENS.reshape(-1, 12)[:, :-1]


@pytest.fixture(scope="module", params=["mhar", "delta_block"])
def ablated(request):
    k = known(request.param)
    return k, ablate(k.walk, WINDOWS)


def change(k, logits) -> np.ndarray:
    """Change in loss, nats a token, and its error over sequences."""
    per_sequence = sequence_losses(logits, TARGETS) - sequence_losses(k.logits, TARGETS)
    return np.array([per_sequence.sum() / 66, (per_sequence / 11).std(ddof=1) / np.sqrt(6)])


# float32 losses of about 4 nats over 66 tokens: each change carries some 1e-6
CLOSE = {"rtol": 1e-4, "atol": 5e-6}


def test_a_source_at_a_site(ablated):
    k, a = ablated
    assert a.loss == pytest.approx(sequence_losses(k.logits, TARGETS).sum() / 66, rel=1e-6)
    assert (a.tokens, a.sequences) == (66, 6)
    for site, shape in enumerate(k.walk.shapes):
        count = len(shape.sources)
        assert np.isnan(a.source[site, count:]).all()
        if count == 1:
            assert np.isnan(a.source[site]).all()
            continue
        for n in {0, count // 2, count - 1}:

            def without(weights, n=n):
                weights = weights.copy()
                weights[n] = 0
                return weights / weights.sum(0)

            np.testing.assert_allclose(a.source[site, n], change(k, edited_logits(k, site, without)), **CLOSE)


def test_equal_weights_are_a_zero_query(ablated):
    k, a = ablated
    for site, shape in enumerate(k.walk.shapes):
        if len(shape.sources) == 1:
            assert np.isnan(a.site_uniform[site]).all()
            continue
        for head in (None, 0, 1):
            params = float64(k.params)
            query = params["routing"]["query"] = params["routing"]["query"].copy()
            if head is None:
                query[site] = 0
            else:
                query[site, head * 16 : (head + 1) * 16] = 0
            logits, _ = forward(params, k.walk.config, FLAT)
            found = a.site_uniform[site] if head is None else a.head_uniform[site, head]
            np.testing.assert_allclose(found, change(k, logits), **CLOSE)


def test_nothing_read_is_a_zero_mix(ablated):
    k, a = ablated
    for site in range(len(k.walk.shapes)):
        everything = edited_logits(k, site, np.zeros_like)
        np.testing.assert_allclose(a.site_off[site], change(k, everything), **CLOSE)

        def without_head(weights):
            weights = weights.copy()
            weights[..., 1] = 0
            return weights

        np.testing.assert_allclose(a.head_off[site, 1], change(k, edited_logits(k, site, without_head)), **CLOSE)


def test_a_final_norm_that_reads_nothing_knows_nothing():
    k = known("mhar")
    a = ablate(k.walk, WINDOWS)
    assert a.loss + a.site_off[-1, 0] == pytest.approx(np.log(64), rel=1e-5)


def test_one_head_has_no_heads_to_ablate():
    a = ablate(known("attention_residuals").walk, WINDOWS.first(1))
    assert np.isnan(a.head_uniform).all()
    assert np.isnan(a.head_off).all()
    assert np.isfinite(a.site_off).all()


def test_padding_does_not_count():
    walk = known("mhar").walk
    padded = np.concatenate([TOKENS[:1], np.zeros_like(TOKENS[:1])])
    mask = np.ones((2, 3, 11), bool)
    mask[1] = False
    whole, cut = ablate(walk, WINDOWS.first(33)), ablate(walk, Windows("padded", padded, mask))
    assert (cut.tokens, cut.sequences) == (33, 3)
    np.testing.assert_allclose(cut.source, whole.source, rtol=1e-6, atol=1e-7)


def test_the_error_is_that_of_a_ratio():
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 20, 400)
    change_ = 0.3 * lengths + rng.standard_normal(400) * np.sqrt(lengths)
    mean, error = _mean_and_error(change_, lengths)
    resampled = [change_[i].sum() / lengths[i].sum() for i in rng.integers(0, 400, (2000, 400))]
    assert mean == pytest.approx(0.3, abs=4 * error)
    assert error == pytest.approx(np.std(resampled), rel=0.1)
    assert np.isnan(_mean_and_error(change_[:1], lengths[:1])[1])
