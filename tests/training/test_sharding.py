"""Meshes and the sharding table, without running anything."""

import math
import re

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from mhar_jax.config import make_config
from mhar_jax.config.schema import MeshConfig
from mhar_jax.errors import UserError
from mhar_jax.sharding import AXES, check_batch, constrain, fit, make_mesh, state_shardings
from mhar_jax.training.step import init_state, model_functions


def mesh_of(data: int, fsdp: int, tensor: int, context: int = 1) -> AbstractMesh:
    """A mesh of any size, on no devices."""
    return AbstractMesh((data, fsdp, context, tensor), AXES, axis_types=(AxisType.Auto,) * 4)


def axes_of(spec: P) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension."""
    return [() if s is None else (s,) if isinstance(s, str) else tuple(s) for s in spec]


@pytest.mark.parametrize(
    ("spec", "shape", "sizes", "expected"),
    [
        (P("fsdp", "tensor"), (1280, 5120), (1, 8, 4), P("fsdp", "tensor")),
        (P("fsdp", "tensor"), (1280, 5120), (1, 512, 1), P(None, "fsdp")),  # 1280 = 512 * 2.5, 5120 = 512 * 10
        (P("fsdp", "tensor"), (1280, 5120), (1, 512, 2), P(None, ("fsdp", "tensor"))),
        (P("tensor", "fsdp"), (387, 1280), (1, 8, 4), P(None, ("tensor", "fsdp"))),
        (P("tensor", "fsdp"), (7, 9), (1, 8, 4), P(None, None)),
        (P("fsdp", "tensor"), (16, 16), (8, 1, 1), P(None, None)),
        (P(), (5, 8), (2, 2, 2), P(None, None)),
        (P("fsdp", "tensor"), (8,), (1, 2, 2), P("fsdp")),
    ],
)
def test_where_axes_go(spec, shape, sizes, expected):
    assert axes_of(fit(spec, shape, mesh_of(*sizes))) == axes_of(expected)


@settings(deadline=None, max_examples=200)
@given(
    spec=st.permutations(["fsdp", "tensor", None]).map(lambda names: P(*names)),
    shape=st.lists(st.integers(1, 12).map(lambda n: n * 4) | st.integers(1, 100), min_size=0, max_size=4).map(tuple),
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4, 8, 512])] * 3),
)
def test_every_fit_divides(spec, shape, sizes):
    """What comes out always divides; an axis is used once; one that fits somewhere is not dropped while alone."""
    mesh = mesh_of(*sizes)
    placed = axes_of(fit(spec, shape, mesh))
    assert len(placed) == len(shape)
    used = [axis for axes in placed for axis in axes]
    assert len(used) == len(set(used))
    for size, axes in zip(shape, placed, strict=True):
        assert size % math.prod(mesh.shape[a] for a in axes) == 0
    wanted = [a for a in spec[: len(shape)] if a is not None and mesh.shape[a] > 1]
    assert set(used) <= set(wanted)
    if len(wanted) == 1 and any(size % mesh.shape[wanted[0]] == 0 for size in shape):
        assert used == wanted
    for dim, axis in enumerate(spec[: len(shape)]):  # the rule's own dimension, where nothing else is there
        if axis in wanted and shape[dim] % mesh.shape[axis] == 0 and placed[dim] in ((), (axis,)):
            assert placed[dim] == (axis,)


def test_moments_and_averages_follow_their_parameter():
    config = make_config(
        {
            "model": {"vocab_size": 512, "num_layers": 1, "tie_embeddings": False, "variant": "mhar"},
            "optimizer": {"ema": 0.9},
        }
    )
    functions = model_functions(config)
    shapes = jax.eval_shape(lambda: init_state(config, functions))
    mesh = jax.make_mesh((2, 2, 1, 2), AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices())
    shardings = state_shardings(mesh, shapes)
    flat = lambda tree: [h.spec for h in jax.tree.leaves(tree)]
    moments = shardings["optimizer"][1][0]
    assert flat(moments.mu) == flat(moments.nu) == flat(shardings["ema"]) == flat(shardings["params"])
    attention, mlp = (shardings["params"]["layers"]["0"][name] for name in ("attention", "mlp"))
    for name in ("w_q", "w_k", "w_v"):
        assert attention[name].spec == P("fsdp", "tensor")
    assert attention["w_o"].spec == mlp["w_down"].spec == P("tensor", "fsdp")
    assert mlp["w_gate"].spec == mlp["w_up"].spec == P("fsdp", "tensor")
    assert shardings["params"]["embedding"].spec == P("tensor", "fsdp")
    assert shardings["params"]["head"].spec == P("fsdp", "tensor")
    for small in (shardings["params"]["routing"], attention["norm"], shardings["step"], shardings["rng"]):
        assert all(h.is_fully_replicated for h in jax.tree.leaves(small))


def test_meshes():
    devices = jax.devices()
    shape = lambda **sizes: dict(make_mesh(MeshConfig(**sizes), devices).shape)
    assert shape() == {"data": 8, "fsdp": 1, "context": 1, "tensor": 1}
    assert shape(data=2, fsdp=-1, tensor=2) == {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}
    assert shape(data=1, fsdp=1, tensor=8) == {"data": 1, "fsdp": 1, "context": 1, "tensor": 8}
    assert shape(fsdp=2, context=2) == {"data": 2, "fsdp": 2, "context": 2, "tensor": 1}
    for sizes, words in (
        ({"data": 4, "fsdp": 4}, "needs 16 devices, and there are 8"),
        ({"data": 2}, "needs 2 devices, and there are 8"),
        ({"tensor": 3}, "multiple of 3 devices, and there are 8"),
        ({"tensor": 16}, "multiple of 16 devices, and there are 8"),
        ({"context": 3}, "context=3 x tensor=1 needs a multiple of 3 devices, and there are 8"),
    ):
        with pytest.raises(UserError, match=words):
            make_mesh(MeshConfig(**sizes), devices)


@pytest.mark.parametrize(
    ("batch", "accumulate", "fine"), [(8, 1, True), (16, 2, True), (12, 1, True), (8, 4, False), (6, 1, False)]
)
def test_batches_on_four_ways(batch, accumulate, fine):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices())
    config = make_config({"batch_size": batch, "optimizer": {"accumulate": accumulate}})
    if fine:
        check_batch(config, mesh)
    else:
        with pytest.raises(UserError, match="multiple of data x fsdp = 4"):
            check_batch(config, mesh)


def test_sequences_split_evenly():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, context=4), jax.devices())
    check_batch(make_config({"batch_size": 2, "seq_len": 36}), mesh)
    with pytest.raises(UserError, match=r"seq_len must be a multiple of mesh\.context = 4, got 30"):
        check_batch(make_config({"batch_size": 2, "seq_len": 30}), mesh)


def test_activations_are_pinned_where_the_mesh_divides():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices())

    def spec(shape, *names):
        with jax.set_mesh(mesh):
            text = str(jax.make_jaxpr(lambda x: constrain(x, *names))(jax.ShapeDtypeStruct(shape, "float32")))
        return re.findall(r"spec=P\((.*)\)\)", text)[0]

    assert spec((4, 3, 6), "batch", None, "hidden") == "('data', 'fsdp'), None, 'tensor'"
    assert spec((4, 3, 5), "batch", None, "hidden") == "('data', 'fsdp'), None, UNCONSTRAINED"
    assert spec((3, 3, 6), "batch", None, "hidden") == "UNCONSTRAINED, None, 'tensor'"
    mesh = make_mesh(MeshConfig(data=2, context=2, tensor=2), jax.devices())
    assert spec((4, 6, 6), "batch", "length", "hidden") == "('data', 'fsdp'), 'context', 'tensor'"
    assert spec((4, 1, 6), "batch", "length", None) == "('data', 'fsdp'), UNCONSTRAINED, None"
    x = jax.ShapeDtypeStruct((4, 3), "float32")
    assert "sharding_constraint" not in str(jax.make_jaxpr(lambda x: constrain(x, "batch", None))(x)), "no mesh"
