"""Remat policies change what is kept, never a value."""

import jax
import numpy as np
import pytest
from flax import nnx

from mhar_jax.models import loss_and_summary
from model_helpers import TOKENS, build, jit, mean_loss, pure, relative, scramble, scrambled, shallow, tiny


@pytest.mark.parametrize(
    ("variant", "remat"),
    [
        pytest.param("mhar", "dots", marks=pytest.mark.exhaustive),
        ("mhar", "sublayer"),
        pytest.param("mhar", "sources", marks=pytest.mark.exhaustive),
        ("mhar", "layer"),
        pytest.param("delta_block", "layer", marks=pytest.mark.exhaustive),
        pytest.param("mhar_headwise", "layer", marks=pytest.mark.exhaustive),
        pytest.param("block_mhar", "sources", marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_stay(variant, remat):
    run = scrambled(variant)
    graph, state = nnx.split(scramble(build(shallow(variant, remat=remat))))
    step = jit(jax.value_and_grad(mean_loss, 1, has_aux=True), static_argnums=0)
    (loss, _), grads = step(graph, state, TOKENS)
    assert float(loss) == pytest.approx(float(run["loss"]), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_array_less(relative(a, b), 1e-4), pure(grads), run["grads"])


@pytest.mark.parametrize("variant", ["delta_block", pytest.param("mhar", marks=pytest.mark.exhaustive)])
def test_depth_weights_are_recorded_under_layer_remat(variant):
    """As evaluations of a run do: in one compiled program, whose values are those without remat, to the bit."""

    def summary(remat: str):
        graph, state = nnx.split(scramble(build(shallow(variant, remat=remat))))
        return jit(lambda s, t: loss_and_summary(nnx.merge(graph, s), t[:, :-1], t[:, 1:]))(state, TOKENS)

    jax.tree.map(np.testing.assert_array_equal, summary("layer"), summary("none"))


def kept(remat: str) -> int:
    """Floats that the forward pass keeps for the backward pass."""
    graph, state = nnx.split(build(tiny("additive", remat=remat)))
    _, pullback = jax.eval_shape(lambda s: jax.vjp(lambda s: nnx.merge(graph, s).hidden(TOKENS).sum(), s), state)
    return sum(leaf.size for leaf in jax.tree.leaves(pullback))


def test_each_policy_keeps_less():
    none, dots, sublayer, layer = map(kept, ("none", "dots", "sublayer", "layer"))
    assert none > dots > sublayer > layer
