"""depth_stack with the Pallas stages under the interpreter, and its kernels through the real TPU compiler.

bfloat16 storage, the only one that the stages take: a blocked result may be at most 1.25 times as far from float64 as
the site-by-site one, in the mean over some draws, since a single one differs by a third either way.
"""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # tests may run in parallel

import functools
import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_kernels import assume_platform, depth_stack, stages_pallas
from mhar_kernels.pallas_stage_layout import Geometry
from oracle import CASES, error, random_case
from test_stack import random_stack as inputs_of_a_stack
from test_stack import tanh_layer

KERNELS = [f"depth_stack_{name}" for name in ("mix", "merge", "pull", "finish")]
# The interpreter's programs are large and run for a moment: half the time to compile them.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
random_stack = functools.partial(inputs_of_a_stack, dtype="bfloat16")


def stack(x, mats, queries, norm_scales=None, *, heads, implementation="pallas_tpu", layer=tanh_layer, **options):
    options = {"interpret": implementation == "pallas_tpu"} | options
    layers = [layer] * len(mats)
    return depth_stack(
        layers, list(mats), x, queries, norm_scales, num_heads=heads, implementation=implementation, **options
    )


def value_and_grads(inputs, cotangent, **options):
    """Outside jit: each kernel is compiled once for all tests of its shape."""
    out, vjp = jax.vjp(functools.partial(stack, **options), *inputs)
    return out, vjp(cotangent.astype(out.dtype))


def compare(draws, block_size, heads, **options):
    """Mean errors against float64, blocked and site by site, of the value and each gradient."""
    errors = []
    plain = jit(functools.partial(value_and_grads, heads=heads, implementation="reference"))
    for inputs, cotangent in draws:
        wide = plain(jax.tree.map(lambda a: a.astype(jnp.float32), inputs), cotangent.astype(jnp.float32))
        by_site = plain(inputs, cotangent)
        blocked = value_and_grads(inputs, cotangent, heads=heads, block_size=block_size, **options)
        chex.assert_trees_all_equal_shapes_and_dtypes(blocked, by_site)
        errors.append(
            [[error(*pair) for pair in zip(*map(jax.tree.leaves, (t, wide)), strict=True)] for t in (blocked, by_site)]
        )
    return np.mean(errors, axis=0)


# The shape that the default tests share, so that they share its compiled kernels: blocks of 2, 1 sites; three tiles of
# tokens, the last ragged; padded heads.
SHARED = {"n": 2, "lead": (2, 10), "dim": 16, "heads": 2}


def shared_stack(**options):
    inputs, cotangent = random_stack(**SHARED)
    return value_and_grads(inputs, cotangent, heads=2, **({"block_size": 2} | options))


@pytest.mark.parametrize(
    ("n", "lead", "dim", "heads", "block_size"),
    [
        (*SHARED.values(), 2),
        pytest.param(4, (2, 10), 48, 3, 2, marks=pytest.mark.slow),
        pytest.param(3, (24,), 16, 16, 8, marks=pytest.mark.slow),  # H = D, one block
        pytest.param(6, (3, 5), 32, 1, 3, marks=pytest.mark.slow),  # H = 1
        pytest.param(4, (16,), 32, 2, 1, marks=pytest.mark.slow),  # every site a block of its own
        pytest.param(8, (2, 10), 48, 3, 3, marks=pytest.mark.slow),  # sites behind a block that are no whole chunks
    ],
)
def test_as_close_to_float64_as_site_by_site(n, lead, dim, heads, block_size):
    draws = [random_stack(n, lead, dim, heads, seed=seed) for seed in range(4)]
    blocked, by_site = compare(draws, block_size, heads)
    assert (blocked <= 1.25 * by_site).all(), (blocked, by_site)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
