"""`depth_route`: validation once for all backends, and dispatch that means what it says."""

import functools
import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from mhar_kernels import kernel_call, reference, xla
from mhar_kernels.contract import RouteArrays, RouteCall, Sources
from mhar_kernels.errors import UnsupportedInputError
from mhar_kernels.target import current_platform
from mhar_kernels.twofloat import two_prod

Implementation = Literal["reference", "xla", "pallas_tpu", "triton"]
IMPLEMENTATIONS: tuple[str, ...] = ("reference", "xla", "pallas_tpu", "triton")
_BEST = {"tpu": "pallas_tpu", "gpu": "triton"}  # tried first; xla supports everything
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_LARGEST = float(np.finfo(np.float32).max)
_log = logging.getLogger("mhar_kernels")

ArrayLike = jax.Array | np.ndarray
SourcesLike = ArrayLike | Sequence[ArrayLike]


@overload
def depth_route(
    sources: SourcesLike,
    query: ArrayLike,
    *,
    num_heads: int,
    norm_scale: ArrayLike | None = ...,
    eps: float = ...,
    residual: ArrayLike | None = ...,
    gate: ArrayLike | float | None = ...,
    null_source: ArrayLike | None = ...,
    return_weights: Literal[False] = ...,
    implementation: str | None = ...,
    interpret: bool = ...,
    tile: Mapping[str, int] | None = ...,
) -> jax.Array: ...


