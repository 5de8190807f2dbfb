"""The chain rule in NumPy, against JAX's derivative of the definition."""

import jax
import numpy as np
import pytest

from mhar_jax.bench import exact
from mhar_kernels import reference

HEADS, T = 3, 4
COUNTS = np.array([1, 3, 2, 5])


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape) for shape in shapes]


def define(sources, query, **rest):
    return reference.define({"sources": sources, "query": query, **rest}, num_heads=HEADS, eps=1e-6)[0]


def derivative(f, arrays, d_out):
    """f's result and the gradients of its arrays in float64; `d_out` of each token counts as often as it is there."""
    with jax.enable_x64(True):
        out, vjp = jax.vjp(jax.jit(f), arrays)
        return out, vjp(d_out)[0]


def test_a_site():
    """All arguments at once; the widths of heads and depth are odd."""
    names = ("sources", "query", "residual", "null_source")
    arrays = dict(zip(names, draw((5, T, 15), (15,), (T, 15), (15,)), strict=True)) | {"gate": np.array(0.7)}
    (d_out,) = draw((T, 15))
    done = exact.site(num_heads=HEADS, **arrays)
    found = exact.site_grads(done, d_out, COUNTS)
    out, each = derivative(lambda a: define(**a), arrays, d_out)
    np.testing.assert_allclose(done.out, out, rtol=1e-12)
    np.testing.assert_allclose(found["sources"], each["sources"], rtol=1e-10, atol=1e-13)
    weighted = derivative(lambda a: define(**a), arrays, COUNTS[:, None] * d_out)[1]
    for name in ("query", "gate", "null_source"):
        np.testing.assert_allclose(found[name], weighted[name], rtol=1e-10, atol=1e-13)


def test_a_stack():
    """Four sites, of which the first and third sublayer add a vector."""
    x, queries, added, d_out = draw((T, 6), (4, 6), (2, 6), (T, 6))
    at = (0, 2)

    def f(arrays):
        sources = [arrays["x"]]
        for i in range(4):
            mix = define(jax.numpy.stack(sources), arrays["queries"][i])
            sources.append(mix + (added[at.index(i)] if i in at else 0))
        return mix

    arrays = {"x": x, "queries": queries}
    out, found = exact.stack(x, queries, dict(zip(at, added, strict=True)), HEADS, d_out, COUNTS)
    right, each = derivative(f, arrays, d_out)
    weighted = derivative(f, arrays, COUNTS[:, None] * d_out)[1]
    np.testing.assert_allclose(out, right, rtol=1e-12)
    np.testing.assert_allclose(found["x"], each["x"], rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(found["queries"], weighted["queries"], rtol=1e-10, atol=1e-13)


def test_delta_sites():
    names = ("x", "deltas", "queries", "nulls", "gates")
    arrays = dict(zip(names, draw((T, 6), (2, T, 6), (3, 6), (3, 6), (3,)), strict=True))
    (d_out,) = draw((T, 6))
    reads = (1, 1, 2)

    def f(arrays):
        x = arrays["x"]
        for i, n in enumerate(reads):
            rest = {"residual": x, "gate": arrays["gates"][i], "null_source": arrays["nulls"][i]}
            x = define(arrays["deltas"][:n], arrays["queries"][i], **rest)
        return x

    out, found = exact.delta_sites(reads, arrays, HEADS, d_out, COUNTS)
    right, each = derivative(f, arrays, d_out)
    weighted = derivative(f, arrays, COUNTS[:, None] * d_out)[1]
    np.testing.assert_allclose(out, right, rtol=1e-12)
    for name in names:
        of = each if name in ("x", "deltas") else weighted
        np.testing.assert_allclose(found[name], of[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 100])
def test_repeats(tokens):
    """Every token is one of the first 16, as often as the next; `rows` are those; a token of its own is seen."""
    from mhar_jax.bench.check import Repeats

    repeats = Repeats.of(tokens)
    (x,) = draw((2, tokens, 3))
    spread = repeats.spread(x)
    np.testing.assert_allclose(spread, x[:, repeats.which], rtol=1e-6)
    np.testing.assert_allclose(repeats.rows(spread), x[:, : min(tokens, 16)], rtol=1e-6)
    assert repeats.counts.sum() == tokens
    assert repeats.counts.max() - repeats.counts.min() <= 1
    assert repeats.distance(spread) == 0
    if tokens > 16:
        odd = next(t for t in range(tokens) if t not in repeats.first)
        assert repeats.distance(spread.at[0, odd, 0].add(1.0)) > 0.1
        assert repeats.distance([spread[0], spread[1].at[odd, 0].set(np.nan)]) != repeats.distance(spread)
