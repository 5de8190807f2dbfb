"""What a routed model reads, in a few numbers: for metrics while training and for the picture at the end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mhar_jax.models.decoder import Decoder
from mhar_jax.models.sites import heads_of_site, num_sites, source_labels


class RoutingSummary(NamedTuple):
    """Depth weights averaged over tokens; all float32.

    The three scalars are means over tokens, heads and those sites that have more than one source.
    """

    weights: jax.Array  # [sites, sources, heads]: mean weight; NaN where a site has no such source or head
    entropy: jax.Array  # of the depth weights, nats
    normalized_entropy: jax.Array  # each site's entropy over the log of its number of sources: 1 is uniform
    newest_mass: jax.Array  # weight on the newest source


def routing_summary(
    model: Decoder,
    tokens: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> RoutingSummary:
    """Summarises a routed model's depth weights on `tokens`, int32 [B, T]; works under `jax.jit`.

    Rows and columns are named by `sites.site_labels` and `sites.source_labels`. Each site's weights are reduced as soon
    as they exist.

    Raises:
      UserError: the model's variant has no depth weights.
    """
    recorder = _Recorder(model)
    model.visit_sites(tokens, recorder, positions=positions, segment_ids=segment_ids)
    return recorder.summary()


def loss_and_summary(
    model: Decoder, tokens: jax.Array, targets: jax.Array
) -> tuple[dict[str, jax.Array], RoutingSummary]:
    """The sums of `Decoder.loss` and the summary of the same forward pass: the weights are those that were used."""
    recorder = _Recorder(model)
    sums = model.loss(tokens, targets, record=recorder)[1]
    return sums, recorder.summary()


class _Recorder:
    """Called with every site's depth weights, of which it keeps means."""

    def __init__(self, model: Decoder):
        config = model.config
        self._counts = [len(labels) for labels in source_labels(config)]
        self._heads = max((heads_of_site(config, i) for i in range(num_sites(config))), default=0)
        self._rows: dict[int, jax.Array] = {}
        self._scalars: list[tuple[jax.Array, jax.Array, jax.Array]] = []

    def __call__(self, site: int, weights: jax.Array) -> None:
        count = self._counts[site]
        mean = _mean(jnp.moveaxis(weights, -1, 1), 2)
        pad = ((0, max(self._counts) - mean.shape[0]), (0, self._heads - mean.shape[1]))
        self._rows[site] = jnp.pad(mean, pad, constant_values=jnp.nan)
        if count > 1:
            entropy = _mean(-jnp.sum(jax.scipy.special.xlogy(weights, weights), axis=0), 0)
            self._scalars.append((entropy, entropy / jnp.log(float(count)), _mean(weights[-1], 0)))

    def summary(self) -> RoutingSummary:
        alone = jnp.zeros(()), jnp.zeros(()), jnp.ones(())  # every site has one source
        means = [jnp.mean(jnp.stack(x)) for x in zip(*self._scalars, strict=True)] if self._scalars else alone
        return RoutingSummary(jnp.stack([self._rows[i] for i in range(len(self._counts))]), *means)


def _mean(x: jax.Array, kept: int) -> jax.Array:
    """Over all but the first axes, one after another: a single long float32 sum of like numbers drifts."""
    while x.ndim > kept:
        x = jnp.mean(x, axis=-1)
    return x
