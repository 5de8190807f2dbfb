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
from mhar_jax.models import blocked
from mhar_jax.sharding import make_mesh
from mhar_jax.training.step import make_trainer

_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

SHAPES = Shapes(batch=2, length=1024, width=1280, keys=frozenset({640}))

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


# Weights gathered in pieces of one channel, a source and a gradient of the weights' shape summed as one, tokens.
STEP = """
HloModule step

%gather (p.0: bf16[512,1024]) -> (bf16[1024,1024], u32[]) {
  %p.0 = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[1024,1024]{1,0} all-gather(%p.0), channel_id=2, dimensions={0}
  ROOT %start = (bf16[1024,1024]{1,0}, u32[]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%body (q: (s32[], bf16[1024,1024], bf16[1024,1024])) -> (s32[], bf16[1024,1024], bf16[1024,1024]) {
  %q = (s32[], bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%q), index=0
  %weight = bf16[1024,1024]{1,0} get-tuple-element(%q), index=1
  %sum = bf16[1024,1024]{1,0} get-tuple-element(%q), index=2
  %moved.weight = bf16[1024,1024]{1,0} collective-permute(%weight), channel_id=7
  %moved.sum = bf16[1024,1024]{1,0} collective-permute(%sum), channel_id=8
  %product = bf16[1024,1024]{1,0} convolution(%moved.weight, %moved.weight), dim_labels=bf_io->bf
  %added = bf16[1024,1024]{1,0} add(%product, %moved.sum)
  ROOT %next = (s32[], bf16[1024,1024]{1,0}, /*index=2*/bf16[1024,1024]{1,0}) tuple(%n, %moved.weight, %added)
}

ENTRY %main (state: bf16[512,1024], tokens: s32[4,1025]) -> (bf16[1024,1024], bf16[1024,1024]) {
  %state = bf16[512,1024]{1,0} parameter(0)
  %tokens = s32[4,1025]{1,0} parameter(1)
  %all-reduce.1 = s32[4,1025]{1,0} all-reduce(%tokens), channel_id=3, to_apply=%add
  %fusion = (bf16[1024,1024]{1,0}, u32[]) fusion(%state), kind=kCustom, calls=%gather
  %weight.1 = bf16[1024,1024]{1,0} get-tuple-element(%fusion), index=0
  %source = bf16[1024,1024]{1,0} gather(%weight.1, %all-reduce.1), offset_dims={1}
  %all-gather.2 = bf16[1024,1024]{1,0} all-gather(%source), channel_id=4, dimensions={0}
  %mix = bf16[1024,1024]{1,0} dot(%all-gather.2, %weight.1), lhs_contracting_dims={1}
  %gradient = bf16[1024,1024]{1,0} multiply(%mix, %mix)
  %all-reduce.2 = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}) all-reduce(%gradient, %mix), channel_id=5
  %first = bf16[1024,1024]{1,0} get-tuple-element(%all-reduce.2), index=0
  %second = bf16[1024,1024]{1,0} get-tuple-element(%all-reduce.2), index=1
  %again = bf16[1024,1024]{1,0} custom-call(%second, %weight.1), custom_call_target="tpu_custom_call"
  %zero = s32[] constant(0)
  %carried = (s32[], bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}) tuple(%zero, %weight.1, %again)
  %while = (s32[], bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}) while(%carried), condition=%less, body=%body
  %total = bf16[1024,1024]{1,0} get-tuple-element(%while), index=2
  ROOT %tuple = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}) tuple(%first, %total)
}
"""


def test_what_an_array_is_does_not_depend_on_its_shape():
    """A weight, a source, a gradient, and tokens; a weight and a sum that a loop carries side by side."""
    shapes = Shapes(batch=1, length=1024, width=1024)
    roles = [(c.kind, *(role(array, shapes) for array in c.arrays)) for c in read_collectives(STEP)]
    assert roles == [
        ("all-gather", "parameters"),
        ("collective-permute", "parameters"),
        ("collective-permute", "parameters"),
        ("all-reduce", "small"),
        ("all-gather", "activations"),
        ("all-reduce", "parameters", "activations"),
    ]
    assert role(Array("s32", (512, 4096), of_model=True), shapes) == "indices"
    with_product = STEP.replace("add(%product, %moved.sum)", "dot(%product, %moved.sum)")
    assert [c.arrays[0].of_model for c in read_collectives(with_product)][1:3] == [False, True]


def activation(*shape: int) -> Array:
    return Array("bf16", shape, of_model=True)


