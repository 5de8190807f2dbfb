"""python -m mhar_jax.convert import | graft | export"""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from mhar_jax.command_line import Help, mesh_of
from mhar_jax.config.schema import DELTA_VARIANTS, ROUTED_VARIANTS
from mhar_jax.errors import UserError, command
from mhar_jax.platforms import prefer_present_hardware


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mhar_jax.convert", description="Pretrained models in, routed models out.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str, run: Any) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=text, description=text, formatter_class=Help, allow_abbrev=False)
        p.set_defaults(run=run)
        return p

    p = add("import", "a Hugging Face directory or GGUF file as a run directory", _import)
    p.add_argument(
        "source", metavar="HF_DIR", help="config.json and safetensors (Llama, Qwen3, routed), or a .gguf file"
    )
    p.add_argument("out", metavar="OUT", help="run directory to make")
    p.add_argument("--param-dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the parameters")
    p.add_argument("--fsdp", metavar="INT", type=int, default=1, help="split on disk as for so many devices of fsdp")
    p.add_argument("--tensor", metavar="INT", type=int, default=1, help="split on disk as for so many of tensor")

    p = add("graft", "an additive checkpoint with depth routing put in", _graft)
    p.add_argument("checkpoint", metavar="CHECKPOINT", help="run directory, Hugging Face directory or .gguf file")
    p.add_argument("out", metavar="OUT", help="run directory to make")
    p.add_argument("--variant", choices=ROUTED_VARIANTS, default="delta_block", help="how sublayers read the depth")
    p.add_argument("--num-blocks", metavar="INT", type=int, default=8, help="blocks of delta_block and block_mhar")
    p.add_argument("--routing-heads", metavar="INT", type=int, help="heads of the depth softmax; None: the KV heads")
    p.add_argument("--no-null-source", action="store_true", help="delta forms without a null source")
    p.add_argument("--no-gate", action="store_true", help="delta forms without gates: not the original model any more")
    p.add_argument("--sample-tokens", metavar="INT", type=int, default=128, help="to compare logits on; 0: do not")
    for axis, default in (("data", 1), ("fsdp", -1), ("tensor", 1)):
        p.add_argument(f"--{axis}", metavar="INT", type=int, default=default, help=f"devices along {axis}, to compare")

    p = add("export", "a checkpoint as a Hugging Face directory", _export)
    p.add_argument("checkpoint", metavar="CHECKPOINT", help="run directory, Hugging Face directory or .gguf file")
    p.add_argument("out", metavar="HF_DIR", help="directory to make")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the tensors; None: the checkpoint's")
    p.add_argument("--max-shard-gb", metavar="FLOAT", type=float, default=5.0, help="size of a safetensors file")
    return parser


def _import(options: argparse.Namespace) -> None:
    from mhar_jax.conversion.importing import import_checkpoint

    with _bar() as progress:
        done = import_checkpoint(
            options.source,
            options.out,
            param_dtype=options.param_dtype,
            fsdp=options.fsdp,
            tensor=options.tensor,
            progress=progress,
        )
    _warn_of("infinities or NaN in", done.not_finite)
    _warn_of(f"values beyond {options.param_dtype} became infinite in", done.overflowed)
    model = done.config.model
    print(f"wrote {options.out}: {model.variant}, {done.parameters:,} parameters in {model.param_dtype}")
    if not (pathlib.Path(options.out) / "tokenizer.json").is_file():
        print("no tokenizer.json came along; commands that need a tokenizer take --tokenizer")


def _graft(options: argparse.Namespace) -> None:
    from mhar_jax.conversion.grafting import graft, is_identity

    if options.variant not in DELTA_VARIANTS and (options.no_gate or options.no_null_source):
        raise UserError(
            f"--no-gate and --no-null-source belong to {' and '.join(DELTA_VARIANTS)}, not {options.variant}"
        )
    if options.sample_tokens < 0:
        raise UserError(f"--sample-tokens must be at least 0, got {options.sample_tokens}")
    mesh = mesh_of(options)
    with _bar() as progress:
        done = graft(
            options.checkpoint,
            options.out,
            mesh=mesh,
            sample_tokens=options.sample_tokens,
            progress=progress,
            variant=options.variant,
            num_blocks=options.num_blocks,
            routing_heads=options.routing_heads,
            null_source=not options.no_null_source,
            gate=not options.no_gate,
        )
    _warn_of("infinities or NaN in", done.not_finite)
    model = done.config.model
    if not is_identity(model):
        print(
            f"warning: {model.variant}{'' if model.gate else ' without gates'} is not the original model at the start: "
            "it computes something else until it is trained; delta_block and delta with gates keep it",
            file=sys.stderr,
        )
    print(f"wrote {options.out}: {model.variant}, {model.heads_of_depth} routing heads")
    if done.deviation is not None:
        for dtype, largest in done.deviation.largest.items():
            print(
                f"largest logit deviation in {dtype}: {largest:g} (logits up to {done.deviation.logits[dtype]:.3g}, "
                f"{done.deviation.tokens} random tokens)"
            )


def _export(options: argparse.Namespace) -> None:
    from mhar_jax.conversion.exporting import export_checkpoint

    if not options.max_shard_gb > 0:
        raise UserError(f"--max-shard-gb must be above 0, got {options.max_shard_gb}")
    with _bar() as progress:
        done = export_checkpoint(
            options.checkpoint, options.out, dtype=options.dtype, max_shard_gb=options.max_shard_gb, progress=progress
        )
    _warn_of("infinities or NaN in", done.not_finite)
    _warn_of(f"values beyond {options.dtype} became infinite in", done.overflowed)
    rounded = f"; rounding changed values by up to {done.rounded:g}" if done.rounded else ""
    loads = "stock transformers load it" if done.model.variant == "additive" else "in the published routed layout"
    print(f"wrote {options.out}: {done.model.variant}, {len(done.files)} safetensors files, {loads}{rounded}")


def _warn_of(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
        print(f"warning: {what} {count}: {', '.join(names[:5])}{more}", file=sys.stderr)


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int], Any]]:
    from tqdm import tqdm

    with tqdm(desc="converting", unit=" values", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        yield bar.update


@command
def main(arguments: list[str] | None = None) -> None:
    """Runs a command; wrong input is one line on standard error and exit code 2."""
    options = _parser().parse_args(arguments)
    for name in ("fsdp", "tensor") if options.command == "import" else ():
        if not 1 <= getattr(options, name) < 2**31:
            raise UserError(f"--{name} must be from 1 to 2147483647, got {getattr(options, name)}")
    prefer_present_hardware()
    options.run(options)


if __name__ == "__main__":
    sys.exit(main())