@overload
def depth_route(
    sources: SourcesLike,
    query: ArrayLike,
    *,
    num_heads: int,
    norm_scale: ArrayLike | None = ...,
    eps: float = ...,
    residual: ArrayLike | None = ...,
    gate: ArrayLike | float | None = ...,
    null_source: ArrayLike | None = ...,
    return_weights: Literal[True],
    implementation: str | None = ...,
    interpret: bool = ...,
    tile: Mapping[str, int] | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


def depth_route(
    sources,
    query,
    *,
    num_heads,
    norm_scale=None,
    eps=1e-6,
    residual=None,
    gate=None,
    null_source=None,
    return_weights=False,
    implementation=None,
    interpret=False,
    tile=None,
):
    """A learned softmax mixture over depth: each of H slices of the width has its own weights over the sources.

    For one token, with sources s_n, and [h] the h-th contiguous slice of D / H features:

        r_n = 1 / sqrt(mean(s_n²) + eps)             over the full width
        logit[h, n] = r_n · <query[h], norm_scale[h] ⊙ s_n[h]>
        mix[h] = Σ_n softmax_n(logit[h, ·])[n] · s_n[h]
        out = mix, or residual + gate · mix

    (Multi-Head Attention Residuals, arXiv 2607.27230. One head: Attention Residuals, arXiv 2603.15031.) Logits, softmax
    and sums are float32 whatever the storage dtype, without matrix units at reduced precision; the result is rounded
    once. Parameter gradients are reduced in float32. Differentiable in every array argument.

    Args:
      sources: array [N, ..., D] or sequence of N arrays [..., D], float32, bfloat16 or float16 (float64 with
        "reference" and "xla"). N = 0 only with a null source (an empty sequence also needs a residual, for its shape).
      query: [D]. Zeros give uniform weights.
      num_heads: H, a divisor of D.
      norm_scale: [D], scale of the key's RMSNorm; None means ones.
      eps: added to the mean square, at least 0.
      residual: [..., D] in the sources' dtype, added to the (gated) mix.
      gate: scalar; multiplies the mix. None means 1.
      null_source: [D], one more source, the same for every token, first in the weights.
      return_weights: also return the depth weights.
      implementation: "reference", "xla", "pallas_tpu" or "triton", which then runs or raises. None: the best that
        supports this platform and input.
      interpret: run "pallas_tpu" or "triton" under its interpreter, on any machine.
      tile: explicit tile sizes for a kernel backend, over the tuned table and the heuristic.

    Returns:
      out [..., D] in the sources' dtype; with `return_weights` also weights [N(+1), ..., H], float32.

    Raises:
      ValueError: a shape, dtype or option is wrong. Raised before anything is traced on the device.
      UnsupportedInputError: the named implementation cannot run this here; says why and what would work.
    """
    call, arrays, lead = _validate(
        sources, query, norm_scale, residual, gate, null_source, num_heads, eps, return_weights, interpret, tile
    )
    name = _choose(implementation, call)
    if name == "reference":
        out, weights = _reference(call, arrays)
    elif name == "xla":
        out, weights = xla.route(call, arrays)
    else:
        out, weights = kernel_call.route(name, call, _flat_parameters(arrays))
    out = out.reshape(*lead, call.dim)
    if not return_weights:
        return out
    return out, weights.reshape(call.rows, *lead, call.num_heads)


def _reference(call: RouteCall, arrays: RouteArrays):
    named = {k: v for k, v in arrays._asdict().items() if v is not None}
    if call.num_sources == 0:
        named["sources"] = jnp.zeros((0, call.tokens, call.dim), call.dtype)
    elif not call.stacked:
        named["sources"] = jnp.stack(arrays.sources)
    return reference.route(call.num_heads, call.eps, named)


def _flat_parameters(arrays: RouteArrays) -> RouteArrays:
    return arrays._replace(
        query=arrays.query.astype(jnp.float32),
        null_source=kernel_call.as_float32(arrays.null_source),
        gate=kernel_call.as_float32(arrays.gate),
    )


def _choose(implementation: str | None, call: RouteCall) -> str:
    if implementation is None:
        name = _BEST.get(call.platform, "xla")
        if name != "xla":
            reason = _unsupported(name, call)
            if reason is not None:
                _log_once(f"depth_route: using xla on {call.platform}, since {name} cannot run: {reason}")
                return "xla"
        _log_once(f"depth_route: using {name}, the best implementation for {call.platform}")
        return name
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation in kernel_call.MODULES:
        reason = _unsupported(implementation, call)
        if reason is not None:
            raise UnsupportedInputError(f"{implementation} cannot run this call: {reason}")
    return implementation


def _unsupported(name: str, call: RouteCall) -> str | None:
    if call.tokens == 0:
        return "there are no tokens; implementation='xla' returns the empty result"
    try:
        backend = kernel_call.load(name)
    except ModuleNotFoundError as error:
        return f"the package {error.name} is not installed; implementation='xla' runs everywhere"
    return backend.unsupported(call)


@functools.cache
def _log_once(message: str) -> None:
    _log.info(message)


def _validate(
    sources, query, norm_scale, residual, gate, null_source, num_heads, eps, return_weights, interpret, tile
) -> tuple[RouteCall, RouteArrays, tuple[int, ...]]:
    """Every check, from shapes and dtypes alone; then leading axes are flattened to tokens."""
    if isinstance(sources, Sequence):
        parts = tuple(_array("sources", s) for s in sources)
        stacked = False
        for i, part in enumerate(parts):
            if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
                raise ValueError(
                    "sources must all have one shape and dtype, got "
                    f"{_describe(parts[0])} for source 0 and {_describe(part)} for source {i}"
                )
        count = len(parts)
        like = parts[0] if parts else None
        shape = like.shape if like is not None else None
    else:
        if not isinstance(sources, jax.Array | np.ndarray):
            raise ValueError(
                "sources must be an array [N, ..., D] or a list or tuple of arrays [..., D], "
                f"got {type(sources).__name__}"
            )
        array = _array("sources", sources)
        if array.ndim < 2:
            raise ValueError(f"sources must be [N, ..., D] with at least two axes, got shape {array.shape}")
        stacked, count, like, shape = True, array.shape[0], array, array.shape[1:]
    if shape is None:
        if residual is None:
            raise ValueError("an empty sequence of sources needs a residual to give the shape, got residual=None")
        like = _array("residual", residual)
        shape = like.shape
    assert like is not None
    if len(shape) < 1 or shape[-1] < 1:
        raise ValueError(f"sources must have a last axis of width D >= 1, got source shape {shape}")
    *lead, dim = shape
    if like.dtype.name not in _DTYPES:
        raise ValueError(f"sources must be one of {', '.join(_DTYPES)}, got {like.dtype.name}")
    if count == 0 and null_source is None:
        raise ValueError("sources must hold at least one source unless a null_source is given, got none")

    if isinstance(num_heads, bool) or not isinstance(num_heads, numbers.Integral) or num_heads < 1:
        raise ValueError(f"num_heads must be a positive integer, got {num_heads!r}")
    if dim % num_heads:
        raise ValueError(f"num_heads must divide the width D, got num_heads={num_heads} and D={dim}")
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real) or eps < 0 or not eps <= _LARGEST:
        raise ValueError(f"eps must be a finite number of at least 0 in float32, got {eps!r}")
    for flag, value in (("return_weights", return_weights), ("interpret", interpret)):
        if not isinstance(value, bool):
            raise ValueError(f"{flag} must be True or False, got {value!r}")
    if tile is not None:
        if not isinstance(tile, Mapping) or not all(isinstance(key, str) for key in tile):
            raise ValueError(f"tile must be None or a mapping from names of sizes to integers, got {tile!r}")
        for key, value in tile.items():
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"tile sizes must be positive integers, got {key}={value!r}")

    wide = jnp.promote_types(like.dtype, jnp.float32)
    query = _parameter("query", query, (dim,)).astype(wide)
    query_low = None
    if norm_scale is not None:
        norm_scale = _parameter("norm_scale", norm_scale, (dim,)).astype(wide)
        if like.dtype == jnp.float32:
            query_low = jax.lax.stop_gradient(two_prod(query, norm_scale).low)
        query = query * norm_scale
    if null_source is not None:
        null_source = _parameter("null_source", null_source, (dim,))
    if gate is not None:
        gate = _parameter("gate", gate, ())
    if residual is not None:
        residual = _array("residual", residual)
        if residual.shape != tuple(shape) or residual.dtype != like.dtype:
            raise ValueError(
                f"residual must have a source's shape and dtype, got {_describe(residual)}; "
                f"a source is {_describe_parts(shape, like.dtype)}"
            )
        residual = residual.reshape(-1, dim) if residual.size else residual.reshape(0, dim)

    tokens = math.prod(lead)
    flat: Sources
    if stacked:
        flat = array.reshape(count, tokens, dim)
    else:
        flat = tuple(p.reshape(tokens, dim) for p in parts)
    call = RouteCall(
        num_sources=count,
        tokens=tokens,
        dim=dim,
        num_heads=int(num_heads),
        dtype=like.dtype.name,
        stacked=stacked,
        has_null=null_source is not None,
        has_residual=residual is not None,
        has_gate=gate is not None,
        return_weights=return_weights,
        eps=float(eps),
        interpret=interpret,
        tile=None if tile is None else tuple(sorted((k, int(v)) for k, v in tile.items())),
        platform=current_platform(),
    )
    return call, RouteArrays(flat, query, query_low, null_source, residual, gate), tuple(lead)


