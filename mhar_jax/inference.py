"""What generation and scoring share: a model laid out over devices, its tokenizer, and shapes that repeat."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mhar_jax.config.load import make_config, read_file
from mhar_jax.config.schema import Config, DataConfig, MeshConfig, ModelConfig
from mhar_jax.data.tokenizers import Tokenizer, load_tokenizer
from mhar_jax.errors import UserError
from mhar_jax.models import Decoder
from mhar_jax.sharding import PARAMETER_RULES, make_mesh, state_shardings
from mhar_jax.training.step import model_functions


class PlacedModel:
    """Parameters sharded as in training, and jitted functions over them that know how often they were traced."""

    def __init__(self, params: Any, config: ModelConfig, mesh: Mesh | None = None):
        """Lays the parameters out.

        Args:
          params: nested dict of arrays, as a checkpoint holds them.
          config: of the model; remat is switched off.
          mesh: None: all devices along `data`.
        """
        self.config = dataclasses.replace(config, remat="none")
        self.mesh = make_mesh(MeshConfig()) if mesh is None else mesh
        self.batch_ways = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        self.merge = model_functions(Config(model=self.config, seq_len=1)).merge
        self.params = jax.device_put(_rounded(params, self.config), state_shardings(self.mesh, params))
        self.traces: dict[str, int] = {}

    @classmethod
    def of(cls, model: Decoder, mesh: Mesh | None = None) -> "PlacedModel":
        """The same from a model."""
        return cls(nnx.to_pure_dict(nnx.state(model)), model.config, mesh)

    def jit(self, name: str, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`function(model, ...)` jitted, called without the model. `traces[name]` counts its compilations."""
        self.traces[name] = 0

        def traced(params: Any, *args: Any, **kwargs: Any) -> Any:
            self.traces[name] += 1
            return function(self.merge(params), *args, **kwargs)

        jitted = jax.jit(traced, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return jitted(self.params, *args, **kwargs)

        return call

    def rows(self, count: int) -> int:
        """A batch for `count` rows: a power of two that the devices divide evenly."""
        return -(-bucket(count, 1 << 30, smallest=1, halves=False) // self.batch_ways) * self.batch_ways


def _rounded(params: Any, config: ModelConfig) -> Any:
    """Matrices in the compute dtype, which is how the model reads them: rounded once instead of at every token."""

    def leaf(path: Any, value: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        matrix = any(re.search(pattern, name) for pattern, _ in PARAMETER_RULES)
        return value.astype(config.compute_dtype) if matrix else value

    return jax.tree_util.tree_map_with_path(leaf, params)


def bucket(length: int, most: int, *, smallest: int = 16, halves: bool = True) -> int:
    """The next of 16, 24, 32, 48, 64, 96, ... (`halves`; else powers of two), at most `most`.

    Padding to these lengths, one compiled program serves many: twice the logarithm of the longest are compiled at most.
    """
    power = smallest
    while power < length:
        if halves and power // 2 * 3 >= length and power > 1:
            return min(power // 2 * 3, most)
        power *= 2
    return min(power, most)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk, ready for use."""

    path: str
    model: Decoder
    config: Config  # of the run; for a pretrained model, its model section and defaults
    tokenizer: Tokenizer
    mesh: Mesh

    def placed(self) -> PlacedModel:
        """The model over the mesh's devices."""
        return PlacedModel.of(self.model, self.mesh)


def open_checkpoint(
    path: str | pathlib.Path,
    *,
    mesh: Mesh | None = None,
    tokenizer: str | None = None,
    compute_dtype: Any = None,
    variant: str | None = None,
) -> Checkpoint:
    """A run directory, a Hugging Face directory or a GGUF file, with its tokenizer.

    Args:
      path: of the checkpoint.
      mesh: the devices it will run on; None: all, along `data`.
      tokenizer: "bytes" or a path; None: the run's, the directory's tokenizer.json, or the one inside the file.
      compute_dtype: name of a dtype that replaces the model's.
      variant: the variant that the checkpoint must be of; None: any.

    Raises:
      UserError: no such checkpoint, no tokenizer, a tokenizer larger than the model's vocabulary, another variant.
    """
    from mhar_jax.loading import load_model

    place = pathlib.Path(path)
    mesh = make_mesh(MeshConfig()) if mesh is None else mesh
    model, config = load_model(place, mesh)
    found = config.model.variant
    if variant is not None and variant != found:
        raise UserError(f"{place} holds a model of variant {found}, and {variant} was asked for")
    if (place / "config.yaml").is_file() and (place / "checkpoints").is_dir():
        written = make_config(read_file(place / "config.yaml")).model.variant
        if written != found:
            raise UserError(f"{place} holds a checkpoint of variant {found}, and its config.yaml says {written}")
    if compute_dtype is not None:
        model_config = dataclasses.replace(config.model, compute_dtype=compute_dtype)
        config = dataclasses.replace(config, model=model_config)
        model.config = model_config
    opened = _tokenizer(place, config.data, tokenizer)
    rows = config.model.vocab_size
    if rows is not None and opened.vocab_size > rows:
        raise UserError(
            f"the tokenizer {opened.spec} has {opened.vocab_size} tokens, and the model of {place} has a vocabulary of "
            f"{rows}; give the one that it was trained with"
        )
    return Checkpoint(str(place), model, config, opened, mesh)


def _tokenizer(place: pathlib.Path, data: DataConfig, spec: str | None) -> Tokenizer:
    if spec is not None:
        return load_tokenizer(spec)
    if place.is_file():
        from mhar_jax.huggingface.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(place)
    if (place / "tokenizer.json").is_file():  # a Hugging Face directory, or one that was made from it
        return load_tokenizer(str(place), data.eos_token)
    if (place / "checkpoints").is_dir():
        return load_tokenizer(data.tokenizer, data.eos_token)
    raise UserError(f"{place} has no tokenizer.json; name a tokenizer with --tokenizer")


def check_tokens(tokens: Sequence[int] | np.ndarray, config: ModelConfig, *, room: int = 1) -> np.ndarray:
    """int32 ids of a prompt that the model can read, with room for `room` more tokens in its context.

    Raises:
      UserError: no tokens, one outside the vocabulary, or too many.
    """
    assert config.vocab_size is not None
    try:
        ids = np.asarray(tokens, np.int64)
    except OverflowError:
        raise UserError(
            f"a token of the prompt is beyond 64 bits; the model's vocabulary has {config.vocab_size} tokens"
        ) from None
    if not ids.size:
        raise UserError("the prompt is empty; give at least one character of text")
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if outside.size:
        raise UserError(
            f"token {outside[0]} of the prompt is outside the model's vocabulary of {config.vocab_size} tokens "
            f"(0 to {config.vocab_size - 1})"
        )
    if ids.size + room > config.context:
        raise UserError(
            f"the prompt has {ids.size} tokens, and the model's context of {config.context} leaves room for "
            f"{config.context - room}; shorten it"
        )
    return ids.astype(np.int32)
