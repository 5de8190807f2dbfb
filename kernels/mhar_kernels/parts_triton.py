"""`depth_mix` on GPUs: the kernels of the depth-blocked schedule that work across blocks, on sources of the caller's.

They number sites behind sources, as in a stack whose first N sites are done: site s of a pass is number N + s.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from mhar_kernels import parts_xla, triton_stage_calls
from mhar_kernels.rounding import as_two
from mhar_kernels.triton_stage_calls import Shape, unused

if TYPE_CHECKING:
    from mhar_kernels.parts import Call


def forward(call: "Call", sources: tuple[jax.Array, ...], queries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `parts_xla`."""
    n, sites = len(sources), queries.shape[0]
    shape = _shape(call, sources, sites, block=sites)
    rows, r = _stacked(call, shape, sources)
    out, lse = triton_stage_calls.mix(shape, rows, r, *_halves(queries, n, rows.dtype), n, sites)
    lead = sources[0].shape[:-1]
    return out.reshape(sites, *lead, shape.dim), lse.reshape(sites, *lead, shape.num_heads)


def backward(
    call: "Call",
    sources: tuple[jax.Array, ...],
    queries: jax.Array,
    lse: jax.Array,
    cotangents: jax.Array,
    deltas: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """See `parts_xla`."""
    n, sites = len(sources), queries.shape[0]
    shape = _shape(call, sources, sites, block=n)
    rows, r = _stacked(call, shape, sources)

    def by_token(x: jax.Array) -> jax.Array:
        """[T, H, NP] of [sites, ..., H]."""
        flat = x.reshape(sites, shape.tokens, shape.num_heads).transpose(1, 2, 0)
        return jnp.pad(flat, ((0, 0), (0, 0), (n, shape.padded - n - sites)))

    keys, value, shared = triton_stage_calls.pull(
        shape,
        rows,
        r,
        *_halves(queries, n, rows.dtype),
        by_token(lse),
        cotangents.reshape(sites, shape.tokens, shape.dim),
        by_token(deltas),
        unused(jnp.float32),
        0,
        n,
        outputs=[
            jax.ShapeDtypeStruct((shape.tokens, shape.num_heads, n, shape.padded), jnp.float32),
            *shape.partial(),
        ],
        skipped=n,
    )
    own = r[:, :n].T ** 2 / shape.dim * jnp.sum(shared, axis=-1)
    d_sources = (value - own[..., None] * rows.astype(jnp.float32)).astype(rows.dtype)
    d_queries = triton_stage_calls.query(shape, rows, keys, range(n, n + sites))
    return [d.reshape(sources[0].shape) for d in jax.lax.unstack(d_sources)], d_queries


def _shape(call: "Call", sources: tuple[jax.Array, ...], sites: int, block: int) -> Shape:
    tokens = int(np.prod(sources[0].shape[:-1], dtype=np.int64))
    depth = len(sources) + sites
    return Shape(sources[0].dtype, tokens, sources[0].shape[-1], call.num_heads, depth, block, call.interpret)


def _stacked(call: "Call", shape: Shape, sources: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """The sources [N, T, D], and their 1/RMS [T, NP]."""
    flat = [s.reshape(shape.tokens, shape.dim) for s in sources]
    r = jnp.stack([parts_xla.inverse_rms(s, call.eps) for s in flat], axis=-1)
    return jnp.stack(flat), jnp.pad(r, ((0, 0), (0, shape.padded - len(sources))))


def _halves(queries: jax.Array, skipped: int, dtype) -> tuple[jax.Array, jax.Array]:
    """Effective queries as two numbers of the storage dtype; the first `skipped` rows are of sites that are done."""
    return as_two(jnp.pad(queries, ((skipped, 0), (0, 0))), dtype)
