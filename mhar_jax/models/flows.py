"""How sublayer outputs become the next sublayer's input: one small class for each kind of variant.

A flow's state is a pytree of arrays. `read` gives sublayer i its input, `write` takes its output, `finish` gives the
final norm its input. Routed flows read through `route`, the only place where a depth softmax is computed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from mhar_jax.config.schema import ModelConfig
from mhar_jax.models.sites import num_sublayers, starts_block

State = Any
Route = Callable[..., jax.Array]  # (site index, Site, sources, residual=None) -> mix or residual + gate · mix


class Flow(Protocol):
    """The interface of every variant."""

    def start(self, x: jax.Array) -> State:
        """The state before the first sublayer; x is the embedding [B, T, D]."""

    def read(self, state: State, i: int, row: Any, route: Route) -> jax.Array:
        """The input of sublayer i."""

    def write(self, state: State, i: int, row: Any, y: jax.Array) -> State:
        """The state after sublayer i returned y."""

    def finish(self, state: State, row: Any, route: Route) -> jax.Array:
        """The input of the final norm."""

    def sources(self, state: State) -> list[jax.Array]:
        """What the next site can read, without a null source; nothing where there are no sites."""


def _add(stream: jax.Array, y: jax.Array) -> jax.Array:
    """The residual addition, rounded to the stream's dtype.

    XLA may keep more digits than a narrow dtype has, and where it does so depends on what surrounds the sum. The
    explicit rounding makes the stream the same, to the bit, in every variant that has one.
    """
    total = stream + y
    kind = jnp.finfo(total.dtype)
    return jax.lax.reduce_precision(total, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


class Unrouted:
    """No sites."""

    def sources(self, state):
        return []


class Additive(Unrouted):
    """The ordinary pre-norm residual stream."""

    def start(self, x):
        return x

    def read(self, state, i, row, route):
        return state

    def write(self, state, i, row, y):
        return _add(state, y)

    def finish(self, state, row, route):
        return state


class HyperConnections(Unrouted):
    """n parallel streams with learned static connections (arXiv 2409.19606, section 2).

    A sublayer reads A_mᵀ·H of the streams H [n, D]; they become Bᵀ·y + A_rᵀ·H.

    The final norm reads the streams' mean where the paper reads their sum: RMSNorm does not see the factor n except
    through eps, and with the mean the model equals the additive one at the start.
    """

    def __init__(self, streams: int):
        self.streams = streams

    def start(self, x):
        return (x,) * self.streams

    def read(self, state, i, row, route):
        return _combine(row["read"], state)

    def write(self, state, i, row, y):
        carried = row["carry"].T
        return tuple(_combine(jnp.append(carried[j], row["write"][j]), (*state, y)) for j in range(self.streams))

    def finish(self, state, row, route):
        return _combine(jnp.full((self.streams,), 1 / self.streams, jnp.float32), state)


def _combine(weights: jax.Array, parts: tuple[jax.Array, ...]) -> jax.Array:
    """Weighted sum in float32, rounded once."""
    terms = [w * part.astype(jnp.float32) for w, part in zip(jax.lax.unstack(weights), parts, strict=True)]
    return sum(terms[1:], terms[0]).astype(parts[0].dtype)


class FullHistory:
    """attention_residuals, mhar, mhar_headwise: every site reads the embedding and every earlier output."""

    def __init__(self, config: ModelConfig):
        self.final = num_sublayers(config)

    def start(self, x):
        return [x]

    def read(self, state, i, row, route):
        return route(i, row, state)

    def write(self, state, i, row, y):
        return [*state, y]

    def finish(self, state, row, route):
        return route(self.final, row, state)

    def sources(self, state):
        return state


class BlockSums(NamedTuple):
    """State of block_mhar. Sums are float32: bfloat16 running sums stop growing."""

    whole: list[jax.Array]  # the embedding and the sum of each completed block, storage dtype
    running: jax.Array | None  # sum of the current block so far, float32; None while it is empty


class BlockHistory:
    """block_mhar: sites read the embedding, a sum for each completed block, and the current block's running sum."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.final = num_sublayers(config)

    def start(self, x):
        return BlockSums([x], None)

    def sources(self, state):
        if state.running is None:
            return state.whole
        return [*state.whole, state.running.astype(state.whole[0].dtype)]

    def read(self, state, i, row, route):
        return route(i, row, self.sources(state))

    def write(self, state, i, row, y):
        wide = y.astype(jnp.float32)
        running = wide if state.running is None else state.running + wide
        if i + 1 == self.final or starts_block(self.config, i + 1):
            return BlockSums([*state.whole, running.astype(y.dtype)], None)
        return BlockSums(state.whole, running)

    def finish(self, state, row, route):
        return route(self.final, row, self.sources(state))


class DeltaState(NamedTuple):
    """State of the delta forms."""

    stream: jax.Array  # the intact residual stream
    sources: list[jax.Array]
    boundary: jax.Array | None = None  # delta_block: the stream as it entered the current block


class Delta:
    """delta: a site adds a gated mix of the whole history to what its sublayer reads; the stream stays intact."""

    def start(self, x):
        return DeltaState(x, [x])

    def read(self, state, i, row, route):
        return route(i, row, state.sources, state.stream)

    def write(self, state, i, row, y):
        return DeltaState(_add(state.stream, y), [*state.sources, y])

    def finish(self, state, row, route):
        return state.stream

    def sources(self, state):
        return state.sources


class DeltaBlock(Delta):
    """delta_block: as delta, with one source a block: how the stream changed between two block boundaries."""

    def __init__(self, config: ModelConfig):
        self.config = config

    def start(self, x):
        return DeltaState(x, [x], x)

    def write(self, state, i, row, y):
        stream = _add(state.stream, y)
        last = i + 1 == num_sublayers(self.config)
        if last or not starts_block(self.config, i + 1):
            return state._replace(stream=stream)
        change = (stream.astype(jnp.float32) - state.boundary.astype(jnp.float32)).astype(stream.dtype)
        return DeltaState(stream, [*state.sources, change], stream)


def make_flow(config: ModelConfig) -> Flow:
    """The flow of a variant."""
    match config.variant:
        case "additive":
            return Additive()
        case "hyper_connections":
            return HyperConnections(config.hyper_streams)
        case "block_mhar":
            return BlockHistory(config)
        case "delta":
            return Delta()
        case "delta_block":
            return DeltaBlock(config)
        case _:
            return FullHistory(config)
