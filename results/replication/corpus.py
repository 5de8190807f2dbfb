"""The replication's text: sources to tokenised documents, and parts to carry to a machine without network.

    python -m results.replication.corpus build TEXT LOG GGUF DATA    documents of a built corpus, tokenised
    python -m results.replication.corpus pack DATA PARTS             compressed parts of DATA
    python -m results.replication.corpus unpack PARTS DATA           DATA again, verified; done once

TEXT holds paragraphs between blank lines, source after source; LOG says how many each source has. Where a source's own
documents begin and end is lost, so a document here is a run of consecutive paragraphs of one source, of 8,000
characters or a little more (about 2,000 tokens): sequences keep their context, and shuffling mixes the sources.

Token ids as 16 bits under xz take a tenth less than the text does.
"""

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import lzma
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mhar_jax.data import load_tokenizer
from mhar_jax.data.files import INDEX_NAME
from mhar_jax.data.prepare import prepare
from mhar_jax.data.shards import HASHES_NAME, LENGTHS_NAME, WRITER_OPTIONS, ShardTokens, load_index
from mhar_jax.errors import UserError, command

# Whole sources that no run trains on: general prose of 1961, a novel, and three manuals of unlike subjects.
HELD_OUT = ("brown", "moby", "debian-handbook", "octave-doc", "postfix-doc")
CHARACTERS = 8000  # of a document, at least, unless its source ends
EOS = "<|endoftext|>"
SPLITS = {"train": 16, "held_out": 1}  # and their shards, which are unpacked side by side
OTHERS = ("tokenizer.json", "sources.json")
MANIFEST = "manifest.json"
_HARDEST = 9 | lzma.PRESET_EXTREME


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


