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
from mhar_jax.conversion.sources import Source, copy_tokenizer, open_source
from mhar_jax.conversion.writer import CheckpointWriter

RECORD = "conversion.json"  # beside a converted checkpoint: where it came from
Progress = Callable[[int], Any]  # called with the number of values written


class Converted(NamedTuple):
    """What was written."""

    config: Config
    parameters: int
    not_finite: list[str]  # tensors that hold infinities or NaN


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
    dtype = np.dtype(jnp.dtype(param_dtype))
    with written_aside(Path(out)) as aside:
        writer = CheckpointWriter(aside, fsdp=fsdp, tensor=tensor)
        total, not_finite = 0, []
        for path in opened.parameters.paths:
            value = opened.parameters.read(path)
            if not writer.write(path, value, dtype):
                not_finite += opened.parameters.tensor_names(path)
            total += value.size
            progress(value.size)
            del value  # before the next one is read
        config = converted_config(opened, replace_dtype(opened.model, param_dtype), aside, Path(out))
        writer.finish(config)
        record(aside, "import", opened, {"stored": stored_dtypes(opened)})
    return Converted(config, total, not_finite)


def replace_dtype(model: ModelConfig, param_dtype: Any) -> ModelConfig:
    """The model with parameters of another dtype."""
    return dataclasses.replace(model, param_dtype=param_dtype)


def converted_config(source: Source, model: ModelConfig, aside: Path, out: Path) -> Config:
    """The run config of a converted checkpoint; copies the tokenizer on the way, whose end-of-text token it names."""
    data = copy_tokenizer(source, aside)
    return Config(run_dir=str(out), model=model, data=data, seq_len=min(model.context, 2048), batch_size=8)


def record(directory: Path, kind: str, source: Source, more: dict[str, Any]) -> None:
    """Writes where a checkpoint came from; a record of the source becomes part of it."""
    before = source.path / RECORD
    facts: dict[str, Any] = {
        "kind": kind,
        "source": str(source.path),
        "format": source.kind,
        "step": source.step,
        **more,
    }
    if source.kind == "run" and before.is_file():
        facts["before"] = json.loads(before.read_text(encoding="utf-8"))
    (directory / RECORD).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def stored_dtypes(source: Source) -> list[str]:
    """Names of the dtypes that the source stores."""
    return sorted({source.parameters.dtype(path).name for path in source.parameters.paths})
