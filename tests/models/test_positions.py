"""Rotary positions, Llama-3.1 scaling and packed rows."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhar_jax.config.schema import RopeScaling
from mhar_jax.models.rotary import inverse_wavelengths, rotary_tables, rotate
from model_helpers import TOKENS, jit, relative, scrambled, tiny


def test_rotation_depends_on_the_distance_only():
    config = tiny("additive")
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))
    at = lambda x, p: rotate(x, rotary_tables(jnp.asarray([[p]]), config))
    near, far = (jnp.sum(at(q, p) * at(k, p - 3)) for p in (5, 105))
    np.testing.assert_allclose(near, far, rtol=1e-4)
    assert abs(float(near - jnp.sum(at(q, 5) * at(k, 1)))) > 1e-3
    np.testing.assert_allclose(jnp.linalg.norm(at(q, 77)), jnp.linalg.norm(q), rtol=1e-6)


def test_llama_31_scaling_case_by_case():
    """Wavelength 2π/f against original_context / 1 and / 4: divided by 8, kept, or in between."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    plain = inverse_wavelengths(128, 500_000.0, None)
    scaled = inverse_wavelengths(128, 500_000.0, scaling)
    seen = set()
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength > 8192:
            expected, kind = before / 8, "low"
        elif wavelength < 8192 / 4:
            expected, kind = before, "high"
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected, kind = (1 - smooth) * before / 8 + smooth * before, "between"
        seen.add(kind)
        assert math.isclose(after, expected, rel_tol=1e-12)
    assert seen == {"low", "high", "between"}


@pytest.mark.parametrize("variant", ["mhar", pytest.param("delta_block", marks=pytest.mark.exhaustive)])
def test_packed_documents_equal_separate_ones(variant):
    """Two documents in one row, with segments and positions of their own, as if each had a row to itself."""
    run = scrambled(variant)
    logits = jit(lambda s, t, p, i: nnx.merge(run["graph"], s)(t, positions=p, segment_ids=i))
    row, lengths, rows = TOKENS[0, :12], (5, 7), np.arange(12)[None].repeat(2, 0)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].repeat(2, 0)
    segments = np.stack([np.repeat([1, 2], lengths), np.ones(12, int)])  # the second row: no segments
    packed, unsegmented = logits(run["state"], row[None].repeat(2, 0), positions, segments)
    padded = np.zeros((2, 12), np.int32)
    padded[0, :5], padded[1, :7] = row[:5], row[5:]
    alone = logits(run["state"], padded, rows, np.ones((2, 12), int))
    assert relative(packed[:5], alone[0, :5]) < 1e-5
    assert relative(packed[5:], alone[1, :7]) < 1e-5
    assert relative(unsegmented[5:], alone[1, :7]) > 1e-2
