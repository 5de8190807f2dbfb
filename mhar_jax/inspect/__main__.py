"""Command line: `python -m mhar_jax.inspect CHECKPOINT --data TEXT --out DIR`."""

import argparse
import logging
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from mhar_jax.command_line import parser
from mhar_jax.errors import UserError, command
from mhar_jax.platforms import prefer_present_hardware


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def _several(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, for a spread, got {text}")
    return value


_positive.__name__ = _not_negative.__name__ = _several.__name__ = "int"  # how argparse and --help call them


def arguments_parser() -> argparse.ArgumentParser:
    """Every option, its type and default."""
    p = parser(
        "inspect",
        "Shows what the depth routing of a trained model does on a text: pictures (PNG and SVG), one HTML report that "
        "opens without a network, and the numbers as JSON.",
    )
    p.add_argument("checkpoint", metavar="CHECKPOINT", help="run directory, Hugging Face directory or .gguf file")
    for name, kind, default, text in (
        ("--data", str, None, "file, glob or directory of text; None: what the run held out"),
        ("--out", str, None, "directory for the report; None: CHECKPOINT/inspect"),
        ("--tokens", _positive, 16384, "tokens for the maps"),
        ("--probe-tokens", _positive, 2048, "tokens for the probe of the queries"),
        ("--ablation-tokens", _not_negative, 2048, "tokens for the ablations; 0: no ablations"),
        ("--sample-tokens", _positive, 96, "tokens from the start of the text to look at singly"),
        ("--slices", _positive, 4, "slices of a query in the probe"),
        ("--draws", _several, 8, "random queries for the null of the probe"),
        ("--matched-sources", _positive, 8, "sources in the control with as many sources at every site"),
        ("--batch-size", _positive, None, "sequences at once; None: about 1024 tokens' worth"),
        ("--seq-len", _positive, None, "tokens a sequence; None: the run's, at most 1024"),
        ("--tokenizer", str, None, "'bytes' or a tokenizer.json; None: the checkpoint's own"),
        ("--seed", _not_negative, 0, "of the random queries"),
    ):
        p.add_argument(name, type=kind, default=default, metavar="INT" if kind is not str else "PATH", help=text)
    return p


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; wrong input is one line on standard error and exit code 2."""
    options = arguments_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    for noisy in ("absl", "orbax", "jax", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    prefer_present_hardware()  # before JAX looks for devices
    inspect(options)
    return 0


def inspect(options: argparse.Namespace) -> list[pathlib.Path]:
    """The whole report from parsed options; returns its files."""
    import jax

    from mhar_jax.config.schema import MeshConfig
    from mhar_jax.inference import open_checkpoint
    from mhar_jax.inspect.ablation import ablate
    from mhar_jax.inspect.figures import Results
    from mhar_jax.inspect.probe import probe
    from mhar_jax.inspect.report import make_out_dir, summary_lines, view_tokens, write_report
    from mhar_jax.inspect.statistics import measure_routing
    from mhar_jax.inspect.text import read_windows, token_texts
    from mhar_jax.inspect.walk import Walk
    from mhar_jax.sharding import make_mesh

    one_device = make_mesh(MeshConfig(data=1), jax.local_devices()[:1])
    checkpoint = open_checkpoint(options.checkpoint, mesh=one_device, tokenizer=options.tokenizer)
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    walk = Walk(checkpoint.model)
    if options.data is None and not (pathlib.Path(options.checkpoint) / "checkpoints").is_dir():
        raise UserError(f"{options.checkpoint} is no run that held out a text of its own; name a text with --data")
    seq_len = options.seq_len or min(config.seq_len, 1024)
    if seq_len > config.model.context:
        raise UserError(f"--seq-len must not exceed the model's context {config.model.context}, got {seq_len}")
    windows = read_windows(
        options.data,
        config,
        tokenizer,
        tokens=options.tokens,
        batch_size=options.batch_size or max(1, 1024 // seq_len),
        seq_len=seq_len,
    )
    out = make_out_dir(options.out or str(pathlib.Path(options.checkpoint) / "inspect"))
    say: Any = lambda text: print(text, flush=True)
    say(f"{windows.count:,} tokens of {windows.name}; {len(walk.shapes)} sites, up to {walk.max_sources} sources")
    routing = measure_routing(walk, windows)
    probed = probe(
        walk,
        windows.first(options.probe_tokens),
        slices=options.slices,
        draws=options.draws,
        matched_sources=options.matched_sources,
        seed=options.seed,
    )
    ablated = ablate(walk, windows.first(options.ablation_tokens)) if options.ablation_tokens else None
    text = windows.tokens.reshape(-1, seq_len + 1)[0]
    ids = text[: min(options.sample_tokens, max(1, int(windows.mask.reshape(-1, seq_len)[0].sum())))]
    view = view_tokens(walk, ids, token_texts(ids, tokenizer))
    results = Results(_describe(options.checkpoint, walk), windows.name, routing, probed, ablated)
    files = write_report(results, view, out)
    for name, value in summary_lines(results):
        say(f"{name}: {value}")
    say(probed.table())
    say(f"report: {files[0]}")
    return files


def _describe(checkpoint: str, walk: Any) -> str:
    config = walk.config
    heads = config.heads_of_depth
    return (
        f"{pathlib.Path(checkpoint).name}: {config.variant}, {config.num_layers} layers of width {config.d_model}, "
        f"{heads} routing head{'s' if heads > 1 else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())
