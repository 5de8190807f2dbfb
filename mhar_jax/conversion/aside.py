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

    What a killed process left beside `out` is removed first.

    Raises:
      UserError: `out` is there already, or the directory cannot be written.
    """
    out = out.absolute()
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UserError(f"{out} is there already; name a directory that is not, or move it away")
    aside = out.parent / f".{out.name}.unfinished-{os.getpid()}"
    with writing("the directory", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in out.parent.glob(f".{glob.escape(out.name)}.unfinished-*"):
            if not _is_running(left.name):
                shutil.rmtree(left)
        aside.mkdir()
    try:
        with writing("files", out):
            yield aside
            if out.exists():
                out.rmdir()
            aside.rename(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


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
