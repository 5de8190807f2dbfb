"""Initial values whose random key depends on the parameter's path, so that variants share their backbone."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhar_jax.sharding import Layout, parameter_layout, with_layout


class Initializer:
    """Makes the parameters of one model, each from a key folded with its own path.

    A parameter's value depends on the seed, its path and its shape only: not on the order of construction, nor on which
    other parameters exist. Two variants at one seed therefore start from the same backbone, and paired runs are paired.

    Called outside `jax.jit`, every parameter is made by itself, laid out over the mesh in scope, by a small program
    that parameters of one shape share: so a deep model takes no longer to compile than a shallow one. (Inside a jitted
    function the compiler would see every matrix's random bits as one program, about a minute's work for 36 layers.)
    """

    def __init__(self, key: jax.Array, *, std: float, dtype: str, path: tuple[str, ...] = ()):
        """`key` is the model's one random key; matrices are N(0, std²), rounded once to `dtype`."""
        self._key, self._std, self._dtype, self._path = key, std, jnp.dtype(dtype), path

    def at(self, name: str) -> "Initializer":
        """The initializer of the child module `name`."""
        return Initializer(self._key, std=self._std, dtype=self._dtype.name, path=(*self._path, name))

    def normal(self, name: str, *shape: int) -> nnx.Param:
        """N(0, std²)."""
        path = "/".join((*self._path, name))
        number = np.uint32(int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big"))
        layout = parameter_layout(path, shape)
        return nnx.Param(_normal(self._key, number, self._std, shape=shape, dtype=self._dtype, layout=layout))

    def ones(self, *shape: int) -> nnx.Param:
        """All ones."""
        return self.constant(np.ones(shape, np.float32))

    def zeros(self, *shape: int) -> nnx.Param:
        """All zeros."""
        return self.constant(np.zeros(shape, np.float32))

    def constant(self, value: np.ndarray) -> nnx.Param:
        """A given array, small: every device gets all of it."""
        return nnx.Param(_constant(value, dtype=self._dtype, layout=parameter_layout("", value.shape)))


@functools.partial(jax.jit, static_argnames=("std", "shape", "dtype", "layout"))
def _normal(
    key: jax.Array, number: np.uint32, std: float, *, shape: tuple[int, ...], dtype: jnp.dtype, layout: Layout
) -> jax.Array:
    value = std * jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32)
    return with_layout(value.astype(dtype), layout)


@functools.partial(jax.jit, static_argnames=("dtype", "layout"))
def _constant(value: np.ndarray, *, dtype: jnp.dtype, layout: Layout) -> jax.Array:
    return with_layout(jnp.asarray(value, dtype), layout)
