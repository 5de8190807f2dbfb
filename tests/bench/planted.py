"""Candidates that are wrong, each in its own way; imported by `--module planted`, it registers them."""

import jax
import jax.numpy as jnp

from mhar_jax.bench.candidates import Candidate, register
from mhar_kernels import UnsupportedInputError, depth_route


def without_norm(sources, query, *, num_heads, **rest):
    """Logits of the raw sources: off where sources are not of unit RMS, by a few percent for random ones."""
    stacked = jnp.stack(list(sources)).astype(jnp.float32)
    heads = lambda x: x.reshape(*x.shape[:-1], num_heads, -1)
    logits = (heads(stacked) * heads(query)).sum(-1)
    mix = (jax.nn.softmax(logits, axis=0)[..., None] * heads(stacked)).sum(0)
    return mix.reshape(stacked.shape[1:]).astype(sources[0].dtype)


def wrong_query_gradient(sources, query, *, num_heads, **rest):
    """Right values; the query's gradient is 5 % too small."""

    @jax.custom_vjp
    def scaled(q):
        return q

    scaled.defvjp(lambda q: (q, None), lambda _, d: (0.95 * d,))
    return depth_route(sources, scaled(query), num_heads=num_heads, implementation="xla", **rest)


def one_token_off(sources, query, *, num_heads, **rest):
    """The last token's result is not a number."""
    out = depth_route(sources, query, num_heads=num_heads, implementation="xla", **rest)
    return out.at[-1, 0].set(jnp.nan)


def nowhere(sources, query, **rest):
    """Cannot run."""
    raise UnsupportedInputError("this chip does not exist")


def broken(sources, query, **rest):
    """Has a mistake in it."""
    return query["nothing"]


for function in (without_norm, wrong_query_gradient, one_token_off, nowhere, broken):
    register(Candidate(function.__name__, function))
