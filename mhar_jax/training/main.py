"""The command line of `train.py`."""

import logging
import os
import pathlib
import sys
from collections.abc import Sequence

from mhar_jax.config.load import describe_fields, load_config
from mhar_jax.distributed import find_processes, joined
from mhar_jax.errors import UserError, command, writing
from mhar_jax.platforms import prefer_present_hardware

OPTIONS = {
    "coordinator": "HOST:PORT of process 0, where several processes are one run (docs/runbook.md)",
    "processes": "int: how many processes are one run",
    "process": "int: which of them this is, from 0",
    "distributed": "auto|on|off = auto: auto looks for Slurm and for TPU slices of several hosts",
    "peer_timeout": "float = 60: seconds after which a silent process ends the others",
    "stall_timeout": "float = 1800: seconds without progress, compilation included, that end the run",
    "compilation_cache": "directory for compiled programs, which later runs then read",
    "dry_run": "true: what the run would take, without running it; also as --dry-run",
    "topology": "of a dry run: a TPU slice that is not there, as v5p:4x4x4, to compile the step for",
}
USAGE = """\
usage: train.py [PRESET or FILE] [--field=value ...] [--option=value ...]

PRESET is the name of a file in configs/ (default: tiny); FILE is YAML or TOML.

Options, which say how this process runs and are not part of the run:
{options}
Fields (also as `--field value`):
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in arguments or "--help" in arguments:
        print(help_text())
        return 0
    arguments, options = take_options(arguments)
    file, overrides = parse(arguments)
    config = load_config(file, overrides)
    processes = find_processes(options)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    quiet = ["absl", "orbax"]  # their errors arrive as exceptions
    if "TF_CPP_MIN_LOG_LEVEL" not in os.environ:  # who sets it wants to read the compiler's warnings
        quiet.append("jax")
    for name in quiet:
        logging.getLogger(name).setLevel(logging.CRITICAL)

    if options.get("dry_run", "false") not in ("true", "false"):
        raise UserError(f"--dry_run must be true or false, got {options['dry_run']!r}")
    dry = options.get("dry_run") == "true"
    if "topology" in options:
        if not dry:
            raise UserError("--topology goes with --dry-run: a slice that is not there cannot train")
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    prefer_present_hardware()  # before JAX looks for devices
    if "compilation_cache" in options:
        keep_compiled(options["compilation_cache"])
    if dry:
        from mhar_jax.training.dry_run import dry_run

        return dry_run(config, options.get("topology"))
    with joined(processes):
        from mhar_jax.training.loop import train

        train(config)
    return 0


def keep_compiled(directory: str) -> None:
    """Has JAX keep compiled programs on disk.

    Raises:
      UserError: the directory cannot be made.
    """
    import jax

    path = pathlib.Path(directory).expanduser().absolute()
    with writing("compiled programs", path):
        path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))


def take_options(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without those that set one of OPTIONS, and these by name.

    Raises:
      UserError: an option without a value.
    """
    rest: list[str] = []
    options: dict[str, str] = {}
    waiting = iter(arguments)
    for argument in waiting:
        name, separator, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("--") or name not in OPTIONS:
            rest.append(argument)
        elif separator:
            options[name] = value
        elif name == "dry_run":
            options[name] = "true"
        else:
            following = next(waiting, None)
            if following is None or following.startswith("--"):
                raise UserError(f"--{name} needs a value, as --{name}=VALUE")
            options[name] = following
    return rest, options


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
    options = "".join(f"  --{name} {text}\n" for name, text in OPTIONS.items())
    return USAGE.format(options=options) + "\n".join(lines)
