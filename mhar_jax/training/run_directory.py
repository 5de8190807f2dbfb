"""A run directory's files beside metrics and checkpoints: whether it may be used, and how they are written and read."""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator

from mhar_jax.config.load import make_config, read_file
from mhar_jax.errors import UserError, writing
from mhar_jax.training.metrics import holds_metrics

_FILES = ("config.yaml", "data.json", "metrics.jsonl", "routing.png")


def prepare_run_dir(path: str, *, write: bool = True) -> pathlib.Path:
    """The run directory, made and seen to be writable.

    Raises:
      UserError: it cannot be made or written, or holds files of these names that no run wrote.
    """
    run_dir = pathlib.Path(path).expanduser()
    if not write:
        return run_dir
    probe = run_dir / f".writable-{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"?")
        probe.unlink()
        _check_own(run_dir)
    except (OSError, ValueError) as error:  # ValueError: a NUL character; and our own
        if isinstance(error, UserError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"run_dir {run_dir} cannot be written: {reason}; choose another run_dir") from None
    return run_dir


@contextlib.contextmanager
def unless_it_fails(path: str, *, write: bool = True) -> Iterator[Callable[[], None]]:
    """Inside, a run begins; where that fails, what it wrote so far is taken away again. Called: it has begun.

    Only what was not there before goes, and never a checkpoint.
    """
    run_dir = pathlib.Path(path).expanduser()
    new = lambda paths: [p for p in paths if not os.path.exists(p)]  # also False where nothing may be looked at
    made, files = new((run_dir, *run_dir.parents)), new(map(run_dir.joinpath, _FILES))
    begun: list[bool] = []
    try:
        yield lambda: begun.append(True)
    except BaseException:
        if write and not begun:
            for file in files:
                with contextlib.suppress(OSError, ValueError):
                    file.unlink(missing_ok=True)
            for directory in (run_dir / "checkpoints", *made):
                with contextlib.suppress(OSError, ValueError):  # not empty, or never made
                    directory.rmdir()
        raise


def _check_own(run_dir: pathlib.Path) -> None:
    """Files that a run would overwrite must be a run's."""
    config, metrics, data = run_dir / "config.yaml", run_dir / "metrics.jsonl", run_dir / "data.json"
    foreign = None
    if config.is_file():
        try:
            make_config(read_file(config))
        except UserError:
            foreign = config
    if metrics.is_file() and not holds_metrics(metrics):
        foreign = metrics
    if data.is_file() and read_fingerprint(run_dir) is None:
        foreign = data
    if foreign is not None:
        raise UserError(f"run_dir {run_dir} holds a {foreign.name} that no run wrote; choose another run_dir")


def read_fingerprint(run_dir: pathlib.Path) -> str | None:
    """Of the data that a run reads; None where no readable `data.json` says."""
    return _read_data(run_dir, "fingerprint")


def read_held_out_fingerprint(run_dir: pathlib.Path) -> str | None:
    """Of a held-out text of its own; None without one, or where `data.json` does not say."""
    return _read_data(run_dir, "held_out_fingerprint")


def _read_data(run_dir: pathlib.Path, name: str) -> str | None:
    try:
        found = json.loads((run_dir / "data.json").read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if found is None else str(found)


def write_file(path: pathlib.Path, what: str, text: str) -> None:
    """Writes a file whole or not at all.

    Raises:
      UserError: it cannot be written.
    """
    aside = path.with_name(f"{path.name}.tmp")
    with writing(what, path):
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
