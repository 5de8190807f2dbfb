"""Gradients of a whole model on eight devices against one device: data, fsdp and tensor sharding together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_jax.config.schema import MeshConfig
from mhar_jax.models import routing
from mhar_jax.models.sites import Site
from mhar_jax.sharding import make_mesh, state_shardings
from model_helpers import build, jit, mean_loss, pure, relative, scramble, tiny


@pytest.mark.parametrize(
    "variant",
    ["mhar", *(pytest.param(v, marks=pytest.mark.slow) for v in ("mhar_headwise", "hyper_connections", "delta_block"))],
)
def test_gradients_equal_one_device(variant):
    model = scramble(build(tiny(variant, num_layers=2)))
    graph, state = nnx.split(model)
    tokens = np.random.default_rng(1).integers(0, 64, (4, 9)).astype(np.int32)
    step = jit(jax.value_and_grad(mean_loss, 1, has_aux=True), static_argnums=0)
    (expected, _), one = step(graph, state, tokens)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(state, state_shardings(mesh, state))
        rows = jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp"))))
        (loss, _), many = step(graph, sharded, rows)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(pure(many)), jax.tree.leaves(pure(one)), strict=True):
        assert relative(a, b) < 2e-5 or float(np.linalg.norm(b)) < 1e-6, path


@pytest.mark.exhaustive
def test_kernels_route_shard_by_shard(monkeypatch):
    """The path of kernels under a mesh: each device its own rows, parameter gradients summed once."""
    rng = np.random.default_rng(0)
    sources = [rng.normal(size=(8, 3, 16)).astype(np.float32) for _ in range(3)]
    residual = rng.normal(size=(8, 3, 16)).astype(np.float32)
    row = Site(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((16,), (16,), (16,), ())))

    def loss(sources, row, residual):
        options = {"num_heads": 2, "eps": 1e-6, "implementation": "xla", "return_weights": True}
        out, weights = routing.route_under_mesh(sources, row, residual, **options)
        return jnp.sum(jnp.sin(out)) + jnp.sum(weights**2)

    expected = jax.value_and_grad(loss, (0, 1, 2))(sources, row, residual)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        assert routing.kernels_need_shards("triton")
        assert not routing.kernels_need_shards("xla")
        assert not routing.kernels_need_shards(None)  # on a CPU
        monkeypatch.setattr(routing, "kernels_need_shards", lambda implementation: True)
        assert "shard_map" in str(jax.make_jaxpr(loss)(sources, row, residual))
        found = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(sources, row, residual)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative(a, b) < 1e-5