def test_given_stack(block_size):
    """The given stack rounded to bfloat16, and the same with tokens and cotangents drawn anew."""
    with np.load(CASES / "stack_6.npz") as z:
        heads = json.loads(str(z["meta"]))["num_heads"]
        given = [jnp.asarray(z[k]) for k in ("x", "mats", "queries", "norm_scales", "cotangent")]
    draws = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        x, cotangent = (jnp.asarray(rng.permuted(a, axis=0), jnp.bfloat16) for a in (given[0], given[4]))
        draws.append(((x, given[1].astype(jnp.bfloat16), *given[2:4]), cotangent))
    blocked, by_site = compare(draws, block_size, heads)
    assert (blocked <= 1.25 * by_site).all(), (blocked, by_site)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_stacks(seed):
    """Random depth, width, heads and block size, ragged blocks and tiles."""
    rng = np.random.default_rng(seed)
    n, heads, head_dim = int(rng.integers(0, 7)), int(rng.integers(1, 12)), int(rng.integers(1, 24))
    inputs, cotangent = random_stack(n, (int(rng.integers(1, 30)),), heads * head_dim, heads, seed=seed)
    blocked = value_and_grads(inputs, cotangent, heads=heads, block_size=int(rng.integers(1, n + 3)))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (inputs, cotangent))
    plain = jit(functools.partial(value_and_grads, heads=heads, implementation="reference"))(*wide)
    for a, b in zip(*map(jax.tree.leaves, (blocked, plain)), strict=True):
        assert error(a, b) < 0.05  # every source and gradient is rounded, through n sublayers


@pytest.mark.parametrize(
    ("n", "dim", "heads", "block_size", "scale"),
    [
        pytest.param(5, 16, 2, 2, 3.0, marks=pytest.mark.exhaustive),  # a pass of several steps, forward and backward
        pytest.param(7, 64, 4, 3, 1.0, marks=pytest.mark.slow),
        pytest.param(7, 64, 4, 3, 30.0, marks=pytest.mark.slow),  # large logits, one weight near one
        pytest.param(6, 320, 2, 2, 3.0, marks=pytest.mark.slow),  # heads of several pieces
    ],
)
def test_given_sources(n, dim, heads, block_size, scale):
    """Sublayers that return given sources, so that the final site is `depth_route` of those, and nothing is rounded
    but the result: the query's gradient has the accuracy of float32 sums, as it would not if Δ came from the rounded
    mix (3e-3) or partial mixes were kept in bfloat16."""
    case = random_case(n, (20,), dim, heads, dtype="bfloat16", query_scale=scale)
    sources, query, norm_scale = (jnp.asarray(case.inputs[k]) for k in ("sources", "query", "norm_scale"))
    queries, scales = (jnp.zeros((n, dim)).at[n - 1].set(a) for a in (query, norm_scale))
    inputs = (sources[0], sources[1:], queries, scales)
    out, (d_x, d_given, d_queries, d_scales) = value_and_grads(
        inputs,
        jnp.asarray(case.cotangent),
        heads=heads,
        eps=case.eps,
        block_size=block_size,
        layer=lambda source, h: source,
    )
    assert error(out, case.out) < 2**-8
    assert error(jnp.concatenate([d_x[None], d_given]), case.grads["sources"]) < 2**-8
    assert error(d_queries[-1], case.grads["query"]) < 1e-4
    assert error(d_scales[-1], case.grads["norm_scale"]) < 1e-4


def test_repeats_to_the_bit_and_remat_changes_nothing():
    first = shared_stack()
    chex.assert_trees_all_equal(first, shared_stack())
    chex.assert_trees_all_equal(first, shared_stack(remat="sublayer"))


def test_one_source_site_has_no_query_gradient_and_the_others_have_one():
    _, (_, d_mats, d_queries, d_scales) = shared_stack()
    np.testing.assert_array_equal(d_queries[0], 0)
    np.testing.assert_array_equal(d_scales[0], 0)
    assert (jnp.linalg.norm(d_queries[1:], axis=-1) > 0).all()
    assert (jnp.linalg.norm(d_mats.astype(jnp.float32), axis=(1, 2)) > 0).all()


@pytest.mark.slow
def test_vmap_gives_gradients_per_example():
    """The axis of examples is one more axis of the grid, and each example has its own query gradient."""
    (x, mats, queries, scales), cotangent = random_stack(1, (3, 10), 16, 2)

    def gradients(x, cotangent):
        loss = lambda x, queries: jnp.sum(stack(x, mats, queries, scales, heads=2, block_size=1) * cotangent)
        return jax.grad(loss, (0, 1))(x, queries)

    mapped = jit(jax.vmap(gradients))(x, cotangent)
    for i in range(3):
        for a, b in zip(mapped, gradients(x[i], cotangent[i]), strict=True):
            # The last bit of a float32 sum, compiled otherwise, may tip one of the 8 bits kept of a mix: 2^-16.
            assert error(a[i], b) < 5e-5


