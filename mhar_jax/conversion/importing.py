"""A pretrained checkpoint as a run directory of ours."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from mhar_jax.config.schema import Config, ModelConfig
from mhar_jax.conversion.aside import written_aside
from mhar_jax.conversion.finite import look
from mhar_jax.conversion.sources import Source, copy_tokenizer, open_source
from mhar_jax.conversion.writer import CheckpointWriter
from mhar_jax.huggingface.json_files import read_object

RECORD = "conversion.json"  # beside a converted checkpoint: where it came from
Progress = Callable[[int], Any]  # called with the number of values written


class Converted(NamedTuple):
    """What was written."""

    config: Config
    parameters: int
    not_finite: list[str]  # tensors that hold infinities or NaN
    overflowed: list[str]  # tensors with finite values that `param_dtype` made infinite


def import_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    param_dtype: Literal["float32", "bfloat16"] = "float32",
    fsdp: int = 1,
    tensor: int = 1,
    progress: Progress = lambda _: None,
) -> Converted:
    """Writes the model of a Hugging Face directory or GGUF file as a run directory, tensor by tensor.

    Memory: the largest tensor as it is stored, and a few times 64 MiB. More for a GGUF file, which dequantises a whole
    tensor to float32 at a time, and for a tied model that holds its embedding twice, which compares the two whole.

    Args:
      source: the directory or file.
      out: run directory to make; it is there whole or not at all.
      param_dtype: dtype of the written parameters. float32 keeps every value of a float32, bfloat16 or float16 tensor.
      fsdp, tensor: axes of the mesh that will read it, see `CheckpointWriter`.
      progress: told how many values each tensor had.

    Raises:
      UserError: the source cannot be read as a model of ours, or `out` is there or cannot be written.
    """
    opened = open_source(source)
    before = read_record(opened)
    dtype = np.dtype(jnp.dtype(param_dtype))
    with written_aside(Path(out)) as aside:
        writer = CheckpointWriter(aside, fsdp=fsdp, tensor=tensor)
        total = 0
        not_finite: list[str] = []
        overflowed: list[str] = []
        for path in opened.parameters.paths:
            value = opened.parameters.read(path)
            if not writer.write(path, value, dtype):
                look(opened.parameters.tensor_names(path), value, dtype, not_finite, overflowed)
            total += value.size
            progress(value.size)
            del value  # before the next one is read
        config = converted_config(opened, replace_dtype(opened.model, param_dtype), aside, Path(out))
        writer.finish(config)
        record(aside, "import", opened, before, {"stored": stored_dtypes(opened)})
    return Converted(config, total, not_finite, overflowed)


def replace_dtype(model: ModelConfig, param_dtype: Any) -> ModelConfig:
    """The model with parameters of another dtype."""
    return dataclasses.replace(model, param_dtype=param_dtype)


def converted_config(source: Source, model: ModelConfig, aside: Path, out: Path) -> Config:
    """The run config of a converted checkpoint; copies the tokenizer on the way, whose end-of-text token it names."""
    data = copy_tokenizer(source, aside)
    return Config(run_dir=str(out), model=model, data=data, seq_len=min(model.context, 2048), batch_size=8)


def read_record(source: Source) -> dict[str, Any] | None:
    """Where a run directory came from, if it was converted itself.

    Raises:
      UserError: its record is damaged.
    """
    path = source.path / RECORD
    return read_object(path) if source.kind == "run" and path.is_file() else None


def record(directory: Path, kind: str, source: Source, before: dict[str, Any] | None, more: dict[str, Any]) -> None:
    """Writes where a checkpoint came from; `before`, the record of its source, becomes part of it."""
    facts: dict[str, Any] = {
        "kind": kind,
        "source": str(source.path),
        "format": source.kind,
        "step": source.step,
        **more,
    }
    if before is not None:
        facts["before"] = before
    (directory / RECORD).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def stored_dtypes(source: Source) -> list[str]:
    """Names of the dtypes that the source stores."""
    return sorted({source.parameters.dtype(path).name for path in source.parameters.paths})
