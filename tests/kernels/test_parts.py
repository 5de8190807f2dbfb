"""Routing in parts, on every backend, against the definition in float64.

Float32: both sum the same numbers in another order. bfloat16: mixes and gradients of sources may be 1.25 times as far
off as the same sites read one by one in plain jnp with the same storage, in the mean over draws. Gradients of
parameters see cotangents of parts, which are rounded like every cotangent of a bfloat16 model: by 2**-9 at most, and
0.3 % is more than its half again.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_kernels import UnsupportedInputError, depth_route, triton_launch
from mhar_kernels.parts import Part, depth_mix, merge, one_source
from oracle import error

_launch = triton_launch.run
KERNELS = ("triton", "pallas_tpu")


def draw(sources, sites, lead, dim, seed=0):
    """bfloat16 sources [N + 1, ..., D], effective queries [sites, D], a null row, cotangents [sites, ..., D]."""
    rng = np.random.default_rng(seed)
    rows = jnp.asarray(rng.standard_normal((sources + 1, *lead, dim)), jnp.bfloat16)
    cotangents = jnp.asarray(rng.standard_normal((sites, *lead, dim)), jnp.bfloat16)
    queries = jnp.asarray(rng.standard_normal((sites, dim)) * 3 * dim**-0.5, jnp.float32)
    null = jnp.asarray(rng.standard_normal(dim), jnp.float32)
    return rows, queries, null, cotangents


def in_parts(rows, queries, null, *, heads, implementation, token_axes=()):
    """All sites' mixes of all sources and a null source; the last source is added by each site."""
    part = depth_mix(
        list(rows[:-1]),
        queries,
        num_heads=heads,
        implementation=implementation,
        interpret=implementation in KERNELS,
        token_axes=token_axes,
    )
    mixes = []
    for i, query in enumerate(queries):
        one = functools.partial(one_source, query=query, num_heads=heads)
        mixes.append(merge([one(null), Part(part.mix[i], part.lse[i]), one(rows[-1])]).astype(rows.dtype))
    return jnp.stack(mixes)


def by_site(rows, queries, null, *, heads, implementation):
    route = functools.partial(depth_route, num_heads=heads, null_source=null, implementation=implementation)
    return jnp.stack([route(list(rows), query) for query in queries])


def value_and_grads(function, inputs, **options):
    *arrays, cotangents = inputs
    out, vjp = jax.vjp(functools.partial(function, **options), *arrays)
    return out, *vjp(cotangents.astype(out.dtype))


@functools.cache
def program(function, **options):
    return jax.jit(functools.partial(value_and_grads, function, **options))


def run(function, inputs, **options):
    return program(function, **options)(inputs)


def exact(inputs, **options):
    with jax.enable_x64(True):
        wide = tuple(jnp.asarray(np.asarray(a, np.float64)) for a in inputs)
        return [np.asarray(a) for a in run(by_site, wide, implementation="reference", **options)]


SHAPES = [  # sources, sites, leading shape, width, heads
    (5, 3, (2, 7), 64, 4),
    pytest.param(19, 18, (5,), 48, 3, marks=pytest.mark.slow),  # more of both than one product, or call, takes
    pytest.param(2, 9, (33,), 160, 1, marks=pytest.mark.slow),  # a head of 128 + 32
    pytest.param(1, 1, (4,), 32, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("sources", "sites", "lead", "dim", "heads"), SHAPES)
def test_float32_equals_site_by_site(sources, sites, lead, dim, heads):
    inputs = tuple(a.astype(jnp.float32) for a in draw(sources, sites, lead, dim))
    found = run(in_parts, inputs, heads=heads, implementation="xla")
    errors = [error(a, b) for a, b in zip(found, exact(inputs, heads=heads), strict=True)]
    assert errors[0] <= 2e-6
    assert max(errors[1:]) <= 1e-5


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
@pytest.mark.parametrize(("sources", "sites", "lead", "dim", "heads"), SHAPES)
def test_bfloat16_is_as_close_to_float64_as_site_by_site(implementation, sources, sites, lead, dim, heads):
    errors = []
    for seed in range(4):
        inputs = draw(sources, sites, lead, dim, seed)
        results = [
            run(in_parts, inputs, heads=heads, implementation=implementation),
            run(by_site, inputs, heads=heads, implementation="xla"),
        ]
        truth = exact(inputs, heads=heads)
        errors.append([[error(a, b) for a, b in zip(r, truth, strict=True)] for r in results])
    parts, plain = np.mean(errors, axis=0)
    assert (parts[:2] <= 1.25 * plain[:2]).all(), (parts, plain)
    assert (parts[2:] <= 3e-3).all(), parts


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_repeats_to_the_bit_under_vmap(implementation):
    inputs = draw(3, 2, (4,), 32)
    both = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), inputs)
    options = {"heads": 2, "implementation": implementation}
    step = jax.vmap(functools.partial(value_and_grads, in_parts, **options))
    compiled = jax.jit(step)
    first, second = compiled(both), compiled(both)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    for a, b in zip(first, run(in_parts, inputs, **options), strict=True):
        # Compiled together, equal arithmetic may be rounded elsewhere: a bfloat16 apart.
        assert error(a[0], b) <= 4e-3


