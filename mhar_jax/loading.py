"""`load_model`: a model from a run directory of ours or from a Hugging Face directory."""

import pathlib

from flax import nnx

from mhar_jax.config.schema import Config
from mhar_jax.errors import UserError
from mhar_jax.models import Decoder


def load_model(path: str | pathlib.Path) -> tuple[Decoder, Config]:
    """The model and its config, from a directory.

    A run directory gives the newest whole checkpoint (the averaged weights, where the run keeps them) and the run's
    config. A Hugging Face directory (`config.json` and safetensors: Llama, Qwen3, or a published routed layout) gives
    its weights, and a config whose `model` section is the checkpoint's and the rest defaults.

    Raises:
      UserError: neither, or something in it is missing, damaged or unknown.
    """
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise UserError(f"a model is a directory, and {directory} is not one")
    if (directory / "config.json").is_file():
        from mhar_jax.huggingface import load_huggingface

        model, model_config = load_huggingface(directory)
        return model, Config(model=model_config, seq_len=model_config.context, run_dir=str(directory))
    if (directory / "checkpoints").is_dir():
        from mhar_jax.training.checkpoints import read_params
        from mhar_jax.training.step import model_functions

        config, _, params = read_params(directory)
        model = model_functions(config).merge(params)
        return nnx.merge(*nnx.split(model)), config
    raise UserError(
        f"{directory} is neither a run directory (it has no checkpoints/) nor a Hugging Face one (no config.json)"
    )
