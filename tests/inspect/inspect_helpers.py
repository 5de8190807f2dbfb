"""Tiny scrambled models taken apart once each, and what float64 says about them."""

import functools
from typing import NamedTuple

import numpy as np
from flax import nnx

import forward_oracle
from mhar_jax.inspect.text import Windows
from mhar_jax.inspect.walk import Walk
from model_helpers import build, pure, scramble, tiny

TOKENS = np.random.default_rng(3).integers(0, 64, (2, 3, 12)).astype(np.int32)  # [batches, B, T + 1]
WINDOWS = Windows("random tokens", TOKENS, np.ones((2, 3, 11), bool))


class Known(NamedTuple):
    """A walk, and the sources and weights of each site in float64, over both batches."""

    walk: Walk
    params: dict  # float64
    sources: list[list[np.ndarray]]  # [site][source]: [6, 11, D]
    weights: list[np.ndarray]  # [site]: [sources, 6, 11, G]
    logits: np.ndarray  # [6, 11, V]


@functools.cache
def known(variant: str, **changes) -> Known:
    """A scrambled tiny model, walked and computed in float64."""
    model = scramble(build(tiny(variant, **changes)))
    params = float64(pure(nnx.state(model)))
    tokens = TOKENS.reshape(-1, TOKENS.shape[-1])[:, :-1]
    sources: list[list[np.ndarray]] = []
    real = forward_oracle.route

    def recording(inputs, *args):
        if (
            not sources
            or len(inputs) != len(sources[-1])
            or any(a is not b for a, b in zip(inputs, sources[-1], strict=True))
        ):
            sources.append(list(inputs))
        return real(inputs, *args)

    forward_oracle.route = recording
    try:
        logits, weights = forward_oracle.forward(params, model.config, tokens)
    finally:
        forward_oracle.route = real
    return Known(Walk(model), params, sources, weights, logits)


def edited_logits(k: Known, site: int, change) -> np.ndarray:
    """Float64 logits when `change(weights)` replaces one site's weights [N, B, T, H]; one route call a site."""
    calls = [0]
    real = forward_oracle.route

    def editing(inputs, query, scale, heads, eps):
        mix, weights = real(inputs, query, scale, heads, eps)
        calls[0] += 1
        if calls[0] - 1 == site:
            weights = change(weights)
            size = query.shape[0] // heads
            parts = [slice(h * size, (h + 1) * size) for h in range(heads)]
            mix = np.concatenate(
                [
                    sum(w[..., None] * s[..., part] for w, s in zip(weights[..., h], inputs, strict=True))
                    for h, part in enumerate(parts)
                ],
                -1,
            )
        return mix, weights

    forward_oracle.route = editing
    try:
        return forward_oracle.forward(k.params, k.walk.config, TOKENS.reshape(-1, TOKENS.shape[-1])[:, :-1])[0]
    finally:
        forward_oracle.route = real


def float64(tree):
    """Nested dictionaries of float64 numpy arrays."""
    if isinstance(tree, dict):
        return {key: float64(value) for key, value in tree.items()}
    return np.asarray(tree, np.float64)


def sequence_losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Summed negative log-likelihood of each sequence."""
    top = logits.max(-1, keepdims=True)
    normaliser = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
    picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (normaliser - picked).sum(-1)
