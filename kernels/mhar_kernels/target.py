"""Which kind of device a traced call will run on."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_assumed: ContextVar[str | None] = ContextVar("mhar_kernels_platform", default=None)


@contextlib.contextmanager
def assume_platform(platform: str) -> Iterator[None]:
    """Traces as if for "tpu", "gpu" or "cpu": for compiling ahead of time on a machine without that chip."""
    if platform not in ("cpu", "gpu", "tpu"):
        raise ValueError(f"platform must be 'cpu', 'gpu' or 'tpu', got {platform!r}")
    token = _assumed.set(platform)
    try:
        yield
    finally:
        _assumed.reset(token)


def current_platform() -> str:
    """ "cpu", "gpu" or "tpu": what `assume_platform` says, else the mesh in scope, else JAX's default device."""
    if (assumed := _assumed.get()) is not None:
        return assumed
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform is not None:
        return _family(device.platform)
    default = jax.config.jax_default_device
    if default is not None:
        return _family(default if isinstance(default, str) else default.platform)
    return _family(jax.default_backend())


def _family(platform: str) -> str:
    return "gpu" if platform in ("gpu", "cuda", "rocm") else platform
