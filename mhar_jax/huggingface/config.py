"""A Hugging Face `config.json` as a ModelConfig."""

import reprlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

from mhar_jax.config.load import complaint
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
    family = _one_of(hf, "model_type", FAMILIES)
    _one_of(hf, "hidden_act", ("silu",), "silu")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if _flag(hf, key):
            raise UserError(f"config.json: {key} must be False, got True")
    _check_layers(hf)
    heads = _whole(hf, "num_attention_heads")
    fields: dict[str, Any] = {
        "variant": "additive",
        "vocab_size": _whole(hf, "vocab_size"),
        "num_layers": _whole(hf, "num_hidden_layers"),
        "d_model": _whole(hf, "hidden_size"),
        "num_heads": heads,
        "num_kv_heads": _whole(hf, "num_key_value_heads", heads),
        "head_dim": None if hf.get("head_dim") is None else _whole(hf, "head_dim"),
        "ffn_dim": _whole(hf, "intermediate_size"),
        "context": _whole(hf, "max_position_embeddings"),
        "qk_norm": FAMILIES[family],
        "tie_embeddings": _flag(hf, "tie_word_embeddings"),
        "norm_eps": _number(hf, "rms_norm_eps"),
        "init_std": _number(hf, "initializer_range", 0.02),
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


def _check_layers(hf: Mapping[str, Any]) -> None:
    """Every layer attends to everything before it, and tensors are what they are."""
    kinds = _get(hf, "layer_types", [])
    if not isinstance(kinds, list):
        raise _wrong("layer_types", "a list", kinds)
    for kind in kinds:
        if kind != "full_attention":
            raise _wrong("layer_types", "'full_attention' for every layer", kind)
    if hf.get("quantization_config") is not None:
        raise _wrong("quantization_config", "left out (quantised tensors are not read)", hf["quantization_config"])


def _routing(hf: Mapping[str, Any]) -> dict[str, Any]:
    mode = _one_of(hf, "attnres_mode", MODES)
    fields: dict[str, Any] = {"variant": MODES[mode]}
    if mode in ("full", "block"):
        fields["routing_heads"] = 1
    else:
        fields["routing_heads"] = _whole(hf, "attnres_num_heads")
    if "block" in mode:
        fields["num_blocks"] = _whole(hf, "attnres_num_blocks")
    if MODES[mode] in DELTA_VARIANTS:
        gate = _one_of(hf, "attnres_gate_type", ("learnable_alpha", "none"), "none")
        fields |= {"gate": gate == "learnable_alpha", "null_source": _flag(hf, "attnres_use_null_source")}
    return fields


def _rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (4)."""
    for rope in (hf, _section(hf, "rope_parameters"), _section(hf, "rope_scaling")):
        if _number(rope, "partial_rotary_factor", 1.0) != 1:
            raise _wrong("partial_rotary_factor", "1", rope["partial_rotary_factor"])
    found = [_rotary_of(hf, where) for where in ("rope_parameters", "rope_scaling") if _section(hf, where)]
    if len(found) == 2 and found[0] != found[1]:  # stock code goes by rope_scaling
        raise _wrong("rope_parameters", "as rope_scaling where both are there", hf["rope_parameters"])
    return found[0] if found else _rotary_of(hf, "rope_scaling")


def _rotary_of(hf: Mapping[str, Any], where: str) -> dict[str, Any]:
    rope = _section(hf, where)
    if any(key.endswith("_attention") for key in rope):
        raise _wrong(where, "one description for all layers", rope)
    theta = _number(rope if rope.get("rope_theta") is not None else hf, "rope_theta", 10000.0)
    kind = _one_of(rope, "type" if rope.get("rope_type") is None else "rope_type", ("default", "llama3"), "default")
    if kind == "default":
        return {"rope_theta": theta}
    scaling: dict[str, Any] = {k: _number(rope, k) for k in ("factor", "low_freq_factor", "high_freq_factor")}
    original = "original_max_position_embeddings"  # stock code takes it from the top, where it is there
    scaling["original_context"] = _whole(hf if hf.get(original) is not None else rope, original)
    try:
        return {"rope_theta": theta, "rope_scaling": RopeScaling(**scaling)}
    except ValueError as error:
        raise UserError(f"config.json: {where} cannot be used: {first_complaint(error)}") from None


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
    if mode == "block_mh" and model.heads_of_depth == 1:  # theirs has no site before the final norm, and `block` has
        mode = "block"
    described: dict[str, Any] = {"attnres_mode": mode, "attnres_num_heads": model.heads_of_depth}
    if "block" in mode:
        described["attnres_num_blocks"] = model.num_blocks
    if model.variant in DELTA_VARIANTS:
        described["attnres_use_null_source"] = model.null_source
        described["attnres_gate_type"] = "learnable_alpha" if model.gate else "none"
    return described


# ---- Fields of config.json: the value, or the default where the key is missing or null.


def _get(hf: Mapping[str, Any], key: str, default: Any) -> Any:
    value = hf.get(key)
    value = default if value is None else value
    if value is None:
        raise UserError(f"config.json: the key {key} is missing")
    return value


def _one_of(hf: Mapping[str, Any], key: str, choices: Collection[str], default: str | None = None) -> str:
    value = _get(hf, key, default)
    if not isinstance(value, str) or value not in choices:
        first, *others = choices
        raise _wrong(key, f"one of {', '.join(choices)}" if others else repr(first), value)
    return value


def _flag(hf: Mapping[str, Any], key: str) -> bool:
    value = _get(hf, key, False)
    if not isinstance(value, bool):
        raise _wrong(key, "true or false", value)
    return value


def _whole(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _get(hf, key, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 < value < 2**31:
        raise _wrong(key, "a whole number from 1 to 2147483647", value)
    return value


def _number(hf: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _get(hf, key, default)
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise _wrong(key, "a finite number above 0", value)
    return value


def _section(hf: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = _get(hf, key, {})
    if not isinstance(value, dict):
        raise _wrong(key, "a JSON object", value)
    return value


def _wrong(key: str, right: str, got: Any) -> UserError:
    return UserError(f"config.json: {key} must be {right}, got {reprlib.repr(got)}")


def first_complaint(error: ValueError) -> str:
    """The first complaint of a pydantic error, in one line."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    return complaint(errors()[0])
