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
    config = model.config
    counts = [len(labels) for labels in source_labels(config)]
    heads = max((heads_of_site(config, i) for i in range(num_sites(config))), default=0)
    rows: dict[int, jax.Array] = {}
    scalars: list[tuple[jax.Array, jax.Array, jax.Array]] = []

    def record(site: int, weights: jax.Array) -> None:
        mean = jnp.mean(weights, axis=tuple(range(1, weights.ndim - 1)))
        pad = ((0, max(counts) - mean.shape[0]), (0, heads - mean.shape[1]))
        rows[site] = jnp.pad(mean, pad, constant_values=jnp.nan)
        if counts[site] > 1:
            entropy = jnp.mean(-jnp.sum(jax.scipy.special.xlogy(weights, weights), axis=0))
            scalars.append((entropy, entropy / jnp.log(float(counts[site])), jnp.mean(weights[-1])))

    model.visit_sites(tokens, record, positions=positions, segment_ids=segment_ids)
    alone = jnp.zeros(()), jnp.zeros(()), jnp.ones(())  # every site has one source
    means = [jnp.mean(jnp.stack(x)) for x in zip(*scalars, strict=True)] if scalars else alone
    return RoutingSummary(jnp.stack([rows[i] for i in range(len(counts))]), *means)
