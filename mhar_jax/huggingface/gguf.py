"""A GGUF file (llama.cpp) of Llama architecture as a model of ours, through the `gguf` package."""

import math
import reprlib
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jax.sharding import Mesh

from mhar_jax.config.schema import ModelConfig
from mhar_jax.errors import UserError, one_line
from mhar_jax.huggingface.config import first_complaint
from mhar_jax.huggingface.gguf_header import check_header
from mhar_jax.huggingface.load import TensorParameters, read_model
from mhar_jax.models import Decoder

# Our Hugging Face names of a layer's tensors, and llama.cpp's.
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_Item = TypeVar("_Item")
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class GGUFFile:
    """The fields and tensors of one file; tensors have Hugging Face names and layout, float32."""

    def __init__(self, path: str | Path):
        """Raises UserError if the file cannot be read as GGUF."""
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise UserError("reading a GGUF file needs the gguf package: extra `hf`") from error
        self.path = Path(path)
        try:
            check_header(self.path)
            reader = GGUFReader(self.path)
        except Exception as error:  # the package raises many types
            raise UserError(f"{path} cannot be read as GGUF: {one_line(error)}") from None
        self.fields = reader.fields
        self._tensors = {t.name: t for t in reader.tensors}
        if len(self._tensors) < len(reader.tensors):
            raise UserError(f"{path} holds two tensors of one name")
        self._theirs = {name: self._hugging_face_name(name) for name in self._tensors}
        self._ours: dict[str, str] = {}
        for theirs, ours in self._theirs.items():
            other = self._ours.setdefault(ours, theirs)
            if other != theirs:
                raise UserError(f"{path}: the tensors {other} and {theirs} are both {ours}")

    def field(self, name: str, default: Any = None) -> Any:
        """A field's value, or the default; UserError where it is missing and there is no default."""
        if name in self.fields:
            try:
                return self.fields[name].contents()
            except Exception as error:  # the package raises many types
                raise UserError(f"{self.path}: the field {name} cannot be read: {one_line(error)}") from None
        if default is None:
            raise UserError(f"{self.path}: the field {name} is missing")
        return default

    def whole(self, name: str, default: int | None = None) -> int:
        """A field that must be a whole number above 0; UserError as for `field`, and where it is something else."""
        value = self.field(name, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self._wrong(name, "a whole number from 1 to 2147483647", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A field that must be a finite number above 0; UserError as for `whole`."""
        value = self.field(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(name, "a finite number above 0", value)
        return value

    def listed(self, name: str, kind: type[_Item]) -> list[_Item]:
        """A field that must be a list of `kind`; UserError as for `whole`."""
        value = self.field(name)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self._wrong(name, f"a list of {kind.__name__}", value)
        return value

    def text(self, name: str) -> str | None:
        """A field that must be text; None where it is missing."""
        if name not in self.fields:
            return None
        value = self.field(name)
        if not isinstance(value, str):
            raise self._wrong(name, "text", value)
        return value

    def token_id(self, name: str, tokens: int) -> int | None:
        """A field that must be the id of one of so many tokens; None where it is missing."""
        if name not in self.fields:
            return None
        value = self.field(name)
        if type(value) is not int or not 0 <= value < tokens:
            raise self._wrong(name, f"the id of one of {tokens} tokens", value)
        return value

    def _wrong(self, name: str, right: str, got: Any) -> UserError:
        return UserError(f"{self.path}: the field {name} must be {right}, got {reprlib.repr(got)}")

    @property
    def heads(self) -> int:
        """Attention query heads."""
        return self.whole("llama.attention.head_count")

    @property
    def kv_heads(self) -> int:
        """Attention key/value heads; as many as query heads where the file does not say."""
        return self.whole("llama.attention.head_count_kv", self.heads)

    @property
    def names(self) -> set[str]:
        """All tensor names, as Hugging Face has them; a tensor without such a name keeps its own."""
        return set(self._ours)

    def stored_name(self, name: str) -> str:
        """What the file calls a tensor."""
        return self._ours[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(int(n) for n in reversed(self._tensors[self._ours[name]].shape))

    def dtype(self, name: str) -> np.dtype:
        """float32, whatever the file stores."""
        return np.dtype(np.float32)

    def read(self, name: str) -> np.ndarray:
        """A tensor, dequantised to float32."""
        from gguf.quants import dequantize

        tensor = self._tensors[self._ours[name]]
        try:
            value = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(self.shape(name))
        except (NotImplementedError, ValueError) as error:
            raise UserError(f"{self.path}: tensor {tensor.name} cannot be read: {one_line(error)}") from None
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = rotary_halves(value, self.heads if "q_proj" in name else self.kv_heads)
        return value

    def _hugging_face_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        for ours, theirs in _WHOLE.items():
            if stem == theirs:
                return f"{ours}.{kind}"
        block, _, part = stem.removeprefix("blk.").partition(".")
        for ours, theirs in _LAYER.items():
            if part == theirs and block.isdigit():
                return f"model.layers.{block}.{ours}.{kind}"
        return name


def rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of a q or k matrix [heads · head_dim, D].

    There the two members of a rotated pair are neighbours, (2i, 2i + 1); here and in Hugging Face they are
    (i, i + head_dim / 2).
    """
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(weight.shape)


def load_gguf(path: str | Path, mesh: Mesh | None = None, **model_overrides: Any) -> tuple[Decoder, ModelConfig]:
    """The model of a GGUF file, dequantised, and its config; `mesh` and `model_overrides` as in
    `load_huggingface`.

    Raises:
      UserError: not GGUF, not Llama architecture, or tensors that do not fit.
    """
    found = open_gguf(path, **model_overrides)
    return read_model(found, mesh), found.config


def open_gguf(path: str | Path, **model_overrides: Any) -> TensorParameters:
    """The parameters of a GGUF file, dequantised when they are asked for; arguments and errors as `load_gguf`."""
    file = GGUFFile(path)
    return TensorParameters(file, gguf_config(file, **model_overrides), file.path)


def gguf_config(file: GGUFFile, **model_overrides: Any) -> ModelConfig:
    """The ModelConfig that a file describes.

    Raises:
      UserError: another architecture, experts, scaled or partial rotary positions, or a missing field.
    """
    architecture = file.field("general.architecture")
    if architecture != "llama":
        raise UserError(f"{file.path}: the architecture must be 'llama', got {architecture!r}")
    if file.field("llama.expert_count", 0) != 0:
        raise UserError(f"{file.path}: experts are not read, and the file has {file.whole('llama.expert_count')}")
    _check_rotary_scaling(file)
    if "model.embed_tokens.weight" not in file.names:
        raise UserError(f"{file.path} must hold token_embd.weight, and does not")
    heads, width = file.heads, file.whole("llama.embedding_length")
    if heads > width:
        raise UserError(
            f"{file.path}: the field llama.attention.head_count must be at most llama.embedding_length = {width}, "
            f"got {heads}"
        )
    head = file.whole("llama.attention.key_length", width // heads)
    for name in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if file.whole(name, head) != head:
            raise UserError(f"{file.path}: the field {name} must be {head}, as a head is wide, got {file.whole(name)}")
    fields: dict[str, Any] = {
        "variant": "additive",
        "vocab_size": file.shape("model.embed_tokens.weight")[0],
        "num_layers": file.whole("llama.block_count"),
        "d_model": width,
        "num_heads": heads,
        "num_kv_heads": file.kv_heads,
        "head_dim": head,
        "ffn_dim": file.whole("llama.feed_forward_length"),
        "context": file.whole("llama.context_length"),
        "qk_norm": False,
        "tie_embeddings": "lm_head.weight" not in file.names,
        "norm_eps": round(file.number("llama.attention.layer_norm_rms_epsilon"), 12),  # stored as float32
        "rope_theta": file.number("llama.rope.freq_base", 10000.0),
    }
    try:
        return ModelConfig(**(fields | model_overrides))
    except ValueError as error:
        raise UserError(f"{file.path} describes no model that can be built: {first_complaint(error)}") from None


def _check_rotary_scaling(file: GGUFFile) -> None:
    """There is none: no type, no factor but 1, no table of frequencies."""
    found = [name for name in file.names if name.startswith("rope_")]
    if file.field("llama.rope.scaling.type", "none") != "none":
        found.append("llama.rope.scaling.type")
    for name in ("llama.rope.scaling.factor", "llama.rope.scale_linear", "llama.rope.scaling.attn_factor"):
        if file.field(name, 1) != 1:
            found.append(name)
    if found:
        raise UserError(
            f"{file.path}: scaled rotary positions ({', '.join(sorted(found)[:5])}) are not read from GGUF; use the "
            "Hugging Face directory"
        )
