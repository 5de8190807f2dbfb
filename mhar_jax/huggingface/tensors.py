"""The safetensors files of a directory: which tensors there are, and where."""

import os
from pathlib import Path

import numpy as np

from mhar_jax.errors import UserError
from mhar_jax.huggingface.json_files import read_object
from mhar_jax.huggingface.safetensors import Entry, read_header, read_tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorFiles:
    """The tensors of one directory, by name; each is read from disk when it is asked for."""

    def __init__(self, directory: Path):
        """Reads the header of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

        Raises:
          UserError: no such file, one too many, a shard that is missing or outside the directory, a tensor in two
            shards, an index that disagrees with its shards, or a header that does not describe its file.
        """
        self._entries: dict[str, tuple[str, Entry]] = {}
        self._directory = directory
        for file in _files(directory):
            for name, entry in read_header(directory / file).items():
                if name in self._entries:
                    first = self._entries[name][0]
                    raise UserError(f"tensor {name} is in two files, {first} and {file}, of {directory}")
                self._entries[name] = (file, entry)
        listed, found = _index(directory), {name: file for name, (file, _) in self._entries.items()}
        if listed is not None and listed != found:
            wrong = sorted(set(listed.items()) ^ set(found.items()))
            raise UserError(f"{directory / INDEX} does not agree with its shards, for instance about {wrong[0][0]}")

    @property
    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._entries)

    def stored_name(self, name: str) -> str:
        """What the file calls a tensor."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._entries[name][1].shape

    def dtype(self, name: str) -> np.dtype:
        """The dtype that `read` gives."""
        return self._entries[name][1].dtype

    def read(self, name: str) -> np.ndarray:
        """A tensor in its stored dtype (bfloat16 as ml_dtypes')."""
        file, entry = self._entries[name]
        return read_tensor(self._directory / file, entry)


def _index(directory: Path) -> dict[str, str] | None:
    path = directory / INDEX
    if not path.is_file():
        return None
    listed = read_object(path).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise UserError(f"{path} must be JSON with a weight_map from tensor to file name, and is not")
    for file in sorted(set(listed.values())):
        if Path(file).name != file or file == "..":
            raise UserError(f"{path} must name files of its own directory, got {file!r}")
        if not os.path.isfile(directory / file):  # False for names that no file can have
            raise UserError(f"{path} names the shard {file}, which is not there")
    return listed


def _files(directory: Path) -> list[str]:
    listed = _index(directory)
    if listed is None and not (directory / SINGLE).is_file():
        raise UserError(f"{directory} must hold {SINGLE} or {INDEX}, and holds neither")
    files = [SINGLE] if listed is None else sorted(set(listed.values()))
    # Left over from another save, most likely; which of the two is the model cannot be told.
    others = sorted({path.name for path in directory.glob("model*.safetensors")} - set(files))
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        said = f"beside {SINGLE}" if listed is None else f"which {INDEX} does not name"
        raise UserError(f"{directory} holds {others[0]}{more}, {said}: move away what is not of the model")
    return files
