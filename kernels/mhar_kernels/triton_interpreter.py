"""Runs a Triton kernel on the host under Triton's interpreter, from inside a JAX program.

Triton decides between compiler and interpreter when a kernel is defined, by an environment variable. Here the compiled
kernel's Python function is rewritten for the interpreter when it is first wanted, so one process can do both. The
interpreter asks for tensor-like arguments; `_Tensor` is the little of that interface it uses, over a NumPy array.
"""

import functools
import math
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.language import standard
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from mhar_kernels import triton_kernels, varying

_lock = threading.Lock()  # the interpreter patches triton.language while it runs; callbacks come from several threads
_TYPES = {
    "float32": tl.float32,
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "int8": tl.int8,
    "int16": tl.int16,
    "uint32": tl.uint32,
}

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_index(tensor, scope) -> None:
    """NumPy 2.5 refuses int() of the one-element arrays in which the interpreter keeps its scalars."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


_convert = interpreter._convert_float


def _round_to_nearest(values, source, target, mode):
    """To and from bfloat16 (16-bit integers to NumPy): GPUs round to nearest, this interpreter cuts off."""
    if source == tl.float32 and target == tl.bfloat16:
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    if source == tl.bfloat16 and target == tl.float32:
        return values.view(ml_dtypes.bfloat16).astype(np.float32)
    return _convert(values, source, target, mode)


interpreter._patch_lang_tensor = _patch_tensor_index
interpreter._convert_float = _round_to_nearest


def call(
    kernel: JITFunction,
    operands: Sequence[jax.Array | int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
    grid: tuple[int, ...],
    aliases: Mapping[int, int],
) -> list[jax.Array]:
    """The kernel's outputs, computed on the host, one program of the grid after another.

    aliases: operand -> output that starts with the operand's values.
    """
    numbers = {i: x for i, x in enumerate(operands) if isinstance(x, int)}
    arrays = [x for x in operands if not isinstance(x, int)]

    def run(*values: jax.Array) -> list[np.ndarray]:
        given = iter([_aligned(v.shape, v.dtype, v) for v in map(np.asarray, values)])
        inputs = [numbers[i] if i in numbers else next(given) for i in range(len(operands))]
        results = [_poisoned(o) for o in outputs]
        for operand, output in aliases.items():
            results[output][...] = inputs[operand]
        _run(kernel, [*inputs, *results], constants, grid)
        return results

    results = jax.pure_callback(run, list(outputs), *arrays, vmap_method="sequential")
    return varying.over(varying.axes(arrays), results)


def _poisoned(like: jax.ShapeDtypeStruct) -> np.ndarray:
    """An output array full of values that show if the kernel leaves one unwritten."""
    return _aligned(like.shape, like.dtype, 77 if np.dtype(like.dtype).kind in "iu" else np.nan)


def _aligned(shape: tuple[int, ...], dtype, fill) -> np.ndarray:
    """An array at a multiple of 16 bytes, as on a GPU."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + 16, np.uint8)
    start = -memory.ctypes.data % 16
    array = memory[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


def _run(
    kernel: JITFunction, arguments: Sequence[np.ndarray | int], constants: Mapping[str, Any], grid: tuple[int, ...]
) -> None:
    with _lock:
        function, names = _rewritten(kernel)
        tensors = [_Tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]
        interpreter.GridExecutor(function, names, grid)(*tensors, **constants)


@functools.cache
def _rewritten(kernel: JITFunction) -> tuple[Callable[..., None], list[str]]:
    """The kernel as a plain Python function for the interpreter, and its argument names.

    The functions it calls become plain functions too: Triton's own wrapper would patch its language anew at every call.
    """
    known = {**vars(triton_kernels), **kernel.fn.__globals__}
    scope = {**known, "tl": _Language(), "_patched": tl}  # the interpreter patches modules in scope
    for name, value in known.items():
        if isinstance(value, JITFunction):
            scope[name] = _rewrite(value, scope)
    return _rewrite(kernel, scope), list(kernel.arg_names)


def _rewrite(kernel: JITFunction, scope: dict) -> Callable[..., None]:
    original = kernel.fn
    clone = types.FunctionType(original.__code__, scope, original.__name__, original.__defaults__)
    clone.__annotations__ = original.__annotations__
    return interpreter.FunctionRewriter(clone).rewrite_ast()


class _Language:
    """triton.language, with the few of its functions that are compiled kernels themselves in plain form."""

    zeros = staticmethod(lambda shape, dtype: tl.full(shape, 0, dtype))
    sum = staticmethod(lambda x, axis, keep_dims=False: tl.reduce(x, axis, standard._sum_combine, keep_dims=keep_dims))
    max = staticmethod(
        lambda x, axis, keep_dims=False: tl.reduce(x, axis, standard._elementwise_max, keep_dims=keep_dims)
    )

    @staticmethod
    def dot(a, b, acc=None):
        """Of float32 numbers: the interpreter's own multiplies the bits of bfloat16 as integers."""
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)

    def __getattr__(self, name: str):
        return getattr(tl, name)


class _Tensor:
    """A NumPy array that the interpreter takes for a tensor in host memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def dtype(self) -> tl.dtype:
        return _TYPES[self.array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_Tensor":
        return self

    def cpu(self) -> "_Tensor":
        return self

    def new_empty(self, *_, **__) -> "_Tensor":
        return _Tensor(np.empty(0))

    def set_(self, storage: "_Tensor", *_) -> None:
        self.array = storage.array

    def copy_(self, other: "_Tensor") -> None:
        """The interpreter worked on this very memory."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return ()
