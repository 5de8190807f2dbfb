"""The replication's text: sources to documents, a tokeniser, and parts to carry to a machine without network.

    python -m results.replication.corpus build TEXT LOG GGUF DIR     documents of a built corpus, and its tokeniser
    python -m results.replication.corpus pack DIR PARTS              compressed parts and a manifest
    python -m results.replication.corpus unpack PARTS DATA           verifies, unpacks and tokenises; done once

TEXT holds paragraphs between blank lines, source after source; LOG says how many each source has. Where a source's own
documents begin and end is lost, so a document here is a run of consecutive paragraphs of one source, of 8,000
characters or a little more (about 2,000 tokens): sequences keep their context, and shuffling mixes the sources.
"""

import argparse
import concurrent.futures
import hashlib
import json
import lzma
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from mhar_jax.data import load_tokenizer
from mhar_jax.data.prepare import prepare
from mhar_jax.data.shards import load_index
from mhar_jax.errors import UserError, command

# Whole sources that no run trains on: general prose of 1961, a novel, and three manuals of unlike subjects.
HELD_OUT = ("brown", "moby", "debian-handbook", "octave-doc", "postfix-doc")
CHARACTERS = 8000  # of a document, at least, unless its source ends
SPLITS = ("train", "held_out")
MANIFEST = "manifest.json"
_PARTS = 16  # of the training text; unpacked and tokenised side by side


def documents(paragraphs: list[str]) -> Iterator[str]:
    """Runs of consecutive paragraphs."""
    held: list[str] = []
    size = 0
    for paragraph in paragraphs:
        held.append(paragraph)
        size += len(paragraph)
        if size >= CHARACTERS:
            yield "\n\n".join(held)
            held, size = [], 0
    if held:
        yield "\n\n".join(held)


def sources(text: pathlib.Path, log: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """Name and paragraphs of each source.

    Raises:
      UserError: the log does not describe the text.
    """
    counts = re.findall(r"^(\S+)\t[\d.]+ MB\t(\d+) paragraphs$", log.read_text(encoding="utf-8"), re.MULTILINE)
    paragraphs = [p for p in text.read_text(encoding="utf-8").split("\n\n") if p]
    total = sum(int(count) for _, count in counts)
    if total != len(paragraphs):
        raise UserError(f"{log} counts {total} paragraphs and {text} holds {len(paragraphs)}; build the text again")
    start = 0
    for name, count in counts:
        yield name, paragraphs[start : start + int(count)]
        start += int(count)


def build(text: pathlib.Path, log: pathlib.Path, gguf: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Writes train.jsonl, held_out.jsonl, tokenizer.json and sources.json; returns the facts of the last."""
    from mhar_jax.huggingface.gguf_tokenizer import gguf_tokenizer

    out.mkdir(parents=True, exist_ok=True)
    gguf_tokenizer(gguf).implementation.save(str(out / "tokenizer.json"))
    train: list[str] = []
    held_out: list[str] = []
    facts: dict[str, Any] = {"held_out": list(HELD_OUT), "characters": {}}
    for name, paragraphs in sources(text, log):
        found = list(documents(paragraphs))
        facts["characters"][name] = sum(map(len, found))
        (held_out if name in HELD_OUT else train).extend(found)
    if missing := set(HELD_OUT) - facts["characters"].keys():
        raise UserError(f"{log} lacks the held-out sources {', '.join(sorted(missing))}; build the whole tier")
    # Evaluations read the first tokens of the held-out text: in order of hash, these are a fair sample of its sources.
    held_out.sort(key=lambda document: hashlib.blake2b(document.encode(), digest_size=8).digest())
    for split, found in zip(SPLITS, (train, held_out), strict=True):
        lines = "".join(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in found)
        (out / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        facts[f"{split}_documents"] = len(found)
    (out / "sources.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts


def pack(directory: pathlib.Path, parts: pathlib.Path) -> list[pathlib.Path]:
    """Compresses what `build` wrote, and writes how it must look when it is unpacked."""
    parts.mkdir(parents=True, exist_ok=True)
    train = (directory / "train.jsonl").read_bytes().splitlines(keepends=True)
    pieces = {
        f"train-{i:02d}.jsonl": b"".join(train[len(train) * i // _PARTS : len(train) * (i + 1) // _PARTS])
        for i in range(_PARTS)
    }
    pieces |= {name: (directory / name).read_bytes() for name in ("held_out.jsonl", "tokenizer.json", "sources.json")}
    manifest = {name: hashlib.blake2b(content, digest_size=16).hexdigest() for name, content in pieces.items()}
    files = [parts / f"{name}.xz" for name in pieces]
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for file, packed in zip(files, pool.map(_compress, pieces.values()), strict=True):
            file.write_bytes(packed)
    files.append(parts / MANIFEST)
    files[-1].write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return files


def unpack(parts: pathlib.Path, data: pathlib.Path, *, workers: int) -> None:
    """Makes `data`: tokenised shards train/ and held_out/, tokenizer.json, sources.json. Nothing is done twice.

    Raises:
      UserError: a part is missing or is not what was packed.
    """
    if (data / "held_out" / "index.json").is_file() and (data / "train" / "index.json").is_file():
        return
    shutil.rmtree(data, ignore_errors=True)
    text = data / "text"
    text.mkdir(parents=True)
    manifest = json.loads((parts / MANIFEST).read_text(encoding="utf-8"))
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        jobs = [pool.submit(_unpack, parts / f"{name}.xz", text / name, digest) for name, digest in manifest.items()]
        for job in jobs:
            job.result()
    for name in ("tokenizer.json", "sources.json"):
        (text / name).rename(data / name)
    tokenizer = load_tokenizer(str(data / "tokenizer.json"), "<|endoftext|>")
    for split, pattern in (("held_out", "held_out.jsonl"), ("train", "train-*.jsonl")):
        prepare(
            path=str(text / pattern),
            out=str(data / split),
            tokenizer=tokenizer,
            shards=1 if split == "held_out" else max(1, workers),
            workers=workers if split == "train" else 1,
        )
    shutil.rmtree(text)


def _compress(content: bytes) -> bytes:
    return lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)


def _unpack(source: pathlib.Path, target: pathlib.Path, digest: str) -> None:
    try:
        content = lzma.decompress(source.read_bytes())
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"the part {source} cannot be read ({error}); carry it again") from None
    if hashlib.blake2b(content, digest_size=16).hexdigest() != digest:
        raise UserError(f"the part {source} is not the one that was packed; carry it again")
    target.write_bytes(content)


@command
def main(arguments: list[str] | None = None) -> None:
    """Runs a command; wrong input is one line on standard error and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m results.replication.corpus", description="The replication's text.")
    actions = parser.add_subparsers(dest="action", required=True)
    for action, names in (("build", "text log gguf out"), ("pack", "directory parts"), ("unpack", "parts data")):
        p = actions.add_parser(action)
        for name in names.split():
            p.add_argument(name, type=pathlib.Path)
        if action == "unpack":
            p.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    o = parser.parse_args(arguments)
    if o.action == "build":
        facts = build(o.text, o.log, o.gguf, o.out)
        print(f"{facts['train_documents']} documents to train on, {facts['held_out_documents']} held out")
    elif o.action == "pack":
        files = pack(o.directory, o.parts)
        print(f"{len(files)} files, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB")
    else:
        unpack(o.parts, o.data, workers=o.workers)
        for split in SPLITS:
            index = load_index(o.data / split)
            print(f"{split}: {index.documents:,} documents, {index.tokens:,} tokens, {index.dtype}")


if __name__ == "__main__":
    sys.exit(main())
