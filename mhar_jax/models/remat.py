"""What the backward pass computes again instead of keeping, by name. It changes memory and time, never values."""

from collections.abc import Callable

import jax


def remat_sublayer(name: str, function: Callable) -> Callable:
    """A sublayer under policy `name`.

    none: every intermediate is kept. dots: results of matrix products with weights are kept, the rest is computed
    again. sublayer: only the sublayer's input is kept. sources: where every output is kept as a source, as with mhar,
    not even that: `depth_stack` mixes it again; elsewhere as sublayer. layer: handled around both sublayers, see
    `remat_layer`.
    """
    match name:
        case "dots":
            return jax.checkpoint(function, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        case "sublayer" | "sources":
            return jax.checkpoint(function)
        case _:
            return function


def remat_layer(name: str, function: Callable) -> Callable:
    """A whole layer, with its depth routing: under "layer" only the state that enters it is kept."""
    return jax.checkpoint(function) if name == "layer" else function
