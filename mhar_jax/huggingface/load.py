"""A Hugging Face directory as a model of ours."""

import json
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhar_jax.config.schema import ModelConfig
from mhar_jax.errors import UserError
from mhar_jax.huggingface.config import model_config
from mhar_jax.huggingface.keys import Key, key_table
from mhar_jax.huggingface.tensors import TensorFiles
from mhar_jax.models import Decoder, build_model


class Tensors(Protocol):
    """Named tensors of a checkpoint, read one at a time."""

    @property
    def names(self) -> set[str]:
        """All tensor names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    def read(self, name: str) -> np.ndarray:
        """A tensor."""


def load_huggingface(path: str | Path, **model_overrides: Any) -> tuple[Decoder, ModelConfig]:
    """Reads `config.json` and the safetensors of a directory.

    Args:
      path: a directory of Llama, Qwen3 or a published routed model.
      **model_overrides: ModelConfig fields that replace what config.json says, for instance compute_dtype="float32".

    Returns:
      The model, in `param_dtype`, and its config.

    Raises:
      UserError: the directory cannot be read as such a model; unknown, missing and mis-shaped tensors are named.
    """
    directory = Path(path)
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise UserError(f"{directory} must be a Hugging Face directory with a config.json, and has none")
    try:
        described = json.loads(config_path.read_text())
    except ValueError as error:
        raise UserError(f"{config_path} is not JSON: {error}") from error
    config = model_config(described, **model_overrides)
    return read_model(TensorFiles(directory), config, directory), config


def read_model(files: Tensors, config: ModelConfig, where: Path) -> Decoder:
    """The model of `config` with the tensors of `files`, which have Hugging Face names and layout.

    Raises:
      UserError: unknown, missing and mis-shaped tensors are named; `where` says of what.
    """
    table = key_table(config)
    check_tensors(files, table, where)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0))))
    keys: dict[tuple, list[Key]] = {}
    for key in table:
        keys.setdefault(key.path, []).append(key)
    filled = []
    for parameter_path, variable in nnx.to_flat_state(abstract):
        value = np.empty(variable.shape, variable.dtype)
        for key in keys.pop(parameter_path):
            value[... if key.row is None else key.row] = key.ours(files.read(key.name))
        filled.append((parameter_path, variable.replace(jnp.asarray(value))))
    assert not keys, f"tensors without a parameter: {sorted(map(str, keys))}"
    return nnx.merge(graph, nnx.from_flat_state(filled))


def check_tensors(files: Tensors, table: list[Key], directory: Path) -> None:
    """Every tensor of the table is there, in its shape, and there is no other.

    Raises:
      UserError: naming the first few that are missing, unknown or mis-shaped.
    """
    expected = {key.name: key.shape for key in table}
    for problem, names in (
        ("misses tensors", sorted(expected.keys() - files.names)),
        ("has tensors this model has no place for", sorted(files.names - expected.keys())),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UserError(f"{directory} {problem}: {', '.join(names[:5])}{more}")
    for name, shape in expected.items():
        found = files.shape(name)
        if found != shape:
            raise UserError(
                f"{directory}: tensor {name} must have shape {list(shape)} by config.json, got {list(found)}"
            )
