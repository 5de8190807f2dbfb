"""Models that the training and decode benchmarks make."""

import dataclasses
from typing import Any

from mhar_jax.config.schema import ModelConfig
from mhar_jax.errors import UserError, one_line

# The paper's micro-batches (sequences a device), by preset.
MICRO_BATCHES = {"mhar_100m": 8, "mhar_350m": 4, "mhar_1b": 2}
# Of `tiny`, where no preset is named on a CPU: small enough for a minute.
SMALL_MODEL = ["model.num_layers=1", "model.d_model=64", "model.ffn_dim=128", "model.vocab_size=256"]


def with_variant(model: ModelConfig, variant: Any, implementation: Any = None) -> ModelConfig:
    """The same model with another way to read the depth, by a named implementation of `depth_route` or the best.

    Raises:
      UserError: this shape cannot have that variant.
    """
    try:
        changed = dataclasses.replace(model, variant=variant)
        return dataclasses.replace(changed, routing_implementation=implementation) if implementation else changed
    except ValueError as error:
        raise UserError(f"the variant {variant} cannot be timed here: {one_line(error)}") from None
