"""What depth_route and depth_stack refuse, how they choose, and what a refusal says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhar_kernels import UnsupportedInputError, assume_platform, depth_route, depth_stack
from oracle import error, numpy_dtype

S = jnp.ones((3, 2, 5, 12))
Q = jnp.ones(12)
R = jnp.ones((2, 5, 12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sources": [S[0], S[1, :1]]},
            r"one shape and dtype, got float32\[2, 5, 12\].*source 0.*\[1, 5, 12\].*source 1",
        ),
        ({"sources": [S[0], S[1].astype(jnp.bfloat16)]}, r"one shape and dtype.*bfloat16"),
        ({"sources": S.astype(jnp.int32)}, "sources must be one of float32.*got int32"),
        ({"sources": jnp.ones(12)}, r"at least two axes, got shape \(12,\)"),
        ({"sources": S[:0]}, "at least one source unless a null_source"),
        ({"sources": []}, "needs a residual"),
        ({"sources": [R, "text"]}, "sources must be an array, got str"),
        ({"query": jnp.ones(11)}, r"query must have shape \(12,\), got \(11,\)"),
        ({"query": jnp.ones(12, jnp.int32)}, "query must be floating point, got int32"),
        ({"query": None}, "query must be an array"),
        ({"num_heads": 5}, "must divide the width D, got num_heads=5 and D=12"),
        ({"num_heads": 0}, "positive integer, got 0"),
        ({"num_heads": 2.0}, "positive integer, got 2.0"),
        ({"num_heads": True}, "positive integer, got True"),
        ({"norm_scale": jnp.ones((1, 12))}, r"norm_scale must have shape \(12,\), got \(1, 12\)"),
        ({"null_source": jnp.ones(4)}, "null_source must have shape"),
        ({"gate": jnp.ones(12)}, r"gate must have shape \(\), got \(12,\)"),
        # [tokens, N, D] for [N, tokens, D]: the residual shows it.
        (
            {"sources": jnp.ones((2, 5, 3, 12)), "residual": R},
            r"residual must have a source's shape.*float32\[5, 3, 12\]",
        ),
        ({"residual": R.astype(jnp.bfloat16)}, "residual must have a source's shape and dtype, got bfloat16"),
        ({"eps": -1e-6}, "eps must be a finite number of at least 0"),
        ({"eps": float("nan")}, "eps must be a finite number"),
        ({"return_weights": 1}, "return_weights must be True or False"),
        ({"interpret": "yes"}, "interpret must be True or False"),
        ({"tile": {"tokens": 0}}, "tile sizes must be positive integers, got tokens=0"),
        ({"implementation": "cuda"}, "must be None or one of reference, xla, pallas_tpu, triton, got 'cuda'"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_traced(change, message):
    arguments = {"sources": S, "query": Q, "num_heads": 3, **change}
    with pytest.raises(ValueError, match=message):
        depth_route(arguments.pop("sources"), arguments.pop("query"), **arguments)
    # Under jit the refusal comes while tracing, as the same error.
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda: depth_route(**{"sources": S, "query": Q, "num_heads": 3, **change}))()


@pytest.mark.parametrize("name", ["pallas_tpu", "triton"])
def test_a_named_kernel_that_cannot_run_says_why_and_what_would(name):
    with pytest.raises(UnsupportedInputError, match=f"{name} cannot run this call: .*(interpret|xla)"):
        depth_route(S, Q, num_heads=3, implementation=name)
    assert issubclass(UnsupportedInputError, NotImplementedError)


def test_no_name_means_the_best_that_runs(caplog):
    with caplog.at_level("INFO", logger="mhar_kernels"):
        out = depth_route(S, Q, num_heads=3)
    np.testing.assert_array_equal(out, depth_route(S, Q, num_heads=3, implementation="xla"))


def test_platform_is_the_assumed_one():
    with assume_platform("tpu"), pytest.raises(UnsupportedInputError, match="triton cannot run"):
        depth_route(S, Q, num_heads=3, implementation="triton")
    with pytest.raises(ValueError, match="platform must be"), assume_platform("npu"):
        pass


def test_axes_of_different_length_keep_their_places():
    """Softmax over N and nothing else: the weights of each token and head sum to one over axis 0."""
    rng = np.random.default_rng(0)
    sources = jnp.asarray(rng.standard_normal((7, 2, 3, 20)), jnp.float32)
    out, weights = depth_route(sources, jnp.asarray(rng.standard_normal(20)), num_heads=5, return_weights=True)
    assert out.shape == (2, 3, 20)
    assert weights.shape == (7, 2, 3, 5)
    np.testing.assert_allclose(weights.sum(0), 1, rtol=1e-6)
    mix = jnp.einsum("nbth,nbthk->bthk", weights, sources.reshape(7, 2, 3, 5, 4)).reshape(2, 3, 20)
    assert error(out, mix) < 1e-6


def test_numpy_and_python_numbers_are_arrays():
    out = depth_route([np.ones((2, 4), np.float32)], np.ones(4, np.float32), num_heads=2, gate=0.5)
    np.testing.assert_allclose(out, 0.5)


def test_no_tokens():
    out, weights = depth_route(jnp.ones((3, 0, 12)), Q, num_heads=3, return_weights=True)
    assert out.shape == (0, 12)
    assert weights.shape == (3, 0, 3)


def test_null_source_alone_has_the_shape_of_the_residual():
    null = jnp.arange(12.0)
    out = depth_route([], Q, num_heads=3, null_source=null, residual=R)
    np.testing.assert_allclose(out, R + null)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_output_has_the_dtype_of_the_sources_and_parameters_get_their_own(dtype):
    s = S.astype(numpy_dtype(dtype))
    loss = lambda s, q, g: jnp.sum(depth_route(s, q, num_heads=3, norm_scale=g).astype(jnp.float32))
    assert depth_route(s, Q, num_heads=3).dtype == dtype
    grads = jax.grad(loss, (0, 1, 2))(s, Q, jnp.ones(12, jnp.bfloat16))
    assert [g.dtype.name for g in grads] == [dtype, "float32", "bfloat16"]


def test_wide_float32_score_does_not_lose_digits():
    """A flat float32 sum over D = 7168 would lose 2.4e-3 of a score."""
    rng = np.random.default_rng(0)
    sources = rng.standard_normal((2, 1, 7168)).astype(np.float32) + 3
    query = rng.standard_normal(7168).astype(np.float32) + 3
    query *= 3 / np.linalg.norm(query)
    want = depth_route(jnp.asarray(sources), jnp.asarray(query), num_heads=1, implementation="reference")
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 5e-3)):
        got = depth_route(jnp.asarray(sources, dtype), jnp.asarray(query), num_heads=1, implementation="xla")
        assert error(got, want) < tolerance


# depth_stack


def _stack(**change):
    arguments = {
        "sublayers": [lambda p, h: jnp.tanh(h * p)] * 2,
        "params": [1.0, 2.0],
        "x": R,
        "queries": jnp.ones((3, 12)),
        "num_heads": 3,
        **change,
    }
    return depth_stack(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": [1.0]}, "params must hold one entry a sublayer, got 1 for 2"),
        ({"queries": jnp.ones((2, 12))}, r"queries must be \[sublayers \+ 1, D\] = \(3, 12\).*got \(2, 12\)"),
        ({"norm_scales": jnp.ones((3, 11))}, "norm_scales must be"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"remat": "all"}, "remat must be"),
        (
            {"sublayers": [lambda p, h: h[..., :2]] * 2},
            r"sublayer 0 must return an array like x.*got float32\[2, 5, 2\]",
        ),
    ],
)
def test_a_wrong_stack_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        _stack(**change)


def test_a_stack_of_nothing_returns_x():
    np.testing.assert_array_equal(_stack(sublayers=[], params=[], queries=jnp.ones((1, 12))), R)
