"""Argument lists and launches of the Triton kernels, compiled or interpreted.

A Triton kernel has a fixed list of arguments, so N separate source arrays need a kernel with N pointers. Those lists
are generated here. Pointer counts are rounded up to a few sizes, so that a model whose sites read 1, 2, ..., 73 sources
compiles a handful of kernels; N itself is a run-time number.
"""

import functools
import inspect
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import triton
from triton.runtime.jit import JITFunction

from mhar_kernels import triton_kernels, varying

POINTER_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192)
CONSTANTS = ("NB", "D", "H", "K", "HB", "L", "C", "SB", "ITEMSIZE", "MANTISSA", "EPS", "STAGES", "AHEAD")
DEFAULT_CAPABILITY = 90  # lowered ahead of time with no GPU in sight: Hopper
_BODIES = {"forward": triton_kernels.forward_body, "backward": triton_kernels.backward_body}


@dataclass(frozen=True)
class Signature:
    """The argument list of one kernel: what is not named is None in the kernel's body.

    `inputs` and `outputs` name parameters of the body, in the order of the call; sources and d_sources stand for
    `pointers` arguments each.
    """

    direction: str  # "forward" | "backward"
    pointers: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def name(self) -> str:
        """The kernel's name, as profilers show it."""
        return f"depth_route_{self.direction}"

    @property
    def arguments(self) -> list[str]:
        """Every argument but the constants, in order."""
        return [a for group in (*self.inputs, *self.outputs) for a in self._expand(group)]

    def _expand(self, name: str) -> list[str]:
        return [f"{name}_{i}" for i in range(self.pointers)] if name in ("sources", "d_sources") else [name]

    def source(self) -> str:
        """Python source of the kernel: a call of the body."""
        body = _BODIES[self.direction].fn
        values = {name: name for name in (*self.inputs, *self.outputs, *CONSTANTS)}
        if "table" in values:
            values["table"] = "table.to(tl.pointer_type(tl.int64))"
        for name in ("sources", "d_sources"):
            values[name] = "(" + "".join(f"{a}, " for a in self._expand(name)) + ")"
        passed = ", ".join(values.get(p, "None") for p in inspect.signature(body).parameters)
        arguments = ", ".join([*self.arguments, *(f"{c}: tl.constexpr" for c in CONSTANTS)])
        return f"def {self.name}({arguments}):\n    {body.__name__}({passed})\n"


def pointer_count(n: int) -> int | None:
    """The number of source pointers of a kernel for n separate arrays; None if there is no kernel with so many."""
    return next((c for c in POINTER_COUNTS if c >= n), None)


@functools.cache
def kernel(signature: Signature) -> JITFunction:
    """The kernel with that argument list."""
    source = signature.source()
    filename = f"<{signature!r}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # Triton reads it back
    scope = dict(vars(triton_kernels))
    exec(compile(source, filename, "exec"), scope)
    return triton.jit(scope[signature.name])


def launch(
    signature: Signature,
    inputs: Sequence[jax.Array | int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
    grid: tuple[int, int],
    warps: int,
    interpret: bool,
) -> list[jax.Array]:
    """Runs the kernel with that argument list."""
    stages = max(2, constants["STAGES"])
    return run(kernel(signature), signature.name, inputs, outputs, constants, grid, warps, stages, interpret)


def run(
    function: JITFunction,
    name: str,
    inputs: Sequence[jax.Array | int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """Runs a kernel: on the GPU through jax-triton, or interpreted on the host.

    aliases: input -> output that is the same memory.
    """
    aliases = dict(aliases or {})
    if interpret:
        from mhar_kernels import triton_interpreter

        return triton_interpreter.call(function, inputs, outputs, constants, grid, aliases)
    import jax_triton

    call: Any = jax_triton.triton_call
    # Multiply and add as one instruction: half the arithmetic. Triton is about to change its default.
    if "out_type" in inspect.signature(call).parameters:  # jax-triton 0.4
        versioned: dict[str, Any] = {"out_type": list(outputs), "backend_options": {"enable_fp_fusion": True}}
    else:
        versioned = {"out_shape": list(outputs), "enable_fp_fusion": True}
    results: list[jax.Array] = call(
        *inputs,
        kernel=function,
        name=name,
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        compute_capability=None if gpu() is not None else DEFAULT_CAPABILITY,
        input_output_aliases=aliases,
        **versioned,
        **constants,
    )
    # jax-triton knows nothing of shard_map, where its outputs vary as its inputs do.
    return varying.over(varying.axes([a for a in inputs if not isinstance(a, int)]), results)


@functools.cache
def gpu() -> jax.Device | None:
    """The first GPU of this process, if JAX sees one."""
    try:
        return jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None
