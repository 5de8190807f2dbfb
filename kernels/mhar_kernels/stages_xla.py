"""The stages of the depth-blocked schedule in plain jnp. `schedule.py` says when each one runs, and why.

Every array keeps its leading axes, written `...` (batch and time, however sharded): only the query gradient mixes
tokens. Sources, cotangents [.., ..., D] in the storage dtype; logits, softmax statistics and sums float32. Depth is one
axis of one buffer, so each stage is a few operations, however deep the stack. The stages come first, then the
arithmetic they share.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mhar_kernels import pre_norm, twofloat
from mhar_kernels.rounding import rounded
from mhar_kernels.schedule import Plan


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


class History(NamedTuple):
    """All sources so far and what is known of them, in buffers of full depth that are updated in place."""

    sources: jax.Array  # [N, ..., D]
    inverse_rms: jax.Array  # [N, ...]
    logits: Logits  # [N, sites, ..., H]; of site i >= source n
    statistics: Statistics  # [sites, ..., H]; of finished mixes
    queries: jax.Array  # [sites, D]
    low: jax.Array | None
    after: jax.Array | None = None  # what reading has to wait for

    def read(self, sources: slice, sites: slice) -> tuple[jax.Array, Logits]:
        """Some sources, and their logits at some sites."""
        logits = jax.tree.map(lambda a: a[sources, sites], self.logits)
        if self.after is not None:
            logits, _ = jax.lax.optimization_barrier((logits, self.after))
        return self.sources[sources], logits


class Mix(NamedTuple):
    """A finished mix [..., D]."""

    rounded: jax.Array
    rest: jax.Array  # what rounding to 16 bits took from it; Δ would be off by as much as they are


class Later(NamedTuple):
    """What the sites left so far gave back."""

    cotangents: jax.Array  # dO [sites, ..., D]
    deltas: jax.Array  # Δ [sites, ..., H]
    d_keys: jax.Array  # dℓ r [sources, sites, ..., H]


def start(plan: Plan, x: jax.Array, queries: jax.Array, low: jax.Array | None) -> History:
    """See `schedule.Stages`."""
    n, lead = plan.num_sites, x.shape[:-1]
    logits = jnp.zeros((n, n, *lead, plan.num_heads), jnp.float32)
    lost = jnp.zeros_like(logits) if x.dtype == jnp.float32 else None
    each = jnp.zeros((n, *lead, plan.num_heads), jnp.float32)
    return History(
        sources=jnp.zeros((n, *x.shape), x.dtype),
        inverse_rms=jnp.zeros((n, *lead), jnp.float32),
        logits=Logits(logits, lost),
        statistics=Statistics(each, each),
        queries=queries,
        low=low,
    )


def mix(plan: Plan, history: History, block: range) -> Partial:
    """See `schedule.Stages`."""
    return add_sources(*history.read(slice(block.start), slice(block.start, block.stop)))


def merge(
    plan: Plan,
    history: History,
    site: int,
    source: jax.Array,
    outside: Partial | None,
    norm: jax.Array | None,
    fresh: bool = True,
) -> tuple[History, jax.Array, Mix]:
    """See `schedule.Stages`. A new source's logits at every site that will read it are made while it is at hand."""
    block = plan.block_of(site)
    if fresh:
        low = None if history.low is None else history.low[site:]
        inverse_rms, logits = score(source, history.queries[site:], low, plan.num_heads, plan.eps)
        history = history._replace(
            sources=history.sources.at[site].set(source),
            inverse_rms=history.inverse_rms.at[site].set(inverse_rms),
            logits=jax.tree.map(lambda buffer, new: buffer.at[site, site:].set(new[0]), history.logits, logits),
        )
    partial = add_sources(
        *history.read(slice(block.start, site + 1), slice(site, site + 1)), _row(outside, site, block)
    )
    if fresh:
        into = lambda buffer, new: buffer.at[site].set(new[0])
        history = history._replace(statistics=jax.tree.map(into, history.statistics, partial.statistics))
    # Site 0 reads one source: its mix is that source, to the bit, and its query has no gradient.
    exact = _scale(partial.mix, 1 / partial.statistics.total)[0] if site else source.astype(jnp.float32)
    near = rounded(exact, source.dtype)
    mixed, rest = near.astype(source.dtype), (exact - near).astype(source.dtype)
    return history, pre_norm.apply(mixed, norm, plan.norm_eps), Mix(mixed, rest)


def again(plan: Plan, history: History, after: jax.Array) -> History:
    """See `schedule.Stages`."""
    return history._replace(after=after)


def source(plan: Plan, history: History, site: int, like: jax.Array) -> jax.Array:
    """See `schedule.Stages`."""
    return history.sources[site]


def begin(plan: Plan, history: History) -> Later:
    """See `schedule.Stages`."""
    return Later(*map(jnp.zeros_like, (history.sources, history.statistics.top, history.logits.high)))


def pull(plan: Plan, history: History, later: Later, block: range) -> tuple[Later, Pulled]:
    """See `schedule.Stages`."""
    return _pull(history, later, slice(block.start, block.stop), slice(block.stop, plan.num_sites), None)


def finish(
    plan: Plan,
    history: History,
    later: Later,
    site: int,
    read: jax.Array,
    kept: Mix,
    cotangent: jax.Array,
    outside: Pulled | None,
    norm: jax.Array | None,
) -> tuple[Later, jax.Array, jax.Array | None]:
    """See `schedule.Stages`."""
    cotangent, d_norm = pre_norm.pull(kept.rounded, norm, plan.norm_eps, cotangent)
    block, one = plan.block_of(site), slice(site, site + 1)
    # Δ[h] = <dO[h], O[h]>: with it the softmax needs no pass of its own over the sources.
    exact = kept.rounded.astype(jnp.float32) + kept.rest.astype(jnp.float32)
    products = cotangent.astype(jnp.float32) * exact
    later = later._replace(
        cotangents=later.cotangents.at[site].set(cotangent),
        deltas=later.deltas.at[site].set(jnp.sum(_heads(products, plan.num_heads), axis=-1)),
    )
    later, pulled = _pull(history, later, one, slice(site, block.stop), _row(outside, site, block))
    return later, source_gradients(history.sources[one], history.inverse_rms[one], pulled)[0], d_norm


def query_gradient(plan: Plan, history: History, later: Later) -> jax.Array:
    """See `schedule.Stages`."""
    return query_sums(history.sources, later.d_keys)


def _pull(history: History, later: Later, sources: slice, sites: slice, before: Pulled | None) -> tuple[Later, Pulled]:
    rows, logits = history.read(sources, sites)
    statistics = jax.tree.map(lambda a: a[sites], history.statistics)
    pulled, d_keys = add_sites(
        rows,
        history.inverse_rms[sources],
        logits,
        history.queries[sites],
        statistics,
        later.cotangents[sites],
        later.deltas[sites],
        before,
    )
    return later._replace(d_keys=later.d_keys.at[sources, sites].set(d_keys)), pulled


def _row(outside, site: int, block: range):
    """One site's, or source's, part of what was made for a block."""
    here = slice(site - block.start, site - block.start + 1)
    return None if outside is None else jax.tree.map(lambda a: a[here], outside)


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


def add_sources(sources: jax.Array, logits: Logits, before: Partial | None = None) -> Partial:
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


def add_sites(
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


def query_sums(sources: jax.Array, d_keys: jax.Array) -> jax.Array:
    """Σ over sources and tokens of (dℓ r) s, one product a head: float32 [sites, D] of [sources, sites, ..., H]."""
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
