"""The text a run prints at its end: plain sampling by whole forward passes over one fixed-size buffer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhar_jax.config.schema import Config
from mhar_jax.data.tokenizers import Tokenizer
from mhar_jax.training.step import Trainer


def sample_text(config: Config, trainer: Trainer, params: Any, tokenizer: Tokenizer) -> str:
    """The prompt of `config.sample` and its continuation, drawn from `config.seed`.

    Causal attention makes what lies behind the current token irrelevant, so one compiled pass serves every length.
    """
    room = config.model.context
    prompt = np.asarray(tokenizer.encode(config.sample.prompt), np.int32)
    prompt = prompt[max(0, len(prompt) - room + 1) :]  # the end of one that is too long, and room for a token
    if not prompt.size:
        prompt = np.array([tokenizer.eos_id], np.int32)
    total = min(len(prompt) + config.sample.tokens, room)
    buffer = np.full((1, total), tokenizer.eos_id, np.int32)
    buffer[0, : len(prompt)] = prompt

    @jax.jit
    def continued(params: Any, buffer: jax.Array, key: jax.Array) -> jax.Array:
        model = trainer.functions.merge(params)

        def draw(i: jax.Array, buffer: jax.Array) -> jax.Array:
            logits = model(buffer)[0, i - 1, : tokenizer.vocab_size]
            if config.sample.temperature == 0:
                token = jnp.argmax(logits)
            else:
                token = jax.random.categorical(jax.random.fold_in(key, i), logits / config.sample.temperature)
            return buffer.at[0, i].set(token.astype(buffer.dtype))

        return jax.lax.fori_loop(len(prompt), total, draw, buffer)

    with jax.set_mesh(trainer.mesh):
        tokens = np.asarray(continued(params, jnp.asarray(buffer), jax.random.key(config.seed)))[0]
    ends = np.flatnonzero(tokens[len(prompt) :] == tokenizer.eos_id)
    return tokenizer.decode(tokens[: len(prompt) + ends[0] if ends.size else None])
