"""Every variant against a float64 program written from the definitions, and what they must share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from forward_oracle import forward
from mhar_jax.errors import UserError
from mhar_jax.models import build_model, loss_and_summary, routing_summary, site_labels, source_labels
from mhar_jax.models.sites import heads_of_site, num_sites
from model_helpers import (
    ROUTED,
    TOKENS,
    VARIANTS,
    build,
    jit,
    mean_loss,
    pure,
    relative,
    scramble,
    scrambled,
    shallow,
    tiny,
)


def float64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_definition(variant):
    run = scrambled(variant)
    logits, _ = forward(float64(run["params"]), run["config"], TOKENS[:, :-1])
    assert run["logits"].dtype == np.float32
    assert run["logits"].shape == (2, 12, 64)
    # float32 rounding through 4 or 6 sublayers: seen 3e-7 to 1e-6
    assert relative(run["logits"], logits) < 5e-6
    log_sum = np.log(np.exp(logits).sum(-1))
    nll = log_sum - np.take_along_axis(logits, TOKENS[:, 1:, None], -1)[..., 0]
    assert run["loss"] == pytest.approx(nll.mean(), rel=1e-5)
    assert run["aux"]["z"] == pytest.approx((log_sum**2).sum(), rel=1e-5)
    assert run["aux"]["tokens"] == 24


@pytest.mark.parametrize("variant", ROUTED)
def test_depth_weights_equal_the_definition(variant):
    run = scrambled(variant)
    config = run["config"]
    _, expected = forward(float64(run["params"]), config, TOKENS[:, :-1])
    assert len(run["weights"]) == len(expected) == num_sites(config) == len(site_labels(config))
    for site, (weights, oracle) in enumerate(zip(run["weights"], expected, strict=True)):
        assert weights.shape == (len(source_labels(config)[site]), 2, 12, heads_of_site(config, site))
        assert relative(weights, oracle) < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_a_gradient(variant):
    """Finite, and non-zero in every site's row, except for the query and key scale of a site with one source."""
    run = scrambled(variant)
    grads = dict(run["grads"])
    alone = {i for i, labels in enumerate(source_labels(run["config"])) if len(labels) == 1}
    assert alone == (set() if variant in ("additive", "hyper_connections", "delta", "delta_block") else {0})
    routing = grads.pop("routing", {})
    if variant == "mhar_headwise":
        attention, other = routing.pop("attention_query")[:, 1], routing["query"]
        pairs = [q for pair in zip(attention, other[:-1], strict=True) for q in pair]
        routing["query"] = np.stack([*pairs, other[-1]])
    for name, rows in routing.items():
        assert np.isfinite(rows).all(), name
        for site, row in enumerate(rows):
            assert row.any() != (site in alone and name in ("query", "norm_scale")), (name, site)
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(g).all(), path
        assert g.any(), path


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_lowers_the_loss_as_the_gradient_says(variant):
    run = scrambled(variant)
    squared = sum(float(np.sum(g.astype(np.float64) ** 2)) for g in jax.tree.leaves(run["grads"]))
    rate = 1e-3 / squared
    state = jax.tree.map(lambda p, g: p - rate * g, run["state"], run["grads_state"])
    loss = run["program"](state)["loss"]
    assert float(run["loss"] - loss) == pytest.approx(1e-3, rel=0.05)  # rate · |gradient|², to first order


@pytest.mark.parametrize("variant", VARIANTS)
def test_backbone_starts_the_same_in_every_variant(variant):
    reference = pure(nnx.state(build(tiny("additive"))))
    mine = pure(nnx.state(build(tiny(variant))))
    for part in ("routing", "hyper"):
        mine.pop(part, None)
    jax.tree.map(np.testing.assert_array_equal, mine, reference)
    other_seed = pure(nnx.state(build(tiny("additive"), seed=1)))
    assert relative(other_seed["embedding"], reference["embedding"]) > 0.1


def test_initial_values():
    config = tiny("delta_block", init_std=0.02, d_model=64)
    state = pure(nnx.state(build(config)))
    layer = state["layers"][1]
    for matrix in (state["embedding"], layer["attention"]["w_q"], layer["mlp"]["w_down"]):
        assert np.std(matrix) == pytest.approx(0.02, rel=0.1)
        assert abs(np.mean(matrix)) < 0.002
    assert relative(layer["mlp"]["w_up"], layer["mlp"]["w_gate"]) > 0.5  # not one key for two matrices
    assert relative(layer["mlp"]["w_up"], state["layers"][0]["mlp"]["w_up"]) > 0.5
    assert (state["final_norm"] == 1).all()
    assert (state["routing"]["norm_scale"] == 1).all()
    for name in ("query", "null_source", "gate"):
        assert not state["routing"][name].any()


