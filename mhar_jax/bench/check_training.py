"""Is the routing of a variant right inside a model? Loss and gradients of routing parameters, on a few layers.

A first loss says nothing of it: queries start at zero and gates closed, and a backend that ignores both has the same
loss. So a model of the same widths and heads, but few layers and a small vocabulary, is given random routing
parameters, and what an implementation makes of it in the storage dtype that is timed is held against the float64
definition of every site (`implementation="reference"`) in a model that is float32 otherwise.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mhar_jax.config.schema import Config

LAYERS, VOCABULARY, TOKENS = 3, 256, 128

# Of losses, as a share: means over few tokens of numbers near 6, in 16 bits seen up to 1.1e-3 off.
LOSS_TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-4}
# ||a - b|| / ||b|| of all sites' gradients of a kind. The whole model is in 16 bits where the other is in 32: plain jnp
# is within 5e-2 in bfloat16 and 1e-5 in float32, where GPUs may take matrix products in TF32. What ignores a parameter
# is off by 1.
GRADIENT_TOLERANCE = {"bfloat16": 0.15, "float16": 0.05, "float32": 0.02}

Result = tuple[Any, Mapping[str, Any]]  # loss, gradients of routing parameters


def small(config: Config, devices: int) -> Config:
    """The model that is checked instead: the same widths, heads and variant."""
    model = dataclasses.replace(
        config.model, num_layers=min(LAYERS, config.model.num_layers), vocab_size=VOCABULARY, ffn_dim=128
    )
    return dataclasses.replace(config, model=model, batch_size=devices, seq_len=min(TOKENS, config.seq_len))


def exact(config: Config) -> Config:
    """The same small model by the definition."""
    changes: dict[str, Any] = {"routing_implementation": "reference", "attention_implementation": "xla"}
    changes |= {"compute_dtype": "float32", "remat": "none"}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


def lower(config: Config) -> Callable[[], Any]:
    """A function that lowers loss and routing gradients of a small model, of nothing but `arguments`."""

    def lowered() -> Any:
        import jax

        from mhar_jax.sharding import make_mesh
        from mhar_jax.training.step import model_functions

        functions = model_functions(config)

        def loss(routing: Any, rest: Any, tokens: jax.Array) -> jax.Array:
            total, sums = functions.merge({**rest, "routing": routing}).loss(tokens[:, :-1], tokens[:, 1:])
            return total / sums["tokens"]

        with jax.set_mesh(make_mesh(config.mesh)):
            return jax.jit(jax.value_and_grad(loss)).lower(*arguments(config))

    return lowered


def arguments(config: Config) -> tuple[Any, Any, Any]:
    """Routing parameters, the others, tokens: random, and the same for all implementations."""
    import jax

    from mhar_jax.training.step import model_functions

    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model_functions(config).init, jax.random.key(0))
    scale = 1 / math.sqrt(config.model.d_model)
    # Matrices keep the size of what they are given, so that every sublayer's output counts; norms' scales are near one.
    draw = lambda s, size: np.asarray(rng.normal(size=s.shape) * size, np.float32).astype(s.dtype)
    rest = {k: jax.tree.map(lambda s: draw(s, scale) if s.ndim > 1 else 1 + draw(s, 0.1), v) for k, v in shapes.items()}
    routing = {}
    for name, s in rest.pop("routing").items():
        if name == "norm_scale":
            routing[name] = 1 + draw(s, 0.1)
        elif name == "gate":
            routing[name] = 0.5 + np.abs(draw(s, 0.2))
        elif name == "null_source":
            routing[name] = draw(s, 1.0)
        else:  # logits of size 1; twice that takes what 16 bits do to gradients from 0.05 to 0.16 (mhar_headwise)
            routing[name] = draw(s, math.sqrt(config.model.heads_of_depth) * scale)
    tokens = rng.integers(0, VOCABULARY, (config.batch_size, config.seq_len + 1), np.int32)
    return routing, rest, tokens


def errors(found: Result, right: Result) -> dict[str, float]:
    """Of the loss, and of the gradient of each kind of routing parameter, over all sites."""
    loss = float(right[0])
    errors = {"loss": abs(float(found[0]) - loss) / abs(loss)}
    wide = lambda a: np.asarray(a).astype(np.float64)
    for name, gradient in right[1].items():
        norm = float(np.linalg.norm(wide(gradient)))
        errors[f"d_{name}"] = float(np.linalg.norm(wide(found[1][name]) - wide(gradient))) / max(norm, 1e-300)
    return errors


def tolerance(dtype: str, name: str) -> float:
    """What one of them may be off by."""
    return (LOSS_TOLERANCE if name == "loss" else GRADIENT_TOLERANCE)[dtype]