def test_a_moved_history_is_seen():
    one = Collective("all-reduce", (activation(2, 1024, 1280),), "")
    split = SHAPES._replace(summed=72)
    assert history_moves([one] * 144, split) == []
    (reason,) = history_moves([one] * 900, split)
    assert "move 900 sources" in reason
    assert history_moves([one] * 2, SHAPES) == [], "the embedding's, forth and back"
    assert "0 split sublayers need at most 4" in history_moves([one] * 8, SHAPES)[0]
    stacked = Collective("all-gather", (activation(9, 2, 1024, 1280),), "jit(step)/gather")
    assert "more than one source (jit(step)/gather)" in history_moves([stacked], split)[0]
    routed = Collective("all-gather", (activation(2, 1024, 1280),), "jit(step)/depth_stack/_mix")
    assert "part of the routing" in history_moves([routed], split)[0]
    keys = Collective("all-gather", (activation(2, 2048, 5, 128),), "")
    assert history_moves([keys] * 144, split) == []
    assert "shaped like keys" in history_moves([keys] * 300, split)[0]
    by_heads = Collective("all-gather", (activation(2, 2048, 10, 128),), "")
    assert "more than one source" in history_moves([by_heads], split)[0], "a source by routing heads"


def test_a_program_that_gathers_its_history_is_seen():
    """Sources split over four devices by batch, and mixed by a program that wants them whole: a fault planted."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sources = jax.ShapeDtypeStruct((5, 4, 128, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "data")))

    def collectives(layout):
        def mix(s):
            s = jax.lax.with_sharding_constraint(s, NamedSharding(mesh, layout))
            return jnp.mean(s, axis=0) @ jnp.ones((64, 32))

        return read_collectives(jax.jit(mix).lower(sources).compile().as_text())

    assert history_moves(collectives(P(None, "data")), Shapes(1, 128, 64)) == []
    assert "more than one source" in history_moves(collectives(P()), Shapes(1, 128, 64))[0]


def moves(variant: str, sizes: dict[str, int], *, length: int = 128, ffn_dim: int = 96) -> tuple[list[str], set[str]]:
    """What `history_moves` says of a step on eight simulated devices, and the kinds of collectives of activations."""
    model = {"variant": variant, "num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": ffn_dim}
    model |= {"vocab_size": 384, "num_blocks": 2, "context": 128}
    config = make_config({"batch_size": 8, "seq_len": length, "model": model, "mesh": {"data": 1, **sizes}})
    mesh = make_mesh(config.mesh, jax.devices())
    trainer = make_trainer(config, mesh)
    compiled = trainer.step.lower(trainer.shapes, trainer.batch).compile(compiler_options=_QUICKLY)
    shapes = topology.shapes_on_a_device(config, mesh)
    found = read_collectives(compiled.as_text())
    return history_moves(found, shapes), {c.kind for c, _ in activations(found, shapes)}


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("mhar", {"fsdp": 2, "context": 2, "tensor": 2}),
        pytest.param("mhar", {"fsdp": 2, "context": 4}, marks=pytest.mark.slow),
        pytest.param("delta_block", {"fsdp": 4, "context": 2}, marks=pytest.mark.slow),  # site by site
    ],
)
def test_split_sequences_do_not_move_the_history(variant, sizes):
    reasons, kinds = moves(variant, sizes)
    assert reasons == []
    assert {"all-gather", "reduce-scatter"} <= kinds, "keys and values, and their gradients"


def fetch_sources(monkeypatch: pytest.MonkeyPatch, layout: P) -> None:
    """Plants a fault: before a pass reads its sources they are laid out so."""
    read = blocked.PassReader._run

    def fetch(self, one, sources):
        read(self, one, [jax.lax.with_sharding_constraint(s, layout) for s in sources])

    monkeypatch.setattr(blocked.PassReader, "_run", fetch)


@pytest.mark.slow
def test_a_history_gathered_over_context_is_seen(monkeypatch):
    fetch_sources(monkeypatch, P("fsdp"))
    assert moves("delta_block", {"fsdp": 4, "context": 2})[0]


def test_a_source_of_a_weights_shape_is_seen(monkeypatch):
    """One sequence of 64 tokens of width 64 a device: a source is as w_q [64, 64], eight are as many as w_up [64, 512].

    The fault planted: every site fetches the sources of all devices.
    """
    sizes = {"length": 64, "ffn_dim": 512}
    assert moves("delta_block", {"fsdp": 8}, **sizes)[0] == []
    fetch_sources(monkeypatch, P())
    reasons, _ = moves("delta_block", {"fsdp": 8}, **sizes)
    assert any("[8, 64, 64] moves more than one source" in reason for reason in reasons), reasons


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