@pytest.mark.parametrize("variant", ROUTED)
def test_zero_queries_weigh_all_sources_equally(variant):
    run = scrambled(variant)
    fresh = nnx.state(build(run["config"]))
    weights = run["program"](fresh)["weights"]
    assert len(weights) == num_sites(run["config"])
    for w in weights:
        np.testing.assert_allclose(w, 1 / w.shape[0], rtol=1e-6)


def test_vocabulary_must_be_known():
    with pytest.raises(UserError, match="vocab_size"):
        build_model(tiny("mhar", vocab_size=None), rngs=nnx.Rngs(0))


def test_tokens_must_be_integers_of_two_axes():
    model = build(tiny("additive", num_layers=1))
    with pytest.raises(ValueError, match="tokens must be integers"):
        model(jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="tokens must be integers"):
        model(jnp.zeros((3,), jnp.int32))


def test_bfloat16_is_close_to_float32():
    run = scrambled("mhar")
    model = scramble(build(shallow("mhar", compute_dtype="bfloat16")))
    logits = jit(lambda s, t: nnx.merge(nnx.graphdef(model), s)(t))(nnx.state(model), TOKENS[:, :-1])
    assert logits.dtype == jnp.float32
    # 8 bits of mantissa through 4 or 6 sublayers: seen 1e-2
    assert relative(logits, run["logits"]) < 4e-2


def test_summary_is_what_the_weights_say():
    run = scrambled("mhar_headwise")
    sums, summary = jit(lambda s, t: loss_and_summary(nnx.merge(run["graph"], s), t[:, :-1], t[:, 1:]))(
        run["state"], TOKENS
    )
    np.testing.assert_allclose(sums["nll"] / sums["tokens"], run["loss"], rtol=1e-5)
    weights = [np.asarray(w, np.float64) for w in run["weights"]]
    assert summary.weights.shape == (5, 5, 2)
    for site, w in enumerate(weights):
        np.testing.assert_allclose(summary.weights[site, : site + 1], w.mean((1, 2)), rtol=1e-4)
        assert np.isnan(summary.weights[site, site + 1 :]).all()
    entropies = [-(w * np.log(w)).sum(0).mean() for w in weights[1:]]
    np.testing.assert_allclose(summary.entropy, np.mean(entropies), rtol=1e-5)
    normal = [e / np.log(n) for n, e in enumerate(entropies, 2)]
    np.testing.assert_allclose(summary.normalized_entropy, np.mean(normal), rtol=1e-5)
    np.testing.assert_allclose(summary.newest_mass, np.mean([w[-1].mean() for w in weights[1:]]), rtol=1e-5)


def test_summary_needs_a_routed_model():
    with pytest.raises(UserError, match="routed"):
        routing_summary(build(tiny("additive", num_layers=1)), jnp.zeros((1, 4), jnp.int32))


def test_labels():
    config = tiny("block_mhar")
    assert site_labels(config) == ["L1 attn", "L1 mlp", "L2 attn", "L2 mlp", "L3 attn", "L3 mlp", "final"]
    assert source_labels(config)[3] == ["embed", "block 1 so far"]
    assert source_labels(config)[4] == ["embed", "block 1"]
    assert source_labels(config)[6] == ["embed", "block 1", "block 2"]
    assert source_labels(tiny("mhar"))[2] == ["embed", "L1 attn", "L1 mlp"]
    assert source_labels(tiny("delta_block"))[4] == ["null", "embed", "block 1"]
    assert source_labels(tiny("delta", null_source=False))[1] == ["embed", "L1 attn"]


def test_hyper_connections_start_as_the_additive_model_and_learn():
    """Equal logits at the start; every matrix has a gradient; after two steps the streams differ."""
    additive, hyper = build(shallow("additive")), build(shallow("hyper_connections"))
    step = jit(jax.value_and_grad(mean_loss, argnums=1, has_aux=True), static_argnums=0)
    graph, state = nnx.split(hyper)
    (loss, _), grads = step(graph, state, TOKENS)
    (reference, _), _ = step(*nnx.split(additive), TOKENS)
    assert float(loss) == pytest.approx(float(reference), rel=1e-6)
    optimizer = optax.sgd(0.1)
    moments = optimizer.init(state)
    for _ in range(2):
        updates, moments = optimizer.update(grads, moments)
        state = optax.apply_updates(state, updates)
        _, grads = step(graph, state, TOKENS)
    learned = pure(state)["hyper"]
    streams = learned["write"]
    assert np.ptp(streams, axis=1).max() > 1e-5  # the symmetry between streams is broken
    scale = float(jnp.linalg.norm(pure(grads)["layers"][0]["mlp"]["w_up"]))
    for name in ("read", "carry", "write"):
        assert float(jnp.linalg.norm(pure(grads)["hyper"][name])) > 1e-4 * scale, name
