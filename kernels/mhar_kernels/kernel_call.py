"""One custom_vjp for every kernel backend: forward keeps the mix and the softmax's log-denominator, nothing else."""

import dataclasses
import functools
import importlib
from typing import cast

import jax
import jax.numpy as jnp

from mhar_kernels import varying
from mhar_kernels.contract import Backend, RouteArrays, RouteCall, RouteSaved
from mhar_kernels.errors import UnsupportedInputError

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


def _differentiable_once(function):
    """function(name, call, *arrays); differentiating it is refused in a sentence, not somewhere inside a kernel."""
    guarded = jax.custom_jvp(function, nondiff_argnums=(0, 1))

    @guarded.defjvp
    def _(name, call, primals, tangents):
        raise UnsupportedInputError(f"{name} has no second derivatives; implementation='xla' has them")

    return guarded


@_differentiable_once
def _run_forward(name, call, arrays):
    return load(name).forward(dataclasses.replace(call, differentiated=True), arrays)


@_differentiable_once
def _run_backward(name, call, kept, cotangents):
    return load(name).backward(call, *kept, *cotangents)


def _forward(name, call, arrays):
    result = _run_forward(name, call, arrays)
    mix = result.out if result.mix is None else result.mix
    return (result.out, result.weights), (arrays, RouteSaved(mix, result.lse, result.weights))


def _backward(name, call, kept, cotangents):
    query_low = kept[0].query_low
    grads = _run_backward(name, call, kept, cotangents)
    if call.rows == 1:  # a softmax over one row is constant, whatever rounding says
        grads = grads._replace(query=jnp.zeros_like(grads.query))
    low = None if query_low is None else jnp.zeros_like(query_low)
    return (RouteArrays(query_low=low, **grads._asdict()),)


_route.defvjp(_forward, _backward)


def as_float32(x: jax.Array | None) -> jax.Array | None:
    """Parameters enter kernels in float32, so that their gradients are reduced there."""
    return None if x is None else x.astype(jnp.float32)
