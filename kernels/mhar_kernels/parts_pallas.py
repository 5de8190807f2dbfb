"""`depth_mix` on TPU: the kernels of the depth-blocked schedule that work across blocks, on sources of the caller's.

They take tokens last (`pallas_stage_layout.py`), so sources and cotangents are turned on the way in, and a limited
number of sites or sources at once, so a pass is cut into groups.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mhar_kernels import parts_xla, stages_pallas
from mhar_kernels.pallas_stage_backward import Cotangents, pull_call, sites_at_once
from mhar_kernels.pallas_stage_forward import Buffers, mix_call
from mhar_kernels.pallas_stage_layout import Geometry

if TYPE_CHECKING:
    from mhar_kernels.parts import Call


def supports(dtype: str, dim: int, num_heads: int, interpret: bool) -> bool:
    """Whether the kernels take such sources, a few at a time at least."""
    return _group(dtype, dim, num_heads, interpret) > 0


def forward(call: "Call", sources: tuple[jax.Array, ...], queries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `parts_xla`."""
    n, sites, like = len(sources), queries.shape[0], sources[0]
    g = _geometry(call, like, n + sites)
    buffers = _buffers(call, g, sources)
    chunk = max(c for c in range(1, 5) if n % c == 0)
    mixes, lses = [], []
    for group in _groups(sites, _group(like.dtype.name, g.dim, g.num_heads, g.interpret)):
        own = jnp.pad(_by_head(g, queries[group.start : group.stop]), ((n, 0), (0, 0), (0, 0)))
        part = mix_call(g, buffers, own, range(n, n + len(group)), chunk)
        mixes.append(_rows(g, part.mix, like.shape))
        lses.append(_rows(g, part.lse[:, : g.num_heads], (*like.shape[:-1], g.num_heads)))
    return jnp.concatenate(mixes), jnp.concatenate(lses)


def backward(
    call: "Call",
    sources: tuple[jax.Array, ...],
    queries: jax.Array,
    lse: jax.Array,
    cotangents: jax.Array,
    deltas: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """See `parts_xla`."""
    sites, like = queries.shape[0], sources[0]
    size = _group(like.dtype.name, like.shape[-1], call.num_heads, call.interpret)
    d_sources: list[jax.Array] = []
    d_queries = jnp.zeros(queries.shape, jnp.float32)
    for group in _groups(len(sources), size):
        g = _geometry(call, like, len(group) + sites)
        heads = ((0, 0), (0, g.heads - g.num_heads), (0, 0))
        buffers = _buffers(call, g, sources[group.start : group.stop])
        buffers = buffers._replace(lse=jnp.pad(_turned(g, lse), heads))
        later = Cotangents(_turned(g, cotangents), jnp.pad(_turned(g, deltas), heads))
        own = jnp.pad(_by_head(g, queries), ((len(group), 0), (0, 0), (0, 0)))
        pulled, d_query = pull_call(g, buffers, later, own, range(len(group)), sites_at_once(size), row=0)
        factor = buffers.inverse_rms**2 / g.dim * pulled.shared
        turned = (pulled.value - factor * buffers.sources.astype(jnp.float32)).astype(like.dtype)
        d_sources += jax.lax.unstack(_rows(g, turned, like.shape))
        d_queries += jnp.sum(d_query, axis=0)[:sites]
    return d_sources, d_queries


def _group(dtype: str, dim: int, num_heads: int, interpret: bool) -> int:
    """Sites, or sources, that a kernel handles at once; 0 where it cannot."""
    fits = (c for c in (8, 4, 2, 1) if stages_pallas.unsupported(dtype, dim, num_heads, c, interpret=interpret) is None)
    return next(fits, 0)


def _groups(count: int, size: int) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _geometry(call: "Call", like: jax.Array, sites: int) -> Geometry:
    dim = like.shape[-1]
    return Geometry.of(sites, like.size // dim, dim, call.num_heads, call.eps, call.interpret)


def _buffers(call: "Call", g: Geometry, sources: tuple[jax.Array, ...]) -> Buffers:
    """Sources and their 1/RMS, tokens last."""
    rows = jnp.stack(sources)
    r = parts_xla.inverse_rms(rows, call.eps)[..., None]
    unread: Any = None
    return Buffers(_turned(g, rows), _turned(g, r), unread, unread)


def _by_head(g: Geometry, queries: jax.Array) -> jax.Array:
    """Effective queries [sites, heads, D]: each head's row is zero outside its features."""
    head, feature = jnp.arange(g.heads)[:, None], jnp.arange(g.dim)[None]
    return jnp.where((feature // g.width == head)[None], queries[:, None, :], 0.0)


def _turned(g: Geometry, x: jax.Array) -> jax.Array:
    """[n, width, T] of [n, ..., width], padded to whole tiles."""
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    return jnp.pad(flat, ((0, 0), (0, g.tokens - flat.shape[1]), (0, 0))).swapaxes(1, 2)


def _rows(g: Geometry, turned: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[n, *shape] of [n, width, T]."""
    tokens = 1
    for size in shape[:-1]:
        tokens *= size
    return turned.swapaxes(1, 2)[:, :tokens].reshape(turned.shape[0], *shape)
