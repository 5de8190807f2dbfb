"""The next token from its logits."""

import dataclasses

import jax
import jax.numpy as jnp

from mhar_jax.errors import UserError

_GREEDY = 1e-6  # float32 logits divided by much less overflow, and the draw would be the likeliest token anyway
# What a model is said to give whose numbers would otherwise pass for chance.
NOT_A_NUMBER = (
    "the model's logits are not numbers (NaN): its parameters or what it computes from them are not finite; if it was "
    "trained in a wider type, --compute-dtype float32 may help"
)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is chosen: by temperature, then among the `top_k` likeliest, then within `top_p`."""

    temperature: float = 0.0  # divides the logits; below 1e-6: the likeliest token, whatever the rest says
    top_k: int | None = None  # only the k likeliest; None: all
    top_p: float | None = None  # only the likeliest that together first reach this probability; None: all
    seed: int = 0  # row i of a batch draws as a single prompt would with seed + i

    def __post_init__(self) -> None:
        """Raises UserError for a value out of range."""
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be a number of at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed must be from 0 to 2147483647, got {self.seed}")

    @property
    def method(self) -> str:
        """Which of the programs of `draw` this needs; numbers are inputs and compile nothing."""
        if self.temperature < _GREEDY:
            return "greedy"
        return "plain" if self.top_k is None and self.top_p in (None, 1.0) else "filtered"


def draw(
    logits: jax.Array,
    seeds: jax.Array,
    step: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    method: str,
) -> jax.Array:
    """Tokens int32 [B]; -1 where a logit is NaN.

    A row's draw depends on its logits, its seed and the step only, so not on the other rows.

    Args:
      logits: float32 [B, V].
      seeds: uint32 [B].
      step: int32, tokens drawn before.
      temperature, top_p: float32; top_k: int32, at most V.
      method: "greedy", "plain" (temperature only) or "filtered".
    """
    drawn = _draw(logits, seeds, step, temperature, top_k, top_p, method)
    return jnp.where(jnp.isnan(logits).any(axis=-1), -1, drawn).astype(jnp.int32)


def _draw(logits: jax.Array, seeds, step, temperature, top_k, top_p, method: str) -> jax.Array:
    if method == "greedy":
        return jnp.argmax(logits, axis=-1)
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), step))(seeds)
    scaled = logits / temperature
    if method == "plain":
        return jax.vmap(jax.random.categorical)(keys, scaled)
    by_rank, tokens = jax.lax.top_k(scaled, scaled.shape[-1])
    by_rank = jnp.where(jnp.arange(by_rank.shape[-1]) < top_k, by_rank, -jnp.inf)  # by rank: ties do not widen it
    probability = jax.nn.softmax(by_rank, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability  # of all likelier tokens: 0 for the likeliest
    by_rank = jnp.where(before < top_p, by_rank, -jnp.inf)
    chosen = jax.vmap(jax.random.categorical)(keys, by_rank)
    return jnp.take_along_axis(tokens, chosen[:, None], axis=-1)[:, 0]
