"""Which tensors hold what is not finite."""

import numpy as np

from mhar_jax.huggingface.safetensors import row_slices


def look(names: list[str], value: np.ndarray, dtype: np.dtype, not_finite: list[str], overflowed: list[str]) -> None:
    """Puts the names of guilty tensors into the two lists: with infinities or NaN, and with finite values that rounding
    to `dtype` makes infinite.

    Args:
      names: of the tensor that the parameter is, or of those that are its rows.
      value: the parameter; at most 64 MiB of it are looked at at a time.
    """
    for name, tensor in zip(names, value if len(names) > 1 else [value], strict=True):
        finite, overflows = True, False
        for part in row_slices(tensor.shape, tensor.dtype.itemsize):
            with np.errstate(over="ignore", invalid="ignore"):
                given, narrow = np.isfinite(tensor[part]), np.isfinite(np.asarray(tensor[part]).astype(dtype))
            finite = finite and bool(given.all())
            overflows = overflows or bool((given & ~narrow).any())
        if not finite:
            not_finite.append(name)
        if overflows:
            overflowed.append(name)
