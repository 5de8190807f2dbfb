"""Float32 pairs: about 48 bits from float32 hardware, for logits whose size would otherwise eat their digits.

A logit of 600 rounded to float32 is off by up to 3e-5, and so is every softmax weight made from it, relatively. With
float32 storage that would be the largest error of the whole op, so its scores are kept as (high, low) pairs.
Formulas: Dekker 1971 (product by splitting), Knuth 1969 (sum), as collected in Hida, Li and Bailey 2001.

Everything is plain jnp on any shape, so XLA and Pallas kernels can both use it. None of it is to be differentiated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Pair(NamedTuple):
    """The number high + low, |low| at most half a unit in the last place of high."""

    high: jax.Array
    low: jax.Array


def two_sum(a: jax.Array, b: jax.Array) -> Pair:
    """a + b exactly."""
    s = a + b
    t = s - a
    return Pair(s, (a - (s - t)) + (b - t))


def _split(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    # By clearing bits, not by Veltkamp's multiplication, which overflows and which a compiler could contract.
    high = jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(a, jnp.uint32) & jnp.uint32(0xFFFFF000), jnp.float32
    )
    return high, a - high


def two_prod(a: jax.Array, b: jax.Array) -> Pair:
    """a * b exactly, short of underflow.

    No rounded product is ever added to anything: XLA computes a value anew in each fusion that uses it and may fuse a
    product with the addition there, so `high` could differ between the fusion that makes `high` and the one that makes
    `low` from it. Products of halves are exact, fused or not.
    """
    a1, a0 = _split(a)
    b1, b0 = _split(b)
    p = a1 * b1 + (a1 * b0 + a0 * b1 + a0 * b0)
    return Pair(p, ((a1 * b1 - p) + a1 * b0 + a0 * b1) + a0 * b0)


def add(a: Pair, b: Pair) -> Pair:
    """a + b to about 46 bits."""
    s = two_sum(a.high, b.high)
    return two_sum(s.high, s.low + (a.low + b.low))


def multiply(a: Pair, b: Pair) -> Pair:
    """a * b to about 46 bits."""
    p = two_prod(a.high, b.high)
    return two_sum(p.high, p.low + (a.high * b.low + a.low * b.high))


def sum_last(a: Pair) -> Pair:
    """Sum over the last axis, as one variadic reduction."""
    zero = jnp.zeros((), jnp.float32)
    high, low = jax.lax.reduce(
        (a.high, a.low), (zero, zero), lambda x, y: tuple(add(Pair(*x), Pair(*y))), dimensions=(a.high.ndim - 1,)
    )
    return Pair(high, low)


def inverse_rms(mean_square: Pair, eps: float) -> Pair:
    """1 / sqrt(mean_square + eps): a float32 estimate and one Newton step for its error."""
    eps_high = np.float32(eps)
    eps_pair = Pair(jnp.full_like(mean_square.high, eps_high), jnp.full_like(mean_square.high, eps - float(eps_high)))
    m = add(mean_square, eps_pair)
    r = jax.lax.rsqrt(m.high)
    square = two_prod(r, r)
    product = two_prod(m.high, square.high)
    residual = (1 - product.high) - (product.low + (m.high * square.low + m.low * square.high))
    return two_sum(r, 0.5 * r * residual)


def divide(a: Pair, divisor: float) -> Pair:
    """a / divisor for a number that float32 holds exactly."""
    d = jnp.float32(divisor)
    q = a.high / d
    p = two_prod(q, jnp.broadcast_to(d, q.shape))
    return two_sum(q, ((a.high - p.high) - p.low + a.low) / d)
