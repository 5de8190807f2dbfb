"""The stages of the depth-blocked schedule in plain jnp. `schedule.py` says when each one runs, and why.

Every array keeps its leading axes, written `...` (batch and time, however sharded): only the query gradient mixes
tokens. Sources, cotangents [.., ..., D] in the storage dtype; logits, softmax statistics and sums float32. Depth is one
axis of one buffer, so each stage is a few operations, however deep the stack.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mhar_kernels import twofloat


class Logits(NamedTuple):
    """r_n <q̃_i[h], s_n[h]> for some sources n and sites i."""

    high: jax.Array  # [sources, sites, ..., H]
    low: jax.Array | None  # what float32 lost of it; kept for float32 storage (see twofloat.py)


class Statistics(NamedTuple):
    """A softmax over depth, so far, for some sites."""

    top: jax.Array  # [sites, ..., H]: the largest logit
    total: jax.Array  # [sites, ..., H]: the sum of exp(logit - top)


class Partial(NamedTuple):
    """The part of some sites' mixes that comes from some sources; not normalised."""

    mix: jax.Array  # [sites, ..., D] float32
    statistics: Statistics


class Pulled(NamedTuple):
    """The gradient of some sources from some of their sites, short of the term they have in common."""

    value: jax.Array  # [sources, ..., D] float32: Σ over sites of α dO + (dℓ r) q̃
    shared: jax.Array  # [sources, ...] float32: Σ over sites and heads of dℓ ℓ


def score(
    source: jax.Array, queries: jax.Array, low: jax.Array | None, num_heads: int, eps: float
) -> tuple[jax.Array, Logits]:
    """1/RMS [...] of one source [..., D], and its logits [1, sites, ..., H] for effective queries [sites, D].

    Float32 storage: logits as pairs. Half precision: the source is exact in float32, and so is the product's accuracy.
    """
    wide = source.astype(jnp.float32)
    if source.dtype == jnp.float32:
        mean_square = twofloat.divide(twofloat.sum_last(twofloat.two_prod(wide, wide)), source.shape[-1])
        exact_rms = twofloat.inverse_rms(mean_square, eps)
        s, q = _heads(wide, num_heads)[None], _per_site(_heads(queries, num_heads), source.ndim)
        terms = twofloat.two_prod(*jnp.broadcast_arrays(s, q))
        if low is not None:
            terms = twofloat.two_sum(terms.high, terms.low + s * _per_site(_heads(low, num_heads), source.ndim))
        dot = twofloat.sum_last(terms)
        scale = twofloat.Pair(*(jnp.broadcast_to(x[None, ..., None], dot.high.shape) for x in exact_rms))
        logit = twofloat.multiply(dot, scale)
        return exact_rms.high, Logits(logit.high[None], logit.low[None])
    inverse_rms = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
    product = jnp.einsum(
        "...hk,shk->s...h", _heads(wide, num_heads), _heads(queries, num_heads), precision=jax.lax.Precision.HIGHEST
    )
    return inverse_rms, Logits((product * inverse_rms[None, ..., None])[None], None)


def mix(sources: jax.Array, logits: Logits, before: Partial | None = None) -> Partial:
    """Adds sources [sources, ..., D] to the mixes of the sites of `logits` [sources, sites, ..., H]."""
    top = jnp.max(logits.high, axis=0)
    if before is not None:
        top = jnp.maximum(top, before.statistics.top)
    weight = _exp(logits, top)
    total = jnp.sum(weight, axis=0)
    wide = _heads(sources.astype(jnp.float32), top.shape[-1])
    mixed = jnp.sum(weight[..., None] * wide[:, None], axis=0)
    mixed = mixed.reshape(*top.shape[:-1], sources.shape[-1])
    if before is not None:
        kept = jnp.exp(before.statistics.top - top)
        total = total + before.statistics.total * kept
        mixed = mixed + _scale(before.mix, kept)
    return Partial(mixed, Statistics(top, total))


