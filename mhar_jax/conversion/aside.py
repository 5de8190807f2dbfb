"""A directory that is there whole or not at all."""

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from mhar_jax.errors import UserError, writing

_LOCK = ".unfinished.lock"  # in the directory; its writer holds it locked


@contextlib.contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A new directory beside `out`, which becomes `out` when the block ends, and is removed when it fails.

    Its name is nobody else's, and a file in it is locked (flock) as long as its writer lives, on whatever host of a
    file system that shares locks: what killed writers left beside `out` is what can be locked, and is removed first.
    Parents that were made for `out` go when the block fails.

    Raises:
      UserError: `out` is there already, its path is not UTF-8, the directory cannot be written, or somebody else took
        it away or wrote `out` meanwhile.
    """
    out = _plain(out)
    made: list[Path] = []
    aside: Path | None = None
    with contextlib.ExitStack() as held:
        try:
            with writing("the directory", out):
                if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
                    raise UserError(f"{out} is there already; name a directory that is not, or move it away")
                for parent in reversed(out.parents):
                    if not parent.exists():
                        with contextlib.suppress(FileExistsError):  # somebody else's now
                            parent.mkdir()
                            made.append(parent)
                for left in out.parent.glob(f".{glob.escape(out.name)}.unfinished-*"):
                    _remove_left_over(left, out)
                aside = _new_name(out)
                aside.mkdir()
                held.enter_context(_locked_new(aside / _LOCK))
                mine = _identity(aside)
            with writing("files", out):
                yield aside
                if _identity(aside) != mine:
                    raise UserError(f"{out} was not written: somebody else removed {aside} while it was being written")
                _become(aside, out)
                with contextlib.suppress(OSError):
                    (out / _LOCK).unlink()
        except BaseException:
            if aside is not None:  # the name is random: whatever is there is ours
                shutil.rmtree(aside, ignore_errors=True)
            for parent in reversed(made):
                with contextlib.suppress(OSError):  # somebody else's files are in it by now
                    parent.rmdir()
            raise


def _plain(path: Path) -> Path:
    """The absolute path without `..`, which TensorStore refuses; a link at its end is left to be seen."""
    plain = Path(os.path.realpath(path))
    if path.name not in ("", ".."):
        plain = Path(os.path.realpath(path.parent)) / path.name
    try:
        str(plain).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"the path to write to must be UTF-8, got {str(plain)!r}") from None
    return plain


def _become(aside: Path, out: Path) -> None:
    try:
        aside.rename(out)  # in place of an empty directory, too
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise UserError(f"{out} was not written: something else has come to be there meanwhile") from None
        raise


def _new_name(out: Path) -> Path:
    host = re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())[:16]  # for who finds it; the digits make it unique
    return out.parent / f".{out.name}.unfinished-{host}-{secrets.token_hex(8)}"


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _locked_new(path: Path) -> Iterator[None]:
    """A new file, locked. Where the file system has no locks nobody can take it, and nothing is left over."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_left_over(left: Path, out: Path) -> None:
    """Removes a directory whose lock nobody holds.

    It gets another name first. If its writer is alive after all (a file system that does not share locks between
    hosts), the writer finds it gone when it wants to rename it: what is half removed never becomes `out`.
    """
    try:
        descriptor = os.open(left / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # not ours, another user's, or about to be locked
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        removed = _new_name(out)
        left.rename(removed)
    except OSError:  # its writer is alive, there are no locks, or somebody else removes it
        return
    else:
        for path in removed.iterdir():
            if path.name == _LOCK:  # last: without it nobody would finish this
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        shutil.rmtree(removed)
    finally:
        os.close(descriptor)
