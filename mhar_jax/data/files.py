"""Which files a `data.path` means, and what is in them."""

import glob
import os
from importlib import resources
from pathlib import Path

from mhar_jax.errors import UserError

SUFFIXES = {
    "text": (".txt", ".text"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}
INDEX_NAME = "index.json"  # marks a directory of prepared shards
_KNOWN = ", ".join(s for group in SUFFIXES.values() for s in group)


def embedded_text() -> Path:
    """The text that is shipped with the package (texts/ORIGIN.md)."""
    return Path(str(resources.files("mhar_jax.data").joinpath("texts", "austen.txt")))


def is_prepared(path: str | None, file_format: str) -> bool:
    """Whether the path is a directory of prepared shards.

    Raises:
      UserError: it is not, and the format says it must be.
    """
    prepared = path is not None and os.path.isfile(os.path.join(path, INDEX_NAME))
    if file_format == "tokens" and not prepared:
        raise UserError(
            f"data.path: {path} is no directory of prepared shards (it holds no {INDEX_NAME}); "
            "make one with `python -m mhar_jax.data prepare`"
        )
    return prepared and file_format in ("auto", "tokens")


def list_files(path: str | None, file_format: str) -> list[tuple[Path, str]]:
    """The files of a path with the format of each ("text", "jsonl" or "parquet"), sorted by name.

    A directory means the files below it whose suffix is known (for one format: of that format), without hidden ones.

    Raises:
      UserError: nothing there, or a file of an unknown type.
    """
    if path is None:
        return [(embedded_text(), "text")]
    if os.path.isdir(path):
        formats = SUFFIXES if file_format == "auto" else {file_format: SUFFIXES[file_format]}
        found = [
            (file, name)
            for file in _walk(Path(path))
            for name, suffixes in formats.items()
            if file.suffix.lower() in suffixes
        ]
        if not found:
            wanted = _KNOWN if file_format == "auto" else ", ".join(SUFFIXES[file_format])
            raise UserError(f"data.path: the directory {path} holds no {wanted} file")
        return found
    if os.path.exists(path):
        files = [Path(path)]
    elif glob.has_magic(path):
        files = [Path(p) for p in sorted(glob.glob(path, recursive=True)) if os.path.isfile(p)]
        if not files:
            raise UserError(f"data.path: no file matches {path}")
    else:
        raise UserError(f"data.path: there is no file or directory {path}")
    return [(file, _format_of(file) if file_format == "auto" else file_format) for file in files]


def _walk(directory: Path) -> list[Path]:
    files = []
    for root, directories, names in os.walk(directory):
        directories[:] = [d for d in directories if not d.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda file: file.relative_to(directory).as_posix())


def _format_of(file: Path) -> str:
    for name, suffixes in SUFFIXES.items():
        if file.suffix.lower() in suffixes:
            return name
    raise UserError(
        f"data.path: cannot tell the type of {file}; known are {_KNOWN} and directories of prepared shards "
        "(decompress .gz and .zst first), or set data.format"
    )
