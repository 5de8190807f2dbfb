"""One custom_vjp for every kernel backend: forward keeps the mix and the softmax's log-denominator, nothing else."""

import dataclasses
import functools
import importlib
from typing import cast

import jax
import jax.numpy as jnp

from mhar_kernels import varying
from mhar_kernels.contract import Backend, RouteArrays, RouteCall, RouteSaved

MODULES = {"pallas_tpu": "mhar_kernels.pallas_tpu", "triton": "mhar_kernels.triton_gpu"}


def load(name: str) -> Backend:
    """The backend module of that name; imported on first use, since each needs packages the other does not."""
    return cast(Backend, importlib.import_module(MODULES[name]))


def route(name: str, call: RouteCall, arrays: RouteArrays) -> tuple[jax.Array, jax.Array | None]:
    """out [T, D], and weights [N(+1), T, H] if the call asks for them; differentiable in every array."""
    return _route(name, call, _vary_together(arrays))


def _vary_together(arrays: RouteArrays) -> RouteArrays:
    """Inside shard_map, marks every array as varying over the axes that any of them varies over.

    The cotangent of that mark is the sum over shards, so a replicated query gets its whole gradient exactly once and
    the backward kernels never see a collective.
    """
    return varying.over(varying.axes(arrays), arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _route(name: str, call: RouteCall, arrays: RouteArrays) -> tuple[jax.Array, jax.Array | None]:
    result = load(name).forward(call, arrays)
    return result.out, result.weights


def _forward(name, call, arrays):
    result = load(name).forward(dataclasses.replace(call, differentiated=True), arrays)
    mix = result.out if result.mix is None else result.mix
    return (result.out, result.weights), (arrays, RouteSaved(mix, result.lse, result.weights))


def _backward(name, call, kept, cotangents):
    arrays, saved = kept
    d_out, d_weights = cotangents
    grads = load(name).backward(call, arrays, saved, d_out, d_weights)
    low = None if arrays.query_low is None else jnp.zeros_like(arrays.query_low)
    return (RouteArrays(query_low=low, **grads._asdict()),)


_route.defvjp(_forward, _backward)


def as_float32(x: jax.Array | None) -> jax.Array | None:
    """Parameters enter kernels in float32, so that their gradients are reduced there."""
    return None if x is None else x.astype(jnp.float32)
