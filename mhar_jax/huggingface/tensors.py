"""The safetensors files of a directory: which tensors there are, and where."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from mhar_jax.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorFiles:
    """The tensors of one directory, by name; each is read from disk when it is asked for."""

    def __init__(self, directory: Path):
        """Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.

        Raises:
          UserError: no such file, a shard that is missing or outside the directory, a tensor in two shards, an index
            that disagrees with its shards, or an unreadable file.
        """
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise UserError("reading Hugging Face directories needs the safetensors package: extra `hf`") from error
        self._files: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        for file in _files(directory):
            try:
                self._files[file] = safe_open(directory / file, framework="numpy")
            except Exception as error:  # safetensors raises its own, undocumented errors
                raise UserError(f"{directory / file} is not a readable safetensors file: {error}") from error
            for name in list(self._files[file].keys()):
                if name in self._names:
                    raise UserError(f"tensor {name} is in two files, {self._names[name]} and {file}, of {directory}")
                self._names[name] = file
        listed = _index(directory)
        if listed is not None and listed != self._names:
            wrong = sorted(set(listed.items()) ^ set(self._names.items()))
            raise UserError(f"{directory / INDEX} does not agree with its shards, for instance about {wrong[0][0]}")

    @property
    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._files[self._names[name]].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """A tensor in its stored dtype (bfloat16 as ml_dtypes')."""
        return self._files[self._names[name]].get_tensor(name)


def _index(directory: Path) -> dict[str, str] | None:
    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        listed = json.loads(path.read_text())["weight_map"]
        files = set(listed.values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path} must be JSON with a weight_map from tensor to file name, and is not") from error
    for file in sorted(map(str, files)):
        if Path(file).name != file:
            raise UserError(f"{path} must name files of its own directory, got {file!r}")
        if not (directory / file).is_file():
            raise UserError(f"{path} names the shard {file}, which is not there")
    return listed


def _files(directory: Path) -> list[str]:
    listed = _index(directory)
    if listed is not None:
        return sorted(set(listed.values()))
    if not (directory / SINGLE).is_file():
        raise UserError(f"{directory} must hold {SINGLE} or {INDEX}, and holds neither")
    return [SINGLE]
