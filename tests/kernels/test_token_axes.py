"""Stacks whose leading axes a mesh splits, each in its own way: batch over some mesh axes, sequence over others."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_kernels import depth_stack
from mhar_kernels.stages_sharded import TokenShards
from oracle import error
from test_stack import random_stack

AXES = (("a", "b"), ("c",))


def program(implementation, token_axes):
    """A stack with pre-norms, and the gradients of all its inputs."""

    def stack(x, mats, queries, norm_scales, pre_norms):
        # float32 matrices, so that the sublayers' own gradients are not rounded on each device.
        layer = lambda w, h: jnp.tanh(h.astype(jnp.float32) @ w).astype(h.dtype)
        options = {"num_heads": 2, "block_size": 2, "implementation": implementation, "token_axes": token_axes}
        interpret = implementation not in ("xla", "reference")
        layers = [layer] * len(mats)
        return depth_stack(
            layers, list(mats), x, queries, norm_scales, pre_norms=pre_norms, interpret=interpret, **options
        )

    @jax.jit
    def run(inputs, cotangent):
        out, vjp = jax.vjp(stack, *inputs)
        return jax.tree.leaves((out, vjp(cotangent.astype(out.dtype))))

    return run


@pytest.mark.parametrize(
    ("implementation", "dtype", "lead"),
    [
        pytest.param("xla", "float32", (4, 6), marks=pytest.mark.slow),
        ("triton", "bfloat16", (4, 6)),
        pytest.param("reference", "float32", (4, 6), marks=pytest.mark.slow),  # site by site
        pytest.param("pallas_tpu", "bfloat16", (4, 6), marks=pytest.mark.slow),
        pytest.param("xla", "float32", (3, 6), marks=pytest.mark.slow),  # the batch does not divide, the sequence does
        pytest.param("xla", "float32", (4, 5), marks=pytest.mark.slow),  # and the other way round
    ],
)
def test_both_axes_are_split(implementation, dtype, lead):
    (x, mats, queries, scales), cotangent = random_stack(3, lead, 32, 2, dtype)
    inputs = (x, mats.astype(jnp.float32), queries, scales, jnp.linspace(0.5, 1.5, 4 * 32).reshape(4, 32))
    expected = program(implementation, ())(inputs, cotangent)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        layout = NamedSharding(mesh, P(AXES[0] if lead[0] == 4 else None, "c" if lead[1] == 6 else None))
        run = program(implementation, AXES)
        arguments = (jax.device_put(x, layout), *inputs[1:]), jax.device_put(cotangent, layout)
        found = run(*arguments)
        text = run.lower(*arguments).compile().as_text()
    for kind in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {kind}(" not in text, "sources stay where they are"
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) < (1e-5 if dtype == "float32" else 5e-3)  # a last bit of bfloat16, fused otherwise


def test_what_axes_may_be_given():
    x = jnp.zeros((4, 6, 32))
    assert TokenShards.of(AXES, x) is None, "no mesh"
    with jax.set_mesh(jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)):
        assert TokenShards.of((), x) is None
        assert TokenShards.of(("a", "b"), x) == TokenShards((("a", "b"),))
        assert TokenShards.of(AXES, x) == TokenShards(AXES)
        assert TokenShards.of(AXES, x[:3]).axes == ("c",)
        assert TokenShards.of(AXES, x[:, :5]).tokens == P(("a", "b"), None)
        assert TokenShards.of(AXES, x[0]).axes == (), "one leading axis, of 6, over 4 devices"
        with pytest.raises(ValueError, match="axes of the mesh"):
            TokenShards.of((("a",), ("rows",)), x)
        with pytest.raises(ValueError, match="once"):
            TokenShards.of((("a",), ("a",)), x)
