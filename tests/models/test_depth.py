"""The depth history of each variant: literals, identities to the bit, and gradients that must reach the far end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhar_jax.config import ModelConfig
from mhar_jax.models.flows import make_flow
from mhar_jax.models.routing import SiteReader
from mhar_jax.models.sites import Site, block_of, num_sites, source_labels, starts_block
from model_helpers import TOKENS, build, jit, mean_loss, pure, scramble, tiny


def logits_of(model, tokens=TOKENS):
    graph, state = nnx.split(model)
    return np.asarray(_logits(graph, state, tokens))


@functools.partial(jax.jit, static_argnums=0)  # models of one config share a program
def _logits(graph, state, tokens):
    return nnx.merge(graph, state)(tokens)


def copy_into(model, source):
    """Gives `model` every parameter that it shares with `source`."""
    values = dict(nnx.to_flat_state(nnx.state(source)))
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        if path in values:
            leaf[...] = values[path][...]
    return model


def test_one_head_of_mhar_is_attention_residuals_to_the_bit():
    one_head = scramble(build(tiny("attention_residuals", num_layers=2)))
    mhar = scramble(build(tiny("mhar", num_layers=2, routing_heads=1)))
    np.testing.assert_array_equal(logits_of(mhar), logits_of(one_head))
    grads = []
    for model in (one_head, mhar):
        graph, state = nnx.split(model)
        grads.append(pure(jit(jax.grad(mean_loss, 1, has_aux=True), static_argnums=0)(graph, state, TOKENS)[0]))
    jax.tree.map(np.testing.assert_array_equal, *grads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["delta", "delta_block"])
def test_closed_gates_equal_the_additive_model_to_the_bit(variant, dtype):
    additive = logits_of(build(tiny("additive", compute_dtype=dtype)))
    model = build(tiny(variant, compute_dtype=dtype))
    routing = model.routing
    for name in ("query", "norm_scale", "null_source"):  # closed gates hide whatever these are
        leaf = getattr(routing, name)
        leaf[...] = jax.random.normal(jax.random.key(3), leaf.shape)
    np.testing.assert_array_equal(logits_of(model), additive)
    routing.gate[...] = routing.gate[...].at[-1].set(0.1)
    assert (logits_of(model) != additive).any()


def run_flow(config: ModelConfig, outputs, rows=None, eps=1e-6):
    """Feeds given sublayer outputs through a flow; returns what each site read and its sources."""
    flow, read, seen = make_flow(config), [], []
    reader = SiteReader(config)

    def route(i, row, sources, residual=None):
        seen.append([np.asarray(s, np.float64) for s in sources])
        return reader(i, row, sources, residual)

    state = flow.start(outputs[0])
    rows = rows or [None] * len(outputs)
    for i, y in enumerate(outputs[1:]):
        read.append(flow.read(state, i, rows[i], route))
        state = flow.write(state, i, rows[i], y)
    read.append(flow.finish(state, rows[-1], route))
    if num_sites(config):
        reader.check()
    return [np.asarray(r) for r in read], seen


def vectors(*rows):
    return [jnp.asarray(r, jnp.float32).reshape(1, 1, -1) for r in rows]


def plain_sites(config, query):
    row = Site(jnp.asarray(query, jnp.float32), jnp.ones(config.d_model))
    return [row] * num_sites(config)


def test_block_literal():
    """Embedding [3,0,0,0], outputs e2, e3, e4, e2+e3+e4, blocks of one layer, query [2,0,0,0], one head."""
    config = ModelConfig(
        variant="block_mhar", num_layers=2, num_blocks=2, d_model=4, num_heads=1, num_kv_heads=1, ffn_dim=4
    )
    outputs = vectors([3, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 1, 1])
    read, _ = run_flow(config, outputs, plain_sites(config, [2, 0, 0, 0]))
    expected = [
        [3, 0, 0, 0],
        [2.9460413, 0.0179862, 0, 0],
        [2.9460413, 0.0179862, 0.0179862, 0],
        [2.8939894, 0.0176684, 0.0176684, 0.0176684],
        [2.8939894, 0.0353369, 0.0353369, 0.0353369],
    ]
    np.testing.assert_allclose(np.concatenate(read).squeeze(1), expected, atol=1e-6)


def test_blocks_of_ten_layers_in_four():
    config = tiny("delta_block", num_layers=10, num_blocks=4)
    assert [block_of(config, 2 * layer) for layer in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert [i for i in range(20) if starts_block(config, i)] == [0, 6, 12, 18]
    assert [len(labels) for labels in source_labels(config)] == [2] * 6 + [3] * 6 + [4] * 6 + [5] * 2


def test_delta_block_sources_by_hand():
    """Ten layers in four blocks: each source is how the stream changed over one block, as of its first layer."""
    config = tiny("delta_block", num_layers=10, num_blocks=4, d_model=2, num_heads=1, num_kv_heads=1, null_source=False)
    values = np.random.default_rng(0).normal(size=(21, 2))
    outputs = vectors(*values)
    row = Site(jnp.zeros(2), jnp.ones(2), gate=jnp.ones(()))
    _, seen = run_flow(config, outputs, [*[row] * 20, None])
    change = [values[0], values[1:7].sum(0), values[7:13].sum(0), values[13:19].sum(0)]
    for site, sources in enumerate(seen):
        expected = change[: 1 + site // 6]
        np.testing.assert_allclose(np.squeeze(sources, (1, 2)), expected, atol=1e-5)


def test_third_delta_is_a_change_not_a_level():
    """A scalar stream: embedding 100, block changes 10, then 1: the third source is 1, not 101."""
    config = tiny("delta_block", num_layers=3, num_blocks=3, d_model=1, num_heads=1, num_kv_heads=1, head_dim=2)
    outputs = vectors([100], [4], [6], [0.5], [0.5], [0], [0])
    row = Site(jnp.zeros(1), jnp.ones(1), jnp.zeros(1), jnp.ones(()))
    _, seen = run_flow(config, outputs, [*[row] * 6, None])
    assert [float(s.squeeze()) for s in seen[4]] == [100, 10, 1]


def test_running_sums_are_not_rounded():
    """In bfloat16, 256 plus eight ones stays 256; a block's sum is 264."""
    config = tiny("block_mhar", num_layers=5, num_blocks=1, d_model=2, num_heads=1, num_kv_heads=1)
    outputs = [o.astype(jnp.bfloat16) for o in vectors([1, 1], [256, 256], *[[1, 1]] * 9)]
    _, seen = run_flow(config, outputs, plain_sites(config, [0, 0]))
    assert seen[9][1].squeeze().tolist() == [264, 264]


