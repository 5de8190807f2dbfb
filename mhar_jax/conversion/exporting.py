"""A checkpoint of ours as a Hugging Face directory: config.json, safetensors, tokenizer and a model card."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mhar_jax.config.schema import ModelConfig
from mhar_jax.conversion.aside import written_aside
from mhar_jax.conversion.card import model_card
from mhar_jax.conversion.importing import Progress
from mhar_jax.conversion.sources import Parameters, copy_tokenizer, open_source
from mhar_jax.conversion.special_tokens import GENERATION, read_ids
from mhar_jax.errors import UserError
from mhar_jax.huggingface.config import describe
from mhar_jax.huggingface.keys import Key, key_table
from mhar_jax.huggingface.safetensors import Planned, row_slices, write_file
from mhar_jax.huggingface.tensors import INDEX, SINGLE


class Exported(NamedTuple):
    """What was written."""

    model: ModelConfig
    files: list[str]  # of tensors
    rounded: float  # largest change of a finite value by the dtype; 0: every value is exactly the checkpoint's
    not_finite: list[str]  # tensors with infinities or NaN in the checkpoint
    overflowed: list[str]  # tensors with values that the dtype made infinite


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_gb: float = 5.0,
    progress: Progress = lambda _: None,
) -> Exported:
    """Writes a Hugging Face directory.

    An additive model has the layout of Llama (without q/k-norm) or Qwen3 (with it), which stock transformers load; a
    routed one has the published routed layout.

    Args:
      checkpoint: run directory (its averaged weights, where it keeps them), Hugging Face directory or GGUF file.
      out: directory to make; it is there whole or not at all.
      dtype: "float32", "bfloat16" or "float16"; None: each parameter's own.
      max_shard_gb: tensors beyond this size (10⁹ bytes) go into a next file.
      progress: told how many values each tensor had.

    Raises:
      UserError: the variant has no published layout, the checkpoint cannot be read, or `out` is there or cannot be
        written.
    """
    source = open_source(checkpoint)
    model = source.model
    if model.variant == "hyper_connections":
        raise UserError("hyper_connections models have no published layout, so they cannot be exported")
    if model.vocab_size is None:
        raise UserError(f"{checkpoint} does not say how large its vocabulary is")
    keys = key_table(model)
    plan = [Planned(k.name, _dtype(source.parameters, k, dtype), k.shape) for k in keys]
    shards = _shards(plan, max_shard_gb * 1e9)
    with written_aside(Path(out)) as aside:
        reader = _Reader(source.parameters, keys, plan, progress)
        names = [SINGLE] if len(shards) == 1 else _shard_names(len(shards))
        for name, shard in zip(names, shards, strict=True):
            write_file(aside / name, shard, reader.tensors(shard))
        if len(shards) > 1:
            _write_json(aside / INDEX, _index(names, shards))
        copy_tokenizer(source, aside)
        dtypes = {p.dtype.name for p in plan}
        described = describe(model, dtype=dtypes.pop() if len(dtypes) == 1 else "float32")
        _write_json(aside / "config.json", described | read_ids(aside / GENERATION))
        (aside / "README.md").write_text(model_card(source, Path(os.path.realpath(out)).name), encoding="utf-8")
    return Exported(model, names, reader.rounded, reader.not_finite, reader.overflowed)


def _dtype(parameters: Parameters, key: Key, dtype: str | None) -> np.dtype:
    return parameters.dtype(key.path) if dtype is None else np.dtype(jnp.dtype(dtype))


def _shards(plan: list[Planned], most: float) -> list[list[Planned]]:
    """Consecutive tensors, as many as fit; a tensor larger than `most` has a file of its own."""
    shards: list[list[Planned]] = [[]]
    size = 0.0
    for planned in plan:
        nbytes = math.prod(planned.shape) * planned.dtype.itemsize
        if shards[-1] and size + nbytes > most:
            shards.append([])
            size = 0.0
        shards[-1].append(planned)
        size += nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _index(names: list[str], shards: list[list[Planned]]) -> dict[str, Any]:
    files = {planned.name: name for name, shard in zip(names, shards, strict=True) for planned in shard}
    total = sum(math.prod(p.shape) * p.dtype.itemsize for shard in shards for p in shard)
    return {"metadata": {"total_size": total}, "weight_map": files}


class _Reader:
    """Tensors in their published layout; a stacked parameter is read once for all its rows."""

    def __init__(self, parameters: Parameters, keys: list[Key], plan: list[Planned], progress: Progress):
        self.rounded = 0.0
        self.not_finite: list[str] = []
        self.overflowed: list[str] = []
        self._parameters, self._progress = parameters, progress
        self._keys = {key.name: key for key in keys}
        self._stacked: dict[Any, np.ndarray] = {}

    def tensors(self, shard: list[Planned]) -> Iterator[np.ndarray]:
        """The tensors of one file, in order."""
        for planned in shard:
            key = self._keys[planned.name]
            if key.row is None:
                value = self._parameters.read(key.path)
            else:
                if key.path not in self._stacked:
                    self._stacked[key.path] = self._parameters.read(key.path)
                value = self._stacked[key.path][key.row]
            self._look(value, planned)
            self._progress(value.size)
            yield key.theirs(value)
            del value

    def _look(self, value: np.ndarray, planned: Planned) -> None:
        """Takes note of what is not finite, and of what rounding to the planned dtype changes, some rows at a time."""
        finite, overflows = True, False
        for part in row_slices(value.shape, value.dtype.itemsize):
            rows = value[part]
            given = np.isfinite(rows)
            finite = finite and bool(given.all())
            if value.dtype == planned.dtype:
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                wide, narrow = rows.astype(np.float32), rows.astype(planned.dtype).astype(np.float32)
                change = np.abs(wide - narrow)
            kept = given & np.isfinite(narrow)
            overflows = overflows or bool((given & ~kept).any())
            self.rounded = max(self.rounded, float(change.max(initial=0.0, where=kept)))
        if not finite:
            self.not_finite.append(planned.name)
        if overflows:
            self.overflowed.append(planned.name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
