"""Which platform JAX starts on, where its own search would complain before it finds the answer."""

import importlib.util
import os
import pathlib


def prefer_present_hardware() -> None:
    """Keeps JAX from probing for a TPU where libtpu is installed only for its compiler.

    With libtpu installed and no TPU in the machine, JAX tries the chip first and prints pages of errors. Does nothing
    if the user has chosen (`JAX_PLATFORMS`), or if a TPU device file or a TPU environment variable is there.
    """
    if os.environ.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu") is None:
        return
    devices = [*pathlib.Path("/dev").glob("accel*"), *pathlib.Path("/dev/vfio").glob("[0-9]*")]
    if devices or any(name in os.environ for name in ("TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")):
        return
    if not pathlib.Path("/dev/nvidiactl").exists() and not pathlib.Path("/dev/kfd").exists():
        import jax

        jax.config.update("jax_platforms", "cpu")
