"""The key/value cache of generation: all that a token leaves behind for later tokens.

Depth routing adds nothing to it. A token's depth history (its sources) is read by that token's own sites only, so it
lives as long as the token is computed, and the cache of every variant is the additive model's.

Row b's token at position p is in slot p. Prompts of different length are filled up at the end: a causal token never
sees what comes after it, and the next tokens overwrite the filling. So prefill needs no mask, and positions no offset.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mhar_jax.config.schema import ModelConfig
from mhar_jax.models.attention import attention
from mhar_jax.models.sublayers import Arrays, TokenContext, queries_keys_values
from mhar_jax.sharding import constrain


class KVCache(NamedTuple):
    """Keys (rotated) and values of the tokens so far. [B, KV, slots, head_dim] each, in the compute dtype."""

    keys: tuple[jax.Array, ...]  # one a layer
    values: tuple[jax.Array, ...]
    lengths: jax.Array  # int32 [B]: slots in use, from slot 0 on

    @property
    def slots(self) -> int:
        """Tokens a row has room for."""
        return self.keys[0].shape[2]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


def empty_cache(config: ModelConfig, batch: int, slots: int) -> KVCache:
    """A cache of zeros for `batch` rows of at most `slots` tokens."""
    shape = (batch, config.num_kv_heads, slots, config.attention_head_dim)

    def zeros() -> tuple[jax.Array, ...]:
        return tuple(_placed(jnp.zeros(shape, config.compute_dtype)) for _ in range(config.num_layers))

    return KVCache(zeros(), zeros(), jnp.zeros((batch,), jnp.int32))


class CachedAttention:
    """The attention sublayers of one call over new tokens; collects the cache with the new tokens in it."""

    def __init__(self, cache: KVCache, tokens: int, config: ModelConfig, *, empty: bool):
        """`empty`: the cache is known to hold nothing, so that the `tokens` new ones see only each other."""
        self._old, self._config, self._empty = cache, config, empty
        self._keys, self._values = list(cache.keys), list(cache.values)
        self.positions = cache.lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32)  # [B, T]

    def sublayer(self, layer: int, p: Arrays, h: jax.Array, context: TokenContext) -> jax.Array:
        """As `attention_sublayer`, of layer `layer`."""
        config = self._config
        q, k, v = queries_keys_values(p, h, context, config)
        self._keys[layer] = keys = self._written(self._keys[layer], k)
        self._values[layer] = values = self._written(self._values[layer], v)
        if self._empty:
            out = attention(q, k, v, causal=True, implementation=config.attention_implementation)
        else:
            visible = jnp.arange(self._old.slots) <= self.positions[:, None, :, None]
            keys, values = jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)
            out = jax.nn.dot_product_attention(q, keys, values, mask=visible, implementation="xla")
        out = out.reshape(*out.shape[:2], -1) @ p["w_o"].astype(h.dtype)
        return constrain(out, "batch", "length", None)

    def cache(self, counts: jax.Array) -> KVCache:
        """The cache after `counts` [B] new tokens of each row."""
        return KVCache(tuple(self._keys), tuple(self._values), self._old.lengths + counts)

    def _written(self, old: jax.Array, new: jax.Array) -> jax.Array:
        """`new` [B, T, KV, head_dim] in its slots; what would lie beyond the last slot is dropped."""
        new = jnp.swapaxes(new, 1, 2)
        if self._empty:
            return _placed(jnp.pad(new, ((0, 0), (0, 0), (0, old.shape[2] - new.shape[2]), (0, 0))))

        def one_row(old: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
            return old.at[:, slots].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

        return _placed(jax.vmap(one_row)(old, new, self.positions))


def _placed(x: jax.Array) -> jax.Array:
    return constrain(x, "batch", "heads", None, None)
