"""`depth_mix` in plain jnp. Arrays keep their leading axes `...`; statistics and sums are float32."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mhar_kernels import stages_xla

if TYPE_CHECKING:
    from mhar_kernels.parts import Call


def inverse_rms(source: jax.Array, eps: float) -> jax.Array:
    """1/RMS [...] of a source [..., D]."""
    wide = source.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)


def logits(source: jax.Array, queries: jax.Array, num_heads: int, eps: float) -> jax.Array:
    """r <q̃[h], s[h]> of one source [..., D], for effective queries [sites, D]: float32 [sites, ..., H]."""
    s = source.astype(jnp.float32).reshape(*source.shape[:-1], num_heads, -1)
    q = queries.astype(jnp.float32).reshape(queries.shape[0], *(1,) * (source.ndim - 1), *s.shape[-2:])
    return jnp.sum(s * q, axis=-1) * inverse_rms(source, eps)[..., None]


def forward(call: "Call", sources: tuple[jax.Array, ...], queries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mixes [sites, ..., D] and log-sum-exps [sites, ..., H], float32."""
    stacked, found = _read(call, sources, queries)
    partial = stages_xla.add_sources(stacked, found)
    top, total = partial.statistics
    heads = partial.mix.reshape(*total.shape, -1) / total[..., None]
    return heads.reshape(partial.mix.shape), top + jnp.log(total)


def backward(
    call: "Call",
    sources: tuple[jax.Array, ...],
    queries: jax.Array,
    lse: jax.Array,
    cotangents: jax.Array,
    deltas: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """The gradients of the sources and of the effective queries [sites, D].

    lse, deltas: float32 [sites, ..., H]. cotangents: [sites, ..., D] in the sources' dtype, of the mixes.
    """
    stacked, found = _read(call, sources, queries)
    r = jnp.stack([inverse_rms(s, call.eps) for s in sources])
    statistics = stages_xla.Statistics(lse, jnp.ones_like(lse))
    pulled, d_keys = stages_xla.add_sites(stacked, r, found, queries, statistics, cotangents, deltas)
    d_sources = stages_xla.source_gradients(stacked, r, pulled)
    return list(jax.lax.unstack(d_sources)), stages_xla.query_sums(stacked, d_keys)


def _read(call: "Call", sources: tuple[jax.Array, ...], queries: jax.Array) -> tuple[jax.Array, stages_xla.Logits]:
    found = [logits(s, queries, call.num_heads, call.eps) for s in sources]
    return jnp.stack(sources), stages_xla.Logits(jnp.stack(found), None)
