"""Causal self-attention through maintained kernels: cuDNN on GPU, splash attention on TPU, XLA everywhere."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from mhar_kernels import UnsupportedInputError
from mhar_kernels.target import current_platform


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    segment_ids: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention with scale 1 / sqrt(head_dim); grouped queries where q has more heads than k.

    Args:
      q: [B, T, heads, head_dim].
      k, v: [B, S, KV, head_dim], KV a divisor of heads. With `causal` or `segment_ids`, S = T.
      causal: query t sees keys up to t.
      segment_ids: int [B, T]; a query sees keys of its own segment only.
      implementation: "xla", "cudnn" or "tpu_flash", which then runs or raises; None: the best that supports the
        platform and input.

    Returns:
      [B, T, heads, head_dim] in q's dtype.

    Raises:
      UnsupportedInputError: the named implementation cannot run this here.
    """
    if implementation is None:
        best = {"gpu": "cudnn", "tpu": "tpu_flash"}.get(current_platform(), "xla")
        implementation = best if _UNSUPPORTED[best](q, k) is None else "xla"
    elif implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation must be None or one of {', '.join(_IMPLEMENTATIONS)}, got {implementation!r}"
        )
    elif (reason := _UNSUPPORTED[implementation](q, k)) is not None:
        raise UnsupportedInputError(f"{implementation} attention cannot run this call: {reason}")
    return _IMPLEMENTATIONS[implementation](q, k, v, causal, segment_ids)


def _segment_mask(segment_ids: jax.Array | None) -> jax.Array | None:
    """True where query and key share a segment: [B, 1, T, T]."""
    if segment_ids is None:
        return None
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def _xla(q, k, v, causal, segment_ids):
    return jax.nn.dot_product_attention(
        q, k, v, mask=_segment_mask(segment_ids), is_causal=causal, implementation="xla"
    )


def _cudnn(q, k, v, causal, segment_ids):
    return jax.nn.dot_product_attention(
        q, k, v, mask=_segment_mask(segment_ids), is_causal=causal, implementation="cudnn"
    )


def _cudnn_unsupported(q, k) -> str | None:
    if current_platform() != "gpu":
        return f"cuDNN needs a GPU, this is {current_platform()}; 'xla' runs everywhere"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention takes bfloat16 or float16, got {q.dtype.name}; 'xla' takes float32"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"cuDNN attention needs a head_dim that is a multiple of 8 and at most 256, got {q.shape[-1]}; use 'xla'"
    if q.shape[1] % 2 or k.shape[1] % 2:
        return f"cuDNN attention needs even sequence lengths, got {q.shape[1]} and {k.shape[1]}; use 'xla'"
    return None


def _tpu_flash(q, k, v, causal, segment_ids):
    raise NotImplementedError


def _tpu_flash_unsupported(q, k) -> str | None:
    return "not yet"


_IMPLEMENTATIONS: dict[str, Callable] = {"xla": _xla, "cudnn": _cudnn, "tpu_flash": _tpu_flash}
_UNSUPPORTED: dict[str, Callable] = {
    "xla": lambda q, k: None,
    "cudnn": _cudnn_unsupported,
    "tpu_flash": _tpu_flash_unsupported,
}
