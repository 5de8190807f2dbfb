"""Decoding with the cache gives the logits of whole forward passes, for every variant and every split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhar_jax.models.cache import empty_cache
from model_helpers import VARIANTS, build, jit, relative, scramble, tiny

LENGTH = 10
ROW = np.random.default_rng(5).integers(0, 64, LENGTH).astype(np.int32)


@functools.cache
def model_of(variant: str):
    return nnx.split(scramble(build(tiny(variant, num_layers=2))))


RELATED = ("delta", "block_mhar", "mhar_headwise")  # forms of what mhar and delta_block do


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=pytest.mark.exhaustive) if v in RELATED else v for v in VARIANTS]
)
def test_decode_equals_whole_passes_at_every_position_for_every_split(variant):
    """Row p of the batch splits the same tokens after p + 1: all splits at once, in batches of different length."""
    graph, state = model_of(variant)
    counts = np.arange(1, LENGTH)

    @jit
    def run(state, row, counts):
        model = nnx.merge(graph, state)
        whole = model(row[None])[0]
        filled = jnp.where(jnp.arange(LENGTH) < counts[:, None], row, 63)
        first, cache = model.prefill(filled, counts, slots=LENGTH + 2)

        def step(cache, _):
            token = row[jnp.minimum(cache.lengths, LENGTH - 1)]
            logits, cache = model.extend(token[:, None], cache)
            return cache, logits[:, 0]

        return whole, first, jax.lax.scan(step, cache, None, length=LENGTH - 1)[1]

    whole, first, rest = map(np.asarray, run(state, ROW, counts))
    seen = 0
    for p in counts:
        decoded = np.concatenate([first[p - 1][None], rest[: LENGTH - p, p - 1]])
        for at, logits in enumerate(decoded):  # each position by itself: a norm over all would hide one
            assert relative(logits, whole[p - 1 + at]) < 1e-5, (p, at)  # float32; seen 1e-6
            seen += 1
    assert seen == sum(LENGTH - p + 1 for p in counts)
    assert relative(whole[3], whole[4]) > 0.1  # positions differ, so the comparison can fail


def test_several_tokens_at_a_time_and_filling_that_does_not_count():
    graph, state = model_of("mhar")

    @jit
    def run(state, row):
        model = nnx.merge(graph, state)
        _, cache = model.prefill(jnp.stack([row[:4], row[:4]]), jnp.array([4, 3]), slots=LENGTH)
        chunk = jnp.stack([row[4:8], jnp.append(row[3:6], 63)])
        logits, cache = model.extend(chunk, cache, jnp.array([4, 3]))
        after, cache = model.extend(row[jnp.array([8, 6])][:, None], cache)
        return model(row[None])[0], logits, after, cache.lengths

    whole, logits, after, lengths = map(np.asarray, run(state, ROW))
    assert relative(logits[0], whole[4:8]) < 1e-5
    assert relative(logits[1, :3], whole[3:6]) < 1e-5
    assert relative(after[0, 0], whole[8]) < 1e-5
    assert relative(after[1, 0], whole[6]) < 1e-5
    assert lengths.tolist() == [9, 7]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_of_every_variant_is_the_additive_one(variant):
    """What one call hands to the next: shapes of a prefill, traced and not run."""

    def cache_of(variant):
        graph, state = model_of(variant)
        tokens, counts = jnp.zeros((2, 5), jnp.int32), jnp.full(2, 5)
        return jax.eval_shape(lambda s: nnx.merge(graph, s).prefill(tokens, counts, slots=9)[1], state)

    found, config = cache_of(variant), tiny(variant, num_layers=2)
    assert found == cache_of("additive")
    per_token = 2 * config.num_layers * config.num_kv_heads * config.attention_head_dim * 4
    assert found.num_bytes == 2 * 9 * per_token + 2 * 4
    assert empty_cache(config, 2, 9).num_bytes == found.num_bytes
    assert found.slots == 9


def test_a_prompt_longer_than_the_cache_is_refused():
    graph, state = model_of("additive")
    with pytest.raises(ValueError, match="slots must be at least the 5 tokens of a row, got 4"):
        nnx.merge(graph, state).prefill(jnp.zeros((1, 5), jnp.int32), jnp.array([5]), slots=4)
