"""Schedules and which parameters decay, against formulas written out here."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mhar_jax.config import make_config
from mhar_jax.training.optimizer import as_float32, decay_mask, make_optimizer, make_schedule
from mhar_jax.training.step import model_functions

PEAK, LAST = 2e-3, 0.1


def rates(steps: int, **optimizer) -> list[float]:
    """The learning rates of steps 1 to `steps`."""
    config = make_config({"steps": steps, "optimizer": {"peak_lr": PEAK, "final_lr_ratio": LAST, **optimizer}})
    schedule = make_schedule(config)
    return [float(schedule(jnp.int32(done))) for done in range(steps)]


def expected(kind: str, step: int, steps: int, warmup: int, decay_fraction: float = 0.2) -> float:
    """The learning rate of a step, counted from 1."""
    if step <= warmup:
        return PEAK * step / warmup
    final = LAST * PEAK
    if kind == "wsd":
        fall = min(max(1, round(decay_fraction * steps)), steps - warmup)
        share = max(0, step - (steps - fall)) / fall
    else:
        share = (step - warmup) / (steps - warmup)
    if kind == "cosine":
        return final + (PEAK - final) * (1 + math.cos(math.pi * share)) / 2
    return PEAK + (final - PEAK) * share


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(("steps", "warmup"), [(40, 8), (40, 0), (40, 36), (1, 0)])
def test_every_step_of_a_schedule(kind, steps, warmup):
    got = rates(steps, schedule=kind, warmup_steps=warmup)
    want = [expected(kind, step, steps, warmup) for step in range(1, steps + 1)]
    np.testing.assert_allclose(got, want, rtol=2e-6)  # float32
    assert got[0] > 0, "no step is wasted on a learning rate of zero"
    assert got[-1] == pytest.approx(LAST * PEAK, rel=1e-6), "the last step gets the last rate"
    if warmup:
        assert max(got) == got[warmup - 1] == pytest.approx(PEAK, rel=1e-6)


@pytest.mark.parametrize("warmup", [10, 1000])
def test_a_run_shorter_than_its_warmup(warmup):
    got = rates(10, warmup_steps=warmup)
    np.testing.assert_allclose(got[:-1], [PEAK * s / 9 for s in range(1, 10)], rtol=2e-6)
    assert got[-1] == pytest.approx(LAST * PEAK, rel=1e-6)


def test_linear_to_zero():
    assert rates(10, schedule="linear", final_lr_ratio=0.0, warmup_steps=0)[-1] == 0


def test_which_parameters_decay():
    def decaying(variant, **fields):
        model = {"vocab_size": 64, "d_model": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, **fields}
        config = make_config({"seq_len": 8, "model": {"variant": variant, "ffn_dim": 16, **model}})
        shapes = jax.eval_shape(model_functions(config).init, jax.random.key(0))
        flat = jax.tree_util.tree_leaves_with_path(decay_mask(shapes))
        return {jax.tree_util.keystr(p, simple=True, separator="/"): yes for p, yes in flat}

    mask = decaying("delta_block", tie_embeddings=False)
    matrices = {f"layers/0/attention/w_{n}" for n in "qkvo"} | {f"layers/0/mlp/w_{n}" for n in ("gate", "up", "down")}
    assert {name for name, yes in mask.items() if yes} == matrices | {"head"}
    assert {"embedding", "final_norm", "routing/query", "routing/gate", "routing/null_source"} <= mask.keys()
    assert not any(yes for name, yes in decaying("hyper_connections").items() if name.startswith("hyper"))


def test_decay_mask_reaches_the_update():
    """With a zero gradient an update is the decay alone: -rate · decay · parameter."""
    params = {"embedding": jnp.full((4, 2), 3.0), "w_q": jnp.full((2, 2), 3.0)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    for mask, kept in (("all", -PEAK * 0.1 * 3), ("matrices", 0.0)):
        config = make_config({"steps": 5, "optimizer": {"peak_lr": PEAK, "warmup_steps": 1, "decay_mask": mask}})
        optimizer = make_optimizer(config)
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        np.testing.assert_allclose(updates["embedding"], kept, rtol=1e-6)
        np.testing.assert_allclose(updates["w_q"], -PEAK * 0.1 * 3, rtol=1e-6)


def test_clipping_is_by_the_global_norm():
    """Two steps against AdamW written out, one with a gradient above the limit and one below."""
    params = {"a": jnp.array([0.5, -0.25]), "b": jnp.array([[2.0]])}
    gradients = [
        {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])},
        {"a": jnp.array([0.1, -0.2]), "b": jnp.array([[0.05]])},
    ]
    config = make_config(
        {"steps": 2, "optimizer": {"peak_lr": PEAK, "warmup_steps": 0, "schedule": "linear", "clip_norm": 1.0}}
    )
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    x = {k: np.asarray(v, np.float64) for k, v in params.items()}
    m = {k: 0 * v for k, v in x.items()}
    v = {k: 0 * value for k, value in x.items()}
    for step, gradient in enumerate(gradients, 1):
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        g = {k: np.asarray(value, np.float64) for k, value in gradient.items()}
        norm = math.sqrt(sum((value**2).sum() for value in g.values()))
        rate = PEAK + (LAST * PEAK - PEAK) * step / 2
        for k in x:
            clipped = g[k] / max(1.0, norm)
            m[k] = 0.9 * m[k] + 0.1 * clipped
            v[k] = 0.95 * v[k] + 0.05 * clipped**2
            adam = (m[k] / (1 - 0.9**step)) / (np.sqrt(v[k] / (1 - 0.95**step)) + 1e-8)
            x[k] = x[k] - rate * (adam + 0.1 * x[k])
            np.testing.assert_allclose(params[k], x[k], rtol=3e-6)


def test_moments_are_float32_for_rounded_parameters():
    params = {"w_q": jnp.ones((2, 2), jnp.bfloat16)}
    optimizer = make_optimizer(make_config({"steps": 5}))
    state = optimizer.init(params)
    _, after = optimizer.update(as_float32(params), state, params)
    for tree in (state, after):
        assert {x.dtype.name for x in jax.tree.leaves(tree)} == {"float32", "int32"}
