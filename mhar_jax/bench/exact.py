"""Depth routing and its gradients in float64 NumPy: the definition, and the chain rule written out.

Multi-Head Attention Residuals, arXiv 2607.27230. With r = 1 / sqrt(mean(s²) + eps), l = r <q, s>, a = softmax(l) and
mix = Σ a s, a cotangent dO of the mix gives, a head,

    dl = a (<dO, s> - Σ a <dO, s>)
    ds = a dO + dl r q - (r³ / D) Σ_heads(dl <q, s>) s
    dq = Σ dl r s

NumPy, since a traced program of dozens of sites takes longer to compile than these few million numbers to work out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Grads = dict[str, Any]
EPS = 1e-6


class Site(NamedTuple):
    """One site's forward pass, and what its backward pass needs."""

    out: Array  # [T, D]
    mix: Array  # [T, D]
    sources: Array  # [N, T, H, K], the null source first
    query: Array  # [H, K]
    r: Array  # [N, T, 1]
    dots: Array  # <q, s>, [N, T, H]
    weights: Array  # [N, T, H]
    gate: float
    null: bool


def site(
    sources: Array, query: Array, num_heads: int, *, residual: Any = None, gate: Any = None, null_source: Any = None
) -> Site:
    """One site.

    Args:
      sources: [N, T, D].
      query, null_source: [D].
      residual: [T, D].
      gate: scalar.
    """
    if null_source is not None:
        sources = np.concatenate([np.broadcast_to(null_source, (1, *sources.shape[1:])), sources])
    heads = lambda a: a.reshape(*a.shape[:-1], num_heads, -1)
    r = 1 / np.sqrt(np.mean(sources * sources, axis=-1, keepdims=True) + EPS)
    s, q = heads(sources), heads(query)
    dots = np.einsum("nthk,hk->nth", s, q)
    weights = np.exp(r * dots - np.max(r * dots, axis=0))
    weights /= weights.sum(axis=0)
    mix = np.einsum("nth,nthk->thk", weights, s).reshape(sources.shape[1:])
    scale = 1.0 if gate is None else float(gate)
    out = scale * mix + (0.0 if residual is None else residual)
    return Site(out, mix, s, q, r, dots, weights, scale, null_source is not None)


def site_grads(done: Site, d_out: Array, counts: Array) -> Grads:
    """Gradients of sources, query, gate and, where there is one, null_source; the residual's is d_out.

    Args:
      d_out: [T, D].
      counts: [T], how often each token is there: gradients of parameters are sums over all of them.
    """
    s, a, r, dots = done.sources, done.weights, done.r, done.dots
    d_mix = (done.gate * d_out).reshape(s.shape[1:])
    d_weights = np.einsum("thk,nthk->nth", d_mix, s)
    d_logits = a * (d_weights - np.sum(a * d_weights, axis=0))
    along = (r**3 / d_out.shape[-1]) * np.sum(d_logits * dots, axis=-1, keepdims=True)
    scaled = d_logits * r
    d_sources = a[..., None] * d_mix + scaled[..., None] * done.query - along[..., None] * s
    grads = {
        "query": np.einsum("nth,nthk->hk", scaled * counts[:, None], s).reshape(-1),
        "gate": np.sum(counts * np.sum(d_out * done.mix, axis=-1)),
    }
    d_sources = d_sources.reshape(*s.shape[:2], -1)
    if done.null:
        grads["null_source"] = np.einsum("t,td->d", counts, d_sources[0])
        d_sources = d_sources[1:]
    return {**grads, "sources": d_sources}


def stack(
    x: Array, queries: Array, added: Mapping[int, Array], num_heads: int, d_out: Array, counts: Array
) -> tuple[Array, Grads]:
    """All sites of a model in replacement form: the final site's mix, and gradients of x and queries.

    Args:
      x, d_out: [T, D].
      queries: [sites, D].
      added: what sublayer i adds to its mix, [D]; the others return it as it is.
      counts: as in `site_grads`.
    """
    sites = len(queries)
    sources, done = np.empty((sites, *x.shape)), []
    sources[0] = x
    for i in range(sites):
        done.append(site(sources[: i + 1], queries[i], num_heads))
        if i + 1 < sites:
            sources[i + 1] = done[i].out + added.get(i, 0.0)
    d_sources, d_queries = np.zeros_like(sources), np.empty_like(queries)
    for i in reversed(range(sites)):
        found = site_grads(done[i], d_out if i + 1 == sites else d_sources[i + 1], counts)
        d_sources[: i + 1] += found["sources"]
        d_queries[i] = found["query"]
    return done[-1].out, {"x": d_sources[0], "queries": d_queries}


def delta_sites(
    reads: Sequence[int], arrays: Mapping[str, Array], num_heads: int, d_out: Array, counts: Array
) -> tuple[Array, Grads]:
    """The stream after all sites of a delta model (`candidates.delta_sites`), and the gradients of all its arrays.

    arrays: deltas [N, T, D]; x [T, D]; queries, nulls [sites, D]; gates [sites].
    """
    stream, done = arrays["x"], []
    for i, count in enumerate(reads):
        rest = {"residual": stream, "gate": arrays["gates"][i], "null_source": arrays["nulls"][i]}
        done.append(site(arrays["deltas"][:count], arrays["queries"][i], num_heads, **rest))
        stream = done[i].out
    d_deltas = np.zeros_like(arrays["deltas"])
    found = [site_grads(one, d_out, counts) for one in done]  # residuals hand the cotangent through
    for count, grads in zip(reads, found, strict=True):
        d_deltas[:count] += grads["sources"]
    of_sites = {"queries": "query", "gates": "gate", "nulls": "null_source"}
    parameters = {name: np.stack([grads[one] for grads in found]) for name, one in of_sites.items()}
    return stream, {"x": d_out, "deltas": d_deltas, **parameters}
