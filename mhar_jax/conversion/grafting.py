"""Depth routing put into a trained additive model, and how far that moves its logits."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mhar_jax.config.schema import DELTA_VARIANTS, ROUTED_VARIANTS, Config, MeshConfig, ModelConfig
from mhar_jax.conversion.aside import written_aside
from mhar_jax.conversion.finite import look
from mhar_jax.conversion.importing import Progress, converted_config, read_record, record, replace_dtype
from mhar_jax.conversion.sources import Source, open_source
from mhar_jax.conversion.writer import CheckpointWriter
from mhar_jax.errors import UserError
from mhar_jax.huggingface.keys import Path as ParameterPath
from mhar_jax.inference import PlacedModel
from mhar_jax.loading import load_model
from mhar_jax.models.initialise import Initializer
from mhar_jax.models.sites import RoutingParameters
from mhar_jax.sharding import make_mesh

DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")


class Deviation(NamedTuple):
    """How far the logits of a graft are from the original's on a sample, at each compute dtype."""

    largest: dict[str, float]  # largest absolute difference; NaN if a logit is not a number
    logits: dict[str, float]  # largest absolute logit of the original, for scale
    tokens: int


class Grafted(NamedTuple):
    """What was written."""

    config: Config
    deviation: Deviation | None
    not_finite: list[str]  # tensors that hold infinities or NaN


def is_identity(model: ModelConfig) -> bool:
    """Whether a fresh graft computes exactly what the original does: delta forms whose gates start closed."""
    return model.variant in DELTA_VARIANTS and model.gate


def grafted_model(model: ModelConfig, **routing: Any) -> ModelConfig:
    """The config of an additive model with depth routing.

    Args:
      model: of the original.
      **routing: `variant` and the other routing fields of ModelConfig.

    Raises:
      UserError: the original is routed already, the variant is not, or the fields do not fit the model.
    """
    if model.variant != "additive":
        raise UserError(f"only an additive model can be grafted, and this one is {model.variant}")
    if routing.get("variant") not in ROUTED_VARIANTS:
        raise UserError(f"variant must be one of {', '.join(ROUTED_VARIANTS)}, got {routing.get('variant')!r}")
    try:
        return dataclasses.replace(model, **routing)
    except ValueError as error:
        from mhar_jax.huggingface.config import first_complaint

        raise UserError(first_complaint(error)) from None


def graft(
    checkpoint: str | Path,
    out: str | Path,
    *,
    mesh: Mesh | None = None,
    sample_tokens: int = 128,
    progress: Progress = lambda _: None,
    **routing: Any,
) -> Grafted:
    """Writes an additive checkpoint with fresh depth routing as a new run directory.

    The backbone is copied to the bit; queries, null sources and gates start at 0, key-norm scales at 1. The graft has
    the run's param_dtype, and float32, which holds every value, where weights have another dtype than that: averages
    of bfloat16 parameters.

    Args:
      checkpoint: run directory, Hugging Face directory or GGUF file.
      out: run directory to make; it is there whole or not at all.
      mesh: devices to compare logits on; None: one device.
      sample_tokens: random tokens to compare logits on; 0: do not compare.
      progress: told how many values each parameter had.
      **routing: see `grafted_model`.

    Raises:
      UserError: sample_tokens is below 0, the checkpoint cannot be read or grafted, or `out` is there or cannot be
        written.
    """
    if sample_tokens < 0:
        raise UserError(f"sample_tokens must be at least 0, got {sample_tokens}")
    source = open_source(checkpoint)
    before = read_record(source)
    model = grafted_model(source.model, **routing)
    if any(source.parameters.dtype(path) != np.dtype(jnp.dtype(model.param_dtype)) for path in source.parameters.paths):
        model = replace_dtype(model, "float32")
    with written_aside(Path(out)) as aside:
        writer = CheckpointWriter(aside)
        dtype = np.dtype(jnp.dtype(model.param_dtype))
        not_finite: list[str] = []
        for path in source.parameters.paths:
            value = source.parameters.read(path)
            if not writer.write(path, value, dtype):
                look(source.parameters.tensor_names(path), value, dtype, not_finite, [])
            progress(value.size)
            del value
        for path, value in fresh_routing(model):
            writer.write(path, value, value.dtype)
        config = converted_config(source, model, aside, Path(out))
        writer.finish(config)
        record(aside, "graft", source, before, {"routing": {k: v for k, v in routing.items() if v is not None}})
        deviation = compare_logits(source, aside, mesh, sample_tokens) if sample_tokens else None
    return Grafted(config, deviation, not_finite)


def fresh_routing(model: ModelConfig) -> Iterator[tuple[ParameterPath, np.ndarray]]:
    """The routing parameters of a new model, which no seed decides."""
    fresh = RoutingParameters(model, Initializer(jax.random.key(0), std=model.init_std, dtype=model.param_dtype))
    for name, value in fresh.arrays().items():
        yield ("routing", name), np.asarray(value)


def compare_logits(original: Source, grafted: Path, mesh: Mesh | None, sample_tokens: int) -> Deviation:
    """Reads both models, one after the other, and compares their logits on random tokens."""
    vocabulary = original.model.vocab_size
    assert vocabulary is not None
    length = min(sample_tokens, original.model.context)
    ways = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    tokens = np.random.default_rng(0).integers(0, vocabulary, (ways, length)).astype(np.int32)
    one = make_mesh(MeshConfig(), jax.local_devices()[:1])
    before = _logits(original.path, tokens, mesh or one)
    after = _logits(grafted, tokens, mesh or one)
    with np.errstate(invalid="ignore"):  # infinity less infinity is the NaN that `largest` promises
        largest: dict[str, float] = {d: float(np.max(np.abs(after[d] - before[d]))) for d in DTYPES}
    logits: dict[str, float] = {d: float(np.max(np.abs(before[d]))) for d in DTYPES}
    return Deviation(largest, logits, tokens.size)


def _logits(path: Path, tokens: np.ndarray, mesh: Mesh) -> dict[str, np.ndarray]:
    model, config = load_model(path, mesh)
    params = nnx.to_pure_dict(nnx.state(model))
    found: dict[str, np.ndarray] = {}
    for dtype in DTYPES:
        placed = PlacedModel(params, dataclasses.replace(config.model, compute_dtype=dtype), mesh)
        found[dtype] = np.asarray(placed.jit("logits", lambda model, tokens: model(tokens))(tokens))
    return found
