"""Parameters and FLOPs of a model, in closed form from its config."""

import jax
from flax import nnx

from mhar_jax.config.schema import DELTA_VARIANTS, ModelConfig
from mhar_jax.errors import UserError
from mhar_jax.models.decoder import build_model
from mhar_jax.models.sites import is_grouped_site, num_sites, num_sublayers, source_labels


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the model as built, from shapes alone: nothing is allocated."""
    model = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def matrix_parameters_per_layer(config: ModelConfig) -> int:
    """Parameters of one layer's matrices: q, k, v, o and the three of the MLP."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.d_model * (heads * config.attention_head_dim + 3 * config.ffn_dim)


def additive_parameters(config: ModelConfig) -> int:
    """Parameters of the backbone, which every variant has.

    V·D embedding (twice when untied), D final norm, and in each layer its matrices, two norms of D and, with q/k-norm,
    two of head_dim.
    """
    vocab, width = _vocab(config), config.d_model
    norms = 2 * width + (2 * config.attention_head_dim if config.qk_norm else 0)
    layers = config.num_layers * (matrix_parameters_per_layer(config) + norms)
    return vocab * width * (1 if config.tie_embeddings else 2) + layers + width


def depth_parameters(config: ModelConfig) -> int:
    """Parameters a variant adds to the backbone.

    Routed: a query and a key-norm scale of D at each site ((2L + 1)·2D in the replacement forms, for any number of
    heads); mhar_headwise has KV queries at each of L attention sites; the delta forms have 2L sites, each with a null
    source of D and a gate when these are on. hyper_connections: n² + 2n for each of 2L sublayers.
    """
    width, sites = config.d_model, num_sites(config)
    if config.variant == "hyper_connections":
        return num_sublayers(config) * (config.hyper_streams**2 + 2 * config.hyper_streams)
    total = 2 * sites * width
    if config.variant == "mhar_headwise":
        total += config.num_layers * (config.num_kv_heads - 1) * width
    if config.variant in DELTA_VARIANTS:
        total += sites * ((width if config.null_source else 0) + (1 if config.gate else 0))
    return total


def expected_parameters(config: ModelConfig) -> int:
    """The closed form of `count_parameters`."""
    return additive_parameters(config) + depth_parameters(config)


def train_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Model FLOPs of one token's forward and backward pass; what is recomputed (remat) is not counted.

    6 · (matrix parameters, the head's V·D included and the embedding look-up not)
    + 6 · layers · heads · head_dim · seq_len, causal attention's two products: 12 · width · (seq_len / 2)
    + depth routing: for each pair of a site and one of its sources 3 · (4D forward): a dot product and a weighted sum
      of D; times KV groups at an attention site of mhar_headwise
    + hyper_connections: for each sublayer 3 · 2D · (n read + n² carry + n write).

    Norms, rotary positions, softmaxes and activations are left out, as is usual (PaLM, arXiv 2204.02311, appendix B).
    """
    width = config.d_model
    matrices = config.num_layers * matrix_parameters_per_layer(config) + _vocab(config) * width
    attention = config.num_layers * config.num_heads * config.attention_head_dim * seq_len
    depth = 0
    for site, sources in enumerate(source_labels(config)):
        full_width = config.num_kv_heads if is_grouped_site(config, site) else 1
        depth += 12 * width * len(sources) * full_width
    if config.variant == "hyper_connections":
        depth = num_sublayers(config) * 6 * width * (config.hyper_streams**2 + 2 * config.hyper_streams)
    return float(6 * (matrices + attention) + depth)


def _vocab(config: ModelConfig) -> int:
    if config.vocab_size is None:
        raise UserError("model.vocab_size must be set to count a model, got None; take it from the tokenizer")
    return config.vocab_size
