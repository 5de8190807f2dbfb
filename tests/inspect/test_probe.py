"""The probe equals a direct float64 computation, knows a hand-built query, and finds nothing in random ones."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from inspect_helpers import WINDOWS, known

from mhar_jax.errors import UserError
from mhar_jax.inspect.probe import _probe_site, _random_queries, _slice_masks, probe
from mhar_jax.inspect.walk import SiteInput, Walk
from model_helpers import build, scramble, tiny


def softmax(x):
    e = np.exp(x - x.max(0))
    return e / e.sum(0)


def direct(sources, query, scale, channels, slices, layout, eps):
    """Mean over tokens and slices of KL(slice alone || all channels), in float64, straight from the definition."""
    s = np.stack(sources)
    keys = s / np.sqrt((s**2).mean(-1, keepdims=True) + eps) * scale
    parts = np.array_split(channels, slices) if layout == "contiguous" else [channels[i::slices] for i in range(slices)]
    alpha = softmax(keys[..., channels] @ query[channels])
    total = 0.0
    for part in parts:
        alone = softmax(keys[..., part] @ query[part])
        total += (alone * np.log(alone / alpha)).sum(0).mean()
    return total / slices, alpha


@pytest.mark.parametrize("variant", ["attention_residuals", "mhar", "mhar_headwise", "delta_block"])
def test_the_numbers_equal_a_direct_float64_computation(variant):
    k = known(variant)
    walk, eps = k.walk, k.walk.config.norm_eps
    result = probe(walk, WINDOWS, slices=4, draws=2, matched_sources=3)
    assert result.tokens == 66
    for site, shape in enumerate(walk.shapes):
        sources, scale = k.sources[site], np.asarray(walk.rows[site].norm_scale, np.float64)
        count = len(shape.sources)
        subset = [sources[i] for i in np.round(np.linspace(0, count - 1, 3)).astype(int)] if count >= 3 else None
        queries = np.asarray(_random_queries(walk, site, 2, 0), np.float64)  # [3, G, D], times the scale already
        own = np.asarray(walk.query(site), np.float64)
        np.testing.assert_allclose(queries[0], own * scale, rtol=1e-6)
        # a random query has the norm of the softmax's own, before the scale
        np.testing.assert_allclose(
            np.linalg.norm(queries / scale, axis=-1), np.linalg.norm(own, axis=-1)[None].repeat(3, 0), rtol=1e-5
        )
        width = 32 if shape.grouped else 32 // shape.softmaxes
        for g in range(shape.softmaxes):
            channels = np.arange(32) if shape.grouped else np.arange(g * width, (g + 1) * width)
            for r in range(3):
                for layout in ("contiguous", "interleaved"):
                    expected, _ = direct(sources, queries[r, g], 1.0, channels, 4, layout, eps)
                    # float32 logits of size about 5 carry 1e-6; a KL of nearly equal weights is a small difference
                    assert result.disagreement[layout][r, site, g] == pytest.approx(expected, rel=2e-5, abs=2e-6)
                    if subset is not None:
                        expected, _ = direct(subset, queries[r, g], 1.0, channels, 4, layout, eps)
                        assert result.matched[layout][r, site, g] == pytest.approx(expected, rel=2e-5, abs=2e-6)
                    else:
                        assert np.isnan(result.matched[layout][r, site]).all()
        real = np.stack(sources[int("null" in shape.sources) :])
        if len(real) > 1:
            unit = real / np.linalg.norm(real, axis=-1, keepdims=True)
            pairs = [(unit[a] * unit[b]).sum(-1).mean() for a in range(len(unit)) for b in range(len(unit)) if a != b]
            assert result.cosine[site] == pytest.approx(np.mean(pairs), rel=1e-4, abs=1e-6)
        else:
            assert np.isnan(result.cosine[site])
        if shape.softmaxes > 1 and count > 1:
            mean = k.weights[site].mean((1, 2))
            assert result.deviation[0, site] == pytest.approx(
                np.abs(mean - mean.mean(1, keepdims=True)).max(), rel=1e-4
            )


def test_summary_leaves_out_sites_with_one_source():
    result = probe(known("mhar").walk, WINDOWS, draws=3, matched_sources=4)
    s = result.summary("contiguous")
    by_site = result.disagreement["contiguous"].mean(-1)
    assert s.sites == 6
    assert result.counts.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert not by_site[:, 0].any()  # one source: nothing to disagree about
    assert s.trained == pytest.approx(by_site[0, 1:].mean())
    assert s.null == pytest.approx(by_site[1:, 1:].mean())
    assert s.null_sd == pytest.approx(np.std(by_site[1:, 1:].mean(1), ddof=1))
    assert s.excess == pytest.approx(s.trained - s.null)
    assert result.summary("contiguous", matched=True).sites == 4  # sites with at least 4 sources
    table = result.table()
    assert f"{s.trained:.4f}" in table
    assert "66 tokens" in table


@pytest.mark.parametrize("size", [0.3, 2.0])
def test_a_hand_built_query_has_its_known_disagreement(size):
    """Sources (2, 0, 0, 0) and (0, 0, 2, 0), query (a, 0, a, 0), eps 0: keys are the sources (their rms is 1).

    Contiguous halves prefer (sigmoid(2a), 1 - sigmoid(2a)) and the reverse, where the whole has (1/2, 1/2): KL = log 2
    - entropy(sigmoid(2a)). Interleaved: channels 0 and 2 are the whole query, channels 1 and 3 have none: KL = 0.
    """
    sources = np.zeros((2, 1, 3, 4), np.float32)
    sources[0, ..., 0] = sources[1, ..., 2] = 2
    query = jnp.asarray([[[size, 0, size, 0]]], jnp.float32)
    given = SiteInput(query[0], jnp.ones(4), None, None, jnp.asarray(sources), np.int32(2))
    counts, everything = jnp.ones((1, 3), bool), jnp.ones(2, bool)
    one_head = np.ones((1, 4), bool)
    p = 1 / (1 + math.exp(-2 * size))
    known_kl = math.log(2) + p * math.log(p) + (1 - p) * math.log(1 - p)
    for layout, expected in (("contiguous", known_kl), ("interleaved", 0.0)):
        found = _probe_site(given, query, _slice_masks(one_head, 2, layout), everything, counts, eps=0.0)
        assert found["all"][0, 0] / 3 == pytest.approx(expected, rel=1e-5, abs=1e-7)
        np.testing.assert_allclose(found["weight"][0, :, 0] / 3, 0.5, rtol=1e-6)


def with_queries(change) -> Walk:
    """A scrambled one-head model of 3 layers and width 32, with other queries."""
    model = scramble(build(tiny("attention_residuals")))
    query = model.routing.query
    query[...] = jnp.asarray(change(np.asarray(query[...])), jnp.float32)
    model.routing.norm_scale[...] = jnp.ones_like(model.routing.norm_scale[...])
    return Walk(model)


def test_random_queries_are_the_null():
    walk = with_queries(lambda q: np.random.default_rng(11).standard_normal(q.shape))
    s = probe(walk, WINDOWS, draws=12).summary("contiguous")
    assert abs(s.excess) < 3 * s.null_sd
    assert s.trained == pytest.approx(s.null, rel=0.35)


def test_halves_that_pull_apart_are_seen_above_the_null():
    """The first two slices follow one source, the others another: more disagreement than any random query has."""
    k = known("attention_residuals")

    def pull_apart(q):
        q = np.zeros_like(q)
        for site in range(1, len(q)):
            first, last = (np.mean(k.sources[site][i], (0, 1)) for i in (0, -1))
            q[site, :16], q[site, 16:] = first[:16], last[16:]
        return 6 * q / np.maximum(np.linalg.norm(q, axis=-1, keepdims=True), 1e-9)

    s = probe(with_queries(pull_apart), WINDOWS, draws=12).summary("contiguous")
    assert s.excess > 4 * s.null_sd


def test_zero_queries_do_not_disagree():
    s = probe(with_queries(np.zeros_like), WINDOWS, draws=12).summary("interleaved")
    assert (s.trained, s.null) == (0, 0)


def test_more_slices_than_channels_are_refused():
    walk = Walk(build(tiny("mhar", num_layers=1)))
    with pytest.raises(UserError, match="got 17 slices of 16 channels"):
        probe(walk, WINDOWS, slices=17)


def test_uneven_slices_are_a_partition():
    for layout in ("contiguous", "interleaved"):
        masks = np.asarray(_slice_masks(np.repeat(np.eye(2, dtype=bool), 7, axis=1), 4, layout))
        np.testing.assert_array_equal(masks.sum(-1), np.repeat(np.eye(2), 7, axis=1))
        assert sorted(masks[0].sum(0)) == [1, 2, 2, 2]


def test_json_holds_every_number():
    result = probe(known("mhar").walk, WINDOWS, draws=3, matched_sources=4)
    numbers = result.as_dict()
    s = result.summary("interleaved")
    assert numbers["width_disagreement"]["interleaved"] == s._asdict()
    assert numbers["on_4_sources"]["contiguous"] == result.summary("contiguous", matched=True)._asdict()
    assert numbers["source_collinearity"]["mean"] == pytest.approx(np.nanmean(result.cosine))
    assert len(numbers["largest_head_deviation"]["null"]) == 3
    assert numbers["per_site"]["sources"] == [1, 2, 3, 4, 5, 6, 7]
