"""The two kinds of sublayer: parameters as NNX modules, computation as pure functions of those parameters.

A sublayer is its pre-norm and its body, without the residual: how its output meets the stream is the variant's business
(`flows.py`). The functions take a dictionary of arrays, so that `depth_stack` can differentiate them one by one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mhar_jax.config.schema import ModelConfig
from mhar_jax.models.attention import attention
from mhar_jax.models.initialise import Initializer
from mhar_jax.models.rotary import rotate
from mhar_jax.sharding import constrain

Arrays = dict[str, jax.Array]


class TokenContext(NamedTuple):
    """What a sublayer knows about its tokens beside their states; no gradient flows into it."""

    rotary: tuple[jax.Array, jax.Array]  # cos, sin; float32 [B or 1, T, 1, head_dim / 2]
    segment_ids: jax.Array | None  # int32 [B, T]; tokens attend within their own segment


class Parameters(nnx.Module):
    """A module whose parameters are read as one flat dictionary of arrays."""

    def arrays(self) -> Arrays:
        """Name to array, of this module's own parameters."""
        return {name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Param)}


class AttentionParameters(Parameters):
    """Pre-norm and causal grouped-query attention. Linear maps are stored [in, out]."""

    def __init__(self, config: ModelConfig, init: Initializer):
        width, head = config.d_model, config.attention_head_dim
        self.norm = init.ones(width)
        self.w_q = init.normal("w_q", width, config.num_heads * head)
        self.w_k = init.normal("w_k", width, config.num_kv_heads * head)
        self.w_v = init.normal("w_v", width, config.num_kv_heads * head)
        self.w_o = init.normal("w_o", config.num_heads * head, width)
        if config.qk_norm:
            self.q_norm = init.ones(head)
            self.k_norm = init.ones(head)


class MLPParameters(Parameters):
    """Pre-norm and SwiGLU. Linear maps are stored [in, out]."""

    def __init__(self, config: ModelConfig, init: Initializer):
        self.norm = init.ones(config.d_model)
        self.w_gate = init.normal("w_gate", config.d_model, config.ffn_dim)
        self.w_up = init.normal("w_up", config.d_model, config.ffn_dim)
        self.w_down = init.normal("w_down", config.ffn_dim, config.d_model)


class Layer(nnx.Module):
    """The parameters of one layer."""

    def __init__(self, config: ModelConfig, init: Initializer):
        self.attention = AttentionParameters(config, init.at("attention"))
        self.mlp = MLPParameters(config, init.at("mlp"))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis, computed in float32; returns float32 (the caller rounds)."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide * inverse * scale.astype(jnp.float32)


def read_through_norm(p: Arrays, h: jax.Array, config: ModelConfig) -> jax.Array:
    """h through a sublayer's pre-norm, in h's dtype; as it is where p has none: `depth_stack` has applied it."""
    return rms_norm(h, p["norm"], config.norm_eps).astype(h.dtype) if "norm" in p else h


def attention_sublayer(p: Arrays, h: jax.Array, context: TokenContext, config: ModelConfig) -> jax.Array:
    """h [B, T, D], or [B, T, KV, D] with one state for each KV group, to [B, T, D], in h's dtype."""
    q, k, v = queries_keys_values(p, h, context, config)
    out = attention(
        q, k, v, causal=True, segment_ids=context.segment_ids, implementation=config.attention_implementation
    )
    out = out.reshape(*out.shape[:2], -1) @ p["w_o"].astype(h.dtype)
    return constrain(out, "batch", "length", None)


def queries_keys_values(
    p: Arrays, h: jax.Array, context: TokenContext, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normed, projected and rotated: q [B, T, heads, head_dim], k and v [B, T, KV, head_dim], in h's dtype."""
    x = read_through_norm(p, h, config)

    def project(name: str) -> jax.Array:
        kernel = p[name].astype(x.dtype)
        if x.ndim == 4:  # group g's heads read group g's state
            kernel = kernel.reshape(kernel.shape[0], config.num_kv_heads, -1)
            y = jnp.einsum("btgd,dgk->btgk", x, kernel)
        else:
            y = x @ kernel
        y = y.reshape(*x.shape[:2], -1, config.attention_head_dim)
        return constrain(y, "batch", "length", "heads", None)

    def position(y: jax.Array, norm: str) -> jax.Array:
        wide = rms_norm(y, p[norm], config.norm_eps) if config.qk_norm else y
        return rotate(wide, context.rotary).astype(h.dtype)

    return position(project("w_q"), "q_norm"), position(project("w_k"), "k_norm"), project("w_v")


def mlp_sublayer(p: Arrays, h: jax.Array, config: ModelConfig) -> jax.Array:
    """h [B, T, D] to [B, T, D], in h's dtype."""
    x = read_through_norm(p, h, config)
    hidden = jax.nn.silu(x @ p["w_gate"].astype(x.dtype)) * (x @ p["w_up"].astype(x.dtype))
    hidden = constrain(hidden, "batch", "length", "hidden")
    return constrain(hidden @ p["w_down"].astype(x.dtype), "batch", "length", None)
