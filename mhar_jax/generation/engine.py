"""Tokens from prompts: one compiled prefill and one compiled decode step for each bucket of shapes."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mhar_jax.generation.sampling import Sampling, draw
from mhar_jax.inference import PlacedModel, bucket, check_tokens
from mhar_jax.models import Decoder
from mhar_jax.models.cache import KVCache

_HOTTEST = 1e38  # as float32 all tokens are equally likely long before


class TokenGenerator:
    """Continues batches of prompts; the cache stays on the devices and is updated in place."""

    def __init__(self, placed: PlacedModel, *, vocabulary: int | None = None):
        """`vocabulary`: tokens from here on are never drawn (rows of the embedding beyond the tokenizer)."""
        self.config = placed.config
        self._placed = placed
        rows = placed.config.vocab_size
        assert rows is not None, "a built model has a vocabulary"
        self._vocabulary: int = vocabulary or rows
        self._prefill = placed.jit("prefill", self._first, static_argnames=("slots", "method"))
        self._decode = placed.jit("decode", self._next, static_argnames=("method",), donate_argnums=1)

    def steps(self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling) -> Iterator[np.ndarray]:
        """One int32 array [prompts] a step: the next token of every prompt, at most `max_tokens` of them.

        Every row goes on until the caller stops iterating; a row whose context is full gets arbitrary tokens, and one
        whose logits are NaN gets -1. The device computes one step ahead of what has been yielded.

        Raises:
          UserError: a prompt that the model cannot read.
        """
        rows = [check_tokens(prompt, self.config) for prompt in prompts]
        longest = max(len(row) for row in rows)
        steps = min(max_tokens, self.config.context - min(len(row) for row in rows))
        length = bucket(longest, self.config.context)
        slots = bucket(length + max_tokens, self.config.context)  # from the bucket: one shape for all its prompts
        batch = self._placed.rows(len(rows))
        tokens, counts = np.zeros((batch, length), np.int32), np.ones(batch, np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], counts[i] = row, len(row)
        how = self._how(sampling, batch)
        new, cache = self._prefill(tokens, counts, *how, slots=slots, method=sampling.method)
        for step in range(1, steps + 1):
            current = new
            if step < steps:
                new, cache = self._decode(cache, new, np.int32(step), *how, method=sampling.method)
            yield np.asarray(current)[: len(rows)]

    def _how(self, sampling: Sampling, batch: int) -> tuple[Any, ...]:
        top_k = self._vocabulary if sampling.top_k is None else min(sampling.top_k, self._vocabulary)
        return (
            ((sampling.seed + np.arange(batch, dtype=np.int64)) % 2**31).astype(np.uint32),
            np.float32(min(sampling.temperature or 1.0, _HOTTEST)),
            np.int32(top_k),
            np.float32(1.0 if sampling.top_p is None else sampling.top_p),
        )

    def _first(self, model: Decoder, tokens, counts, seeds, temperature, top_k, top_p, *, slots: int, method: str):
        logits, cache = model.prefill(tokens, counts, slots=slots)
        return self._drawn(logits, cache, seeds, jnp.int32(0), temperature, top_k, top_p, method)

    def _next(self, model: Decoder, cache: KVCache, tokens, step, seeds, temperature, top_k, top_p, *, method: str):
        logits, cache = model.extend(tokens[:, None], cache)
        return self._drawn(logits[:, 0], cache, seeds, step, temperature, top_k, top_p, method)

    def _drawn(self, logits: jax.Array, cache: KVCache, seeds, step, temperature, top_k, top_p, method: str):
        logits = logits[:, : self._vocabulary]
        tokens = draw(logits, seeds, step, temperature, top_k, top_p, method=method)
        if self._placed.mesh.size > 1:  # every process reads them, and the next step's input is laid out as this one's
            tokens = jax.lax.with_sharding_constraint(tokens, P())
            cache = cache._replace(lengths=jax.lax.with_sharding_constraint(cache.lengths, P()))
        return tokens, cache