def build(text: pathlib.Path, log: pathlib.Path, gguf: pathlib.Path, data: pathlib.Path, workers: int) -> None:
    """Writes `data`: prepared shards train/ and held_out/, tokenizer.json and sources.json."""
    from mhar_jax.huggingface.gguf_tokenizer import gguf_tokenizer

    data.mkdir(parents=True)
    gguf_tokenizer(gguf).implementation.save(str(data / "tokenizer.json"))
    found: dict[str, list[str]] = {split: [] for split in SPLITS}
    facts: dict[str, Any] = {"held_out": list(HELD_OUT), "characters": {}}
    for name, paragraphs in sources(text, log):
        of_source = list(documents(paragraphs))
        facts["characters"][name] = sum(map(len, of_source))
        found["held_out" if name in HELD_OUT else "train"] += of_source
    if missing := set(HELD_OUT) - facts["characters"].keys():
        raise UserError(f"{log} lacks the held-out sources {', '.join(sorted(missing))}; build the whole tier")
    # Evaluations read the first tokens of the held-out text: in order of hash, these are a fair sample of its sources.
    found["held_out"].sort(key=lambda document: hashlib.blake2b(document.encode(), digest_size=8).digest())
    tokenizer = load_tokenizer(str(data / "tokenizer.json"), EOS)
    for split, shards in SPLITS.items():
        lines = "".join(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in found[split])
        aside = data / f"{split}.jsonl"
        aside.write_text(lines, encoding="utf-8")
        prepare(path=str(aside), out=str(data / split), tokenizer=tokenizer, shards=shards, workers=workers)
        aside.unlink()
    (data / "sources.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def pack(data: pathlib.Path, parts: pathlib.Path) -> list[pathlib.Path]:
    """Compresses `data`: a part for each shard, and one for each other file."""
    parts.mkdir(parents=True)
    jobs: list[tuple[pathlib.Path, pathlib.Path]] = []
    for split in SPLITS:
        index = load_index(data / split)
        if index.dtype != "uint16":
            raise UserError(f"{data / split} holds ids of {index.dtype}, and parts are for uint16")
        names = [*(s.file for s in index.shards), INDEX_NAME, index.lengths_file, index.hashes_file]
        jobs += [(data / split / name, parts / f"{split}.{name}.xz") for name in names]
    jobs += [(data / name, parts / f"{name}.xz") for name in OTHERS]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # xz works outside the lock
        digests = list(pool.map(_compress, *zip(*jobs, strict=True)))
    files = [part for _, part in jobs]
    manifest = {part.name: digest for part, digest in zip(files, digests, strict=True)}
    (parts / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return [*files, parts / MANIFEST]


def unpack(parts: pathlib.Path, data: pathlib.Path, *, workers: int) -> None:
    """Makes `data` from its parts; nothing is done twice.

    Raises:
      UserError: a part is missing or is not what was packed.
    """
    done = data / "sources.json"  # written last
    if done.is_file():
        return
    shutil.rmtree(data, ignore_errors=True)
    for split in SPLITS:
        (data / split).mkdir(parents=True)
    manifest = json.loads((parts / MANIFEST).read_text(encoding="utf-8"))

    def restore(name: str, target: pathlib.Path) -> None:
        target.write_bytes(_verified(parts / name, manifest))

    for split in SPLITS:
        for name in (INDEX_NAME, LENGTHS_NAME, HASHES_NAME):
            restore(f"{split}.{name}.xz", data / split / name)
        content = json.loads((data / split / INDEX_NAME).read_text(encoding="utf-8"))
        lengths = np.load(data / split / LENGTHS_NAME)
        ends = np.cumsum([shard["documents"] for shard in content["shards"]])[:-1]
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            jobs = [
                pool.submit(
                    _write_shard, parts / f"{split}.{shard['file']}.xz", manifest, data / split / shard["file"], part
                )
                for shard, part in zip(content["shards"], np.split(lengths, ends), strict=True)
            ]
            for shard, job in zip(content["shards"], jobs, strict=True):
                shard["bytes"] = job.result()  # a file's, not its content's: it may differ between library versions
        (data / split / INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(_restored_tokenizer(restore, data), data / split / "tokenizer.json")
        load_index(data / split)
    restore("sources.json.xz", done)


def _restored_tokenizer(restore: Callable[[str, pathlib.Path], None], data: pathlib.Path) -> pathlib.Path:
    file = data / "tokenizer.json"
    if not file.is_file():
        restore("tokenizer.json.xz", file)
    return file


def _compress(source: pathlib.Path, part: pathlib.Path) -> str:
    """Writes a part; returns the hash of what it holds."""
    if source.suffix == ".array_record":
        index = load_index(source.parent)
        tokens = ShardTokens(source.parent, index)
        before = itertools.takewhile(lambda shard: shard.file != source.name, index.shards)
        start = sum(shard.documents for shard in before)
        count = next(shard.documents for shard in index.shards if shard.file == source.name)
        content = np.concatenate([tokens.document(i) for i in range(start, start + count)]).astype("<u2").tobytes()
        # Position and literals by pairs of bytes.
        filters = [{"id": lzma.FILTER_LZMA2, "preset": _HARDEST, "lc": 0, "lp": 1, "pb": 1}]
        part.write_bytes(lzma.compress(content, filters=filters))
    else:
        content = source.read_bytes()
        part.write_bytes(lzma.compress(content, preset=_HARDEST))
    return _digest(content)


def _write_shard(part: pathlib.Path, manifest: dict[str, str], target: pathlib.Path, lengths: np.ndarray) -> int:
    """Writes a shard, a record for each document as `prepare` does; returns its size in bytes."""
    from array_record.python.array_record_module import ArrayRecordWriter

    content = _verified(part, manifest)
    writer = ArrayRecordWriter(str(target), WRITER_OPTIONS)
    start = 0
    for length in lengths.tolist():
        writer.write(content[start : start + 2 * length])
        start += 2 * length
    writer.close()
    return target.stat().st_size


def _verified(part: pathlib.Path, manifest: dict[str, str]) -> bytes:
    try:
        content = lzma.decompress(part.read_bytes())
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"the part {part} cannot be read ({error}); carry it again") from None
    if manifest.get(part.name) != _digest(content):
        raise UserError(f"the part {part} is not the one that was packed; carry it again")
    return content


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@command
def main(arguments: list[str] | None = None) -> None:
    """Runs a command; wrong input is one line on standard error and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m results.replication.corpus", description="The replication's text.")
    actions = parser.add_subparsers(dest="action", required=True)
    for action, names in (("build", "text log gguf data"), ("pack", "data parts"), ("unpack", "parts data")):
        p = actions.add_parser(action)
        for name in names.split():
            p.add_argument(name, type=pathlib.Path)
        p.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    o = parser.parse_args(arguments)
    if o.action == "pack":
        files = pack(o.data, o.parts)
        print(f"{len(files)} files, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB")
        return
    if o.action == "build":
        build(o.text, o.log, o.gguf, o.data, o.workers)
    else:
        unpack(o.parts, o.data, workers=o.workers)
    for split in SPLITS:
        index = load_index(o.data / split)
        print(f"{split}: {index.documents:,} documents, {index.tokens:,} tokens, {index.dtype}")


if __name__ == "__main__":
    sys.exit(main())
