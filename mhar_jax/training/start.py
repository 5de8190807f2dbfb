"""The parameters that a run starts from where `init_from` names a checkpoint: trained ones, and a cold optimizer."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mhar_jax.config.schema import DELTA_VARIANTS, Config, ModelConfig
from mhar_jax.errors import UserError
from mhar_jax.loading import load_model
from mhar_jax.models.initialise import Initializer
from mhar_jax.models.sites import RoutingParameters
from mhar_jax.training.step import Trainer

_log = logging.getLogger("mhar_jax")

# Fields of the model that decide its backbone: shapes, and what the shapes do not show.
BACKBONE = (
    "vocab_size",
    "num_layers",
    "d_model",
    "num_heads",
    "num_kv_heads",
    "attention_head_dim",
    "ffn_dim",
    "qk_norm",
    "tie_embeddings",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
)
# What decides its depth routing, beside the variant.
ROUTING = ("heads_of_depth", "num_blocks", "null_source", "gate")


def read_start(config: Config, trainer: Trainer) -> Any:
    """The parameters of `config.init_from`, laid out like the trainer's.

    A run directory gives its averaged weights, where it keeps them. An additive checkpoint also starts a routed model:
    the routing parameters are then fresh, as `convert graft` makes them.

    Raises:
      UserError: the checkpoint cannot be read, or is of another model.
    """
    assert config.init_from is not None
    try:
        model, found = load_model(config.init_from, trainer.mesh)
    except UserError as error:
        raise UserError(f"init_from: {error}") from None
    fresh = needs_routing(config.model, found.model, config.init_from)
    params = _string_keys(nnx.to_pure_dict(nnx.state(model)))
    del model
    if fresh:
        if config.model.variant not in DELTA_VARIANTS or not config.model.gate:
            _log.warning("%s is not the model of %s at the start", config.model.variant, config.init_from)
        init = Initializer(jax.random.key(0), std=config.model.init_std, dtype=config.model.param_dtype)
        params["routing"] = RoutingParameters(config.model, init).arrays()
    wanted, structure = jax.tree.flatten(trainer.shapes["params"])
    leaves, found_structure = jax.tree.flatten(params)
    assert str(structure) == str(found_structure)
    del params
    for i, shape in enumerate(wanted):  # one at a time, to save memory; copied, since a step takes its arguments over
        leaves[i] = jax.device_put(jnp.copy(leaves[i]).astype(shape.dtype), shape.sharding)
    return jax.tree.unflatten(structure, leaves)


def needs_routing(model: ModelConfig, found: ModelConfig, path: str) -> bool:
    """Whether a checkpoint of `found` lacks the routing parameters of `model`, and holds all others.

    Raises:
      UserError: it is of another model.
    """
    fresh = found.variant == "additive" and model.is_routed
    fields: tuple[str, ...] = BACKBONE if fresh else ("variant", *BACKBONE)
    if model.is_routed and not fresh:
        fields += tuple(f for f in ROUTING if _matters(f, model))
    wrong = [
        f"model.{name} is {getattr(found, name)!r} there and {getattr(model, name)!r} here"
        for name in fields
        if getattr(found, name) != getattr(model, name)
    ]
    if wrong:
        raise UserError(f"init_from {path} holds another model: {'; '.join(wrong)}")
    return fresh


def _matters(field: str, model: ModelConfig) -> bool:
    if field == "num_blocks":
        return "block" in model.variant
    if field in ("null_source", "gate"):
        return model.variant in DELTA_VARIANTS
    return field == "heads_of_depth"


def _string_keys(tree: Any) -> Any:
    return {str(k): _string_keys(v) for k, v in tree.items()} if isinstance(tree, dict) else tree
