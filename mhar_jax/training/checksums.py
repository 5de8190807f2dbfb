"""Numbers that tell whether what is read back is what was written."""

import hashlib
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Examined(NamedTuple):
    """What one pass over a tree of arrays tells."""

    checksums: dict[str, int]  # by path
    finite: bool  # no floating-point array holds an infinity or NaN


def examine(tree: Any) -> Examined:
    """A 32-bit number for each array, a sum of its bits weighted by position, modulo 2³²; and whether all is finite.

    The weights are odd, so one flipped bit always shows. The sum does not depend on how the array is sharded, so that a
    checkpoint can be verified on another mesh.
    """
    sums, finite = jax.device_get(_examine(tree))
    paths = jax.tree_util.tree_leaves_with_path(sums)
    return Examined(
        {jax.tree_util.keystr(path, simple=True, separator="/"): int(value) for path, value in paths},
        all(map(bool, jax.tree.leaves(finite))),
    )


@jax.jit
def _examine(tree: Any) -> tuple[Any, Any]:
    return jax.tree.map(_weighted_sum, tree), jax.tree.map(_is_finite, tree)


def _weighted_sum(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits.astype(jnp.uint32) * (2 * position + 1), dtype=jnp.uint32)


def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(x))  # integers are


def json_digest(value: Any) -> str:
    """Hash of a JSON value; equal for values that JSON does not tell apart."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def part_checksum(values: np.ndarray, first: int = 0) -> int:
    """What a contiguous part of an array adds to its checksum in `examine`, modulo 2³².

    Args:
      values: the part, of a dtype of 1, 2 or 4 bytes.
      first: position of its first value in the whole array, in row-major order.
    """
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.itemsize}").astype(np.uint32)
    position = np.arange(bits.size, dtype=np.uint32) + np.uint32(first % 2**32)
    position *= np.uint32(2)
    position += np.uint32(1)
    bits *= position
    return int(np.sum(bits, dtype=np.uint32))
