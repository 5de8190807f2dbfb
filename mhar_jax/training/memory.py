"""What a run needs at the least, against the memory that there is: said before anything is read, traced or written."""

import contextlib
import math
import os
import pathlib
import resource
from typing import Any

import jax
import jax.numpy as jnp

from mhar_jax.config.schema import Config
from mhar_jax.errors import UserError
from mhar_jax.models.counting import expected_parameters


def check_memory(config: Config, mesh: Any, rows: int) -> None:
    """Refuses a run that cannot fit, whatever the compiler does. One that passes may still not fit.

    Args:
      config: with `model.vocab_size` set.
      rows: of each batch that this process reads.

    Raises:
      UserError: the state and two activations do not fit a device, or the prepared batches do not fit this host.
    """
    wanted, there = least_on_a_device(config, mesh), device_memory(mesh.local_devices[0])
    if there is not None and wanted > there:
        raise UserError(
            f"out of memory: state and input of the model take {wanted / 1e9:,.1f} GB at the least on each device, and "
            f"it has {there / 1e9:,.1f}; smaller batches or a smaller model are needed, or more devices to share it "
            "(mesh.fsdp)"
        )
    kept = config.data.prefetch + 1 + (config.eval.batches if config.data.format == "synthetic" else 0)
    batch = 4 * rows * (config.seq_len + 1)
    if kept * batch > (there := host_memory()):
        raise UserError(
            f"out of memory: {kept:,} batches of {batch / 1e9:,.3f} GB are prepared, and this host has "
            f"{there / 1e9:,.1f} GB; smaller batches are needed, or fewer (data.prefetch, eval.batches)"
        )


def least_on_a_device(config: Config, mesh: Any) -> int:
    """Bytes that every device holds at once in any step.

    Parameters, two float32 moments, averages, and gradients where their norm is needed before they are used; the
    embedding's output and its cotangent.
    """
    model, shape = config.model, mesh.shape
    a_parameter = jnp.dtype(model.param_dtype).itemsize + 8
    a_parameter += 4 * (config.optimizer.ema > 0) + 4 * (config.optimizer.clip_norm is not None)
    state = expected_parameters(model) * a_parameter // (shape["fsdp"] * shape["tensor"])
    tokens = config.batch_size // config.optimizer.accumulate * config.seq_len
    tokens //= math.prod(shape[axis] for axis in ("data", "fsdp", "context"))
    return state + 2 * tokens * model.d_model * jnp.dtype(model.compute_dtype).itemsize


def device_memory(device: jax.Device) -> int | None:
    """Bytes that arrays of one device may take; None where the platform does not say. CPU devices share the host's."""
    if device.platform == "cpu":
        return host_memory() // jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def host_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less where a limit or a control group says so."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    mapped, _ = resource.getrlimit(resource.RLIMIT_AS)
    if mapped != resource.RLIM_INFINITY:
        limits.append(mapped)
    with contextlib.suppress(OSError, ValueError):  # no control groups here, or "max"
        limits.append(int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)
