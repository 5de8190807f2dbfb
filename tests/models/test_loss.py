"""The chunked cross-entropy against the plain one in float64, and under every way of sharding it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_jax.config.schema import MeshConfig
from mhar_jax.models.loss import cross_entropy
from mhar_jax.sharding import make_mesh
from model_helpers import relative

B, T, D, V = 4, 7, 16, 24


def problem(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(B, T, D)).astype(dtype)
    head = rng.normal(size=(V, D)).astype(np.float32)
    weights = rng.uniform(0, 2, (B, T)).astype(np.float32) * (rng.uniform(size=(B, T)) > 0.3)
    return hidden, head, rng.integers(0, V, (B, T)).astype(np.int32), weights.astype(np.float32)


def plain(hidden, head, targets, weights, z_loss):
    """float64 value of the three sums and gradients of total to hidden and head, by hand."""
    hidden, head, weights = (np.asarray(a, np.float64) for a in (hidden, head, weights))
    logits = hidden @ head.T
    top = logits.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
    nll = lse - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    p = np.exp(logits - lse[..., None])
    d = p * (1 + 2 * z_loss * lse)[..., None] - np.eye(V)[targets]
    d = d * weights[..., None]
    sums = [np.sum(weights * (nll + z_loss * lse**2)), np.sum(weights * nll), np.sum(weights * lse**2)]
    return sums, d @ head, np.einsum("btv,btd->vd", d, hidden)


def run(hidden, head, targets, weights, *, vocab_axis=0, **options):
    def total(hidden, head):
        sums = cross_entropy(hidden, head, targets, weights, vocab_axis=vocab_axis, **options)
        return 3 * sums.total, sums  # the 3 checks that the cotangent is used

    (_, sums), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(hidden, head)
    return sums, grads


@pytest.mark.parametrize("chunk", [1, 5, 8, 12, 1000])  # one position, ragged, even, ragged, all at once
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_equals_the_plain_loss(chunk, z_loss):
    hidden, head, targets, weights = problem()
    with jax.default_matmul_precision("highest"):
        sums, (d_hidden, d_head) = run(hidden, head, targets, weights, chunk=chunk, z_loss=z_loss)
    expected, e_hidden, e_head = plain(hidden, head, targets, weights, z_loss)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    assert relative(d_hidden, 3 * e_hidden) < 1e-5
    assert relative(d_head, 3 * e_head) < 1e-5


def test_untied_orientation_and_no_weights():
    hidden, head, targets, _ = problem(1)
    sums, (d_hidden, d_head) = run(hidden, head.T, targets, None, vocab_axis=1, chunk=6)
    expected, e_hidden, e_head = plain(hidden, head, targets, np.ones((B, T)), 0.0)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    assert relative(d_hidden, 3 * e_hidden) < 1e-5
    assert relative(d_head, 3 * e_head.T) < 1e-5


def test_value_without_gradient_is_the_same():
    hidden, head, targets, weights = problem(2)
    alone = jax.jit(lambda *a: cross_entropy(*a, chunk=5))(hidden, head, targets, weights)
    sums, _ = run(hidden, head, targets, weights, chunk=5)
    np.testing.assert_allclose(alone, sums, rtol=1e-6)


def test_large_logits_stay_finite():
    """A token whose loss is 300 nats, beyond the range of exp in float32."""
    hidden = jnp.ones((1, 2, 1)) * 100
    head = jnp.arange(4.0)[:, None]
    sums, (d_hidden, _) = run(hidden, head, jnp.asarray([[0, 3]]), None, chunk=2)
    np.testing.assert_allclose(sums.nll, 300, rtol=1e-6)
    np.testing.assert_allclose(d_hidden[0, :, 0], [9, 0], atol=1e-5)


def test_bfloat16_gradient_of_the_head_is_summed_in_float32():
    hidden, head, targets, weights = problem(3)
    rounded = jnp.asarray(hidden, jnp.bfloat16)
    _, (d_hidden, d_head) = run(rounded, head, targets, weights, chunk=4)
    _, e_hidden, e_head = plain(rounded, head, targets, weights, 0.0)
    assert d_hidden.dtype == jnp.bfloat16
    assert d_head.dtype == jnp.float32
    # logits of size 4 rounded to 8 bits: up to 1 % in a probability
    assert relative(d_hidden, 3 * e_hidden) < 2e-2
    assert relative(d_head, 3 * e_head) < 2e-2


def test_no_array_of_all_logits():
    """The compiled program has no array as large as tokens x vocabulary."""
    hidden, head = jnp.zeros((2, 64, D)), jnp.zeros((4096, D))
    targets = jnp.zeros((2, 64), jnp.int32)
    f = jax.jit(jax.grad(lambda h, w: cross_entropy(h, w, targets, chunk=16).total, (0, 1)))
    text = f.lower(hidden, head).compile().as_text()
    assert "[16,4096]" in text
    assert "[128,4096]" not in text
    assert "[2,64,4096]" not in text


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2), (1, 4, 2), (1, 1, 8), (1, 2, 4)])
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_sharded_equals_unsharded(mesh, vocab_axis):
    """Batch over data and fsdp, vocabulary over tensor; 4 rows on 8 data devices fall back to the partitioner."""
    hidden, head, targets, weights = problem(4)
    expected, e_hidden, e_head = plain(hidden, head, targets, weights, 0.1)
    sizes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    mesh = make_mesh(MeshConfig(**sizes))
    with jax.set_mesh(mesh):
        ours = head if vocab_axis == 0 else head.T
        spec = P("tensor", "fsdp") if vocab_axis == 0 else P("fsdp", "tensor")
        rows = P(("data", "fsdp")) if sizes["data"] * sizes["fsdp"] <= B else P()
        hidden, targets, weights = (jax.device_put(a, NamedSharding(mesh, rows)) for a in (hidden, targets, weights))
        ours = jax.device_put(ours, NamedSharding(mesh, spec))
        sums, (d_hidden, d_head) = run(hidden, ours, targets, weights, vocab_axis=vocab_axis, z_loss=0.1, chunk=9)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    assert relative(d_hidden, 3 * e_hidden) < 1e-5
    assert relative(d_head, 3 * (e_head if vocab_axis == 0 else e_head.T)) < 1e-5


def test_sharded_head_gradient_is_reduced_once():
    """One all-reduce of the head's gradient after the loop, not one in every chunk."""
    mesh = make_mesh(MeshConfig(data=8))
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P(("data", "fsdp")))
        hidden = jax.ShapeDtypeStruct((8, 64, D), jnp.float32, sharding=rows)
        targets = jax.ShapeDtypeStruct((8, 64), jnp.int32, sharding=rows)
        head = jax.ShapeDtypeStruct((V, D), jnp.float32, sharding=NamedSharding(mesh, P()))
        f = jax.jit(jax.grad(lambda h, w, t: cross_entropy(h, w, t, chunk=8).total, (0, 1)))
        text = f.lower(hidden, head, targets).compile().as_text()
    bodies = [block for block in text.split("\n\n") if "while" in block.split("{")[0] or "body" in block.split("{")[0]]
    assert bodies
    assert "all-reduce" in text
    assert not any("all-reduce" in body for body in bodies)
