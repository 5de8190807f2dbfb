"""Rows of the embedding by token, on a mesh too."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mhar_jax.sharding import ACTIVATION_AXES, constrain, partitioned_mesh


def embed(table: jax.Array, tokens: jax.Array, dtype: str) -> jax.Array:
    """Rows of the table [V, D] for tokens [B, T]: [B, T, D], rounded to `dtype`.

    The partitioner gathers every token's part of a row where it lies, and sends each device its own tokens. Where
    sequences are split too it finds no such way, and would gather all rows on all devices, so it is written out.
    """
    mesh = partitioned_mesh()
    batch, length = ACTIVATION_AXES["batch"], ACTIVATION_AXES["length"]
    if mesh is None or mesh.shape[length] == 1 or _is_uneven(tokens, mesh, (batch, length)):
        # Rows are gathered before they are rounded: casting the whole table first would cost more.
        return constrain(table[tokens].astype(dtype), "batch", "length", None)
    vocab, width = ("tensor", "fsdp")
    vocab_axis = vocab if mesh.shape[vocab] > 1 and table.shape[0] % mesh.shape[vocab] == 0 else None
    width_axis = width if mesh.shape[width] > 1 and table.shape[1] % mesh.shape[width] == 0 else None

    def own(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if width_axis:
            tokens = jax.lax.all_gather(tokens, width_axis, axis=0, tiled=True)
        if vocab_axis:
            tokens = tokens - jax.lax.axis_index(vocab_axis) * table.shape[0]
            here = (tokens >= 0) & (tokens < table.shape[0])
            rows = jnp.where(here[..., None], table[jnp.where(here, tokens, 0)], 0).astype(dtype)
            rows = jax.lax.psum(rows, vocab_axis)  # of one row and zeros
        else:
            rows = table[tokens].astype(dtype)
        return jax.lax.all_to_all(rows, width_axis, 0, 2, tiled=True) if width_axis else rows

    split = P(batch, length)
    return jax.shard_map(own, in_specs=(P(vocab_axis, width_axis), split), out_specs=split)(table, tokens)


def _is_uneven(tokens: jax.Array, mesh, axes) -> bool:
    ways = [math.prod(mesh.shape[a] for a in ((part,) if isinstance(part, str) else part)) for part in axes]
    return any(size % way for size, way in zip(tokens.shape, ways, strict=True))