def _array(name: str, value) -> jax.Array:
    if not isinstance(value, jax.Array | np.ndarray):
        raise ValueError(f"{name} must be an array, got {type(value).__name__}")
    return _as_jax(name, value)


def _as_jax(name: str, value) -> jax.Array:
    try:
        return jnp.asarray(float(value) if isinstance(value, int) else value)
    except (TypeError, OverflowError):  # text, objects, dates, a foreign byte order; 10**400
        got = getattr(value, "dtype", "an integer beyond float64")
        raise ValueError(f"{name} must be of a floating-point dtype that JAX has, got {got}") from None


def _parameter(name: str, value, shape: tuple[int, ...]) -> jax.Array:
    if isinstance(value, bool) or not isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
        wanted = f"an array of shape {shape}" if shape else "a number or an array of shape ()"
        raise ValueError(f"{name} must be {wanted}, got {type(value).__name__}")
    array = _as_jax(name, value)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    if isinstance(value, int | float):
        array = array.astype(jnp.float32)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point, got {array.dtype.name}")
    return array


def _describe(array: jax.Array) -> str:
    return _describe_parts(array.shape, array.dtype)


def _describe_parts(shape: Sequence[int], dtype) -> str:
    return f"{jnp.dtype(dtype).name}{list(shape)}"
