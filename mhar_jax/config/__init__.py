"""Settings of a run: the schema, and reading it from a file and the command line."""

from mhar_jax.config.load import load_config, make_config, to_dict, to_yaml
from mhar_jax.config.schema import Config, ModelConfig

__all__ = ["Config", "ModelConfig", "load_config", "make_config", "to_dict", "to_yaml"]
