"""Sequences split over devices: attention over whole ones, segments across borders, and each device its own tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_jax.config.schema import MeshConfig
from mhar_jax.models import attention as module
from mhar_jax.models import routing
from mhar_jax.models.attention import attention
from mhar_jax.models.embedding import embed
from mhar_jax.models.sites import Site
from mhar_jax.sharding import make_mesh, state_shardings
from model_helpers import build, jit, pure, relative, scramble, tiny

TOKENS = P(("data", "fsdp"), "context")


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def packed(batch: int, length: int) -> np.ndarray:
    """Segments whose borders are not the devices'; the first one of each row spans two devices."""
    borders = np.random.default_rng(3).integers(length // 2 + 1, length, batch)
    return (np.arange(length) >= borders[:, None]).astype(np.int32)


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ({"context": 4, "data": 2}, False),
        ({"context": 2, "data": 1, "fsdp": 2, "tensor": 2}, True),
        pytest.param({"context": 4, "data": 1, "tensor": 2}, True, marks=pytest.mark.slow),
        pytest.param({"context": 2, "data": 1, "tensor": 4}, True, marks=pytest.mark.slow),  # two groups of keys
    ],
)
def test_attention_equals_one_device(sizes, segments):
    q, k, v, out = draw(4, 16, 4, 8), draw(4, 16, 2, 8, seed=1), draw(4, 16, 2, 8, seed=2), draw(4, 16, 4, 8, seed=3)
    ids = jnp.asarray(packed(4, 16)) if segments else None

    @jit
    def run(q, k, v, ids):
        result, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, segment_ids=ids, implementation="xla"), q, k, v)
        return result, vjp(out)

    expected = run(q, k, v, ids)
    mesh = make_mesh(MeshConfig(**sizes))
    with jax.set_mesh(mesh):
        place = lambda x: None if x is None else jax.device_put(x, NamedSharding(mesh, TOKENS))
        found = run(*map(place, (q, k, v, ids)))
        text = run.lower(*map(place, (q, k, v, ids))).compile().as_text()
    assert "all-gather" in text
    assert "reduce-scatter" in text
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative(a, b) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("segments", [False, True])
def test_splash_attention_knows_which_part_it_has(monkeypatch, segments):
    """Interpreted: the kernel of each device gets its own rows of the mask."""
    interpreted = functools.partial(splash_attention.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention, "make_splash_mha", interpreted)
    monkeypatch.setitem(module._UNSUPPORTED, "tpu_flash", lambda q, k, ids: None)
    q, k, v, out = draw(2, 256, 2, 64), draw(2, 256, 2, 64, seed=1), draw(2, 256, 2, 64, seed=2), draw(2, 256, 2, 64)
    ids = jnp.asarray(packed(2, 256)) if segments else None

    def run(name, q, k, v, ids):
        result, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, segment_ids=ids, implementation=name), q, k, v)
        return result, vjp(out)

    expected = jax.jit(run, static_argnums=0)("xla", q, k, v, ids)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, context=2, tensor=2))):
        found = jax.jit(run, static_argnums=0)("tpu_flash", q, k, v, ids)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative(a, b) < 1e-5  # blockwise softmax


@pytest.mark.parametrize("variant", ["mhar", pytest.param("delta_block", marks=pytest.mark.slow)])
def test_packed_segments_cross_the_border(variant):
    """Positions start again in each segment; loss weights too are split."""
    model = scramble(build(tiny(variant, num_layers=2)))
    graph, state = nnx.split(model)
    tokens = np.random.default_rng(1).integers(0, 64, (2, 17)).astype(np.int32)
    ids, weights = packed(2, 16), np.random.default_rng(2).random((2, 16)).astype(np.float32)
    positions = np.where(ids == 1, np.cumsum(ids, axis=1) - 1, np.arange(16)).astype(np.int32)

    @functools.partial(jit, static_argnums=0)
    def step(graph, state, tokens, ids, positions, weights):
        def loss(state):
            options = {"segment_ids": ids, "positions": positions, "loss_weights": weights, "z_loss": 1e-3}
            total, sums = nnx.merge(graph, state).loss(tokens[:, :-1], tokens[:, 1:], **options)
            return total / sums["tokens"]

        return jax.value_and_grad(loss)(state)

    expected, one = step(graph, state, tokens, ids, positions, weights)
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, context=2, tensor=2))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(state, state_shardings(mesh, state))
        place = lambda x: jax.device_put(x, NamedSharding(mesh, TOKENS))
        loss, many = step(graph, sharded, tokens, *map(place, (ids, positions, weights)))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(pure(many)), jax.tree.leaves(pure(one)), strict=True):
        assert relative(a, b) < 1e-5 or float(np.linalg.norm(b)) < 1e-6, path


@pytest.mark.parametrize("vocab", [12, 13])  # split over tensor, and not
def test_rows_of_a_split_table(vocab):
    """To the bit: a row is fetched, or added to zeros."""
    table, tokens, out = draw(vocab, 8), np.random.default_rng(1).integers(0, vocab, (4, 6)), draw(4, 6, 8, seed=2)

    @functools.partial(jit, static_argnums=2)
    def run(table, tokens, dtype):
        rows, vjp = jax.vjp(lambda t: embed(t, tokens, dtype), table)
        return rows, vjp(out.astype(dtype))[0]

    with jax.set_mesh(mesh := make_mesh(MeshConfig(data=1, fsdp=2, context=2, tensor=2))):
        table = jax.device_put(table, NamedSharding(mesh, P("tensor" if vocab == 12 else None, "fsdp")))
        for dtype in ("float32", "bfloat16"):
            rows, gradient = run(table, tokens, dtype)
            np.testing.assert_array_equal(rows, np.asarray(table)[tokens].astype(rows.dtype))
            exact = np.zeros((vocab, 8))
            np.add.at(exact, tokens, np.asarray(out.astype(dtype), np.float64))
            assert relative(gradient, exact) < 1e-6  # added in float32


def test_sites_route_their_own_tokens():
    """No collective but the sum of the parameters' gradients; three rows divide no batch axis, so all have them."""
    for batch in (4, 3):
        sources, residual = [draw(batch, 6, 16, seed=i) for i in range(3)], draw(batch, 6, 16, seed=7)
        row = Site(*(draw(*shape, seed=9) for shape in ((16,), (16,), (16,), ())))

        def loss(sources, row, residual):
            options = {"num_heads": 2, "eps": 1e-6, "implementation": "xla", "return_weights": True}
            out, weights = routing.route_under_mesh(sources, row, residual, **options)
            return jnp.sum(jnp.sin(out)) + jnp.sum(weights**2)

        run = jit(jax.value_and_grad(loss, (0, 1, 2)))
        expected = run(sources, row, residual)
        with jax.set_mesh(mesh := make_mesh(MeshConfig(data=2, context=2, tensor=2))):
            layout = NamedSharding(mesh, TOKENS if batch == 4 else P(None, "context"))
            arguments = jax.device_put(sources, layout), row, jax.device_put(residual, layout)
            found = run(*arguments)
            text = run.lower(*arguments).compile().as_text()
        for kind in ("all-gather", "all-to-all", "collective-permute"):
            assert f" {kind}(" not in text
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert relative(a, b) < 1e-5
