"""Candidates that are wrong, each in its own way; imported by `--module planted`, it registers them."""

import jax
import jax.numpy as jnp

from mhar_jax.bench.candidates import Candidate, register, site_by_site
from mhar_kernels import UnsupportedInputError, depth_route

FEW = 3  # sources up to which the lazy ones are right


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


def right(sources, query, *, num_heads, **rest):
    return depth_route(list(sources), query, num_heads=num_heads, implementation="xla", **rest)


def lazy_route(sources, query, **rest):
    """Right for few sources; of more, those after the first few are ignored."""
    return right(sources[:FEW], query, **rest)


def last_two(sources, query, **rest):
    """Right for few sources; of more, the mean of the last two."""
    return right(sources, query, **rest) if len(sources) <= FEW else (sources[-1] + sources[-2]) / 2


def deaf_route(sources, query, **rest):
    """Right values; from some site on, no gradient for the query."""
    return right(sources, query if len(sources) <= FEW else jax.lax.stop_gradient(query), **rest)


def stack_of(route):
    """A schedule of its own for whole models, as wrong as its op; of single sites, it has the right one."""
    candidate = Candidate("inner", route)

    def stack(sublayers, params, x, queries, *, num_heads, block_size):
        return site_by_site(candidate, sublayers, params, x, queries, num_heads=num_heads)

    return stack


for function in (last_two, deaf_route):
    register(Candidate(f"stack_{function.__name__}", right, stack_of(function)))
for function in (lazy_route, without_norm, wrong_query_gradient, one_token_off, nowhere, broken):
    register(Candidate(function.__name__, function))
