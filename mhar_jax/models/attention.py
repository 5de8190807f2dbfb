"""Causal self-attention through maintained kernels: cuDNN on GPU, splash attention on TPU, XLA everywhere."""

import functools
import logging
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

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
        platform = current_platform()
        implementation = {"gpu": "cudnn", "tpu": "tpu_flash"}.get(platform, "xla")
        if (reason := _UNSUPPORTED[implementation](q, k, segment_ids)) is not None:
            _log_once(f"attention: using xla on {platform}, since {implementation} cannot run: {reason}")
            implementation = "xla"
        else:
            _log_once(f"attention: using {implementation}, the best implementation for {platform}")
    elif implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation must be None or one of {', '.join(_IMPLEMENTATIONS)}, got {implementation!r}"
        )
    elif (reason := _UNSUPPORTED[implementation](q, k, segment_ids)) is not None:
        raise UnsupportedInputError(f"{implementation} attention cannot run this call: {reason}")
    return _IMPLEMENTATIONS[implementation](q, k, v, causal, segment_ids)


@functools.cache
def _log_once(message: str) -> None:
    logging.getLogger("mhar_jax").info(message)


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


def _cudnn_unsupported(q, k, segment_ids) -> str | None:
    if current_platform() != "gpu":
        return f"cuDNN needs a GPU, this is {current_platform()}; 'xla' runs everywhere"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention takes bfloat16 or float16, got {q.dtype.name}; 'xla' takes float32"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"cuDNN attention needs a head_dim that is a multiple of 8 and at most 256, got {q.shape[-1]}; use 'xla'"
    if segment_ids is not None and (q.shape[1] % 2 or k.shape[1] % 2):
        return f"cuDNN attention with segments needs an even sequence length, got {q.shape[1]}; use 'xla'"
    return None


def _tpu_flash(q, k, v, causal, segment_ids):
    """Splash attention (shipped with JAX); a kernel is opaque to the partitioner, so each device runs its own part."""
    q = (q.astype(jnp.float32) / math.sqrt(q.shape[-1])).astype(q.dtype)  # the kernel does not scale
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or any(t == AxisType.Manual for t in mesh.axis_types):
        return _splash(q, k, v, segment_ids, causal)
    batch_axes, head_axis = ("data", "fsdp"), "tensor"
    batch = batch_axes if q.shape[0] % math.prod(mesh.shape[a] for a in batch_axes) == 0 else None
    heads = head_axis if k.shape[2] % mesh.shape[head_axis] == 0 else None
    part = P(batch, None, heads, None)
    run = jax.shard_map(
        lambda q, k, v, ids: _splash(q, k, v, ids, causal),
        in_specs=(part, part, part, None if segment_ids is None else P(batch)),
        out_specs=part,
        check_vma=False,
    )
    return run(q, k, v, segment_ids)


def _splash(q, k, v, segment_ids, causal):
    kernel = _splash_kernel(q.shape[2], q.shape[1], k.shape[1], causal)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    ids = None if segment_ids is None else splash_attention.SegmentIds(segment_ids, segment_ids)
    out = jax.vmap(kernel)(q, k, v, ids)
    return jnp.swapaxes(out, 1, 2)


def _splash_kernel(heads: int, q_length: int, kv_length: int, causal: bool):
    kind = splash_attention.CausalMask if causal else splash_attention.FullMask
    mask = splash_attention.MultiHeadMask([kind((q_length, kv_length))] * heads)
    q_block, kv_block = (next(b for b in (512, 256, 128) if n % b == 0) for n in (q_length, kv_length))
    blocks = splash_attention.BlockSizes(
        block_q=q_block,
        block_kv=kv_block,
        block_q_dkv=q_block,
        block_kv_dkv=kv_block,
        block_kv_dkv_compute=kv_block,
        block_q_dq=q_block,
        block_kv_dq=kv_block,
    )
    return splash_attention.make_splash_mha(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1)


def _tpu_flash_unsupported(q, k, segment_ids) -> str | None:
    if current_platform() != "tpu":
        return f"splash attention needs a TPU, this is {current_platform()}; 'xla' runs everywhere"
    if q.shape[1] % 128 or k.shape[1] % 128:
        return (
            f"splash attention needs sequence lengths that are multiples of 128, got {q.shape[1]} and {k.shape[1]}; "
            "use 'xla'"
        )
    return None


_IMPLEMENTATIONS: dict[str, Callable] = {"xla": _xla, "cudnn": _cudnn, "tpu_flash": _tpu_flash}
_UNSUPPORTED: dict[str, Callable] = {
    "xla": lambda q, k, segment_ids: None,
    "cudnn": _cudnn_unsupported,
    "tpu_flash": _tpu_flash_unsupported,
}
