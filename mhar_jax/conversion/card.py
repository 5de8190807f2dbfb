"""The README.md of an exported model."""

from mhar_jax.config.schema import ModelConfig
from mhar_jax.conversion.sources import Source
from mhar_jax.models.counting import count_parameters

_WHAT = {
    "additive": "an ordinary pre-norm Transformer",
    "attention_residuals": "Attention Residuals: one softmax over depth before every sublayer",
    "mhar": "Multi-Head Attention Residuals: a softmax over depth for each slice of the width, before every sublayer",
    "mhar_headwise": "Multi-Head Attention Residuals with one depth query for each KV group at attention sublayers",
    "block_mhar": "Multi-Head Attention Residuals over sums of blocks of layers",
    "delta": "a gated mix of the depth history added to what each sublayer reads; the residual stream is intact",
    "delta_block": "a gated mix of block deltas added to what each sublayer reads; the residual stream is intact",
}


def model_card(source: Source, name: str) -> str:
    """Markdown: what the model is, how to load it, and what other code may do with it."""
    model, run = source.model, source.run
    shape = "Qwen3" if model.qk_norm else "Llama"
    lines = [
        "---",
        f"library_name: {'transformers' if model.variant == 'additive' else 'mhar-jax'}",
        "pipeline_tag: text-generation",
        f"tags: [{'mhar-jax' if model.variant == 'additive' else 'mhar-jax, depth-routing, ' + model.variant}]",
        "---",
        f"# {name}",
        "",
        f"{count_parameters(model):,} parameters of {shape} shape: {model.num_layers} layers of width {model.d_model}, "
        f"{model.num_heads} query and {model.num_kv_heads} key/value heads of {model.attention_head_dim}, vocabulary "
        f"{model.vocab_size}, context {model.context}.",
        "",
        f"Depth: `{model.variant}`, {_WHAT[model.variant]}",
    ]
    if model.is_routed:
        facts = [f"{model.heads_of_depth} routing heads"]
        if "block" in model.variant:
            facts.append(f"{model.num_blocks} blocks")
        if model.variant.startswith("delta"):
            facts.append(f"{'with' if model.null_source else 'without'} a null source")
            facts.append(f"{'with a scalar' if model.gate else 'without a'} gate at each site")
        lines[-1] += f" ({', '.join(facts)}; arXiv 2607.27230)"
    lines[-1] += "."
    if run is not None and source.step:
        averaged = f" The weights are averages (decay {run.optimizer.ema})." if run.optimizer.ema else ""
        lines += [
            "",
            f"After {source.step:,} of {run.steps:,} steps of {run.batch_size * run.seq_len:,} tokens.{averaged}",
        ]
    lines += ["", "## Use", "", "    from mhar_jax import load_model", f'    model, config = load_model("{name}")', ""]
    if model.variant == "additive":
        lines.append(f"The keys and `config.json` are those of {shape}, so `transformers` loads it as well.")
    else:
        lines += [
            "The keys are those of the published PyTorch code of the method; stock `transformers` has no such model.",
            *_differences(model),
        ]
    return "\n".join(lines) + "\n"


def _differences(model: ModelConfig) -> list[str]:
    """What the published code computes otherwise."""
    if model.variant == "delta_block":
        return [
            "",
            "The published code appends `stream - previous delta` as a block's source where the definition says "
            "`stream - stream at the last boundary`: from the third source on its results differ from this model's.",
        ]
    if model.variant == "block_mhar" and model.heads_of_depth > 1:
        return [
            "",
            "The published code has no routing site before the final norm in this mode, and this model has one.",
        ]
    return []
