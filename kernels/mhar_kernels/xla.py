"""Depth routing in plain jnp: the same formulas everywhere, and the fallback where no kernel runs.

Scores are float32 multiply-and-reduce, never a matrix product, so no backend's default matmul precision touches them.
A sequence of sources is stacked inside the call: one chain of operations a site keeps compile time linear in the number
of sites, where a chain a source would make it quadratic.
"""

import functools

import jax
import jax.numpy as jnp

from mhar_kernels import twofloat
from mhar_kernels.contract import RouteArrays, RouteCall


def route(call: RouteCall, arrays: RouteArrays) -> tuple[jax.Array, jax.Array]:
    """out [T, D] in the storage dtype, weights [N(+1), T, H] float32 (float64 for float64 sources).

    Differentiable by autodiff. The backward pass keeps only the inputs: statistics are made again from the sources,
    which are in memory anyway, instead of keeping float32 images of them.
    """
    return jax.checkpoint(functools.partial(_route, call))(arrays)


def _route(call: RouteCall, arrays: RouteArrays) -> tuple[jax.Array, jax.Array]:
    wide = jnp.promote_types(call.dtype, jnp.float32)
    query = arrays.query.astype(wide)
    heads = lambda x: x.reshape(*x.shape[:-1], call.num_heads, call.head_dim)

    def logits(s: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        inverse_rms = jax.lax.rsqrt(jnp.mean(s * s, axis=-1) + call.eps)
        logit = _tree_sum(heads(s) * heads(query)) * inverse_rms[..., None]
        if call.dtype != "float32":
            return logit, None
        exact = _exact_logits(call, *jax.lax.stop_gradient((s, query, arrays.query_low)))
        # The pair's value with the plain formula's gradient.
        return logit + jax.lax.stop_gradient(exact.high - logit), exact.low

    parts = []
    if arrays.null_source is not None:  # one row for all tokens: its logits are made once and broadcast
        parts.append(arrays.null_source.astype(wide)[None, None])
    if call.num_sources:
        sources = arrays.sources if isinstance(arrays.sources, jax.Array) else jnp.stack(arrays.sources)
        parts.append(sources.astype(wide))
    tokens_of = lambda x: jnp.broadcast_to(x, (x.shape[0], call.tokens, call.num_heads))
    pairs = [logits(part) for part in parts]
    high = jnp.concatenate([tokens_of(h) for h, _ in pairs])
    low = jnp.concatenate([tokens_of(x) for _, x in pairs if x is not None]) if call.dtype == "float32" else None
    weights = _softmax(high, low)

    mix, start = jnp.zeros((), wide), 0
    for part in parts:
        w = weights[start : start + part.shape[0], :, :, None]
        mix = mix + jnp.sum(w * heads(part), axis=0)
        start += part.shape[0]
    mix = mix.reshape(call.tokens, call.dim)

    out = mix if arrays.gate is None else arrays.gate.astype(wide) * mix
    if arrays.residual is not None:
        out = arrays.residual.astype(wide) + out
    return out.astype(call.dtype), weights


def _softmax(logits: jax.Array, low: jax.Array | None) -> jax.Array:
    """Over axis 0, of logits given with the digits that float32 lost; gradients are the softmax's."""
    if low is None:
        return jax.nn.softmax(logits, axis=0)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=0))
    # The difference of near logits is exact, so the lost digits still count.
    return jax.nn.softmax((logits - top) + low, axis=0)


def _exact_logits(call: RouteCall, s: jax.Array, query: jax.Array, query_low: jax.Array | None) -> twofloat.Pair:
    """r_n <query[h], s_n[h]> as float32 pairs [N, T, H]; see twofloat.py for why."""
    heads = lambda x: x.reshape(*x.shape[:-1], call.num_heads, call.head_dim)
    mean_square = twofloat.divide(twofloat.sum_last(twofloat.two_prod(s, s)), call.dim)
    inverse_rms = twofloat.inverse_rms(mean_square, call.eps)
    terms = twofloat.two_prod(heads(s), jnp.broadcast_to(heads(query), heads(s).shape))
    if query_low is not None:
        terms = twofloat.two_sum(terms.high, terms.low + heads(s) * heads(query_low))
    dot = twofloat.sum_last(terms)
    return twofloat.multiply(dot, twofloat.Pair(inverse_rms.high[..., None], inverse_rms.low[..., None]))


def _tree_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis in two levels, where a flat float32 sum of thousands of terms would lose digits."""
    size = x.shape[-1]
    if size >= 512 and size % 64 == 0:
        x = jnp.sum(x.reshape(*x.shape[:-1], size // 64, 64), axis=-1)
    return jnp.sum(x, axis=-1)
