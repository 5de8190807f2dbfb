"""Any checkpoint as parameters that are read one at a time."""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorstore as ts
from flax import nnx

from mhar_jax.config.load import make_config
from mhar_jax.config.schema import Config, DataConfig, ModelConfig
from mhar_jax.conversion.special_tokens import GENERATION, complete, gguf_ids, read_ids
from mhar_jax.conversion.writer import parameter_store
from mhar_jax.errors import UserError, one_line, writing
from mhar_jax.huggingface.keys import Path as ParameterPath
from mhar_jax.huggingface.load import open_huggingface
from mhar_jax.models import build_model
from mhar_jax.training.checkpoints import list_steps, read_meta
from mhar_jax.training.checksums import part_checksum

# What belongs to a tokenizer or says how to use the model; copied byte for byte, never run.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)


class Parameters(Protocol):
    """The parameters of a model on disk."""

    config: ModelConfig

    @property
    def paths(self) -> list[ParameterPath]:
        """Every parameter, as NNX paths go."""

    def tensor_names(self, path: ParameterPath) -> list[str]:
        """What the file calls the tensors of a parameter."""

    def dtype(self, path: ParameterPath) -> np.dtype:
        """The dtype that `read` gives."""

    def read(self, path: ParameterPath) -> np.ndarray:
        """A parameter."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that is going to be converted."""

    path: Path
    kind: str  # "huggingface", "gguf" or "run"
    parameters: Parameters
    run: Config | None  # of a run directory
    step: int | None  # of a run directory

    @property
    def model(self) -> ModelConfig:
        """The model's config."""
        return self.parameters.config


def open_source(path: str | Path) -> Source:
    """A run directory, a Hugging Face directory or a GGUF file; nothing but headers is read.

    Raises:
      UserError: it is none of these, or what it holds does not fit together.
    """
    place = Path(path)
    try:
        place.stat()
    except (FileNotFoundError, ValueError):
        pass  # said below
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror or one_line(error)}") from None
    if place.is_file() and place.suffix == ".gguf":
        from mhar_jax.huggingface.gguf import open_gguf

        return Source(place, "gguf", open_gguf(place), None, None)
    if (place / "config.json").is_file():
        return Source(place, "huggingface", open_huggingface(place), None, None)
    if (place / "checkpoints").is_dir():
        run = RunParameters(place)
        return Source(place, "run", run, run.run, run.step)
    raise UserError(
        f"{place} must be a Hugging Face directory (config.json), a .gguf file or a run directory (checkpoints/), and "
        "is none of them"
    )


class RunParameters:
    """The parameters of a run's newest checkpoint: the averaged ones, where the run keeps them."""

    def __init__(self, run_dir: Path):
        """Raises UserError if there is no checkpoint whose meta can be read."""
        directory = run_dir / "checkpoints"
        steps = list_steps(directory)
        if not steps:
            raise UserError(f"{run_dir} holds no checkpoint (looked for {directory}/STEP)")
        self.step = steps[-1]
        checkpoint = directory / str(self.step)
        try:
            meta = read_meta(checkpoint)
        except (OSError, ValueError) as error:
            raise UserError(f"the checkpoint {checkpoint} is cut short or damaged: {one_line(error)}") from None
        self.run = make_config(meta["config"])
        self.config = self.run.model
        self._checksums: Mapping[str, int] = meta["checksums"]
        self._name = "ema" if self.run.optimizer.ema else "params"
        self._item = checkpoint / self._name
        abstract = nnx.state(nnx.eval_shape(lambda: build_model(self.config, rngs=nnx.Rngs(0))))
        self._leaves: dict[Any, Any] = dict(nnx.to_flat_state(abstract))

    @property
    def paths(self) -> list[ParameterPath]:
        """Every parameter, as NNX paths go."""
        return list(self._leaves)

    def tensor_names(self, path: ParameterPath) -> list[str]:
        """The parameter's own name."""
        return ["/".join(map(str, path))]

    def dtype(self, path: ParameterPath) -> np.dtype:
        """The model's; averaged weights are float32."""
        return np.dtype(np.float32) if self._name == "ema" else np.dtype(self._leaves[path].dtype)

    def read(self, path: ParameterPath) -> np.ndarray:
        """A parameter that matches its checksum.

        Raises:
          UserError: it does not, or cannot be read.
        """
        names = list(map(str, path))
        try:
            store = ts.open(parameter_store(self._item, ".".join(names)), open=True, read=True).result()
            value = store.read().result()
        except ValueError as error:  # what TensorStore raises
            raise UserError(f"{self._item}: {'/'.join(names)} cannot be read: {one_line(error)}") from None
        wanted = self._checksums.get("/".join((self._name, *names)))
        if value.shape != self._leaves[path].shape or part_checksum(value) != wanted:
            raise UserError(f"{self._item} is damaged: {'/'.join(names)} differs from its checksum")
        return value


def copy_tokenizer(source: Source, target: Path) -> DataConfig:
    """Brings the tokenizer along, and gives the config section that names its end-of-text token.

    A run without tokenizer files in its directory gives those of `data.tokenizer`; a GGUF file gives a tokenizer.json.
    Ids of special tokens that only config.json or the GGUF file names go into generation_config.json.

    Raises:
      UserError: a file cannot be copied, or special tokens of a GGUF file that its tokenizer does not have.
    """
    data = DataConfig() if source.run is None else source.run.data
    if source.kind == "gguf":
        return _write_gguf_tokenizer(source.path, target, data)
    places = [source.path]
    if data.tokenizer != "bytes":
        # One that is gone gives nothing: the directory of a bare name would be the working directory.
        if os.path.isdir(data.tokenizer):
            places.append(Path(data.tokenizer))
        elif os.path.isfile(data.tokenizer):
            places.append(Path(data.tokenizer).parent)
    found = {place: [n for n in TOKENIZER_FILES if (place / n).is_file()] for place in places}
    # The first place with a tokenizer; a place with nothing but generation settings is the last resort.
    places.sort(key=lambda place: (not found[place], found[place] == [GENERATION]))
    with writing("the tokenizer", target):
        for name in found[places[0]]:
            shutil.copyfile(places[0] / name, target / name)
        if source.kind == "huggingface":
            complete(target, read_ids(source.path / "config.json"))
    return data


def _write_gguf_tokenizer(path: Path, target: Path, data: DataConfig) -> DataConfig:
    from mhar_jax.huggingface.gguf import GGUFFile
    from mhar_jax.huggingface.gguf_tokenizer import gguf_tokenizer

    file = GGUFFile(path)
    ids = gguf_ids(file, file.shape("model.embed_tokens.weight")[0])
    with writing("the tokenizer", target):
        complete(target, ids)
    try:
        tokenizer = gguf_tokenizer(path)
    except UserError:  # of a kind that is not known here: the model is still good
        return data
    named = {name.removesuffix("_id"): tokenizer.implementation.id_to_token(i) for name, i in ids.items()}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **{k: v for k, v in named.items() if v is not None}}
    if template := file.text("tokenizer.chat_template"):
        described["chat_template"] = template
    with writing("the tokenizer", target):
        tokenizer.implementation.save(str(target / "tokenizer.json"))
        (target / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return dataclasses.replace(data, eos_token=tokenizer.eos_token)
