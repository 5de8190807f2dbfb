"""`load_model`: a model from a run directory of ours or from a Hugging Face directory."""

import pathlib
from typing import Any

import jax
from jax.sharding import Mesh

from mhar_jax.config.schema import Config
from mhar_jax.errors import UserError, one_line
from mhar_jax.models import Decoder
from mhar_jax.sharding import state_shardings


def load_model(path: str | pathlib.Path, mesh: Mesh | None = None) -> tuple[Decoder, Config]:
    """The model and its config, from a directory or a GGUF file.

    A run directory gives the newest whole checkpoint (the averaged weights, where the run keeps them) and the run's
    config. A Hugging Face directory (`config.json` and safetensors: Llama, Qwen3, or a published routed layout) gives
    its weights, and a config whose `model` section is the checkpoint's and the rest defaults; so does a GGUF file of
    Llama architecture.

    Args:
      path: of the directory or file.
      mesh: lays the parameters out over its devices as they are read; None: the first device holds everything.

    Raises:
      UserError: neither, or something in it is missing, damaged or unknown.
    """
    directory = pathlib.Path(path)
    try:
        directory.stat()
    except OSError as error:
        what = f"a model is a directory or a .gguf file, and {one_line(path)} is neither"
        raise UserError(f"{what}: {error.strerror}") from None
    if directory.suffix == ".gguf" and directory.is_file():
        from mhar_jax.huggingface.gguf import load_gguf

        model, model_config = load_gguf(directory, mesh)
        return model, Config(model=model_config, seq_len=model_config.context, run_dir=str(directory))
    if not directory.is_dir():
        raise UserError(f"a model is a directory or a .gguf file, and {directory} is neither")
    if (directory / "config.json").is_file():
        from mhar_jax.huggingface import load_huggingface

        model, model_config = load_huggingface(directory, mesh)
        return model, Config(model=model_config, seq_len=model_config.context, run_dir=str(directory))
    if (directory / "checkpoints").is_dir():
        from mhar_jax.training.checkpoints import read_params
        from mhar_jax.training.step import model_functions

        def shapes(config: Config) -> Any:
            params = jax.eval_shape(lambda: model_functions(config).init(jax.random.key(0)))
            if mesh is not None:
                return jax.tree.map(lambda s, h: s.update(sharding=h), params, state_shardings(mesh, params))
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            return jax.tree.map(lambda s: s.update(sharding=here), params)

        config, _, params = read_params(directory, shapes)
        return model_functions(config).merge(params), config
    raise UserError(
        f"{directory} is neither a run directory (it has no checkpoints/) nor a Hugging Face one (no config.json)"
    )
