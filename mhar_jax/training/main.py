"""The command line of `train.py`."""

import logging
import os
import sys
from collections.abc import Sequence

from mhar_jax.config.load import describe_fields, load_config
from mhar_jax.errors import UserError, command
from mhar_jax.platforms import prefer_present_hardware

USAGE = """\
usage: train.py [PRESET or FILE] [--field=value ...]

PRESET is the name of a file in configs/ (default: tiny); FILE is YAML or TOML. Fields (also as `--field value`):
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in arguments or "--help" in arguments:
        print(help_text())
        return 0
    file, overrides = parse(arguments)
    config = load_config(file, overrides)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    quiet = ["absl", "orbax"]  # their errors arrive as exceptions
    if "TF_CPP_MIN_LOG_LEVEL" not in os.environ:  # who sets it wants to read the compiler's warnings
        quiet.append("jax")
    for name in quiet:
        logging.getLogger(name).setLevel(logging.CRITICAL)

    prefer_present_hardware()  # before JAX looks for devices
    from mhar_jax.training.loop import train

    train(config)
    return 0


def parse(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The config file (default: tiny) and the overrides as `name=value`.

    Raises:
      UserError: two files, or a field without a value.
    """
    file: str | None = None
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, separator, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            name, separator, value = "config", "=", argument
        elif not separator:
            following = next(rest, None)
            if following is None or following.startswith("--"):
                raise UserError(f"--{name} needs a value, as --{name}=VALUE")
            value = following
        if name != "config":
            overrides.append(f"{name}={value}")
        elif file is not None:
            raise UserError(f"give one config, got {file!r} and {value!r}; overrides look like --field=value")
        else:
            file = value
    return file or "tiny", overrides


def help_text() -> str:
    """Every field, its type, its default and what it means."""
    fields = describe_fields()
    lines = [f"  --{f.name} {f.type} = {f.default}\n      {f.text}" for f in fields]
    return USAGE + "\n".join(lines)
