"""A Hugging Face directory as a model of ours."""

from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mhar_jax.config.schema import ModelConfig
from mhar_jax.errors import UserError
from mhar_jax.huggingface import keys
from mhar_jax.huggingface.config import model_config
from mhar_jax.huggingface.json_files import read_object
from mhar_jax.huggingface.keys import Key, key_table
from mhar_jax.huggingface.tensors import TensorFiles
from mhar_jax.models import Decoder, build_model
from mhar_jax.sharding import state_shardings

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Tensors(Protocol):
    """Named tensors of a checkpoint, read one at a time."""

    @property
    def names(self) -> set[str]:
        """All tensor names."""

    def stored_name(self, name: str) -> str:
        """What the file calls a tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    def dtype(self, name: str) -> np.dtype:
        """The dtype that `read` gives."""

    def read(self, name: str) -> np.ndarray:
        """A tensor."""


class TensorParameters:
    """The parameters of a model, each made from the tensors of a checkpoint when it is asked for."""

    def __init__(self, files: Tensors, config: ModelConfig, where: Path):
        """Checks that the tensors of `files`, in Hugging Face names and layout, are those of `config`'s model.

        Raises:
          UserError: unknown, missing and mis-shaped tensors are named; `where` says of what.
        """
        if config.num_layers > len(files.names):  # before a table of them is made
            raise UserError(
                f"{where} says that there are {config.num_layers} layers, and has {len(files.names)} tensors"
            )
        table = key_table(config)
        if config.tie_embeddings and _HEAD in files.names:
            _check_tied_head(files, where)
            table.append(keys.head_key(config))
        check_tensors(files, table, where)
        table = [key for key in table if not (config.tie_embeddings and key.name == _HEAD)]
        self.config = config
        self._files = files
        self._keys: dict[keys.Path, list[Key]] = {}
        for key in table:
            self._keys.setdefault(key.path, []).append(key)

    @property
    def paths(self) -> list[keys.Path]:
        """Every parameter, as NNX paths go."""
        return list(self._keys)

    def tensor_names(self, path: keys.Path) -> list[str]:
        """The tensors that a parameter is made of, row by row where there are several."""
        return [key.name for key in sorted(self._keys[path], key=lambda key: key.row or 0)]

    def dtype(self, path: keys.Path) -> np.dtype:
        """The dtype that `read` gives: the tensors' own, float32 where they differ."""
        found = {self._files.dtype(key.name) for key in self._keys[path]}
        return found.pop() if len(found) == 1 else np.dtype(np.float32)

    def read(self, path: keys.Path) -> np.ndarray:
        """A parameter, or a view of its one tensor."""
        first, *rest = self._keys[path]
        if first.row is None:
            assert not rest, path
            return first.ours(self._files.read(first.name))
        rows = {key.row: key.ours(self._files.read(key.name)) for key in self._keys[path]}
        return np.stack([rows[i] for i in range(len(rows))]).astype(self.dtype(path), copy=False)


def open_huggingface(path: str | Path, **model_overrides: Any) -> TensorParameters:
    """The parameters of a directory with `config.json` and safetensors; arguments and errors as `load_huggingface`."""
    directory = Path(path)
    config = model_config(read_config(directory), **model_overrides)
    return TensorParameters(TensorFiles(directory), config, directory)


def load_huggingface(path: str | Path, mesh: Mesh | None = None, **model_overrides: Any) -> tuple[Decoder, ModelConfig]:
    """Reads `config.json` and the safetensors of a directory.

    Args:
      path: a directory of Llama, Qwen3 or a published routed model.
      mesh: lays the parameters out over its devices, one after the other; None: the first device holds everything.
      **model_overrides: ModelConfig fields that replace what config.json says, for instance compute_dtype="float32".

    Returns:
      The model, in `param_dtype`, and its config.

    Raises:
      UserError: the directory cannot be read as such a model; unknown, missing and mis-shaped tensors are named.
    """
    found = open_huggingface(path, **model_overrides)
    return read_model(found, mesh), found.config


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json.

    Raises:
      UserError: there is none, or it is no JSON object.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{directory} must be a Hugging Face directory with a config.json, and has none")
    return read_object(path)


def read_model(parameters: TensorParameters, mesh: Mesh | None = None) -> Decoder:
    """The model, read parameter by parameter; `mesh` as for `load_huggingface`."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: build_model(parameters.config, rngs=nnx.Rngs(0))))
    flat = nnx.to_flat_state(abstract)
    assert {path for path, _ in flat} == set(parameters.paths)
    filled = []
    for nnx_path, variable in flat:
        path: Any = nnx_path
        value = np.ascontiguousarray(parameters.read(path).astype(variable.dtype, copy=False))
        if mesh is None:
            placed = jnp.asarray(value)
        else:
            name = "/".join(map(str, path))
            placed = jax.device_put(value, state_shardings(mesh, {name: value})[name])
        filled.append((path, variable.replace(placed)))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _check_tied_head(files: Tensors, where: Path) -> None:
    """Some tied checkpoints hold the embedding a second time, under the head's name."""
    if _EMBEDDING not in files.names:
        return  # it is named among what is missing
    if files.shape(_EMBEDDING) == files.shape(_HEAD):
        a, b = files.read(_EMBEDDING), files.read(_HEAD)
        if a.dtype == b.dtype and np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}")):
            return
    raise UserError(f"{where}: tie_word_embeddings is true, and {_HEAD} is not equal to {_EMBEDDING}")


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
                f"{directory}: tensor {files.stored_name(name)} must have shape {list(shape)} by its config, "
                f"got {list(found)}"
            )
