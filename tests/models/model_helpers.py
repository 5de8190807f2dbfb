"""Tiny models, the same for all tests of this folder, and one compiled program for each variant."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhar_jax.config import ModelConfig
from mhar_jax.config.schema import ROUTED_VARIANTS, Variant
from mhar_jax.models import Decoder, build_model

VARIANTS = get_args(Variant)
ROUTED = ROUTED_VARIANTS
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 13)).astype(np.int32)

# Half the compile time; the programs are tiny.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def tiny(variant: str, **changes) -> ModelConfig:
    """3 layers (blocks of 2 and 1), D 32, 4 heads over 2 KV heads, vocabulary 64, float32."""
    fields = {
        "variant": variant,
        "vocab_size": 64,
        "num_layers": 3,
        "d_model": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 48,
        "num_blocks": 2,
        "compute_dtype": "float32",
        "loss_chunk": 10,
        "init_std": 0.2,
    }
    return ModelConfig(**(fields | changes))


def shallow(variant: str, **changes) -> ModelConfig:
    """`tiny` with two layers where blocks do not need a third."""
    return tiny(variant, **({"num_layers": 3 if "block" in variant else 2} | changes))


def build(config: ModelConfig, seed: int = 0) -> Decoder:
    """A fresh model."""
    return build_model(config, rngs=nnx.Rngs(seed))


def scramble(model: Decoder, seed: int = 1) -> Decoder:
    """Moves every norm, query, gate and connection away from its special starting value, in place."""
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if leaf.ndim <= 1 or path[0] in ("routing", "hyper"):
            leaf[...] = leaf[...] + 0.5 * jax.random.normal(next(keys), leaf.shape, leaf.dtype)
    return model


def mean_loss(graph, state, tokens):
    """Mean cross-entropy of the next token, and the auxiliary sums."""
    total, aux = nnx.merge(graph, state).loss(tokens[:, :-1], tokens[:, 1:])
    return total / aux["tokens"], aux


@functools.cache
def scrambled(variant: str) -> dict:
    """Everything about one scrambled tiny model: `config`, `params` (numpy), and what one program computes of it.

    `program(state)` computes the same of another state, without being compiled again.
    """
    model = scramble(build(shallow(variant)))
    graph, state = nnx.split(model)

    @jit
    def everything(state, tokens):
        (loss, aux), grads = jax.value_and_grad(functools.partial(mean_loss, graph), has_aux=True)(state, tokens)
        model = nnx.merge(graph, state)
        weights = model.depth_weights(tokens[:, :-1]) if model.config.is_routed else None
        return {"loss": loss, "aux": aux, "grads": grads, "logits": model(tokens[:, :-1]), "weights": weights}

    program = functools.partial(everything, tokens=jnp.asarray(TOKENS))
    results = jax.tree.map(np.asarray, program(state))
    results["grads_state"] = results["grads"]
    results["grads"] = pure(results["grads"])
    facts = {"config": model.config, "params": pure(state), "graph": graph, "state": state, "program": program}
    return {**facts, **results}


def pure(state) -> dict:
    """An NNX state as nested dictionaries of arrays."""
    return nnx.to_pure_dict(state)


def relative(a, b) -> float:
    """||a - b|| / ||b||, in float64."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300))
