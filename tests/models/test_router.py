"""DepthRouter, NNX and Linen: the same parameters and the same numbers, and the examples in their docstrings."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mhar_jax.linen
import mhar_jax.router
from mhar_jax.linen import DepthRouter as LinenRouter
from mhar_jax.router import DepthRouter
from mhar_kernels import depth_route

SOURCES = [jax.random.normal(jax.random.key(i), (2, 5, 12)) for i in range(4)]
RESIDUAL = jax.random.normal(jax.random.key(9), (2, 5, 12))
OPTIONS = {"norm_scale": True, "null_source": True, "gate": True}


@pytest.mark.parametrize("module", [mhar_jax.router, mhar_jax.linen])
def test_examples_of_the_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 4
    assert not result.failed


def test_fresh_router_returns_the_mean():
    router = DepthRouter(12, 3, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(router(SOURCES), sum(SOURCES) / 4, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(router(jnp.stack(SOURCES)), router(SOURCES))


def test_options_are_the_ops():
    router = DepthRouter(12, 3, rngs=nnx.Rngs(0), eps=1e-3, **OPTIONS)
    values = {"query": 1, "norm_scale": 2, "null_source": 3, "gate": 4}
    for name, seed in values.items():
        leaf = getattr(router, name)
        leaf[...] = values[name] = jax.random.normal(jax.random.key(seed), leaf.shape)
    query = values.pop("query")
    expected = depth_route(SOURCES, query, num_heads=3, eps=1e-3, residual=RESIDUAL, **values)
    np.testing.assert_array_equal(router(SOURCES, RESIDUAL), expected)


def test_closed_gate_returns_the_residual():
    router = DepthRouter(12, 3, rngs=nnx.Rngs(0), gate=True)
    np.testing.assert_array_equal(router(SOURCES, RESIDUAL), RESIDUAL)


def test_linen_and_nnx_agree():
    nnx_router = DepthRouter(12, 4, rngs=nnx.Rngs(0), **OPTIONS)
    linen_router = LinenRouter(4, **OPTIONS)
    variables = linen_router.init(jax.random.key(0), SOURCES, RESIDUAL)
    mine = nnx.to_pure_dict(nnx.state(nnx_router, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, variables["params"], mine)
    query = jax.random.normal(jax.random.key(1), (12,))
    nnx_router.query[...] = query
    nnx_router.gate[...] = jnp.ones(())
    variables["params"] |= {"query": query, "gate": jnp.ones(())}
    np.testing.assert_array_equal(linen_router.apply(variables, SOURCES, RESIDUAL), nnx_router(SOURCES, RESIDUAL))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads=4 and dim=10"):
        DepthRouter(10, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_heads must divide"):
        LinenRouter(5).init(jax.random.key(0), SOURCES)


def test_trains_under_nnx():
    """The query's gradient is non-zero, so a router in somebody's model learns."""
    router = DepthRouter(12, 3, rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda r: jnp.sum(r(SOURCES) ** 2))(router)
    assert np.abs(grads["query"][...]).min() > 0
