"""Depth routing in JAX: models, training and tools around the kernels of `mhar_kernels`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhar_jax.loading import load_model
    from mhar_jax.models import build_model
    from mhar_jax.router import DepthRouter

__all__ = ["DepthRouter", "build_model", "load_model"]

_HOME = {
    "DepthRouter": "mhar_jax.router",
    "build_model": "mhar_jax.models",
    "load_model": "mhar_jax.loading",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `--help` and the config need no Flax."""
    if name not in _HOME:
        raise AttributeError(f"module 'mhar_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