def test_the_kernels_are_in_the_program(monkeypatch):
    inputs = draw(3, 2, (4,), 32)
    launched = []
    monkeypatch.setattr(
        triton_launch, "run", lambda kernel, name, *a: launched.append(name) or _launch(kernel, name, *a)
    )
    run(in_parts, inputs, heads=1, implementation="triton")
    assert launched == ["depth_stack_mix", "depth_stack_pull", "depth_stack_query"]
    step = functools.partial(value_and_grads, in_parts, heads=1, implementation="pallas_tpu")
    jaxpr = str(jax.make_jaxpr(step)(inputs))
    assert re.findall(r"name=(depth_stack_\w+)", jaxpr) == ["depth_stack_mix", "depth_stack_pull"]


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_sharded_gradients_equal_unsharded_ones(implementation):
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    inputs = draw(3, 2, (8, 3), 32)
    options = {"heads": 2, "implementation": implementation}
    whole = run(in_parts, inputs, **options)
    by_row = NamedSharding(mesh, P(None, ("data", "fsdp")))
    spread = (jax.device_put(inputs[0], by_row), *inputs[1:3], jax.device_put(inputs[3], by_row))
    with jax.set_mesh(mesh):
        split = run(in_parts, spread, token_axes=("data", "fsdp"), **options)
    for a, b in zip(split, whole, strict=True):
        assert error(a, b) <= 4e-3  # sums over tokens in another order, results rounded to bfloat16


def test_a_single_part_is_its_mix_and_moves_no_query():
    rows, queries, _, cotangents = draw(0, 1, (5,), 16)

    def read(source, query):
        return merge([one_source(source, query, num_heads=2)])

    out, vjp = jax.vjp(read, rows[0], queries[0])
    np.testing.assert_array_equal(np.asarray(out), np.asarray(rows[0], np.float32))
    assert not np.asarray(vjp(cotangents[0].astype(jnp.float32))[1]).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sources": []}, "sources must be one or more arrays"),
        ({"sources": [jnp.ones((2, 8)), jnp.ones((3, 8))]}, "of one shape and dtype"),
        ({"queries": jnp.ones((2, 9))}, r"queries must be \[sites, D\] with D = 8, got \(2, 9\)"),
        ({"num_heads": 3}, "num_heads must divide D = 8, got 3"),
    ],
)
def test_wrong_input(change, words):
    arguments = {"sources": [jnp.ones((2, 8))], "queries": jnp.ones((2, 8)), "num_heads": 2} | change
    with pytest.raises(ValueError, match=words):
        depth_mix(**arguments)


@pytest.mark.parametrize("implementation", [*KERNELS, "reference"])
def test_what_no_kernel_takes_is_refused_with_the_way_out(implementation):
    with pytest.raises(UnsupportedInputError, match="use implementation='xla', or depth_route site by site"):
        depth_mix([jnp.ones((2, 64))], jnp.ones((1, 64)), num_heads=2, implementation=implementation, interpret=True)
