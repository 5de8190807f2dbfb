"""float16 storage inside Pallas TPU kernels, as the 16-bit integers of the same bits.

The TPU compiler neither loads float16 nor converts it, and takes no float16 argument. So float16 arrays enter a kernel
as int16, and a few integer operations a number turn them into float32, exactly, and back, rounded to nearest even.
"""

import jax
import jax.numpy as jnp

_EXPONENT = 112 << 23  # float32's bias less float16's, where float32 keeps exponents
_SMALLEST_NORMAL = 2.0**-14


def storage(dtype: str) -> jnp.dtype:
    """The dtype in which a kernel holds numbers of a storage dtype."""
    return jnp.dtype("int16" if dtype == "float16" else dtype)


def to_float32(stored: jax.Array) -> jax.Array:
    """float32 from numbers in a kernel's storage."""
    return _decode(stored) if stored.dtype == jnp.int16 else stored.astype(jnp.float32)


def to_storage(x: jax.Array, dtype) -> jax.Array:
    """float32 numbers rounded to a dtype that `storage` gave."""
    return _encode(x) if dtype == jnp.int16 else x.astype(dtype)


def as_bits(x: jax.Array) -> jax.Array:
    """Outside a kernel: an array as the kernel takes it."""
    return jax.lax.bitcast_convert_type(x, jnp.int16) if x.dtype == jnp.float16 else x


def _decode(half: jax.Array) -> jax.Array:
    bits = half.astype(jnp.int32)
    magnitude = (bits & 0x7FFF) << 13
    # TPUs take float32 subnormals for zero, so float16's are made from normal numbers.
    subnormal = _float(magnitude + (_EXPONENT + (1 << 23))) - _SMALLEST_NORMAL
    rebiased = magnitude + jnp.where(magnitude < 31 << 23, _EXPONENT, 2 * _EXPONENT)  # 31: infinity and NaN
    value = jnp.where(magnitude < 1 << 23, subnormal, _float(rebiased))
    return jnp.where(bits < 0, -value, value)


def _encode(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    # Half of the last kept place less one, plus the last kept bit: ties go to even. A carry may reach infinity.
    rounded = (magnitude - _EXPONENT + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    # Where 0.5 is added, the sum's last place is float16's smallest number.
    subnormal = jax.lax.bitcast_convert_type(_float(magnitude) + 0.5, jnp.int32) - (126 << 23)
    half = jnp.where(magnitude < 113 << 23, subnormal, rounded)
    half = jnp.where(magnitude >= 143 << 23, jnp.where(magnitude > 255 << 23, 0x7E00, 0x7C00), half)
    return (half | ((bits >> 16) & 0x8000)).astype(jnp.int16)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
