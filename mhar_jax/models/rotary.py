"""Rotary positions: the half-split convention of Hugging Face, plain and with Llama-3.1's scaling."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from mhar_jax.config.schema import ModelConfig, RopeScaling


def inverse_wavelengths(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Angular frequency of each rotated pair, in radians a token, float64 [head_dim / 2].

    Plain: theta^(-2i / head_dim) (RoFormer, arXiv 2104.09864, section 3.4.2). Llama-3.1 divides frequencies whose
    wavelength exceeds original_context / low_freq_factor by `factor`, leaves those below original_context /
    high_freq_factor, and interpolates linearly in original_context / wavelength between the two.
    """
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequency
    turns = scaling.original_context * frequency / (2 * math.pi)  # wavelengths that fit in the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return frequency * (keep + (1 - keep) / scaling.factor)


def rotary_tables(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., T, 1, head_dim / 2], for int32 `positions` [..., T]; the 1 is the heads' axis."""
    frequency = inverse_wavelengths(config.attention_head_dim, config.rope_theta, config.rope_scaling)
    angle = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(frequency, jnp.float32)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates pairs (i, i + head_dim / 2) of x [B, T, heads, head_dim], in float32; returns float32."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
