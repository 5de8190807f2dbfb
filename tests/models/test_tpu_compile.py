"""The real TPU compiler, without a TPU: a one-layer model's gradient for four chips of a v5e."""

import os
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_jax.config import ModelConfig
from mhar_jax.config.schema import MeshConfig
from mhar_jax.models import build_model
from mhar_jax.sharding import make_mesh
from mhar_kernels import assume_platform


@pytest.fixture(scope="module")
def chips():
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"needs libtpu: {error}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "mesh", "segments"),
    [
        (64, {"data": 4}, False),
        (80, {"data": 2, "tensor": 2}, True),
        (64, {"data": 1, "context": 2, "tensor": 2}, True),
    ],
)
def test_flash_attention_compiles_inside_a_model(chips, head_dim, mesh, segments):
    """Head dims 64 and 80 unpadded, sharded over batch and heads, forward and both backward kernels."""
    mesh = make_mesh(MeshConfig(**mesh), chips)
    config = ModelConfig(
        variant="additive",
        vocab_size=512,
        num_layers=1,
        d_model=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        ffn_dim=512,
        attention_implementation="tpu_flash",
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0))))
    whole = NamedSharding(mesh, P())
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), state)
    tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32, sharding=NamedSharding(mesh, P(("data", "fsdp"))))

    def loss(state, tokens):
        return nnx.merge(graph, state).loss(tokens, tokens, segment_ids=tokens if segments else None)[0]

    with assume_platform("tpu"), jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss)).trace(state, tokens).lower(lowering_platforms=("tpu",)).compile()
    assert compiled.as_text().count("tpu_custom_call") >= 3


@pytest.mark.slow
def test_a_routed_model_runs_the_blocked_kernels_on_each_chips_tokens(chips):
    """Three sites in one block: a merge and a finish each, inside shard_map, and no site by site."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2), chips)
    config = ModelConfig(
        variant="mhar",
        vocab_size=512,
        num_layers=1,
        d_model=256,
        num_heads=2,
        num_kv_heads=2,
        head_dim=128,
        ffn_dim=512,
        compute_dtype="bfloat16",
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0))))
    whole = NamedSharding(mesh, P())
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), state)
    tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32, sharding=NamedSharding(mesh, P(("data", "fsdp"))))

    def loss(state, tokens):
        return nnx.merge(graph, state).loss(tokens, tokens)[0]

    with assume_platform("tpu"), jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss)).trace(state, tokens).lower(lowering_platforms=("tpu",)).compile()
    calls = re.findall(r"%(\w+)[.\d]* = .*tpu_custom_call", compiled.as_text())
    assert [calls.count(kernel) for kernel in ("depth_stack_merge", "depth_stack_finish")] == [3, 3]
    assert not any("depth_route" in name for name in calls)
