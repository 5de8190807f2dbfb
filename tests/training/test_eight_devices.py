"""Losses and gradients on eight simulated devices equal one device's."""

import re
from typing import get_args

import jax
import numpy as np
import pytest

from mhar_jax.config.schema import Variant
from mhar_jax.sharding import BATCH

# data, fsdp, tensor and, where sequences are split, context
PURE = [(8, 1, 1), (1, 8, 1), (1, 1, 8)]
MIXED = [(2, 2, 2), (1, 2, 4)]
CONTEXT = [(1, 2, 2, 2), (2, 1, 1, 4)]


def gradients(tools, config, sizes):
    """Numbers of one step, and the gradient: Adam's first moment over 1 - beta1, without clipping."""
    trainer = tools.trainer(config, sizes)
    state = trainer.init()
    draws = np.random.default_rng(1)

    def moved(x):  # away from uniform weights and unit norms
        return jax.device_put(np.asarray(x) + 0.2 * draws.standard_normal(x.shape).astype(x.dtype), x.sharding)

    state = {**state, "params": jax.tree.map(moved, state["params"])}
    after, metrics = trainer.step(state, tools.tokens(trainer))
    for leaf, shape in zip(*map(jax.tree.leaves, (after, trainer.shapes)), strict=True):
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim), "the state keeps its layout"
    return jax.device_get(metrics), {k: v / (1 - 0.9) for k, v in tools.flat(after["optimizer"][0].mu).items()}


def check(tools, variant, meshes, seq_len=30, **changes):
    """Against one device: the loss and every parameter's gradient, in relative norm."""
    # 30 positions in chunks of 50 tokens do not come out even; tensor does not divide 387.
    model = {"variant": variant, "vocab_size": 387, "loss_chunk": 50, "num_blocks": 1, **changes.pop("model", {})}
    optimizer = {"clip_norm": None, "ema": 0.0, "z_loss": 1e-3, "accumulate": 2, "warmup_steps": 0, **changes}
    config = tools.config(model=model, optimizer=optimizer, seq_len=seq_len, batch_size=16)
    metrics, expected = gradients(tools, config, (1, 1, 1))
    assert sum(np.linalg.norm(g) > 1e-4 for g in expected.values()) >= len(expected) - 1, "gradients to compare"
    for sizes in meshes:
        got_metrics, got = gradients(tools, config, sizes)
        for name in ("loss", "z", "grad_norm"):
            # float32 sums in another order
            assert got_metrics[name] == pytest.approx(metrics[name], rel=1e-6 if name != "grad_norm" else 1e-5), (
                sizes,
                name,
            )
        for name, gradient in expected.items():
            a, b = got[name].astype(np.float64), gradient.astype(np.float64)
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b), (sizes, name)


@pytest.mark.exhaustive
def test_additive_on_each_axis_and_all(tools):
    check(tools, "additive", [(1, 8, 1), (1, 1, 8), (2, 2, 2)])


def test_mhar_on_a_mixed_mesh(tools):
    check(tools, "mhar", [(2, 2, 2)])


def test_gradients_of_whole_replicas_are_exchanged_once_a_step(tools):
    check(tools, "mhar", [(8, 1, 1)])
    config = tools.config(model={"variant": "mhar"}, optimizer={"accumulate": 2, "clip_norm": None}, batch_size=16)
    trainer = tools.trainer(config, (8, 1, 1))
    text = trainer.step.lower(trainer.shapes, trainer.batch).compile().as_text()
    assert "all-reduce" in text
    bodies = set(re.findall(r"body=%?([\w.-]+)", text))
    assert bodies, "micro-batches are a loop"
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        if (name := re.match(r"%?([\w.-]+)", computation)) and name[1] in bodies:
            assert "all-reduce" not in computation, "exchanged for every micro-batch"


def test_sequences_are_split(tools):
    check(tools, "mhar", [(1, 2, 2, 2)], seq_len=28)


def test_one_micro_batch_an_untied_head_and_a_vocabulary_that_is_split(tools):
    check(tools, "additive", [(2, 2, 2)], accumulate=1, model={"tie_embeddings": False, "vocab_size": 384})


@pytest.mark.slow
@pytest.mark.parametrize("variant", get_args(Variant))
def test_each_variant_on_every_mesh(tools, variant):
    check(tools, variant, [*PURE, *MIXED], model={"num_layers": 2, "num_blocks": 2})
    tools.forget()


@pytest.mark.slow
@pytest.mark.parametrize("variant", get_args(Variant))
def test_each_variant_on_split_sequences(tools, variant):
    check(tools, variant, CONTEXT, seq_len=28, model={"num_layers": 2, "num_blocks": 2, "remat": "sublayer"})
    tools.forget()


def test_no_device_holds_all_logits(tools):
    config = tools.config(model={"variant": "additive"}, optimizer={"ema": 0.0}, batch_size=16, seq_len=24)
    trainer = tools.trainer(config, (2, 2, 2))
    assert trainer.batch.sharding.spec == BATCH
    text = trainer.step.lower(trainer.shapes, trainer.batch).compile().as_text()
    shapes = set(re.findall(r"f32\[([\d,]+)\]", text))
    assert "2,24,32" in shapes, "a device's activations of a micro-batch"
    assert not shapes & {"8,24,32", "16,24,32", "8,24,384", "16,24,384", "192,384", "384,384"}


@pytest.mark.exhaustive
def test_a_whole_run(here, there, tools, tmp_path):
    run_dir = tmp_path / "run"
    # Warnings of the compiler are shown, and programs are not taken from the cache.
    options = {"devices": 8, "environment": {"TF_CPP_MIN_LOG_LEVEL": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}}
    outcome = there(
        f"--run_dir={run_dir}", "--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2", "--checkpoint.every=4", **options
    )
    assert outcome.code == 0, outcome.err
    assert "rematerialization" not in outcome.err, "the partitioner gathers an array because it knows no other way"
    assert "8 x cpu (cpu), mesh data=2, fsdp=2, context=1, tensor=2" in outcome.out
    assert re.search(r"^step compiled in [\d.]+ s$", outcome.out, re.MULTILINE)
    assert (run_dir / "routing.png").stat().st_size > 1000
    one = tmp_path / "one"
    assert here(f"--run_dir={one}").code == 0
    for (step, name, a), (other_step, other_name, b) in zip(tools.losses(run_dir), tools.losses(one), strict=True):
        assert (step, name) == (other_step, other_name)
        assert a == pytest.approx(b, rel=1e-5 if name != "grad_norm" else 1e-4), (step, name)
