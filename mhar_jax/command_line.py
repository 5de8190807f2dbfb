"""Arguments that the commands over checkpoints share."""

import argparse

from mhar_jax.config.schema import ROUTED_VARIANTS, MeshConfig

VARIANTS = ("additive", "hyper_connections", *ROUTED_VARIANTS)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows every argument's type and default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        kind = getattr(action.type, "__name__", None) if action.type is not None else None
        return f"{text} [{kind}]" if text and kind in ("int", "float") else text


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser of `python -m mhar_jax.COMMAND`."""
    return argparse.ArgumentParser(
        prog=f"python -m mhar_jax.{command}", description=description, formatter_class=Help, allow_abbrev=False
    )


def add_checkpoint_arguments(arguments: argparse.ArgumentParser) -> None:
    """CHECKPOINT, and how it is opened; `open_from` reads them."""
    arguments.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="run directory, Hugging Face directory or .gguf file"
    )
    arguments.add_argument(
        "--tokenizer", metavar="PATH", help="'bytes' or a tokenizer.json; None: the checkpoint's own"
    )
    arguments.add_argument("--variant", choices=VARIANTS, help="refuse a checkpoint of another variant; None: any")
    dtypes = ("bfloat16", "float32", "float16")
    arguments.add_argument("--compute-dtype", choices=dtypes, help="dtype of activations; None: the checkpoint's")
    for axis, default in (("data", -1), ("fsdp", 1), ("tensor", 1)):
        words = "batch split" if axis == "data" else "batch and parameters split" if axis == "fsdp" else "heads split"
        text = f"devices along the mesh axis {axis} ({words}); -1: what is left"
        arguments.add_argument(f"--{axis}", metavar="INT", type=int, default=default, help=text)


def mesh_of(options: argparse.Namespace):
    """The mesh of --data, --fsdp and --tensor; UserError where they are no mesh of these devices."""
    from mhar_jax.errors import UserError
    from mhar_jax.huggingface.config import first_complaint
    from mhar_jax.sharding import make_mesh

    try:
        config = MeshConfig(data=options.data, fsdp=options.fsdp, tensor=options.tensor)
    except ValueError as error:
        raise UserError(first_complaint(error)) from None
    return make_mesh(config)


def open_from(options: argparse.Namespace):
    """The `Checkpoint` that the arguments name."""
    from mhar_jax.inference import open_checkpoint

    return open_checkpoint(
        options.checkpoint,
        mesh=mesh_of(options),
        tokenizer=options.tokenizer,
        compute_dtype=options.compute_dtype,
        variant=options.variant,
    )
