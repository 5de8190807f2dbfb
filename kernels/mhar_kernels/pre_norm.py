"""The RMSNorm that a sublayer puts before its body, where a kernel does not do it on the way out."""

import jax
import jax.numpy as jnp


def apply(mix: jax.Array, scale: jax.Array | None, eps: float) -> jax.Array:
    """mix [..., D] through RMSNorm with scale [D], in float32 and rounded once; as it is where scale is None."""
    if scale is None:
        return mix
    wide = mix.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale.astype(jnp.float32)).astype(mix.dtype)


def pull(
    mix: jax.Array, scale: jax.Array | None, eps: float, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The gradients of the mix and of the scale, given that of the result."""
    if scale is None:
        return cotangent, None
    d_mix, d_scale = jax.vjp(lambda mix, scale: apply(mix, scale, eps), mix, scale)[1](cotangent)
    return d_mix, d_scale
