"""What the backward pass computes again instead of keeping, by name. It changes memory and time, never values."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name


def remat_sublayer(name: str, function: Callable) -> Callable:
    """A sublayer under policy `name`.

    none: every intermediate is kept. dots: results of matrix products with weights are kept, the rest is computed
    again. sublayer: only the sublayer's input is kept. sources: where every output is kept as a source, as with mhar,
    not even that: `depth_stack` mixes it again; elsewhere as sublayer. layer: handled around both sublayers, see
    `remat_layer`. Where sites are read by passes (`blocked.py`), the float32 parts that passes made are kept as well,
    but under "layer" (`remat_block`).
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


_BETWEEN_LAYERS = "state_between_layers"


def remat_block(function: Callable) -> Callable:
    """A depth block, or a run of layers, each under `remat_layer`, with the passes over sources that serve them.

    What passes make, float32 mixes for all of the block's sites, is made again when the block's gradients are; of the
    layers only the state that enters each is kept, as without this.
    """
    return jax.checkpoint(function, policy=jax.checkpoint_policies.save_only_these_names(_BETWEEN_LAYERS))


def between_layers(before: Any, after: Any) -> Any:
    """The state after a layer, with what the layer changed of it marked to be kept."""
    known = {id(leaf) for leaf in jax.tree.leaves(before)}
    return jax.tree.map(lambda leaf: leaf if id(leaf) in known else checkpoint_name(leaf, _BETWEEN_LAYERS), after)