def finish(partial: Partial, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The sites' mixes [sites, ..., D]: normalised, and rounded once."""
    return _scale(partial.mix, 1 / partial.statistics.total).astype(dtype)


def output_dots(cotangent: jax.Array, out: jax.Array, num_heads: int) -> jax.Array:
    """Δ [..., H] = <dO[h], O[h]> of a site: with it the softmax needs no pass of its own over the sources."""
    return jnp.sum(_heads(cotangent.astype(jnp.float32), num_heads) * _heads(out.astype(jnp.float32), num_heads), -1)


def pull(
    sources: jax.Array,
    inverse_rms: jax.Array,
    logits: Logits,
    queries: jax.Array,
    statistics: Statistics,
    cotangents: jax.Array,
    deltas: jax.Array,
    before: Pulled | None = None,
) -> tuple[Pulled, jax.Array]:
    """Adds to the gradients of some sources what some sites contribute.

        dℓ = α · (<dO[h], s[h]> − Δ),    value += α dO[h] + (dℓ r) q̃[h],    shared += dℓ ℓ

    Args:
      sources: [sources, ..., D]; inverse_rms: [sources, ...].
      logits: [sources, sites, ..., H]; statistics: final, of these sites.
      queries: effective, [sites, D] float32.
      cotangents: dO [sites, ..., D]; deltas: Δ [sites, ..., H].

    Returns:
      The sum so far, and dℓ r [sources, sites, ..., H], which is what the query gradient needs.
    """
    num_heads = deltas.shape[-1]
    weight = _exp(logits, statistics.top) / statistics.total
    d_out = _heads(cotangents.astype(jnp.float32), num_heads)
    dots = jnp.sum(d_out[None] * _heads(sources.astype(jnp.float32), num_heads)[:, None], axis=-1)
    d_logit = weight * (dots - deltas)
    d_key = d_logit * inverse_rms[:, None, ..., None]
    q = _per_site(_heads(queries, num_heads), sources.ndim - 1)
    value = jnp.sum(weight[..., None] * d_out + d_key[..., None] * q, axis=1).reshape(sources.shape)
    shared = jnp.sum(d_logit * logits.high, axis=(1, -1))
    if before is not None:
        value, shared = before.value + value, before.shared + shared
    return Pulled(value, shared), d_key


def source_gradients(sources: jax.Array, inverse_rms: jax.Array, pulled: Pulled) -> jax.Array:
    """d s = value − (r² / D) · shared · s in the storage dtype; the last term is the derivative of the 1/RMS."""
    factor = inverse_rms**2 / sources.shape[-1] * pulled.shared
    return (pulled.value - factor[..., None] * sources.astype(jnp.float32)).astype(sources.dtype)


def query_gradient(sources: jax.Array, d_keys: jax.Array) -> jax.Array:
    """d q̃ [sites, D] float32 = Σ over sources and tokens of (dℓ r) s, from d_keys [sources, sites, ..., H]."""
    heads = _heads(sources.astype(jnp.float32), d_keys.shape[-1])
    out = jnp.einsum("ns...h,n...hk->shk", d_keys, heads, precision=jax.lax.Precision.HIGHEST)
    return out.reshape(out.shape[0], -1)


def _heads(x: jax.Array, num_heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)


def _per_site(x: jax.Array, source_rank: int) -> jax.Array:
    """[sites, H, K] beside sources [..., H, K]: the token axes put in."""
    return x.reshape(x.shape[0], *(1,) * (source_rank - 1), *x.shape[1:])


def _scale(rows: jax.Array, by: jax.Array) -> jax.Array:
    """rows [..., D] times one factor [..., H] a head."""
    return (_heads(rows, by.shape[-1]) * by[..., None]).reshape(rows.shape)


def _exp(logits: Logits, top: jax.Array) -> jax.Array:
    # The difference of near logits is exact, so what float32 lost of them still counts.
    return jnp.exp(logits.high - top if logits.low is None else (logits.high - top) + logits.low)
