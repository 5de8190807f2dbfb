"""A directory that is there whole or not at all."""

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mhar_jax.errors import UserError, writing


@contextlib.contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A new directory beside `out`, which becomes `out` when the block ends, and is removed when it fails.

    What a killed process left beside `out` is removed first. Parents that were made for `out` go when the block fails.

    Raises:
      UserError: `out` is there already, or the directory cannot be written.
    """
    out = _plain(out)
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UserError(f"{out} is there already; name a directory that is not, or move it away")
    aside = out.parent / f".{out.name}.unfinished-{os.getpid()}"
    made: list[Path] = []
    try:
        with writing("the directory", out):
            for parent in reversed(out.parents):
                if not parent.exists():
                    parent.mkdir(exist_ok=True)
                    made.append(parent)
            for left in out.parent.glob(f".{glob.escape(out.name)}.unfinished-*"):
                if not _is_running(left.name):
                    shutil.rmtree(left)
            aside.mkdir()
        with writing("files", out):
            yield aside
            if out.exists():
                out.rmdir()
            aside.rename(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        for parent in reversed(made):
            with contextlib.suppress(OSError):  # somebody else's files are in it by now
                parent.rmdir()
        raise


def _plain(path: Path) -> Path:
    """The absolute path without `..`, which TensorStore refuses; a link at its end is left to be seen."""
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


def _is_running(name: str) -> bool:
    number = name.rpartition("-")[2]
    if not number.isdigit():
        return True  # not ours
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
