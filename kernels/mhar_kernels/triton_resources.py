"""What the GPU compiler makes of the Triton kernels, found without a GPU.

    python -m mhar_kernels.triton_resources [--capability 80 90 100]

Compiles forward and backward kernels to machine code and prints registers a thread, shared memory and spills.
"""

import argparse
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mhar_kernels import schedule, stages_triton, triton_gpu, triton_launch
from mhar_kernels.contract import RouteArrays, RouteCall

# 9 sources of the paper's three widths and of an 8B model, and the same as separate arrays of a 73-site model.
CASES = [(9, 512, 4), (9, 1024, 8), (9, 1280, 8), (9, 4096, 8), (73, 1280, 8)]
_POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
_POINTERS |= {"int8": "*i8", "int16": "*i16", "uint32": "*u32"}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes of a multiprocessor."""

    registers: int  # a thread
    shared: int  # bytes a program
    spilled: int  # bytes a thread, of stack and local memory
    warps: int
    size: int  # bytes of machine code
    narrow: int  # loads and stores of device memory that move less than 4 bytes a lane


def resources(call: RouteCall, direction: str, capability: int) -> Resources:
    """Compiles one kernel of the call for that compute capability (80, 90, 100, ...)."""
    return machine_code(call, direction, capability)[1]


def machine_code(call: RouteCall, direction: str, capability: int) -> tuple[bytes, Resources]:
    """The cubin of one kernel of the call, and what it takes."""
    found: list[tuple[bytes, Resources]] = []

    def compile_only(signature, inputs, outputs, constants, grid, warps, interpret):
        types = [x if isinstance(x, int) else _POINTERS[x.dtype.name] for x in (*inputs, *outputs)]
        stages = max(2, constants["STAGES"])
        found.append(_compile(triton_launch.kernel(signature), types, constants, warps, stages, capability))
        return [jnp.zeros(o.shape, o.dtype) for o in outputs]

    row, head = jnp.zeros((call.tokens, call.dim), call.dtype), jnp.zeros((call.tokens, call.num_heads))
    wide = jnp.zeros((1, call.dim))
    stacked = jnp.zeros((call.num_sources, call.tokens, call.dim), call.dtype)

    def run(row, head, wide, stacked):
        low = wide if call.dtype == "float32" else None
        arrays = RouteArrays(
            sources=stacked if call.stacked else (row,) * call.num_sources,
            query=wide,
            query_low=low,
            null_source=wide if call.has_null else None,
            residual=row if call.has_residual else None,
            gate=wide[:, 0] if call.has_gate else None,
        )
        if direction == "forward":
            return triton_gpu.launch_forward(call, 1, arrays, launch=compile_only)
        operands = dict(
            d_out=row,
            mix=row,
            rest=row.astype(jnp.int16),
            lse=head,
            lse_low=None if low is None else head,
            d_weights=None,
            weighted=None,
        )
        return triton_gpu.launch_backward(call, 1, arrays, operands, launch=compile_only)

    jax.eval_shape(run, row, head, wide, stacked)
    return found[0]


def stage_resources(
    tokens: int, dim: int, heads: int, sites: int, block_size: int, capability: int
) -> dict[str, Resources]:
    """The same for the kernels of a bfloat16 stack by blocks, the last one launched of each name."""
    found: dict[str, Resources] = {}

    def compile_only(function, name, inputs, outputs, constants, grid, warps, stages, interpret, aliases=None):
        types = [x if isinstance(x, int) else _POINTERS[x.dtype.name] for x in (*inputs, *outputs)]
        if name not in found or constants.get("OUTSIDE"):
            found[name] = _compile(function, types, constants, warps, stages, capability)[1]
        return [jnp.zeros(o.shape, o.dtype) for o in outputs]

    plan = schedule.Plan((lambda p, h: h,) * (sites - 1), heads, 1e-6, block_size, "none")

    def run(x, queries):
        stack = lambda x, q, norms: schedule.run(plan, stages_triton, [None] * (sites - 1), x, q, None, norms)
        out, vjp = jax.vjp(stack, x, queries, queries)
        return vjp(out)

    with mock.patch.object(triton_launch, "run", compile_only):
        jax.eval_shape(
            run, jax.ShapeDtypeStruct((tokens, dim), jnp.bfloat16), jax.ShapeDtypeStruct((sites, dim), jnp.float32)
        )
    return found


def _compile(function, types, constants, warps: int, stages: int, capability: int) -> tuple[bytes, Resources]:
    names = dict(zip([a for a in function.arg_names if a not in constants], types, strict=True))
    integers = {n for n, t in names.items() if isinstance(t, int)}
    ones: dict[str, Any] = {n: 1 for n in integers if names[n] == 1}  # constants to the compiler, as in a launch
    constants = dict(constants) | ones
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in integers}
    kinds = {n: "i32" if n in integers else t for n, t in names.items()} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(function, signature=kinds, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    binary = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    assert found is not None, report
    registers, stack, local = map(int, found.groups())
    narrow = len(re.findall(r"(?:ld|st)\.global\S*\.[bu](?:8|16) ", compiled.asm["ptx"]))
    return binary, Resources(registers, compiled.metadata.shared, stack + local, warps, len(binary), narrow)


def example(n: int, dim: int, heads: int, *, stacked: bool, **changes) -> RouteCall:
    """A call as depth_route would make it on a GPU, differentiated and in bfloat16."""
    base: dict[str, Any] = dict(
        num_sources=n,
        tokens=8192,
        dim=dim,
        num_heads=heads,
        dtype="bfloat16",
        stacked=stacked,
        has_null=False,
        has_residual=False,
        has_gate=False,
        return_weights=False,
        eps=1e-6,
        interpret=False,
        tile=None,
        platform="gpu",
        differentiated=True,
    )
    return RouteCall(**(base | changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="*", default=[80, 90, 100])
    options = parser.parse_args()
    print("| sources | D | H | arrays | direction | sm | warps | registers | shared bytes | spilled bytes |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for n, dim, heads in CASES:
        for direction in ("forward", "backward"):
            for stacked in (True, False):
                for capability in options.capability:
                    r = resources(example(n, dim, heads, stacked=stacked), direction, capability)
                    form = "one" if stacked else "separate"
                    print(
                        f"| {n} | {dim} | {heads} | {form} | {direction} | {capability} | {r.warps} | {r.registers} "
                        f"| {r.shared} | {r.spilled} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
