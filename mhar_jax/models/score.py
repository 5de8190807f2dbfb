"""Log-likelihoods of single tokens, a chunk of positions at a time."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


def score_chunks(
    hidden: jax.Array, targets: jax.Array, logits_of: Callable[[jax.Array], jax.Array], *, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """log p(target) and whether it is the likeliest token.

    Args:
      hidden: [B, T, D].
      targets: int32 [B, T].
      logits_of: hidden [B, t, D] to float32 logits [B, t, V].
      chunk: tokens whose logits exist at once, at least one position of every row.

    Returns:
      float32 [B, T], in nats, and bool [B, T].
    """
    batch, length = targets.shape
    count = math.ceil(length / max(1, chunk // batch))
    size = math.ceil(length / count)

    def chunks(x: jax.Array) -> jax.Array:  # [B, T, ...] to [count, B, size, ...], filled up with zeros
        x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    def one(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, target = part
        logits = logits_of(h)
        # A masked sum instead of a gather: it stays local where the vocabulary is split over devices.
        is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == target[..., None]
        picked = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
        return picked - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == target

    scores, best = jax.lax.map(one, (chunks(hidden), chunks(targets)))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, count * size)[:, :length]
    return join(scores), join(best)
