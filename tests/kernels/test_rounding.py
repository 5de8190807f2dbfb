"""Rounding that a compiler must not leave out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhar_kernels.rounding import as_two, rounded


@pytest.mark.parametrize(("dtype", "left"), [("bfloat16", 2.0**-16), ("float16", 2.0**-20)])
def test_two_numbers_hold_what_one_rounding_took(dtype, left):
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, 1000), jnp.float32)
    high, low = jax.jit(lambda x: as_two(x, dtype))(x)
    assert high.dtype == low.dtype == dtype
    np.testing.assert_array_equal(np.asarray(high, np.float32), np.asarray(jax.jit(lambda x: rounded(x, dtype))(x)))
    assert float(jnp.abs(low).max()) > 100 * left
    assert float(jnp.abs(x - high.astype(jnp.float32) - low.astype(jnp.float32)).max()) <= left


def test_the_program_says_so():
    """Casts there and back may be dropped by a compiler; `reduce_precision` may not."""
    assert "reduce_precision" in jax.jit(lambda x: as_two(x, "bfloat16")).lower(jnp.ones(4)).as_text()
