"""The text a run prints at its end."""

from typing import Any

import numpy as np

from mhar_jax.config.schema import Config
from mhar_jax.data.tokenizers import Tokenizer
from mhar_jax.generation import Sampling, TokenGenerator, complete
from mhar_jax.inference import PlacedModel
from mhar_jax.training.step import Trainer


def sample_text(config: Config, trainer: Trainer, params: Any, tokenizer: Tokenizer) -> str:
    """The prompt of `config.sample` and its continuation, drawn from `config.seed`."""
    prompt = np.asarray(tokenizer.encode(config.sample.prompt), np.int32)
    prompt = prompt[max(0, len(prompt) - config.model.context + 1) :]  # the end of one that leaves no room
    if not prompt.size:
        prompt = np.array([tokenizer.eos_id], np.int32)
    generator = TokenGenerator(PlacedModel(params, config.model, trainer.mesh), vocabulary=tokenizer.vocab_size)
    sampling = Sampling(temperature=config.sample.temperature, seed=config.seed)
    (found,) = complete(generator, tokenizer, [prompt], max_tokens=config.sample.tokens, sampling=sampling)
    return tokenizer.decode(prompt) + found.text
