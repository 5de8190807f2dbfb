"""Initial values whose random key depends on the parameter's path, so that variants share their backbone."""

import hashlib

import jax
import jax.numpy as jnp
from flax import nnx


class Initializer:
    """Makes the parameters of one model, each from a key folded with its own path.

    A parameter's value depends on the seed, its path and its shape only: not on the order of construction, nor on which
    other parameters exist. Two variants at one seed therefore start from the same backbone, and paired runs are paired.
    """

    def __init__(self, key: jax.Array, *, std: float, dtype: str, path: tuple[str, ...] = ()):
        """`key` is the model's one random key; matrices are N(0, std²), rounded once to `dtype`."""
        self._key, self._std, self._dtype, self._path = key, std, jnp.dtype(dtype), path

    def at(self, name: str) -> "Initializer":
        """The initializer of the child module `name`."""
        return Initializer(self._key, std=self._std, dtype=self._dtype.name, path=(*self._path, name))

    def normal(self, name: str, *shape: int) -> nnx.Param:
        """N(0, std²)."""
        digest = hashlib.sha256("/".join((*self._path, name)).encode()).digest()
        key = jax.random.fold_in(self._key, int.from_bytes(digest[:4], "big"))
        return nnx.Param((self._std * jax.random.normal(key, shape, jnp.float32)).astype(self._dtype))

    def ones(self, *shape: int) -> nnx.Param:
        """All ones."""
        return nnx.Param(jnp.ones(shape, self._dtype))

    def zeros(self, *shape: int) -> nnx.Param:
        """All zeros."""
        return nnx.Param(jnp.zeros(shape, self._dtype))

    def constant(self, value) -> nnx.Param:
        """A given array."""
        return nnx.Param(jnp.asarray(value, self._dtype))
