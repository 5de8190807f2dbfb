"""Depth routing in parts: a softmax over depth merges from softmaxes over some of the sources, exactly.

`depth_stack` does this for stacks in which every site reads all sources before it. Here are the pieces for all others:
`depth_mix` reads some sources once for many sites, `one_source` is the part of a single source, such as a running sum
or a null source, and `merge` puts a site's parts together. Each is differentiable by itself.
"""

import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mhar_kernels import parts_xla, varying
from mhar_kernels.errors import UnsupportedInputError
from mhar_kernels.rounding import rounded
from mhar_kernels.stages_sharded import TokenAxes, TokenShards
from mhar_kernels.target import current_platform


class Part(NamedTuple):
    """What some sources give to a site's mix: their own mix, and how much it weighs."""

    mix: jax.Array  # [..., D]: Σ softmax(ℓ) s; float32, or a single source as it is
    lse: jax.Array  # float32 [..., H]: log Σ exp(ℓ)


class Call(NamedTuple):
    """What is static about a pass over some sources."""

    num_heads: int
    eps: float
    interpret: bool


def depth_mix(
    sources: Sequence[jax.Array],
    queries: jax.Array,
    *,
    num_heads: int,
    eps: float = 1e-6,
    implementation: str | None = None,
    interpret: bool = False,
    token_axes: TokenAxes = (),
) -> Part:
    """What the same sources give to the mixes of many sites, in one pass over them.

    Args:
      sources: N arrays [..., D].
      queries: effective, [sites, D] float32: each site's query times its norm scale.
      num_heads: H, a divisor of D.
      eps: added to the mean square of the keys.
      implementation, interpret: as in `depth_route`; None chooses what is quickest here.
      token_axes: as in `depth_stack`.

    Returns:
      A part [sites, ..., D] and [sites, ..., H], float32: mixes that merge from rounded parts would be off by more than
      their own rounding.

    Raises:
      ValueError: shapes do not agree.
      UnsupportedInputError: the implementation asked for does not take this; `blocked_implementation` says so before.
    """
    sources = [jnp.asarray(s) for s in sources]
    if not sources or any(s.shape != sources[0].shape or s.dtype != sources[0].dtype for s in sources):
        raise ValueError(f"sources must be one or more arrays of one shape and dtype, got {[s.shape for s in sources]}")
    dim = sources[0].shape[-1]
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise ValueError(f"queries must be [sites, D] with D = {dim}, got {queries.shape}")
    if num_heads < 1 or dim % num_heads:
        raise ValueError(f"num_heads must divide D = {dim}, got {num_heads}")
    name = blocked_implementation(implementation, sources[0].dtype, dim, num_heads, interpret=interpret)
    if name is None:
        raise UnsupportedInputError(
            f"depth_mix has no {implementation} kernels for {sources[0].dtype.name}, D = {dim} and {num_heads} heads "
            "here; use implementation='xla', or depth_route site by site"
        )
    backend, call = _backend(name), Call(num_heads, float(eps), interpret)

    def run(sources: list[jax.Array], queries: jax.Array) -> Part:
        arrays = (sources, queries)
        sources, queries = varying.over(varying.axes(arrays), arrays)
        return Part(*_mix(backend, call, tuple(sources), queries))

    shards = TokenShards.of(token_axes, sources[0])
    if shards is not None:
        run = shards.differentiable(run, (shards.tokens, P()), P(None, *shards.tokens))
    return run(sources, queries.astype(jnp.float32))


def one_source(source: jax.Array, query: jax.Array, *, num_heads: int, eps: float = 1e-6) -> Part:
    """The part of a single source [..., D], which is its own mix, at a site with effective query [D] float32."""
    logits = parts_xla.logits(source, query[None], num_heads, eps)
    return Part(source, logits[0])


def merge(parts: Sequence[Part]) -> jax.Array:
    """The mix [..., D] float32 over the sources of all the parts of a site; leading axes are broadcast."""
    if len(parts) == 1:  # its weight is one, to the bit, and its logits have no gradient
        return parts[0].mix.astype(jnp.float32)
    top = jax.lax.stop_gradient(parts[0].lse)
    for part in parts[1:]:
        top = jnp.maximum(top, jax.lax.stop_gradient(part.lse))
    weights = [jnp.exp(part.lse - top) for part in parts]
    total = sum(weights[1:], weights[0])
    mix = None
    for part, weight in zip(parts, weights, strict=True):
        heads = part.lse.shape[-1]
        wide = part.mix.astype(jnp.float32).reshape(*part.mix.shape[:-1], heads, -1)
        term = wide * (weight / total)[..., None]
        mix = term if mix is None else mix + term
    assert mix is not None
    return mix.reshape(*mix.shape[:-2], -1)


def blocked_implementation(
    implementation: str | None, dtype, dim: int, num_heads: int, *, interpret: bool = False
) -> str | None:
    """Which of "xla", "triton" and "pallas_tpu" runs `depth_mix`; None where what is asked for cannot."""
    platform = current_platform()
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float64 or implementation == "reference":
        return None
    has_triton = importlib.util.find_spec("jax_triton") is not None
    choice = implementation or {"gpu": "triton" if has_triton else "xla", "tpu": "pallas_tpu"}.get(platform, "xla")
    if choice == "triton":
        from mhar_kernels import stages_triton

        runs = (interpret or (platform == "gpu" and has_triton)) and stages_triton.supports(dtype, dim // num_heads)
    elif choice == "pallas_tpu":
        from mhar_kernels import parts_pallas

        runs = (interpret or platform == "tpu") and parts_pallas.supports(dtype.name, dim, num_heads, interpret)
    else:
        runs = choice == "xla"
    if runs:
        return choice
    return "xla" if implementation is None else None


def _backend(name: str) -> ModuleType:
    """The module whose `forward` and `backward` run a pass."""
    if name == "triton":
        from mhar_kernels import parts_triton

        return parts_triton
    if name == "pallas_tpu":
        from mhar_kernels import parts_pallas

        return parts_pallas
    return parts_xla


def _mix(backend: ModuleType, call: Call, sources: tuple[jax.Array, ...], queries: jax.Array):
    @jax.custom_vjp
    def mix(sources, queries):
        return backend.forward(call, sources, queries)

    def forward(sources, queries):
        out, lse = backend.forward(call, sources, queries)
        return (out, lse), (sources, queries, out, lse)

    def backward(kept, cotangents):
        sources, queries, out, lse = kept
        d_out, d_lse = cotangents
        near = rounded(d_out, sources[0].dtype)
        d_out, products = near.astype(sources[0].dtype), near * out  # of what kernels see: then Σ dℓ is right
        products = jnp.sum(products.reshape(*out.shape[:-1], call.num_heads, -1), axis=-1)
        # dℓ = α (<dO, s> − Δ), and Δ = <dO, O> less what comes in through the log-sum-exp.
        d_sources, d_queries = backend.backward(call, sources, queries, lse, d_out, products - d_lse)
        return tuple(d_sources), d_queries

    mix.defvjp(forward, backward)
    return mix(sources, queries)
