"""The one table between Hugging Face tensor names and our parameters, read in both directions."""

from typing import NamedTuple

from mhar_jax.config.schema import DELTA_VARIANTS, ModelConfig
from mhar_jax.models.sites import num_sites, num_sublayers

Path = tuple[str | int, ...]


class Key(NamedTuple):
    """One tensor of a checkpoint and where it lives here.

    `ours` and `theirs` are inverse to each other and work on numpy and JAX arrays alike.
    """

    name: str  # Hugging Face tensor name
    path: Path  # our parameter, as NNX paths go: ("layers", 0, "mlp", "w_up")
    shape: tuple[int, ...]  # the tensor's shape there
    transpose: bool = False  # linear maps are [out, in] there and [in, out] here
    row: int | None = None  # the tensor is this row of our stacked parameter

    def ours(self, tensor):
        """Their tensor in our layout: the whole parameter, or its row."""
        if self.path[-1] == "query":
            return tensor.reshape(self.shape[1:])  # [1, D] there and [D] here
        return tensor.T if self.transpose else tensor

    def theirs(self, array):
        """Our parameter, or its row, in their layout."""
        return array.T if self.transpose else array.reshape(self.shape)


def key_table(config: ModelConfig) -> list[Key]:
    """Every tensor of the published layout of `config`'s model, in the order of the layers."""
    width, head = config.d_model, config.attention_head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    assert config.vocab_size is not None
    table = [Key("model.embed_tokens.weight", ("embedding",), (config.vocab_size, width))]

    def linear(name: str, path: Path, fan_in: int, fan_out: int) -> Key:
        return Key(f"{name}.weight", path, (fan_out, fan_in), transpose=True)

    for i in range(config.num_layers):
        hf, attention, mlp = f"model.layers.{i}", ("layers", i, "attention"), ("layers", i, "mlp")
        table += [
            Key(f"{hf}.input_layernorm.weight", (*attention, "norm"), (width,)),
            linear(f"{hf}.self_attn.q_proj", (*attention, "w_q"), width, queries),
            linear(f"{hf}.self_attn.k_proj", (*attention, "w_k"), width, keys),
            linear(f"{hf}.self_attn.v_proj", (*attention, "w_v"), width, keys),
            linear(f"{hf}.self_attn.o_proj", (*attention, "w_o"), queries, width),
        ]
        if config.qk_norm:
            table += [Key(f"{hf}.self_attn.{n}.weight", (*attention, n), (head,)) for n in ("q_norm", "k_norm")]
        table += [
            Key(f"{hf}.post_attention_layernorm.weight", (*mlp, "norm"), (width,)),
            linear(f"{hf}.mlp.gate_proj", (*mlp, "w_gate"), width, config.ffn_dim),
            linear(f"{hf}.mlp.up_proj", (*mlp, "w_up"), width, config.ffn_dim),
            linear(f"{hf}.mlp.down_proj", (*mlp, "w_down"), config.ffn_dim, width),
        ]
    table += [Key("model.norm.weight", ("final_norm",), (width,)), *_routing_keys(config)]
    if not config.tie_embeddings:
        table.append(head_key(config))
    return table


def head_key(config: ModelConfig) -> Key:
    """The output matrix, which tied models may hold a second time."""
    assert config.vocab_size is not None
    return Key("lm_head.weight", ("head",), (config.vocab_size, config.d_model), transpose=True)


def _routing_keys(config: ModelConfig) -> list[Key]:
    """Site by site: `attn_res_*` and `mlp_res_*` of each layer, then `final_res_*`."""
    table, width = [], config.d_model
    for site in range(num_sites(config)):
        layer, kind = divmod(site, 2)
        if site == num_sublayers(config):
            stem = "model.final"
        else:
            stem = f"model.layers.{layer}.{'mlp' if kind else 'attn'}"
        query = Key(f"{stem}_res_proj.weight", ("routing", "query"), (1, width), row=site)
        if config.variant == "mhar_headwise":  # its attention queries are a parameter of their own
            query = query._replace(row=layer)
            if not kind and site < num_sublayers(config):
                query = query._replace(path=("routing", "attention_query"), shape=(config.num_kv_heads, width))
        table += [query, Key(f"{stem}_res_norm.weight", ("routing", "norm_scale"), (width,), row=site)]
        if config.variant in DELTA_VARIANTS and config.null_source:
            table.append(Key(f"{stem}_null_source", ("routing", "null_source"), (width,), row=site))
        if config.variant in DELTA_VARIANTS and config.gate:
            table.append(Key(f"{stem}_res_alpha", ("routing", "gate"), (), row=site))
    return table
