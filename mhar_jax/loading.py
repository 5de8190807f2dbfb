"""`load_model`: a model from a run directory of ours or from a Hugging Face directory."""

import pathlib
from typing import Any

import jax

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

        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def shapes(config: Config) -> Any:
            params = jax.eval_shape(lambda: model_functions(config).init(jax.random.key(0)))
            return jax.tree.map(lambda s: s.update(sharding=here), params)

        config, _, params = read_params(directory, shapes)
        return model_functions(config).merge(params), config
    raise UserError(
        f"{directory} is neither a run directory (it has no checkpoints/) nor a Hugging Face one (no config.json)"
    )
