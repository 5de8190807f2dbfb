"""The blocked stack's Triton stages, interpreted, against site by site in float64; what the GPU compiler makes of them.

Only 16-bit storage runs by blocks. A result may be at most 1.25 times as far from float64 as site by site in the same
storage, in the mean over draws: partial mixes and gradients are rounded once more than there, and weights not at all.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_kernels import depth_route, depth_stack, schedule, stages_triton, traffic, triton_launch, triton_stage_calls
from mhar_kernels.triton_resources import stage_resources
from oracle import error
from test_stack import random_stack, tanh_layer


def value_and_grads(inputs, cotangent, *, heads, block_size, implementation, remat="none"):
    def stack(x, mats, queries, norm_scales):
        return depth_stack(
            [tanh_layer] * len(mats),
            list(mats),
            x,
            queries,
            norm_scales,
            num_heads=heads,
            block_size=block_size,
            remat=remat,
            implementation=implementation,
            interpret=implementation == "triton",
        )

    out, vjp = jax.vjp(stack, *inputs)
    return jax.tree.leaves((out, vjp(cotangent.astype(out.dtype))))


def programs(heads, block_size):
    """Jitted: site by site, and by blocks."""
    make = lambda name: jax.jit(
        functools.partial(value_and_grads, heads=heads, block_size=block_size, implementation=name)
    )
    return make("reference"), make("triton")


CASES = [  # sublayers, leading shape, width, heads, block size, dtype
    (4, (2, 5), 48, 3, 2, "bfloat16"),  # ragged last block; heads of 16
    pytest.param(
        6, (15,), 64, 1, 2, "bfloat16", marks=pytest.mark.exhaustive
    ),  # several of an odd number of tokens together
    pytest.param(3, (4,), 320, 2, 2, "float16", marks=pytest.mark.exhaustive),  # heads of 128 + 32
    pytest.param(
        18, (3,), 32, 2, 17, "bfloat16", marks=pytest.mark.exhaustive
    ),  # a block beyond the rows of one product
    pytest.param(17, (4,), 24, 1, 1, "bfloat16", marks=pytest.mark.exhaustive),  # more sources than one step
    pytest.param(5, (7,), 300, 1, 3, "bfloat16", marks=pytest.mark.exhaustive),  # a head of several chunks
]


@pytest.mark.parametrize(("n", "lead", "dim", "heads", "block_size", "dtype"), CASES)
def test_as_close_to_float64_as_site_by_site(n, lead, dim, heads, block_size, dtype):
    by_site, by_blocks = programs(heads, block_size)
    errors = []
    for seed in range(4):
        inputs, cotangent = random_stack(n, lead, dim, heads, dtype, seed)
        exact = by_site(tuple(a.astype(jnp.float32) for a in inputs), cotangent.astype(jnp.float32))
        results = [f(inputs, cotangent) for f in (by_blocks, by_site)]
        assert [a.dtype for a in results[0]] == [a.dtype for a in results[1]]
        errors.append([[error(a, b) for a, b in zip(r, exact, strict=True)] for r in results])
    blocked, plain = np.mean(errors, axis=0)
    assert (blocked <= 1.25 * plain).all(), blocked / plain


@pytest.mark.parametrize("remat", ["none", "sublayer"])
def test_which_kernels_a_stack_launches(remat, monkeypatch):
    """A merge and a finish a site, a mix and a pull a block, one query gradient; all of them in the lowered program."""
    x, mats, queries, _ = random_stack(4, (3,), 32, 2, "bfloat16")[0]
    plan = schedule.Plan((tanh_layer,) * 4, 2, 1e-6, 2, remat, interpret=True)

    def grads(x, mats, queries):
        out, vjp = jax.vjp(
            lambda *a: schedule.run(plan, stages_triton, list(a[1]), a[0], a[2], None, None), x, mats, queries
        )
        return vjp(out)

    launched = []
    launch = triton_launch.run
    monkeypatch.setattr(triton_launch, "run", lambda f, name, *rest: launched.append(name) or launch(f, name, *rest))
    text = jax.jit(grads).lower(x, mats, queries).as_text()
    counts = {"merge": 5, "mix": 2, "finish": 5, "pull": 2, "query": 1}
    assert {k: launched.count(f"depth_stack_{k}") for k in counts} == counts
    assert len(re.findall(r"custom_call @xla_\w*python\w*callback", text)) == sum(counts.values())


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 32), ("bfloat16", 8)])
def test_what_runs_site_by_site(dtype, head_dim):
    assert not stages_triton.supports(jnp.dtype(dtype), head_dim)


def test_repeats_to_the_bit_and_under_remat():
    inputs, cotangent = random_stack(4, (3,), 32, 2, "bfloat16")
    _, run = programs(2, 2)
    again = jax.jit(
        functools.partial(value_and_grads, heads=2, block_size=2, implementation="triton", remat="sublayer")
    )
    for a, b, c in zip(run(inputs, cotangent), run(inputs, cotangent), again(inputs, cotangent), strict=True):
        np.testing.assert_array_equal(a, b)
        assert error(c, a) < 5e-3  # XLA fuses a recomputed sublayer otherwise: a last bit of bfloat16


def test_one_source_gives_its_query_no_gradient():
    inputs, cotangent = random_stack(3, (3,), 32, 2, "bfloat16")
    _, _, _, d_queries, d_scales = programs(2, 2)[1](inputs, cotangent)
    np.testing.assert_array_equal(d_queries[0], 0)
    np.testing.assert_array_equal(d_scales[0], 0)
    assert (np.linalg.norm(d_queries[1:], axis=-1) > 0).all()


QUERIES = [  # tokens, head size, heads, sources, sites, dtype, warps in all: so that a program takes several products
    (70, 32, 3, 5, range(5), "bfloat16", 3),  # products of 16 tokens
    (70, 96, 1, 5, range(2, 5), "float16", 1),  # of 32; some sites
    pytest.param(70, 160, 1, 34, range(34), "bfloat16", 4, marks=pytest.mark.exhaustive),  # of 64
    pytest.param(131, 128, 2, 70, range(70), "bfloat16", 32, marks=pytest.mark.exhaustive),  # more sites than a program
    pytest.param(64, 300, 1, 6, range(6), "bfloat16", 6, marks=pytest.mark.exhaustive),  # a head of several programs
    pytest.param(5, 24, 2, 9, range(9), "float16", 2112, marks=pytest.mark.exhaustive),  # one token a program
]


@pytest.mark.parametrize(("tokens", "head_dim", "heads", "n", "sites", "dtype", "warps"), QUERIES)
def test_query_gradients_over_any_number_of_tokens(tokens, head_dim, heads, n, sites, dtype, warps, monkeypatch):
    monkeypatch.setattr(triton_stage_calls, "_QUERY_WARPS", warps)
    rng = np.random.default_rng(0)
    shape = triton_stage_calls.Shape(jnp.dtype(dtype), tokens, heads * head_dim, heads, n, n, True)
    sources = jnp.asarray(rng.standard_normal((n, tokens, shape.dim)), dtype)
    i = np.arange(shape.padded)
    exists = (i >= np.arange(n)[:, None]) & (i < n)
    keys = np.where(exists, rng.standard_normal((tokens, heads, n, shape.padded)), np.nan).astype(np.float32)
    found, again = (triton_stage_calls.query(shape, sources, jnp.asarray(keys), sites) for _ in range(2))
    rows = np.asarray(sources, np.float64).reshape(n, tokens, heads, head_dim)
    exact = np.einsum("thni,nthk->ihk", np.where(exists, keys, 0).astype(np.float64), rows).reshape(-1, shape.dim)
    assert error(found, exact[sites.start : sites.stop]) < 4e-6  # dl r as two bfloat16 numbers: up to 2^-18
    np.testing.assert_array_equal(found, again)


def test_vmap_scan_and_checkpoint():
    (x, mats, queries, scales), cotangent = random_stack(3, (2, 3), 32, 2, "bfloat16")

    def one(x, cotangent):
        options = {"num_heads": 2, "block_size": 2, "implementation": "triton", "interpret": True}
        out = depth_stack([tanh_layer] * 3, list(mats), x, queries, scales, **options)
        return jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32))

    whole = jax.jit(jax.grad(one))(x, cotangent)
    mapped = jax.jit(jax.vmap(jax.grad(jax.checkpoint(one))))(x, cotangent)
    _, scanned = jax.lax.scan(lambda c, xy: (c, jax.grad(one)(*xy)), 0, (x, cotangent))
    assert error(mapped, whole) < 5e-3  # a last bit of bfloat16, where XLA fuses otherwise
    assert error(scanned, whole) < 5e-3


def test_sharded_gradients_equal_unsharded_ones():
    inputs, cotangent = random_stack(3, (8, 2), 32, 2, "bfloat16")
    plain = programs(2, 2)[1](inputs, cotangent)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def stack(x, mats, queries, norm_scales):
        options = {"num_heads": 2, "block_size": 2, "implementation": "triton", "interpret": True}
        layers = [tanh_layer] * len(mats)
        return depth_stack(layers, list(mats), x, queries, norm_scales, token_axes=("a",), **options)

    @jax.jit
    def run(inputs, cotangent):
        out, vjp = jax.vjp(stack, *inputs)
        return jax.tree.leaves((out, vjp(cotangent)))

    with jax.set_mesh(mesh):
        place = lambda a: jax.device_put(a, NamedSharding(mesh, P("a")))
        sharded = run((place(inputs[0]), *inputs[1:]), place(cotangent))
    for a, b in zip(sharded, plain, strict=True):
        assert error(a, b) < 1e-2  # eight devices' gradients of mats, each rounded to bfloat16 before they are added


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.exhaustive), 90, pytest.param(100, marks=pytest.mark.exhaustive)]
)
def test_the_gpu_compiler_takes_every_kernel(capability):
    """The width that does not divide into powers of two; what is spilled is little and known (README.md)."""
    found = stage_resources(2048, 1280, 8, 73, 8, capability)
    assert set(found) == {f"depth_stack_{k}" for k in ("merge", "mix", "finish", "pull", "query")}
    for name, r in found.items():
        print(capability, name, r)
        assert r.shared <= 98_304, name  # 99 KiB on the smallest chips
        most = {"depth_stack_mix": 256, "depth_stack_pull": 256, "depth_stack_query": 16 if capability == 80 else 0}
        assert r.spilled <= most.get(name, 0), (name, r)


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "packed"),
    [
        (2, 64, "bfloat16", True),
        (3, 44, "bfloat16", True),  # a head, and the end of each head, that do not fill their tiles
        (3, 44, "float16", True),
        (2, 18, "bfloat16", False),  # tiles of two features
    ],
)
def test_what_rounding_takes_from_a_mix_is_kept(heads, head_dim, dtype, packed):
    """10 bits of it where four features share a byte, else 16; float32's own rounding is up to 16 units of those."""
    dim, rng = heads * head_dim, np.random.default_rng(0)
    x, source = jnp.asarray(rng.lognormal(size=(2, 5, dim)), dtype)  # nothing cancels: float32 is off by a few units
    queries = jnp.asarray(rng.standard_normal((2, dim)) / 10, jnp.float32)
    plan = schedule.Plan((None,), heads, 1e-6, 2, "none", interpret=True)
    history = stages_triton.start(plan, x, queries, None)
    history, _, _ = stages_triton.merge(plan, history, 0, x, None, None)
    _, read, kept = stages_triton.merge(plan, history, 1, source, None, None)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in (x, source, queries[1])]
        exact = np.asarray(depth_route(wide[:2], wide[2], num_heads=heads, implementation="reference"))
    rest = np.asarray(kept.rest, np.int64)
    if packed:
        upper, lower = rest[:, :dim], rest[:, dim:, None] >> np.arange(0, 8, 2) & 3
        rest = upper << 8 | lower.reshape(upper.shape) << 6
    near, kind = np.asarray(read, np.float32), jnp.finfo(dtype)
    unit = np.maximum(2.0 ** np.floor(np.log2(np.abs(near))), kind.tiny) * 2.0 ** (-kind.nmant - 16)
    whole = near + rest * unit
    if dtype == "bfloat16":  # the lower half of a float32, with the upper half's sign
        whole = (near.view(np.int32) + rest.astype(np.int32)).view(np.float32)
    assert kept.rest.dtype == (jnp.int8 if packed else jnp.int16)
    assert (np.abs(near - exact) / unit).max() > 30_000
    step = np.where(np.abs(rest) >= 511 << 6, 64, 32) if packed else 1  # half of the last bit; the largest is cut off
    assert (np.abs(whole - exact) / unit - step).max() < 16


def test_the_gpu_compiler_takes_one_token():
    """A number of tokens that is 1 is a constant to it, not a value of the program."""
    found = stage_resources(1, 64, 2, 4, 2, 90)
    assert set(found) == {f"depth_stack_{k}" for k in ("merge", "mix", "finish", "pull", "query")}


def test_rows_of_the_schedule():
    """By hand: 5 sites in blocks of 2 are {0, 1}, {2, 3}, {4}."""
    rows = traffic.rows(5, 2)
    assert rows.mix == (2 + 2) + (4 + 1)
    assert rows.merge == 4 * 5 + 1 + 1 + 3  # one pair in each full block; three sites have sources outside
    assert rows.pull == (3 + 4) + (1 + 4)
    assert rows.finish == 6 * 5 + 1 + 1 + 4
    assert rows.query == 5
    assert traffic.site_by_site_rows(73) == 2774
    assert traffic.best_block_size(1, stages_triton.COSTS) == 1
    assert all(1 <= traffic.best_block_size(n, stages_triton.COSTS) <= 16 for n in range(1, 200))
