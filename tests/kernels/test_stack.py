"""depth_stack: the given stacks, and the blocked schedule against site-by-site routing.

Tolerances, ‖a − b‖ / ‖b‖ against float64: values 1e-6 and gradients 1e-5 in float32. In bfloat16 a blocked result may
be at most 1.25 times as far from float64 as the site-by-site one: it rounds no oftener, partial mixes stay float32.
"""

import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_kernels import depth_route, depth_stack
from oracle import CASES, error, load_case

NAMES = ("x", "mats", "queries", "norm_scales")


def tanh_layer(w, h):
    return jnp.tanh(h @ w)


def random_stack(n, lead, dim, heads, dtype="float32", seed=0):
    """Inputs like the given stacks': x, mats [n, D, D], queries and norm scales [n + 1, D]; and a cotangent."""
    rng = np.random.default_rng(seed)
    inputs = (
        jnp.asarray(rng.standard_normal((*lead, dim)), dtype),
        jnp.asarray(rng.standard_normal((n, dim, dim)) * 1.5 / np.sqrt(dim), dtype),
        jnp.asarray(rng.standard_normal((n + 1, dim)) * 2 / np.sqrt(dim / heads), jnp.float32),
        jnp.asarray(rng.uniform(0.7, 1.3, (n + 1, dim)), jnp.float32),
    )
    return inputs, jnp.asarray(rng.standard_normal((*lead, dim)), dtype)


@functools.partial(jax.jit, static_argnames=("heads", "eps", "block_size", "implementation", "remat"))
def value_and_grads(inputs, cotangent, *, heads, eps=1e-6, block_size=None, implementation="xla", remat="none"):
    def stack(x, mats, queries, norm_scales):
        layers = [tanh_layer] * len(mats)
        options = {"block_size": block_size, "implementation": implementation, "remat": remat}
        return depth_stack(layers, list(mats), x, queries, norm_scales, num_heads=heads, eps=eps, **options)

    out, vjp = jax.vjp(stack, *inputs)
    return out, vjp(cotangent.astype(out.dtype))


def check_given(name, **options):
    with np.load(CASES / f"{name}.npz") as z:
        meta = json.loads(str(z["meta"]))
        inputs = tuple(jnp.asarray(z[k]) for k in NAMES)
        out, grads = value_and_grads(
            inputs, jnp.asarray(z["cotangent"]), heads=meta["num_heads"], eps=meta["eps"], **options
        )
        assert error(out, z["out"]) < 1e-6
        for k, grad in zip(NAMES, grads, strict=True):
            assert error(grad, z[f"d_{k}"]) < 1e-5, k


@pytest.mark.parametrize("block_size", [2, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (1, 3, 8))])
def test_given_stack(block_size):
    check_given("stack_6", block_size=block_size)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 25])
def test_given_deep_stack(block_size):
    check_given("stack_24", block_size=block_size)


@pytest.mark.exhaustive
def test_given_stack_site_by_site():
    check_given("stack_6", implementation="reference")


@pytest.mark.parametrize("heads", [1, pytest.param(12, marks=pytest.mark.exhaustive)])  # H = 1 and H = D
def test_extreme_head_counts(heads):
    inputs, cotangent = random_stack(4, (3,), 12, heads)
    blocked = value_and_grads(inputs, cotangent, heads=heads, block_size=2)
    plain = value_and_grads(inputs, cotangent, heads=heads, implementation="reference")
    assert error(blocked[0], plain[0]) < 1e-6
    for a, b in zip(blocked[1], plain[1], strict=True):
        assert error(a, b) < 1e-5


def test_bfloat16_is_as_close_to_float64_as_site_by_site():
    """The mean over some draws: a single one differs by a third either way."""
    errors = []
    for seed in range(3):
        inputs, cotangent = random_stack(4, (2, 40), 48, 3, "bfloat16", seed)
        exact = tuple(a.astype(jnp.float32) for a in inputs), cotangent.astype(jnp.float32)
        wide = value_and_grads(*exact, heads=3, implementation="reference")
        blocked = value_and_grads(inputs, cotangent, heads=3, block_size=3)
        by_site = value_and_grads(inputs, cotangent, heads=3, implementation="reference")
        chex.assert_trees_all_equal_shapes_and_dtypes(blocked, by_site)
        errors.append(
            [[error(*pair) for pair in zip(*map(jax.tree.leaves, (t, wide)), strict=True)] for t in (blocked, by_site)]
        )
    blocked, by_site = np.mean(errors, axis=0)
    assert (blocked <= 1.25 * by_site).all(), (blocked, by_site)


def test_repeats_to_the_bit():
    inputs, cotangent = random_stack(4, (3,), 12, 3)
    chex.assert_trees_all_equal(
        value_and_grads(inputs, cotangent, heads=3, block_size=2),
        value_and_grads(inputs, cotangent, heads=3, block_size=2),
    )


