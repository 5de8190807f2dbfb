"""Reading what a program sends between devices: by hand, on simulated devices, and with the real TPU compiler."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_jax import topology
from mhar_jax.collectives import Array, Collective, Shapes, activations, history_moves, read_collectives, role
from mhar_jax.config import make_config
from mhar_jax.models import routing
from mhar_jax.models.sites import num_sublayers
from mhar_jax.sharding import make_mesh
from mhar_jax.training.step import make_trainer

_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

SHAPES = Shapes(batch=2, length=1024, width=1280, parameters=frozenset({1280 * 5120, 151936 * 1280}))

TEXT = """
  %all-gather.1 = bf16[1280,5120]{1,0:T(8,128)} all-gather(%p), channel_id=4, metadata={op_name="jit(step)/a"}
  %fused = bf16[1280,5120]{1,0} all-gather(%p), channel_id=4, replica_groups=[2,2]
  ROOT %all-reduce.7 = (f32[2,1024,1280]{2,1,0}, f32[]) all-reduce(%x, %y), channel_id=9
  %permute = (bf16[8,16]{1,0}, bf16[8,16]{1,0}, u32[], u32[]) collective-permute-start(%z), channel_id=11
  %done = bf16[8,16]{1,0} collective-permute-done(%permute)
  %by-hand.1 = f32[8,16]{1,0} all-gather(%k), channel_id=1, frontend_attributes={chain_id="2"}
  %by-hand.2 = f32[8,16]{1,0} all-gather(%k), channel_id=1, frontend_attributes={chain_id="2"}
  %by-hand.3 = f32[8,16]{1,0} all-gather(%v), channel_id=1
  %by-hand.4 = f32[8,16]{1,0} all-gather(%w), channel_id=1
  %not-one = f32[4] add(%all-reduce.7, %all-gather.1)
"""


def test_a_text_is_read():
    assert read_collectives(TEXT) == (
        Collective("all-gather", (Array("bf16", (1280, 5120)),), "jit(step)/a"),
        Collective("all-reduce", (Array("f32", (2, 1024, 1280)), Array("f32", ())), ""),
        Collective("collective-permute", (Array("bf16", (8, 16)),), ""),
        *[Collective("all-gather", (Array("f32", (8, 16)),), "")] * 3,
    )
    assert read_collectives(TEXT)[0].bytes == 1280 * 5120 * 2


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 1024, 1280), "activations"),
        ((73, 1280, 2048), "activations"),  # the history as the TPU kernels keep it
        ((9, 2, 1024, 1280), "activations"),
        ((1280, 5120), "parameters"),
        ((256, 5, 151936), "parameters"),  # the embedding, in the partitioner's own shape
        ((73, 1280), "parameters"),
        ((80,), "small"),
        ((), "small"),
    ],
)
def test_what_an_array_is(shape, expected):
    assert role(Array("bf16", shape), SHAPES) == expected


def test_a_moved_history_is_seen():
    one = Collective("all-reduce", (Array("bf16", (2, 1024, 1280)),), "")
    assert history_moves([one] * 144, SHAPES, 72) == []
    (reason,) = history_moves([one] * 900, SHAPES, 72)
    assert "move 900 sources" in reason
    stacked = Collective("all-gather", (Array("bf16", (9, 2, 1024, 1280)),), "jit(step)/gather")
    assert "more than one source (jit(step)/gather)" in history_moves([stacked], SHAPES, 72)[0]
    routed = Collective("all-gather", (Array("bf16", (2, 1024, 1280)),), "jit(step)/depth_stack/_mix")
    assert "part of the routing" in history_moves([routed], SHAPES, 72)[0]


def test_a_program_that_gathers_its_history_is_seen():
    """Sources split over four devices by batch, and mixed by a program that wants them whole: a fault planted."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sources = jax.ShapeDtypeStruct((5, 4, 128, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "data")))
    shapes = Shapes(1, 128, 64, frozenset())

    def collectives(layout):
        def mix(s):
            return jnp.mean(jax.lax.with_sharding_constraint(s, NamedSharding(mesh, layout)), axis=0)

        return read_collectives(jax.jit(mix).lower(sources).compile().as_text())

    assert history_moves(collectives(P(None, "data")), shapes, 4) == []
    assert "more than one source" in history_moves(collectives(P()), shapes, 4)[0]


def moves_over_context(variant: str, sizes: dict[str, int]) -> tuple[list[str], set[str]]:
    """What `history_moves` says of a step on eight simulated devices, and the kinds of collectives of activations."""
    model = {"variant": variant, "num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96}
    model |= {"vocab_size": 384, "num_blocks": 2, "context": 128}
    config = make_config({"batch_size": 8, "seq_len": 128, "model": model, "mesh": {"data": 1, **sizes}})
    mesh = make_mesh(config.mesh, jax.devices())
    trainer = make_trainer(config, mesh)
    compiled = trainer.step.lower(trainer.shapes, trainer.batch).compile(compiler_options=_QUICKLY)
    shapes = topology.shapes_on_a_device(config, mesh, trainer.shapes["params"])
    found = read_collectives(compiled.as_text())
    return history_moves(found, shapes, num_sublayers(config.model)), {c.kind for c, _ in activations(found, shapes)}


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("mhar", {"fsdp": 2, "context": 2, "tensor": 2}),
        pytest.param("mhar", {"fsdp": 2, "context": 4}, marks=pytest.mark.slow),
        pytest.param("delta_block", {"fsdp": 4, "context": 2}, marks=pytest.mark.slow),  # site by site
    ],
)
def test_split_sequences_do_not_move_the_history(variant, sizes):
    moves, kinds = moves_over_context(variant, sizes)
    assert moves == []
    assert {"all-gather", "reduce-scatter"} <= kinds, "keys and values, and their gradients"


@pytest.mark.slow
def test_a_history_gathered_over_context_is_seen(monkeypatch):
    """The fault planted: batch and sequence as one axis of tokens, left to the partitioner."""
    monkeypatch.setattr(routing, "axes_of_tokens", lambda implementation: ())
    moves, _ = moves_over_context("delta_block", {"fsdp": 4, "context": 2})
    assert moves


@pytest.fixture
def _environment():
    """What libtpu is told here stays in the test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
def test_routing_sends_no_activations_that_additive_does_not():
    """Two layers on four chips of a v5e, split by batch and by heads, through the real compiler."""
    found = {}
    for variant in ("additive", "mhar", "delta_block"):
        model = {"num_layers": 2, "d_model": 256, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 512, "context": 256}
        config = make_config(
            {
                "batch_size": 8,
                "seq_len": 256,
                "model": {**model, "vocab_size": 512, "variant": variant, "num_blocks": 2},
                "mesh": {"data": 1, "fsdp": 2, "tensor": 2},
            }
        )
        found[variant] = topology.compile_step(config, "v5e:2x2")
        assert found[variant].history_moves() == []
    moved = {
        variant: sum(a.size for _, a in activations(f.collectives, f.shapes)) / f.shapes.source
        for variant, f in found.items()
    }
    assert max(moved["mhar"], moved["delta_block"]) <= moved["additive"] + 1, moved
    assert 4 <= moved["additive"] <= 16
