"""Calls of the kernel backends that nobody should make: each is refused in one sentence before a kernel is launched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhar_kernels import UnsupportedInputError, assume_platform, depth_route
from mhar_kernels.pallas_float16 import to_float32, to_storage
from oracle import error

S = jnp.linspace(-1, 1, 3 * 4 * 24).reshape(3, 4, 24)
Q = jnp.linspace(-1, 1, 24)

WRONG = [
    ({"sources": S[:0]}, "at least one source unless a null_source is given"),
    ({"sources": [], "residual": S[0]}, "at least one source unless a null_source is given"),
    ({"sources": [], "null_source": Q}, "needs a residual to give the shape"),
    ({"sources": None}, r"array \[N, ..., D\] or a list or tuple of arrays \[..., D\], got NoneType"),
    ({"sources": iter(S)}, "a list or tuple of arrays"),
    ({"sources": [[S[0]]]}, "sources must be an array, got list"),
    ({"sources": S[0, 0]}, r"at least two axes, got shape \(24,\)"),
    ({"sources": [jnp.float32(1)]}, "width D >= 1"),
    ({"sources": S[..., :0]}, "width D >= 1"),
    ({"sources": S.astype(jnp.int32)}, "one of float32, bfloat16, float16, float64, got int32"),
    ({"sources": S.astype(jnp.float8_e4m3fn)}, "got float8_e4m3fn"),
    ({"sources": np.full((3, 4, 24), "a")}, "sources must be of a floating-point dtype that JAX has, got <U1"),
    ({"sources": np.ones((3, 4, 24), ">f4")}, "sources must be of a floating-point dtype that JAX has, got >f4"),
    ({"query": np.full(24, None)}, "query must be of a floating-point dtype that JAX has, got object"),
    ({"sources": [S[0], S[1].astype(jnp.bfloat16)]}, "one shape and dtype, got float32.*bfloat16"),
    ({"num_heads": 5}, "num_heads=5 and D=24"),
    ({"num_heads": None}, "positive integer, got None"),
    ({"query": Q.reshape(2, 12)}, r"query must have shape \(24,\), got \(2, 12\)"),
    ({"query": [1.0] * 24}, r"query must be an array of shape \(24,\), got list"),
    ({"norm_scale": jnp.ones(12)}, r"norm_scale must have shape \(24,\), got \(12,\)"),
    ({"null_source": jnp.ones((4, 24))}, r"null_source must have shape \(24,\), got \(4, 24\)"),
    ({"gate": jnp.ones(2)}, r"gate must have shape \(\), got \(2,\)"),
    ({"gate": 10**400}, "gate must be of a floating-point dtype that JAX has, got an integer beyond float64"),
    ({"gate": True}, r"gate must be a number or an array of shape \(\), got bool"),
    ({"residual": S[0, :1]}, r"residual must have a source's shape.*\[1, 24\]"),
    ({"residual": S[0].astype(jnp.bfloat16)}, "residual must have a source's shape and dtype, got bfloat16"),
    ({"eps": jnp.float32(1e-6)}, "eps must be a finite number"),
    ({"eps": 10**400}, "eps must be a finite number of at least 0 in float32, got 1000"),
    ({"eps": 1e39}, r"eps must be a finite number of at least 0 in float32, got 1e\+39"),
    ({"tile": 8}, "tile must be None or a mapping from names of sizes to integers, got 8"),
    ({"tile": {8: 8}}, "tile must be None or a mapping from names of sizes to integers, got {8: 8}"),
    ({"tile": {"rows": 8.0}}, "tile sizes must be positive integers, got rows=8.0"),
    ({"tile": {"lanes": 3}}, "tile may only name .*, got lanes"),
]


@pytest.mark.parametrize("implementation", ["triton", "pallas_tpu"])
@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_input(implementation, change, message):
    arguments = {"sources": S, "query": Q, "num_heads": 2, **change}
    with pytest.raises(ValueError, match=message):
        depth_route(implementation=implementation, interpret=True, **arguments)


@pytest.mark.parametrize(
    ("implementation", "tile", "message"),
    [
        ("triton", {"sources": 3}, "sources must be a power of two, got 3"),
        ("triton", {"sources": 2**40}, "a lane .* features .* at most 256: fewer sources or more warps"),
        ("triton", {"width": 2**20}, "a lane .* features .* at most 256"),
        ("triton", {"stages": 10**6}, "bytes of shared memory, and a program has at most 232448: fewer stages"),
        ("pallas_tpu", {"rows": 12}, "rows must be a multiple of 8 for float32, got 12"),
        ("pallas_tpu", {"rows": 2**31}, "MiB of VMEM, more than 100.0; pass a smaller tile"),
        ("pallas_tpu", {"sweeps": 3}, "'sweeps' must be 1 or 2, got 3"),
    ],
)
def test_tiles_that_no_chip_holds(implementation, tile, message):
    with pytest.raises((ValueError, UnsupportedInputError), match=message):
        depth_route(S, Q, num_heads=2, implementation=implementation, interpret=True, tile=tile)


@pytest.mark.parametrize("implementation", ["triton", "pallas_tpu"])
@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (S[:, :0], "no tokens; implementation='xla'"),
        (jnp.ones((1, 1, 16_385)), "16384, got 16385; implementation='xla'"),
    ],
)
def test_sizes_beyond_the_limits(implementation, sources, message):
    with pytest.raises(UnsupportedInputError, match=message):
        depth_route(sources, jnp.ones(sources.shape[-1]), num_heads=1, implementation=implementation, interpret=True)


@pytest.mark.parametrize(("implementation", "platform"), [("triton", "gpu"), ("pallas_tpu", "tpu")])
def test_float64_has_no_kernel(implementation, platform):
    with jax.enable_x64(True), assume_platform(platform):
        sources = jnp.ones((2, 3, 8), jnp.float64)
        with pytest.raises(UnsupportedInputError, match=r"float64.*'xla'"):
            depth_route(sources, jnp.ones(8), num_heads=2, implementation=implementation)
        assert depth_route(sources, jnp.ones(8), num_heads=2).dtype == jnp.float64


@pytest.mark.parametrize("implementation", ["triton", pytest.param("pallas_tpu", marks=pytest.mark.exhaustive)])
def test_the_widest_row(implementation):
    rng = np.random.default_rng(0)
    sources = jnp.asarray(rng.standard_normal((2, 1, 16_384)), jnp.bfloat16)
    query = jnp.asarray(rng.standard_normal(16_384) / 128, jnp.float32)
    route = lambda s, q, **kw: depth_route(s, q, num_heads=4, **kw)
    ours = jax.jit(
        lambda s, q: route(s, q, implementation=implementation, interpret=True),
        compiler_options={"xla_backend_optimization_level": 0},  # of the interpreter
    )
    assert error(ours(sources, query), route(sources, query, implementation="xla")) < 1e-3


@pytest.mark.parametrize("implementation", ["triton", "pallas_tpu"])
def test_a_list_of_one(implementation):
    """Its mix is the source itself, whatever the query."""
    out = depth_route([S[0]], Q, num_heads=2, implementation=implementation, interpret=True)
    np.testing.assert_allclose(out, S[0], rtol=1e-6)


@pytest.mark.parametrize("implementation", ["triton", "pallas_tpu"])
def test_second_derivatives_are_refused(implementation):
    loss = lambda q: jnp.sum(depth_route(S, q, num_heads=2, implementation=implementation, interpret=True) ** 2)
    with pytest.raises(UnsupportedInputError, match="no second derivatives; implementation='xla'"):
        jax.jit(jax.hessian(loss))(Q)


@pytest.mark.parametrize("implementation", ["triton", "pallas_tpu"])
def test_a_batch_of_none(implementation):
    route = lambda s, q: depth_route(s, q, num_heads=2, implementation=implementation, interpret=True)
    none = jnp.zeros((0, *S.shape))
    many = jax.vmap(route, (0, None))
    assert many(none, Q).shape == (0, 4, 24)
    np.testing.assert_array_equal(jax.grad(lambda q: jnp.sum(many(none, q)))(Q), 0)


def test_every_float16_number_is_decoded_exactly():
    bits = np.arange(2**16, dtype=np.uint16).view(np.int16)
    want = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(to_float32(jnp.asarray(bits)), want)


def test_float16_is_rounded_to_nearest_even():
    """NumPy rounds so. Numbers, their neighbours, the ties between them, and bits of every kind."""
    numbers = np.sort(np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64))
    ties = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)  # exact
    up, down = np.float32(np.inf), np.float32(-np.inf)
    any_bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    special = np.float32([0, 65_519.99, 65_520, 65_536, 1e30, np.inf, np.nan, 1e-40])
    x = np.concatenate([ties, np.nextafter(ties, up), np.nextafter(ties, down), any_bits, special])
    x = np.concatenate([x, -x])
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(np.float16)
    np.testing.assert_array_equal(np.asarray(to_storage(jnp.asarray(x), jnp.int16)).view(np.float16), want)
