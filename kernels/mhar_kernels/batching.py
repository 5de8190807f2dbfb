"""What the batching rules of the kernel backends share."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def of_none(function: Callable[..., Any], batched: Sequence[Any], operands: Sequence[Any]) -> Any:
    """The results of `function` over an empty batch: no kernel can be launched for one."""

    def one(is_batched: bool, x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:] if is_batched else x.shape, x.dtype)

    each = jax.eval_shape(function, *jax.tree.map(one, tuple(batched), tuple(operands)))
    return jax.tree.map(lambda s: jnp.zeros((0, *s.shape), s.dtype), each)