@pytest.mark.parametrize(
    "name",
    [
        "peaked",
        "zero_source",
        "tiny_values",
        pytest.param("mixed_scales", marks=pytest.mark.exhaustive),
        pytest.param("twelve_heads", marks=pytest.mark.exhaustive),
    ],
)
def test_given_sources(name):
    """Sublayers that return given sources whatever they read: the final site is then `depth_route` of those."""
    case = load_case(name)
    sources, query, scale = (jnp.asarray(case.inputs[k]) for k in ("sources", "query", "norm_scale"))
    n = len(sources) - 1

    @jax.jit
    def both(sources, query, scale, cotangent):
        def stack(sources, query, scale):
            queries, scales = (jnp.zeros((n + 1, query.size)).at[n].set(a) for a in (query, scale))
            layers = [lambda source, h: source] * n
            return depth_stack(
                layers,
                list(sources[1:]),
                sources[0],
                queries,
                scales,
                num_heads=case.num_heads,
                eps=case.eps,
                block_size=2,
                implementation="xla",
            )

        out, vjp = jax.vjp(stack, sources, query, scale)
        return out, vjp(cotangent)

    out, grads = both(sources, query, scale, jnp.asarray(case.cotangent))
    assert error(out, case.out) < 1e-6
    for k, grad in zip(("sources", "query", "norm_scale"), grads, strict=True):
        assert error(grad, case.grads[k]) < 1e-5, k


def test_remat_changes_nothing_and_keeps_less():
    inputs, cotangent = random_stack(4, (64,), 24, 3)

    def two_products(w, h):  # more to remember inside than its output
        return jnp.tanh(jnp.sin(jnp.tanh(h @ w) * 3) @ w.T)

    def loss(inputs, remat):
        x, mats, queries, scales = inputs
        layers = [two_products] * len(mats)
        out = depth_stack(layers, list(mats), x, queries, scales, num_heads=3, remat=remat, implementation="xla")
        return jnp.sum(out * cotangent)

    plain, *again = (
        jax.jit(jax.grad(functools.partial(loss, remat=r)))(inputs) for r in ("none", "sublayer", "sources")
    )
    for saving in again:
        for a, b in zip(plain, saving, strict=True):
            assert error(a, b) < 1e-6

    def kept(remat):
        """Rows of D numbers that the forward pass keeps for the backward pass."""
        _, pullback = jax.eval_shape(lambda inputs: jax.vjp(functools.partial(loss, remat=remat), inputs), inputs)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback)) / cotangent.size

    none, sublayer, sources = map(kept, ("none", "sublayer", "sources"))
    assert sublayer + 8 < none  # two rows inside each sublayer at least
    assert sources + 9.9 < sublayer  # the mix of each site and what rounding took from it


def test_extra_inputs_and_closed_over_parameters():
    """Dropout keys and integers pass through; what a sublayer closes over gets its gradient."""
    inputs, cotangent = random_stack(3, (5,), 12, 3)
    x, mats, queries, scales = inputs
    keys = list(jax.random.split(jax.random.key(0), 3))
    shift = jnp.ones(12)

    def loss(mats, shift, implementation):
        def layer(p, h):
            w, key, index = p
            keep = jax.random.bernoulli(key, 0.5, h.shape)
            return jnp.tanh(h @ w + shift * index) * keep

        params = [(w, key, jnp.int32(i)) for i, (w, key) in enumerate(zip(mats, keys, strict=True))]
        out = depth_stack(
            [layer] * 3, params, x, queries, scales, num_heads=3, implementation=implementation, block_size=2
        )
        return jnp.sum(out * cotangent)

    blocked = jax.jit(jax.grad(functools.partial(loss, implementation="xla"), (0, 1)))(mats, shift)
    plain = jax.jit(jax.grad(functools.partial(loss, implementation="reference"), (0, 1)))(mats, shift)
    for a, b in zip(blocked, plain, strict=True):
        assert np.linalg.norm(b) > 0
        assert error(a, b) < 1e-5


def test_vmap_checkpoint_and_scan():
    (x, mats, queries, scales), cotangent = random_stack(3, (2, 5), 12, 3)

    def one(x, cotangent):
        out = depth_stack([tanh_layer] * 3, list(mats), x, queries, scales, num_heads=3, block_size=2)
        return jnp.sum(out * cotangent)

    whole = jax.jit(jax.grad(one))(x, cotangent)
    mapped = jax.jit(jax.vmap(jax.grad(jax.checkpoint(one))))(x, cotangent)
    _, scanned = jax.lax.scan(lambda c, xy: (c, jax.grad(one)(*xy)), 0, (x, cotangent))
    assert error(mapped, whole) < 1e-6
    assert error(scanned, whole) < 1e-6