@pytest.mark.slow
def test_checkpoint_and_scan():
    (x, mats, queries, scales), cotangent = random_stack(1, (2, 10), 16, 2)
    one = jax.checkpoint(lambda x, c: jnp.sum(stack(x, mats, queries, scales, heads=2, block_size=1) * c))
    _, scanned = jax.jit(lambda x, c: jax.lax.scan(lambda k, xc: (k, jax.grad(one)(*xc)), 0, (x, c)))(x, cotangent)
    for i in range(2):
        assert error(scanned[i], jax.grad(one)(x[i], cotangent[i])) < 1e-5


@pytest.mark.slow
def test_float32_runs_site_by_site():
    """Its scores are float32 pairs, which the stages do not make; the one-site kernels do."""
    with np.load(CASES / "stack_6.npz") as z:
        meta = json.loads(str(z["meta"]))
        names = ("x", "mats", "queries", "norm_scales")
        run = jit(functools.partial(value_and_grads, heads=meta["num_heads"], eps=meta["eps"]))
        out, grads = run(tuple(jnp.asarray(z[k]) for k in names), jnp.asarray(z["cotangent"]))
        assert error(out, z["out"]) < 1e-6
        for k, grad in zip(names, grads, strict=True):
            assert error(grad, z[f"d_{k}"]) < 1e-5, k


def test_the_kernels_are_in_the_program():
    """Five sites in blocks of two: a merge and a finish a site, a mix for all blocks but the first, a pull for all but
    the last; sublayer remat adds none."""
    jaxpr = jax.make_jaxpr(lambda *a: value_and_grads(*a, heads=2, block_size=2))(*random_stack(4, (16,), 16, 2))
    assert [_kernels(jaxpr.jaxpr).count(name) for name in KERNELS] == [2, 5, 2, 5]
    remat = jax.make_jaxpr(lambda *a: value_and_grads(*a, heads=2, block_size=2, remat="sublayer"))
    assert [_kernels(remat(*random_stack(4, (16,), 16, 2)).jaxpr).count(name) for name in KERNELS] == [2, 5, 2, 5]
    by_site = jax.make_jaxpr(lambda *a: value_and_grads(*a, heads=2, block_size=2))
    assert not set(KERNELS) & set(_kernels(by_site(*random_stack(1, (16,), 16, 2, dtype="float32")).jaxpr))


def _kernels(jaxpr) -> list[str]:
    """Names of the Pallas calls in a jaxpr, in order."""
    names = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            names.append(eqn.params["name"])
            continue
        for value in jax.tree.leaves(
            tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names += _kernels(inner)
    return names


@pytest.mark.parametrize("implementation", ["xla", pytest.param("pallas_tpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [8, pytest.param(3, marks=pytest.mark.slow)])  # 3: every device has all tokens
def test_sharded_gradients_equal_unsharded_ones(implementation, rows):
    """Each device routes its own tokens; the query gradient is added up over them exactly once."""
    dtype = "float32" if implementation == "xla" else "bfloat16"
    inputs, cotangent = random_stack(2, (rows, 3), 16, 2, dtype=dtype)

    def loss(inputs, cotangent, token_axes):
        # float32 matrices, so that the sublayers' own gradients are not rounded on each device.
        layer = lambda w, h: jnp.tanh(h.astype(jnp.float32) @ w).astype(dtype)
        x, mats, *rest = inputs
        out = stack(
            x, mats, *rest, heads=2, block_size=2, layer=layer, implementation=implementation, token_axes=token_axes
        )
        return jnp.sum((out * cotangent).astype(jnp.float32))

    inputs = (inputs[0], inputs[1].astype(jnp.float32), *inputs[2:])
    run = jit(jax.value_and_grad(loss), static_argnums=2)
    plain = run(inputs, cotangent, ())
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        place = lambda a: jax.device_put(a, NamedSharding(mesh, P(("a", "b") if rows == 8 else None)))
        arguments = ((place(inputs[0]), *inputs[1:]), place(cotangent))
        sharded = run(*arguments, ("a", "b"))
        assert "shard_map" in str(jax.make_jaxpr(loss, static_argnums=2)(*arguments, ("a", "b")))
        with pytest.raises(ValueError, match="token_axes"):
            run(*arguments, ("a", "rows"))
    for a, b in zip(*map(jax.tree.leaves, (sharded, plain)), strict=True):
        assert error(a, b) < 1e-5


def test_inside_a_callers_shard_map():
    """With checks of what varies over the mesh: a shared query gets the sum of the devices' gradients."""
    (x, mats, queries, scales), cotangent = random_stack(2, (4, 3), 16, 2, dtype="float32")
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))

    def loss(queries, run):
        return jnp.sum(run(x, queries) * cotangent)

    run = functools.partial(stack, heads=2, block_size=2, implementation="xla", norm_scales=scales)
    plain = lambda x, queries: run(x, mats, queries)
    sharded = jax.shard_map(plain, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), check_vma=True)
    got, want = (jit(jax.grad(functools.partial(loss, run=f)))(queries) for f in (sharded, plain))
    assert error(got, want) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("float32", 512, 4, 8), "bfloat16"),
        (("bfloat16", 512, 512, 8), "heads"),
        (("bfloat16", 500, 4, 8), "500"),
        (("bfloat16", 512, 64, 8), "heads"),  # of width 8
        (("bfloat16", 512, 4, 32), "32"),
        (("bfloat16", 16384, 8, 8), "VMEM"),
    ],
)
def test_what_runs_site_by_site(arguments, words):
    assert words in stages_pallas.unsupported(*arguments, interpret=False)
    for dim, heads in ((512, 4), (1024, 8), (1280, 8), (1280, 1), (2048, 8)):
        assert stages_pallas.unsupported("bfloat16", dim, heads, 8, interpret=False) is None


