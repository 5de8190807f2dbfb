"""Cross-entropy over a large vocabulary that never holds all logits at once.

The gradient is made in the forward pass: a chunk's logits give its loss, its d_hidden and its share of d_head, and are
then dropped. Against rematerialising them this saves one of four matrix products with the head; the price is that both
gradients are held from here to the backward pass, where they would be soon anyway.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mhar_jax.sharding import constrain, partitioned_mesh


class LossSums(NamedTuple):
    """Sums over tokens, each token times its weight; float32 scalars."""

    total: jax.Array  # nll + z_loss * z; the only one that carries a gradient
    nll: jax.Array  # negative log-likelihood, nats
    z: jax.Array  # logsumexp(logits)²


class _Options(NamedTuple):
    vocab_axis: int
    z_loss: float
    chunk: int


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    vocab_axis: int = 0,
    z_loss: float = 0.0,
    chunk: int = 2048,
) -> LossSums:
    """Weighted sum of -log softmax(hidden · head)[target] over tokens.

    Logits are one matrix product in hidden's dtype with float32 accumulation, rounded to that dtype; everything after
    is float32. Gradients reach `hidden` (in its dtype) and `head` (summed over chunks in float32), not `weights`.

    Args:
      hidden: [B, T, D], the final norm's output.
      head: [V, D] with vocab_axis 0 (a tied embedding), [D, V] with vocab_axis 1; cast to hidden's dtype here.
      targets: int32 [B, T], in [0, V).
      weights: float [B, T], 0 for tokens that do not count; None: all 1.
      z_loss: weight of logsumexp² in the total.
      chunk: tokens of one device whose logits exist at once, at least one position of each of its sequences.

    Returns:
      The three sums.
    """
    if weights is None:
        weights = jnp.ones(targets.shape, jnp.float32)
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    return LossSums(*_cross_entropy(_Options(vocab_axis, float(z_loss), chunk), hidden, head, targets, weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(options, hidden, head, targets, weights):
    return _sharded(options, False, hidden, head, targets, weights)[0]


def _forward(options, hidden, head, targets, weights):
    sums, grads = _sharded(options, True, hidden, head, targets, weights)
    return sums, (grads, weights)


def _backward(options, saved, cotangents):
    (d_hidden, d_head), weights = saved
    scale = cotangents[0]
    d_hidden = (d_hidden.astype(jnp.float32) * scale).astype(d_hidden.dtype)
    return d_hidden, (d_head * scale).astype(d_head.dtype), None, jnp.zeros_like(weights)


_cross_entropy.defvjp(_forward, _backward)


def _sharded(options, with_grads, hidden, head, targets, weights):
    """Runs `_scan` on each device's own tokens and its own part of the vocabulary, and sums once at the end.

    Left to the partitioner, the loop would reduce the head's gradient over devices in every chunk.
    """
    mesh = partitioned_mesh()
    batch_axes, length_axis, vocab_axis = ("data", "fsdp"), "context", "tensor"
    if mesh is None or hidden.shape[0] % math.prod(mesh.shape[a] for a in batch_axes):
        return _scan(options, with_grads, None, hidden, head, targets, weights)

    split = vocab_axis if head.shape[options.vocab_axis] % mesh.shape[vocab_axis] == 0 else None
    head_spec = P(split, None) if options.vocab_axis == 0 else P(None, split)
    length = length_axis if hidden.shape[1] % mesh.shape[length_axis] == 0 else None
    token_axes = (*batch_axes, length) if length else batch_axes
    # The rounded head is what travels: half the bytes of the master weights.
    tokens, head_dtype = P(batch_axes, length), head.dtype
    head = jax.lax.with_sharding_constraint(head.astype(hidden.dtype), head_spec)

    def local(hidden, head, targets, weights):
        sums, grads = _scan(options, with_grads, split, hidden, head, targets, weights)
        sums = jax.lax.psum(sums, token_axes)
        if grads is not None:
            grads = (grads[0], jax.lax.psum(grads[1], token_axes))
        return sums, grads

    run = jax.shard_map(
        local,
        in_specs=(tokens, head_spec, tokens, tokens),
        out_specs=(P(), (tokens, head_spec) if with_grads else None),
        check_vma=False,
    )
    sums, grads = run(hidden, head, targets, weights)
    return sums, None if grads is None else (constrain(grads[0], "batch", "length", None), grads[1].astype(head_dtype))


def _scan(options, with_grads, vocab_axis_name, hidden, head, targets, weights):
    """Sums, and with `with_grads` (d_hidden, d_head) of the total, over chunks of positions.

    `head` is this device's part of the vocabulary when `vocab_axis_name` names a mesh axis.
    """
    batch, length, width = hidden.shape
    count = math.ceil(length / max(1, options.chunk // batch)) if batch else 1
    size = math.ceil(length / count) if length else 0

    def chunks(x):  # [B, T, ...] -> [count, B * size, ...], padded with zeros: weight 0
        x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
        x = jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)
        return x.reshape(count, batch * size, *x.shape[3:])

    rounded = head.astype(hidden.dtype)
    gradient_dtype = jnp.promote_types(head.dtype, jnp.float32)
    vocab, embed = options.vocab_axis, 1 - options.vocab_axis
    over_vocab = functools.partial(jax.lax.psum, axis_name=vocab_axis_name) if vocab_axis_name else lambda x: x
    first = jax.lax.axis_index(vocab_axis_name) * head.shape[vocab] if vocab_axis_name else 0

    def body(carry, chunk):
        sums, d_head = carry
        h, target, weight = chunk
        logits = jax.lax.dot_general(h, rounded, (((1,), (embed,)), ((), ()))).astype(jnp.float32)
        top = jnp.max(logits, axis=-1)
        if vocab_axis_name:
            top = jax.lax.pmax(top, vocab_axis_name)
        lse = top + jnp.log(over_vocab(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1)))
        local = target - first
        picked = jnp.take_along_axis(logits, jnp.clip(local, 0, logits.shape[1] - 1)[:, None], axis=-1)[:, 0]
        target_logit = over_vocab(jnp.where((local >= 0) & (local < logits.shape[1]), picked, 0))
        nll, z = jnp.sum(weight * (lse - target_logit)), jnp.sum(weight * lse * lse)
        sums = (sums[0] + nll + options.z_loss * z, sums[1] + nll, sums[2] + z)
        if not with_grads:
            return (sums, d_head), None
        # d total / d logits = weight · (softmax · (1 + 2 z_loss · lse) − [target])
        probability_scale = weight * (1 + 2 * options.z_loss * lse)
        d_logits = jnp.exp(logits - lse[:, None]) * probability_scale[:, None]
        is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == local[:, None]
        d_logits = (d_logits - jnp.where(is_target, weight[:, None], 0)).astype(hidden.dtype)
        d_h = over_vocab(
            jax.lax.dot_general(d_logits, rounded, (((1,), (vocab,)), ((), ())), preferred_element_type=gradient_dtype)
        ).astype(hidden.dtype)
        pair = (d_logits, h) if vocab == 0 else (h, d_logits)
        d_head = d_head + jax.lax.dot_general(*pair, (((0,), (0,)), ((), ())), preferred_element_type=gradient_dtype)
        return (sums, d_head), d_h

    zero = jnp.zeros((), jnp.float32)
    start = ((zero, zero, zero), jnp.zeros(head.shape, gradient_dtype) if with_grads else None)
    (sums, d_head), d_hidden = jax.lax.scan(body, start, tuple(map(chunks, (hidden, targets, weights))))
    if d_head is None:
        return sums, None
    d_hidden = jnp.moveaxis(d_hidden.reshape(count, batch, size, width), 0, 1).reshape(batch, count * size, width)
    return sums, (d_hidden[:, :length], d_head.astype(head.dtype) if vocab_axis_name is None else d_head)