@pytest.mark.parametrize("spec", [P("a"), P("a", None, "b"), P(None, None, ("a", "b"))])
def test_sharded_gradients_equal_unsharded_ones(spec):
    """Tokens split, the width split, and both: the compiler places what communication is needed."""
    inputs, cotangent = random_stack(3, (4, 2), 16, 2)
    plain = value_and_grads(inputs, cotangent, heads=2, block_size=2)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    place = lambda a: jax.device_put(a, NamedSharding(mesh, spec))
    sharded = value_and_grads((place(inputs[0]), *inputs[1:]), place(cotangent), heads=2, block_size=2)
    for a, b in zip(*map(jax.tree.leaves, (sharded, plain)), strict=True):
        assert error(a, b) < 1e-6


def test_one_source_site_has_no_query_gradient_and_the_first_sublayer_has_one():
    inputs, cotangent = random_stack(3, (4,), 12, 3)
    _, (_, d_mats, d_queries, d_scales) = value_and_grads(inputs, cotangent, heads=3, block_size=2)
    np.testing.assert_array_equal(d_queries[0], 0)
    np.testing.assert_array_equal(d_scales[0], 0)
    assert (jnp.linalg.norm(d_queries[1:], axis=-1) > 0).all()
    assert (jnp.linalg.norm(d_mats, axis=(1, 2)) > 0).all()


@pytest.mark.exhaustive
def test_memory_grows_linearly_with_depth():
    """At L and 2L: histories stacked anew at every site would make it grow fourfold."""

    def peak(n):
        inputs, cotangent = random_stack(n, (256,), 128, 1)
        lowered = value_and_grads.lower(inputs, cotangent, heads=1, block_size=2)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert peak(10) < 2.4 * peak(5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_stacks(seed):
    """Random depth, width, heads, block size and dtype, against site by site in float64."""
    rng = np.random.default_rng(seed)
    n, heads, head_dim = int(rng.integers(0, 8)), int(rng.integers(1, 5)), int(rng.integers(1, 7))
    dtype = str(rng.choice(["float32", "bfloat16", "float16"]))
    lead = tuple(int(v) for v in rng.integers(1, 4, int(rng.integers(0, 3))))
    inputs, cotangent = random_stack(n, lead, heads * head_dim, heads, dtype, seed)
    blocked = value_and_grads(inputs, cotangent, heads=heads, block_size=int(rng.integers(1, n + 3)))
    plain = value_and_grads(inputs, cotangent, heads=heads, implementation="reference")
    for a, b in zip(*map(jax.tree.leaves, (blocked, plain)), strict=True):
        # Half precision: both sides round every source and gradient, in orders of their own, through n sublayers.
        assert error(a, b) < (1e-5 if dtype == "float32" else 0.05)


def test_route_and_stack_agree_on_one_site():
    x, q = jnp.arange(24.0).reshape(2, 12), jnp.ones((1, 12))
    np.testing.assert_array_equal(depth_stack([], [], x, q, num_heads=3), depth_route([x], q[0], num_heads=3))


@functools.cache
def depth_of_36_layers():
    """A stack of 73 sites, and the definition in float64: a scan over sites of a masked history, compiled once."""
    n, heads = 72, 2
    (x, mats, queries, scales), cotangent = random_stack(n, (5,), 16, heads)

    def by_site(x, mats, queries, scales):
        history = jnp.zeros((n + 1, *x.shape), x.dtype).at[0].set(x)

        def site(history, step):
            i, query, scale = step
            r = jax.lax.rsqrt(jnp.mean(history**2, axis=-1, keepdims=True) + 1e-6)
            keys = (history * r * scale).reshape(*history.shape[:-1], heads, -1)
            logits = jnp.sum(keys * query.reshape(heads, -1), axis=-1)
            logits = jnp.where((jnp.arange(n + 1) <= i)[:, None, None], logits, -jnp.inf)
            weights = jax.nn.softmax(logits, axis=0)[..., None]
            mix = jnp.sum(weights * history.reshape(keys.shape), axis=0).reshape(x.shape)
            source = tanh_layer(mats[jnp.minimum(i, n - 1)], mix)
            return history.at[i + 1].set(source, mode="drop"), mix

        return jax.lax.scan(site, history, (jnp.arange(n + 1), queries, scales))[1][-1]

    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in (x, mats, queries, scales)]
        exact, vjp = jax.vjp(jax.jit(by_site), *wide)
        expected = vjp(jnp.asarray(np.asarray(cotangent, np.float64)))
    return ((x, mats, queries, scales), cotangent), jax.tree.map(np.asarray, (exact, expected))


@pytest.mark.parametrize(
    "block_size",
    [
        *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (1, 8, 73)),
        *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3)),
    ],
)
def test_the_depth_of_36_layers(block_size):
    (inputs, cotangent), (exact, expected) = depth_of_36_layers()
    out, grads = value_and_grads(inputs, cotangent, heads=2, block_size=block_size)
    assert error(out, exact) < 1e-6
    for name, grad, want in zip(NAMES, grads, expected, strict=True):
        assert error(grad, want) < 1e-5, name