def test_pieces_lie_within_heads():
    for dim, heads in ((512, 4), (1280, 8), (1280, 1), (48, 3), (640, 40)):
        g = Geometry.of(9, 1000, dim, heads, 1e-6, False)
        assert g.width % g.piece == 0
        assert g.piece % 16 == 0
        assert g.tokens == 1024


TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def _compile(chip, sites, dim, heads, *, tokens=1024, block_size=8, batch=None):
    """The compiled forward and backward pass of a stack with sublayers of one product a feature."""
    pytest.importorskip("libtpu")
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    lead = (tokens,) if batch is None else (batch, tokens)
    inputs = (struct(*lead, dim), struct(sites - 1, dim), struct(sites, dim, dtype=jnp.float32))
    layer = lambda w, h: jnp.tanh(h * w)

    def both(inputs, cotangent):
        options = {"heads": heads, "block_size": block_size, "interpret": False, "layer": layer}
        return value_and_grads(inputs, cotangent, **options)

    if batch is not None:
        both = jax.vmap(both, ((0, None, None), 0))
    with assume_platform("tpu"):
        traced = jax.jit(both).trace(inputs, struct(*lead, dim))
    return traced.lower(lowering_platforms=("tpu",)).compile()


def _check(chip, sites, dim, heads, **options):
    text = _compile(chip, sites, dim, heads, **options).as_text()
    blocks = -(-sites // options.get("block_size", 8))
    counts = [len(re.findall(rf"%{name}[.\d]* = .*tpu_custom_call", text)) for name in KERNELS]
    assert counts == [blocks - 1, sites, blocks - 1, sites]
    copies = [x for x in text.splitlines() if f"= bf16[{sites},{dim}," in x and " copy(" in x]
    assert not copies, copies


def test_compiles():
    """Every stage: two blocks, the last ragged, and a head of 160 features."""
    _check("v5e", 3, 1280, 8, block_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize(("sites", "dim", "heads"), [(25, 512, 4), (49, 1024, 8), (73, 1280, 8)])
def test_compiles_everywhere(chip, sites, dim, heads):
    _check(chip, sites, dim, heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sites", "dim", "heads", "options"),
    [
        (6, 1280, 1, {"block_size": 5}),
        (4, 512, 32, {"block_size": 3, "tokens": 5}),  # heads of 16 features, tokens padded to a tile
        (10, 2048, 8, {"block_size": 8}),  # the most VMEM
        (4, 512, 4, {"block_size": 2, "tokens": 200, "batch": 2}),  # under vmap
    ],
)
def test_compiles_odd_shapes(sites, dim, heads, options):
    if "batch" in options:
        assert "tpu_custom_call" in _compile("v5e", sites, dim, heads, **options).as_text()
    else:
        _check("v5e", sites, dim, heads, **options)
