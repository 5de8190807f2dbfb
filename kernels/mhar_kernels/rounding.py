"""Rounding that is kept."""

import jax
import jax.numpy as jnp


def rounded(x: jax.Array, dtype) -> jax.Array:
    """float32 x as the nearest numbers of a narrower dtype, still float32.

    Casting there and back would not do: XLA may leave both casts out, and what rounding took would come out as nothing.
    """
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


def as_two(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """float32 x as two numbers of a narrower dtype, whose sum is nearly it."""
    high = rounded(x, dtype)
    return high.astype(dtype), (x - high).astype(dtype)