@pytest.mark.parametrize("variant", ["attention_residuals", "mhar", "mhar_headwise", "block_mhar"])
def test_first_sublayer_is_reached_through_the_depth_path(variant):
    """All later sublayers return nothing, so the loss depends on the first one through sources alone."""
    model = build(tiny(variant, num_layers=2))
    for i, layer in enumerate(model.layers):
        layer.mlp.w_down[...] = 0 * layer.mlp.w_down[...]
        if i:
            layer.attention.w_o[...] = 0 * layer.attention.w_o[...]
    graph, state = nnx.split(model)
    grads, _ = jit(jax.grad(mean_loss, 1, has_aux=True), static_argnums=0)(graph, state, TOKENS)
    first = pure(grads)["layers"][0]["attention"]
    for name in ("w_q", "w_v", "w_o"):
        assert np.abs(first[name]).max() > 1e-5, name


def test_a_dropped_site_is_noticed():
    config = tiny("mhar", num_layers=1)
    reader = SiteReader(config)
    row = plain_sites(config, np.zeros(32))[0]
    x = jnp.ones((1, 1, 32))
    reader(0, row, [x])
    reader(2, row, [x, x, x])
    with pytest.raises(AssertionError, match="routing sites read"):
        reader.check()
    with pytest.raises(AssertionError):  # a source too few
        reader(1, row, [x])
