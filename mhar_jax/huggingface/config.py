"""A Hugging Face `config.json` as a ModelConfig."""

from collections.abc import Mapping
from typing import Any

from mhar_jax.config.schema import DELTA_VARIANTS, ModelConfig, RopeScaling
from mhar_jax.errors import UserError

# model_type, and whether that family normalises each head's query and key. `_attnres`: the published routed layouts.
FAMILIES = {"llama": False, "llama_attnres": False, "qwen3": True, "qwen3_attnres": True}

# attnres_mode of the published code. Its `block` has one head, `block_mh` has several.
MODES = {
    "full": "attention_residuals",
    "full_mh": "mhar",
    "full_hw": "mhar_headwise",
    "block": "block_mhar",
    "block_mh": "block_mhar",
    "delta": "delta",
    "delta_block": "delta_block",
}


def model_config(hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    """The ModelConfig of a parsed config.json; `overrides` are ModelConfig fields that replace what it says.

    Raises:
      UserError: a family, mode or option that this package does not compute, or a missing key.
    """
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"config.json: model_type must be one of {', '.join(FAMILIES)}, got {family!r}")
    for key, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
    ):
        if hf.get(key, wanted) != wanted:
            raise UserError(f"config.json: {key} must be {wanted!r}, got {hf[key]!r}")
    fields: dict[str, Any] = {
        "variant": "additive",
        "vocab_size": _get(hf, "vocab_size"),
        "num_layers": _get(hf, "num_hidden_layers"),
        "d_model": _get(hf, "hidden_size"),
        "num_heads": _get(hf, "num_attention_heads"),
        "num_kv_heads": hf.get("num_key_value_heads") or _get(hf, "num_attention_heads"),
        "head_dim": hf.get("head_dim"),
        "ffn_dim": _get(hf, "intermediate_size"),
        "context": _get(hf, "max_position_embeddings"),
        "qk_norm": FAMILIES[family],
        "tie_embeddings": hf.get("tie_word_embeddings", False),
        "norm_eps": _get(hf, "rms_norm_eps"),
        "init_std": hf.get("initializer_range", 0.02),
        **_rotary(hf),
    }
    if "attnres_mode" in hf:
        fields |= _routing(hf)
    elif family.endswith("_attnres"):
        raise UserError(f"config.json: model_type {family} needs the key attnres_mode, got none")
    try:
        return ModelConfig(**(fields | overrides))
    except ValueError as error:
        raise UserError(f"config.json describes no model that can be built: {first_complaint(error)}") from error


def _routing(hf: Mapping[str, Any]) -> dict[str, Any]:
    mode = hf["attnres_mode"]
    if mode not in MODES:
        raise UserError(f"config.json: attnres_mode must be one of {', '.join(MODES)}, got {mode!r}")
    fields: dict[str, Any] = {"variant": MODES[mode]}
    if mode in ("full", "block"):
        fields["routing_heads"] = 1
    else:
        fields["routing_heads"] = _get(hf, "attnres_num_heads")
    if "block" in mode:
        fields["num_blocks"] = _get(hf, "attnres_num_blocks")
    if MODES[mode] in DELTA_VARIANTS:
        gate = hf.get("attnres_gate_type")
        if gate not in ("learnable_alpha", "none", None):
            raise UserError(f"config.json: attnres_gate_type must be 'learnable_alpha' or 'none', got {gate!r}")
        fields |= {"gate": gate == "learnable_alpha", "null_source": bool(hf.get("attnres_use_null_source", False))}
    return fields


def _rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (4)."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise UserError(f"config.json: rope_type must be 'default' or 'llama3', got {kind!r}")
    scaling = {key: _get(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    scaling["original_context"] = _get(rope, "original_max_position_embeddings")
    return {"rope_theta": theta, "rope_scaling": RopeScaling(**scaling)}


def describe(model: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json of a model, which `model_config` reads back: Llama without q/k-norm, Qwen3 with it.

    Args:
      model: of any variant but hyper_connections.
      dtype: of the tensors beside it.
    """
    family = "qwen3" if model.qk_norm else "llama"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    older: dict[str, Any] = {"rope_theta": model.rope_theta}  # transformers 4
    if model.rope_scaling is not None:
        scaling = model.rope_scaling
        stretch = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
        rope |= stretch
        older["rope_scaling"] = stretch
    described = {
        "architectures": [f"{family.capitalize()}{'AttnRes' if model.is_routed else ''}ForCausalLM"],
        "model_type": f"{family}{'_attnres' if model.is_routed else ''}",
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.attention_head_dim,
        "intermediate_size": model.ffn_dim,
        "max_position_embeddings": model.context,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "use_cache": True,
        "rope_parameters": rope,
        **older,
    }
    if model.qk_norm:
        described |= {"use_sliding_window": False, "sliding_window": None}
        del described["mlp_bias"]
    return described | _describe_routing(model)


def _describe_routing(model: ModelConfig) -> dict[str, Any]:
    if not model.is_routed:
        return {}
    mode = next(mode for mode, variant in reversed(MODES.items()) if variant == model.variant)
    described: dict[str, Any] = {"attnres_mode": mode, "attnres_num_heads": model.heads_of_depth}
    if "block" in mode:
        described["attnres_num_blocks"] = model.num_blocks
    if model.variant in DELTA_VARIANTS:
        described["attnres_use_null_source"] = model.null_source
        described["attnres_gate_type"] = "learnable_alpha" if model.gate else "none"
    return described


def _get(hf: Mapping[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise UserError(f"config.json: the key {key} is missing")
    return hf[key]


def first_complaint(error: ValueError) -> str:
    """The first complaint of a pydantic error, in one line."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    first = errors()[0]
    return ".".join([*map(str, first["loc"]), first["msg"]])
