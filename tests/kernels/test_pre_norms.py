"""depth_stack with the sublayers' pre-norms in it, against sublayers that norm for themselves; and run forward only.

Tolerances as in test_stack.py: float32 values 1e-6 and gradients 1e-5; in 16 bits at most 1.25 times as far from
float64 as site by site, in the mean over eight draws: of so few tokens, four still leave 1.4 to chance.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhar_kernels import depth_stack
from oracle import error
from test_stack import random_stack, tanh_layer

EPS = 1e-3  # large enough to show where it is used


def norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPS) * scale).astype(x.dtype)


def random_norms(n, dim, seed=0):
    """Of both signs; one feature of one site is switched off."""
    return jnp.asarray(np.random.default_rng(seed).uniform(-1.3, 1.3, (n + 1, dim)), jnp.float32).at[1, 3].set(0.0)


@functools.partial(jax.jit, static_argnames=("heads", "block_size", "implementation", "inside"))
def value_and_grads(inputs, norms, cotangent, *, heads, block_size=None, implementation="xla", inside=True):
    def stack(x, mats, queries, norm_scales, norms):
        options = {"num_heads": heads, "block_size": block_size, "implementation": implementation}
        options["interpret"] = implementation == "triton"
        if inside:
            options |= {"pre_norms": norms, "pre_norm_eps": EPS}
            return depth_stack([tanh_layer] * len(mats), list(mats), x, queries, norm_scales, **options)
        layers = [lambda p, h: tanh_layer(p[0], norm(h, p[1]))] * len(mats)
        return norm(
            depth_stack(layers, list(zip(mats, norms, strict=False)), x, queries, norm_scales, **options), norms[-1]
        )

    out, vjp = jax.vjp(stack, *inputs, norms)
    return jax.tree.leaves((out, vjp(cotangent.astype(out.dtype))))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_equals_sublayers_that_norm_for_themselves(implementation):
    inputs, cotangent = random_stack(5, (2, 3), 24, 3)
    norms = random_norms(5, 24)
    given = value_and_grads(inputs, norms, cotangent, heads=3, block_size=2, implementation=implementation)
    expected = value_and_grads(inputs, norms, cotangent, heads=3, implementation="reference", inside=False)
    for i, (a, b) in enumerate(zip(given, expected, strict=True)):
        assert error(a, b) < (1e-5 if i else 1e-6), i


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("n", "lead", "dim", "heads", "block_size", "dtype"),
    [
        (3, (4,), 48, 3, 2, "bfloat16"),  # tiles with features that do not exist
        (6, (5,), 64, 1, 3, "bfloat16"),
        (3, (4,), 64, 2, 2, "float16"),  # the norm is then not the kernel's
    ],
)
def test_kernels_are_as_close_to_float64_as_site_by_site(n, lead, dim, heads, block_size, dtype):
    errors = []
    for seed in range(8):
        inputs, cotangent = random_stack(n, lead, dim, heads, dtype, seed)
        rest = random_norms(n, dim, seed), cotangent
        run = functools.partial(value_and_grads, heads=heads, block_size=block_size)
        exact = run(tuple(a.astype(jnp.float32) for a in inputs), *rest, implementation="reference")
        results = [run(inputs, *rest, implementation=name) for name in ("triton", "reference")]
        errors.append([[error(a, b) for a, b in zip(r, exact, strict=True)] for r in results])
    blocked, plain = np.mean(errors, axis=0)
    assert (blocked <= 1.25 * plain).all(), blocked / plain


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("lead", [(3,), (1,)])
def test_a_forward_only_stack_lets_sublayers_have_effects(implementation, lead):
    (x, mats, queries, _), _ = random_stack(3, lead, 32, 2, "bfloat16")
    norms = random_norms(3, 32)
    options = {"num_heads": 2, "block_size": 2, "implementation": implementation, "pre_norms": norms}
    options["interpret"] = implementation == "triton"

    def run(x, inference):
        seen = []

        def layer(w, h):
            seen.append(h)
            return tanh_layer(w, h)

        out = depth_stack([layer] * 3, list(mats), x, queries, inference=inference, **options)
        return (out, seen) if inference else out

    out, seen = jax.jit(functools.partial(run, inference=True))(x)
    assert [h.shape for h in seen] == [x.shape] * 3
    np.testing.assert_array_equal(out, jax.jit(functools.partial(run, inference=False))(x))


def test_a_wrong_number_of_norms_is_refused():
    (x, mats, queries, _), _ = random_stack(2, (3,), 16, 2)
    with pytest.raises(ValueError, match=r"pre_norms must be \[sublayers \+ 1, D\]"):
        depth_stack([tanh_layer] * 2, list(mats), x, queries, num_heads=2, pre_norms=jnp.ones((2, 16)))


def test_the_first_query_has_no_gradient():
    """Its site reads one source: to the bit, since an optimizer would make steps of what is nearly nothing."""
    inputs, cotangent = random_stack(3, (4,), 16, 2)
    d_queries = np.asarray(value_and_grads(inputs, random_norms(3, 16), cotangent, heads=2)[3])
    assert not d_queries[0].any()
    assert d_queries[1].any()
