"""python -m mhar_jax.data prepare | inspect"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

from mhar_jax.data.files import is_prepared
from mhar_jax.data.prepare import prepare
from mhar_jax.data.shards import ShardTokens, load_index, own_tokenizer
from mhar_jax.data.tokenizers import load_tokenizer
from mhar_jax.errors import UserError, command


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mhar_jax.data", description="Prepare and look at training text.")
    commands = parser.add_subparsers(dest="command", required=True)
    style = argparse.ArgumentDefaultsHelpFormatter

    p = commands.add_parser("prepare", help="tokenise text once into ArrayRecord token shards", formatter_class=style)
    p.add_argument("--path", metavar="PATH", help="file, glob or directory of text; None: the embedded text")
    p.add_argument(
        "--out", metavar="DIR", required=True, default=argparse.SUPPRESS, help="directory to make (required)"
    )
    p.add_argument("--tokenizer", metavar="PATH", default="bytes", help="'bytes', a tokenizer.json or its directory")
    p.add_argument("--eos-token", metavar="TEXT", help="end-of-text token; None: the usual names are looked for")
    p.add_argument("--format", default="auto", choices=("auto", "text", "jsonl", "parquet"), help="type of the files")
    p.add_argument("--text-field", metavar="NAME", default="text", help="field or column that holds a document")
    p.add_argument("--shards", metavar="INT", type=_positive, help="files to write; None: one for each 256 MB of text")
    cores = os.cpu_count() or 1
    p.add_argument("--workers", metavar="INT", type=_positive, default=cores, help="processes, a shard each at a time")
    p.set_defaults(run=_prepare)

    p = commands.add_parser("inspect", help="print the facts of prepared shards", formatter_class=style)
    p.add_argument("directory", metavar="DIR", help="what prepare wrote")
    p.add_argument("--documents", metavar="INT", type=int, default=3, help="first documents to print")
    p.add_argument("--characters", metavar="INT", type=_positive, default=300, help="of each document to print")
    p.add_argument("--verify", action="store_true", help="read every document")
    p.set_defaults(run=_inspect)
    return parser


def _prepare(options: argparse.Namespace) -> None:
    index = prepare(
        path=options.path,
        out=options.out,
        tokenizer=load_tokenizer(options.tokenizer, options.eos_token),
        file_format=options.format,
        text_field=options.text_field,
        shards=options.shards,
        workers=options.workers,
    )
    print(f"wrote {options.out}: {index.documents:,} documents, {index.tokens:,} tokens, {len(index.shards)} shards")


def _inspect(options: argparse.Namespace) -> None:
    if not is_prepared(options.directory, "auto"):
        raise UserError(f"{options.directory} is no directory of prepared shards (it holds no index.json)")
    directory = Path(options.directory)
    index = load_index(directory)
    tokens = ShardTokens(directory, index)
    size = sum(shard.bytes for shard in index.shards)
    print(f"documents    {index.documents:,}")
    print(f"tokens       {index.tokens:,} (without end-of-text), stored as {index.dtype}")
    print(
        f"a document   {np.min(tokens.lengths):,} to {np.max(tokens.lengths):,} tokens, "
        f"{np.mean(tokens.lengths):,.1f} on average"
    )
    print(f"shards       {len(index.shards)}, {size / 1e6:,.1f} MB")
    print(f"tokenizer    {index.tokenizer}, {index.vocab_size:,} ids, fingerprint {index.tokenizer_fingerprint}")
    print(f"end of text  {index.eos_token} ({index.eos_id})")
    if options.verify:
        for document in range(index.documents):
            tokens.document(document)
        print("verified     every document can be read")
    tokenizer = own_tokenizer(options.directory, index) if options.documents > 0 else None
    for document in range(min(options.documents, index.documents)):
        assert tokenizer is not None
        text = tokenizer.decode(tokens.document(document).tolist())
        more = "..." if len(text) > options.characters else ""
        print(f"\n[{document}] {tokens.lengths[document]:,} tokens\n{text[: options.characters]}{more}")


@command
def main(arguments: list[str] | None = None) -> None:
    """Runs a command; wrong input is one line on standard error and exit code 2."""
    options = _parser().parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    sys.exit(main())
