"""Where the depth history is read: the sites of each variant, their parameters, and their names."""

from typing import Any, NamedTuple

import jax
import numpy as np

from mhar_jax.config.schema import DELTA_VARIANTS, ModelConfig
from mhar_jax.models.initialise import Initializer
from mhar_jax.models.sublayers import Arrays, Parameters

REPLACEMENT_VARIANTS = ("attention_residuals", "mhar", "mhar_headwise", "block_mhar")


def num_sublayers(config: ModelConfig) -> int:
    """Attention and MLP of every layer."""
    return 2 * config.num_layers


def num_sites(config: ModelConfig) -> int:
    """Routing sites: one before each sublayer, and one before the final norm in the replacement forms."""
    if not config.is_routed:
        return 0
    return num_sublayers(config) + (config.variant in REPLACEMENT_VARIANTS)


def layers_per_block(config: ModelConfig) -> int:
    """Layers of a depth block; the last block may be shorter."""
    return -(-config.num_layers // config.num_blocks)


def block_of(config: ModelConfig, sublayer: int) -> int:
    """The depth block that a sublayer belongs to."""
    return sublayer // (2 * layers_per_block(config))


def starts_block(config: ModelConfig, sublayer: int) -> bool:
    """Whether a sublayer is the first of its depth block."""
    return sublayer % (2 * layers_per_block(config)) == 0


def is_grouped_site(config: ModelConfig, site: int) -> bool:
    """Whether each KV group has its own full-width query here: the attention sites of mhar_headwise."""
    return config.variant == "mhar_headwise" and site % 2 == 0 and site < num_sublayers(config)


def heads_of_site(config: ModelConfig, site: int) -> int:
    """Depth softmaxes at one site: the KV groups at an attention site of mhar_headwise, H elsewhere."""
    return config.num_kv_heads if is_grouped_site(config, site) else config.heads_of_depth


def sublayer_labels(config: ModelConfig) -> list[str]:
    """ "L1 attn", "L1 mlp", "L2 attn", ...; layers counted from 1."""
    return [f"L{i // 2 + 1} {'mlp' if i % 2 else 'attn'}" for i in range(num_sublayers(config))]


def site_labels(config: ModelConfig) -> list[str]:
    """A site is named after the sublayer that reads from it; the last of the replacement forms is "final"."""
    return [*sublayer_labels(config), "final"][: num_sites(config)]


def source_labels(config: ModelConfig) -> list[list[str]]:
    """The sources of every site, in the order of its weights: "null", "embed", "L1 attn", "block 1", "block 2 so far".

    A block's label is its change of the stream in delta_block, and the sum of its outputs in block_mhar.
    """
    labels, outputs = [], sublayer_labels(config)
    null = ["null"] if config.variant in DELTA_VARIANTS and config.null_source else []
    for site in range(num_sites(config)):
        if config.variant not in ("block_mhar", "delta_block"):
            labels.append([*null, "embed", *outputs[:site]])
            continue
        final = site == num_sublayers(config)
        block = block_of(config, site - 1) + 1 if final else block_of(config, site)
        whole = [f"block {b + 1}" for b in range(block)]
        partial = config.variant == "block_mhar" and not final and not starts_block(config, site)
        labels.append([*null, "embed", *whole, *([f"block {block + 1} so far"] if partial else [])])
    return labels


class Site(NamedTuple):
    """The arrays of one site, float32; None where the variant has no such parameter."""

    query: jax.Array  # [D], or [KV, D] at an attention site of mhar_headwise
    norm_scale: jax.Array  # [D]
    null_source: jax.Array | None = None  # [D]
    gate: jax.Array | None = None  # scalar


class RoutingParameters(Parameters):
    """The routing parameters of all sites, stacked over sites.

    query [sites, D] zeros and norm_scale [sites, D] ones; null_source [sites, D] and gate [sites] zeros in the delta
    forms. mhar_headwise keeps the attention sites' queries apart, as attention_query [L, KV, D], and `query` then holds
    the MLP sites and the final one, [L + 1, D].
    """

    def __init__(self, config: ModelConfig, init: Initializer):
        sites, width = num_sites(config), config.d_model
        if config.variant == "mhar_headwise":
            self.attention_query = init.zeros(config.num_layers, config.num_kv_heads, width)
            self.query = init.zeros(config.num_layers + 1, width)
        else:
            self.query = init.zeros(sites, width)
        self.norm_scale = init.ones(sites, width)
        if config.variant in DELTA_VARIANTS:
            if config.null_source:
                self.null_source = init.zeros(sites, width)
            if config.gate:
                self.gate = init.zeros(sites)


class HyperParameters(Parameters):
    """Static hyper-connections (arXiv 2409.19606, section 2): how each sublayer meets the n streams.

    read [2L, n] is A_m, carry [2L, n, n] is A_r (row: from, column: to), write [2L, n] is B. They start as the paper's
    equivalent of a pre-norm residual: sublayer k reads stream k mod n, every stream is carried unchanged, and every
    stream gets the output.
    """

    def __init__(self, config: ModelConfig, init: Initializer):
        sublayers, streams = num_sublayers(config), config.hyper_streams
        identity = np.eye(streams, dtype=np.float32)
        self.read = init.constant(identity[np.arange(sublayers) % streams])
        self.carry = init.constant(np.broadcast_to(identity, (sublayers, streams, streams)))
        self.write = init.ones(sublayers, streams)


def depth_rows(config: ModelConfig, arrays: Arrays) -> list[Any]:
    """Splits the stacked depth parameters into one pytree a sublayer (and one for a final site, else None).

    `unstack` is one operation whose transpose is one stack: indexing would add up a full-size gradient a site.
    """
    rows = {name: list(jax.lax.unstack(value)) for name, value in arrays.items()}
    if config.variant == "additive":
        return [None] * (num_sublayers(config) + 1)
    if config.variant == "hyper_connections":
        return [*({k: v[i] for k, v in rows.items()} for i in range(num_sublayers(config))), None]
    if config.variant == "mhar_headwise":
        mixed = [rows.pop("attention_query"), rows["query"][:-1]]
        rows["query"] = [q for pair in zip(*mixed, strict=True) for q in pair] + [rows["query"][-1]]
    sites = [Site(**{k: v[i] for k, v in rows.items()}) for i in range(num_sites(config))]
    return sites if len(sites) == num_sublayers(config) + 1 else [*sites, None]
