"""Causal self-attention through maintained kernels: cuDNN on GPU, splash attention on TPU, XLA everywhere.

Where a mesh splits sequences (`context`), each device fetches the keys and values of whole sequences, which grouped
queries keep small, and attends with its own queries. The gradients of keys and values go back the same way, summed.
A device late in the sequence sees more keys than an early one, and all wait for the last: splash attention leaves
out blocks that a device cannot see, XLA and cuDNN compute them and mask them.
"""

import functools
import logging
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_jax.sharding import partitioned_mesh
from mhar_kernels import UnsupportedInputError
from mhar_kernels.target import current_platform

_BATCH, _LENGTH, _HEADS = ("data", "fsdp"), "context", "tensor"  # mesh axes


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
    if (mesh := partitioned_mesh()) is not None and _ways(q, k) > 1:
        return _over_context(mesh, implementation, q, k, v, causal, segment_ids)
    return _IMPLEMENTATIONS[implementation](q, k, v, causal, segment_ids)


def _ways(q: jax.Array, k: jax.Array) -> int:
    """Into how many parts the mesh in scope splits the sequences of q and k."""
    mesh = partitioned_mesh()
    ways = 1 if mesh is None else mesh.shape.get(_LENGTH, 1)
    return 1 if q.shape[1] % ways or k.shape[1] % ways else ways


def _part(mesh: AbstractMesh, k: jax.Array, length: str | None) -> P:
    """How q, k and v [B, T, heads, head_dim] are split, as far as the mesh divides them."""
    batch = _BATCH if k.shape[0] % math.prod(mesh.shape[a] for a in _BATCH) == 0 else None
    return P(batch, length, _HEADS if k.shape[2] % mesh.shape[_HEADS] == 0 else None, None)


def _over_context(mesh, implementation, q, k, v, causal, segment_ids):
    """Each device's own queries over the keys and values of whole sequences."""
    part = _part(mesh, k, _LENGTH)
    gather = lambda x: jax.lax.all_gather(x, _LENGTH, axis=1, tiled=True)
    kernel = kernel_spec = None
    if implementation == "tpu_flash":
        q = _scaled(q)
        heads = q.shape[2] // (1 if part[2] is None else mesh.shape[_HEADS])
        kernel = _splash_kernel(heads, q.shape[1], k.shape[1], causal, mesh.shape[_LENGTH])
        kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, P(None, _LENGTH)))

    def own(kernel, q, k, v, ids):
        k, v = gather(k), gather(v)
        all_ids = None if ids is None else gather(ids)
        if kernel is not None:
            return _splash(kernel, q, k, v, ids, all_ids)
        first = jax.lax.axis_index(_LENGTH) * q.shape[1]
        mask = None if all_ids is None else (ids[:, :, None] == all_ids[:, None, :])[:, None]
        if causal:
            seen = (first + jnp.arange(q.shape[1]))[:, None] >= jnp.arange(k.shape[1])
            mask = seen[None, None] if mask is None else mask & seen
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    ids_part = None if segment_ids is None else P(*part[:2])
    specs = (kernel_spec, part, part, part, ids_part)
    return jax.shard_map(own, in_specs=specs, out_specs=part, check_vma=False)(kernel, q, k, v, segment_ids)


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
    own, masked = q.shape[1] // _ways(q, k), segment_ids is not None or _ways(q, k) > 1
    if masked and (own % 2 or k.shape[1] % 2):
        return f"cuDNN attention with segments or a context axis needs an even sequence length, got {own}; use 'xla'"
    return None


def _tpu_flash(q, k, v, causal, segment_ids):
    """Splash attention (shipped with JAX); a kernel is opaque to the partitioner, so each device runs its own part."""

    def own(q, k, v, ids):
        return _splash(_splash_kernel(q.shape[2], q.shape[1], k.shape[1], causal), q, k, v, ids, ids)

    q, mesh = _scaled(q), partitioned_mesh()
    if mesh is None:
        return own(q, k, v, segment_ids)
    part = _part(mesh, k, None)
    specs = (part, part, part, None if segment_ids is None else P(part[0]))
    return jax.shard_map(own, in_specs=specs, out_specs=part, check_vma=False)(q, k, v, segment_ids)


def _scaled(q):
    return (q.astype(jnp.float32) / math.sqrt(q.shape[-1])).astype(q.dtype)  # the kernel does not scale


def _splash(kernel, q, k, v, q_ids, kv_ids):
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    ids = None if q_ids is None else splash_attention.SegmentIds(q_ids, kv_ids)
    return jnp.swapaxes(jax.vmap(kernel)(q, k, v, ids), 1, 2)


def _splash_kernel(heads: int, q_length: int, kv_length: int, causal: bool, length_shards: int = 1):
    """For lengths of whole sequences; of several shards, each gets its part of what the kernel knows of the mask."""
    kind = splash_attention.CausalMask if causal else splash_attention.FullMask
    mask = splash_attention.MultiHeadMask([kind((q_length, kv_length))] * heads)
    q_block, kv_block = (next(b for b in (512, 256, 128) if n % b == 0) for n in (q_length // length_shards, kv_length))
    blocks = splash_attention.BlockSizes(
        block_q=q_block,
        block_kv=kv_block,
        block_q_dkv=q_block,
        block_kv_dkv=kv_block,
        block_kv_dkv_compute=kv_block,
        block_q_dq=q_block,
        block_kv_dq=kv_block,
    )
    return splash_attention.make_splash_mha(mask, block_sizes=blocks, head_shards=1, q_seq_shards=length_shards)


def _tpu_flash_unsupported(q, k, segment_ids) -> str | None:
    if current_platform() != "tpu":
        return f"splash attention needs a TPU, this is {current_platform()}; 'xla' runs everywhere"
    own = q.shape[1] // _ways(q, k)
    if own % 128 or k.shape[1] % 128:
        return (
            f"splash attention needs sequence lengths that are multiples of 128, got {own} and {k.shape[1]}; use 'xla'"
        )
    return None


_IMPLEMENTATIONS: dict[str, Callable] = {"xla": _xla, "cudnn": _cudnn, "tpu_flash": _tpu_flash}
_UNSUPPORTED: dict[str, Callable] = {
    "xla": lambda q, k, segment_ids: None,
    "cudnn": _cudnn_unsupported,
    "tpu_flash": _tpu_flash_unsupported,
}
