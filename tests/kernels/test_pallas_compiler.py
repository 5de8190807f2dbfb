"""The Pallas kernels through the real TPU compiler, on a machine without a TPU."""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # tests may run in parallel

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from mhar_kernels import assume_platform, depth_route

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def _compile(
    chip, n, dim, heads, *, tokens=1024, dtype="bfloat16", stacked=False, delta=False, return_weights=False, tile=None
):
    """Text of the compiled program of one call, forward and backward."""
    pytest.importorskip("libtpu")
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    token_rows, vector = struct((tokens, dim), dtype), struct((dim,), jnp.float32)
    sources = struct((n, tokens, dim), dtype) if stacked else (token_rows,) * n
    optional = {"residual": token_rows, "gate": struct((), jnp.float32), "null_source": vector} if delta else {}

    def both(sources, query, optional, d_out):
        def call(sources, query, optional):
            result = depth_route(
                sources,
                query,
                num_heads=heads,
                implementation="pallas_tpu",
                return_weights=return_weights,
                tile=tile,
                **optional,
            )
            return result if return_weights else (result, None)

        (out, weights), vjp = jax.vjp(call, sources, query, optional)
        return out, weights, vjp((d_out, weights))

    with assume_platform("tpu"):
        traced = jax.jit(both).trace(sources, vector, optional, token_rows)
    return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


def _check(*args, **kw):
    text = _compile(*args, **kw)
    assert "depth_route_forward" in text
    assert "depth_route_backward" in text


def test_compiles():
    """The 8B delta form: two sweeps, null source, gate and residual."""
    _check("v5e", 9, 4096, 8, delta=True)


def test_compiles_narrow_heads():
    _check("v5e", 9, 512, 4, stacked=True)


@pytest.mark.parametrize(
    ("chip", "dim", "heads"),
    [("v5e", 256, 2), *(pytest.param(c, 1280, 8, marks=pytest.mark.exhaustive) for c in TOPOLOGIES)],
)
def test_compiles_float16(chip, dim, heads):
    """Which the compiler does not know: it is int16 in the kernel."""
    _check(chip, 9, dim, heads, dtype="float16")


@pytest.mark.exhaustive
@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("dim", "heads"), [(512, 4), (1024, 8), (1280, 8), (4096, 8)])
def test_compiles_everywhere(chip, dim, heads, stacked):
    _check(chip, 9, dim, heads, delta=dim == 4096, stacked=stacked)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("n", "dim", "heads", "options"),
    [
        (3, 21, 7, {"tokens": 5}),  # odd width: padded to whole lane tiles
        (3, 123, 1, {"tokens": 1}),
        (3, 300, 300, {}),  # more heads than lanes
        (3, 1000, 8, {"tokens": 1001}),  # ragged rows
        (0, 512, 4, {"delta": True}),
        (1, 512, 4, {}),
        (129, 512, 4, {}),
        (129, 4096, 8, {}),  # does not fit VMEM: one sweep
        (9, 1280, 8, {"delta": True, "return_weights": True}),
        (9, 4096, 8, {"delta": True, "return_weights": True}),
        (9, 1280, 8, {"dtype": "float32"}),
        (9, 4096, 8, {"dtype": "float16", "delta": True}),
        (9, 16384, 8, {"dtype": "float32", "delta": True}),
        (9, 16384, 128, {}),
        (9, 4096, 8, {"tile": {"rows": 128, "chunk": 5, "sweeps": 2}}),  # more VMEM than the default limit
    ],
)
def test_compiles_odd_shapes(n, dim, heads, options):
    _check("v5e", n, dim, heads, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("n", "dim", "heads"), [(25, 512, 4), (49, 1024, 8), (73, 1280, 8), (9, 16384, 8)])
def test_compiles_for_the_smallest_vmem(n, dim, heads):
    """v4 has 16 MiB of it, and half the vector slots."""
    _check("v4", n, dim, heads, dtype="bfloat16")


def test_compiles_under_remat_and_scan():
    """A site in a rematerialised scan body keeps its kernels."""
    pytest.importorskip("libtpu")
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES["v5e"]).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    sources = jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16, sharding=sharding)
    queries = jax.ShapeDtypeStruct((3, 256), jnp.float32, sharding=sharding)

    def loss(sources, queries):
        @jax.checkpoint
        def step(total, query):
            out = depth_route(sources, query, num_heads=2, implementation="pallas_tpu")
            return total + jnp.sum(out.astype(jnp.float32)), None

        return jax.lax.scan(step, 0.0, queries)[0]

    with assume_platform("tpu"):
        traced = jax.jit(jax.grad(loss, (0, 1))).trace(sources, queries)
    text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    assert "depth_route_forward" in text
    assert "depth_route_backward" in text
