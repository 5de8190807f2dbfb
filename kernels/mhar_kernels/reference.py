"""The definition of depth routing, as plainly as it can be written, in float64. Slow; every backend is held against it.

Multi-Head Attention Residuals, arXiv 2607.27230; with one head, Attention Residuals, arXiv 2603.15031.
"""

import functools

import jax
import jax.numpy as jnp


def define(arrays: dict[str, jax.Array], *, num_heads: int, eps: float) -> tuple[jax.Array, jax.Array]:
    """out [..., D], weights [N(+1), ..., H] of sources [N, ..., D], query [D], optional residual, gate, null_source."""
    s = arrays["sources"]
    if "null_source" in arrays:
        s = jnp.concatenate([jnp.broadcast_to(arrays["null_source"], (1, *s.shape[1:])), s])
    heads = lambda x: x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)

    keys = s / jnp.sqrt(jnp.mean(s * s, axis=-1, keepdims=True) + eps)
    logits = jnp.sum(heads(arrays["query"]) * heads(keys), axis=-1)
    weights = jax.nn.softmax(logits, axis=0)
    out = jnp.sum(weights[..., None] * heads(s), axis=0).reshape(s.shape[1:])

    if "gate" in arrays:
        out = arrays["gate"] * out
    if "residual" in arrays:
        out = arrays["residual"] + out
    return out, weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def route(num_heads: int, eps: float, arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """`define` in float64 whatever comes in; out in the sources' dtype, weights in float32 (float64 for float64)."""
    with jax.enable_x64(True):
        out, weights = define(_wide(arrays), num_heads=num_heads, eps=eps)
        storage = arrays["sources"].dtype
        return out.astype(storage), weights.astype(jnp.promote_types(storage, jnp.float32))


def _forward(num_heads, eps, arrays):
    return route(num_heads, eps, arrays), arrays


def _backward(num_heads, eps, arrays, cotangents):
    # The float64 program is differentiated inside its own scope: outside of it JAX would shorten its constants.
    with jax.enable_x64(True):
        _, vjp = jax.vjp(functools.partial(define, num_heads=num_heads, eps=eps), _wide(arrays))
        (grads,) = vjp(tuple(c.astype(jnp.float64) for c in cotangents))
        return ({k: grads[k].astype(a.dtype) if k in grads else jnp.zeros_like(a) for k, a in arrays.items()},)


route.defvjp(_forward, _backward)


def _wide(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    wide = {name: a.astype(jnp.float64) for name, a in arrays.items()}
    if "query_low" in wide:
        wide["query"] = wide["query"] + wide.pop("query_low")
    return wide
