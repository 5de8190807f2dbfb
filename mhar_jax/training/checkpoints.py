"""Checkpoints of a run: Orbax, asynchronous, each whole or not there, each verified when it is read.

`checkpoints/STEP` holds the items `params`, `ema` (where the run averages), `rest` (optimizer, step, RNG), `data` (the
state of the data iterator) and `meta` (config, data fingerprint, and checksums of everything).
"""

import contextlib
import json
import logging
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from mhar_jax.config.load import differences, make_config, to_dict
from mhar_jax.config.schema import Config
from mhar_jax.data.fingerprints import what_differs
from mhar_jax.distributed import tells_of_a_lost_peer
from mhar_jax.errors import UserError, one_line
from mhar_jax.training.abandon import abandon_save
from mhar_jax.training.checksums import examine, json_digest

_log = logging.getLogger("mhar_jax")
_FORMAT = 1
# Seconds that Orbax waits for a save at most. It reads the wall clock, which may jump by hours while a save is on its
# way; a save that hangs is the business of `distributed`, and one that failed is not waited for (`abandon`).
_SAVE_TIMEOUT = 7 * 24 * 3600


class Restored(NamedTuple):
    """What a run continues from."""

    step: int
    state: dict[str, Any]
    data: Any  # state of the data iterator


class Checkpoints:
    """The checkpoints of one run directory; a context manager that waits for the last save."""

    def __init__(self, run_dir: pathlib.Path, *, keep: int = 3):
        """Raises UserError if the directory cannot be written."""
        self.directory = pathlib.Path(os.path.realpath(run_dir)) / "checkpoints"  # Orbax refuses `..`
        self._started: int | None = None  # step of the save that may not be finished
        for unfinished in sorted(self.directory.glob("*.orbax-checkpoint-tmp*")):
            step = unfinished.name.partition(".")[0]
            _log.warning("the save of step %s was not finished, so it is dropped for the one before it", step)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(timeout_secs=_SAVE_TIMEOUT),
        )
        try:
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        except (OSError, ValueError) as error:
            raise UserError(f"checkpoint directory {self.directory} cannot be used: {one_line(error)}") from None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Waits, so that a save that was started is whole; an error that is on its way already is the one told."""
        try:
            self.wait()
        except UserError as error:
            if kind is None:
                raise
            _log.warning("%s", error)
        finally:
            try:
                self._manager.close()
            except Exception as error:  # a failed save is raised again; it has been told
                _log.debug("closing the checkpoints: %s", error)

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, whole or damaged, oldest first."""
        return list_steps(self.directory)

    def save(self, state: dict[str, Any], config: Config, data_state: Any, data_fingerprint: str) -> None:
        """Starts to save; returns once the arrays are copied out of the devices.

        Raises:
          UserError: this save or the one before it could not be written (disk full, permission), or the state holds
            values that are not finite.
        """
        step = int(jax.device_get(state["step"]))
        examined = examine(state)
        if not examined.finite:
            raise UserError(f"the state after step {step} holds values that are not finite, so it is not saved")
        meta = checkpoint_meta(step, to_dict(config), data_fingerprint, data_state, examined.checksums)
        arrays = {name: ocp.args.StandardSave(tree) for name, tree in _items(state).items()}
        self.wait()
        self._started = step
        try:
            saved = self._manager.save(
                step,
                args=ocp.args.Composite(
                    **arrays,
                    data=ocp.args.JsonSave(data_state),
                    meta=ocp.args.JsonSave(meta),
                ),
            )
        except Exception as error:  # tensorstore and Orbax raise many types for a failed write
            raise self._failed(error) from None
        if not saved:
            raise UserError(f"the checkpoint of step {step} was not written: {self.directory} holds a later one")

    def wait(self) -> None:
        """Until what was started is on disk.

        Raises:
          UserError: it could not be written; the checkpoints before it are whole.
        """
        if self._started is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from None
        self._started = None

    def restore(self, shapes: dict[str, Any], config: Config, data_fingerprint: str) -> Restored | None:
        """The newest whole checkpoint, or None where there is none.

        A checkpoint that cannot be read, or does not match its checksums, is skipped with a warning for the one before
        it, and renamed to STEP.damaged so that the step can be saved again.

        Raises:
          UserError: a readable checkpoint is of another config or of other data, or none of those present is readable.
        """
        skipped: list[int] = []
        for step, meta in self._metas(skipped):
            if changed := differences(meta["config"], config):
                raise UserError(
                    f"run_dir {self.directory.parent} holds a checkpoint of another config ({'; '.join(changed)}); "
                    "use another run_dir, or set these fields back"
                )
            if meta["data_fingerprint"] != data_fingerprint:
                raise UserError(
                    f"run_dir {self.directory.parent} holds a checkpoint trained on other data (fingerprint "
                    f"{meta['data_fingerprint']}, now {data_fingerprint}"
                    f"{what_differs(meta['data_fingerprint'], data_fingerprint)}); use another run_dir or the same text"
                )
            with _damage_is_skipped(self.directory / str(step), skipped, step):
                items = {
                    name: _read_arrays(self.directory / str(step) / name, tree, name, meta["checksums"])
                    for name, tree in _items(shapes).items()
                }
                with _together():
                    data = _read_json(self.directory / str(step) / "data")
                if json_digest(data) != meta["data_digest"]:
                    raise ValueError("the state of the data differs from its checksum")
                self._set_aside(skipped)
                return Restored(step, _state(items), data)
        if skipped:
            raise UserError(
                f"none of the checkpoints in {self.directory} can be read (steps "
                f"{', '.join(map(str, sorted(skipped)))}); move the directory away to start again"
            )
        return None

    def _metas(self, skipped: list[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Step and meta, newest first; unreadable ones are warned about and added to `skipped`."""
        for step in reversed(self.steps()):
            meta = None
            with _damage_is_skipped(self.directory / str(step), skipped, step), _together():
                meta = read_meta(self.directory / str(step))
            if meta is not None:
                yield step, meta

    def _set_aside(self, damaged: list[int]) -> None:
        """Makes room for these steps to be saved again; nothing is deleted."""
        if not damaged:
            return
        if jax.process_index() == 0:
            for step in damaged:
                source, target = self.directory / str(step), self.directory / f"{step}.damaged"
                number = 1
                while target.exists():
                    number += 1
                    target = self.directory / f"{step}.damaged-{number}"
                try:
                    source.rename(target)
                except OSError as error:
                    raise UserError(
                        f"the damaged checkpoint {source} is in the way and cannot be renamed: {error.strerror}"
                    ) from None
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("damaged checkpoints are set aside")
        self._manager.reload()

    def _failed(self, error: Exception) -> Exception:
        if jax.process_count() > 1 and not isinstance(error, OSError) and tells_of_a_lost_peer(error):
            return error  # nothing is wrong with the disk; `distributed` says what is
        step, self._started = self._started, None
        if jax.process_count() == 1:  # several end without waiting for their threads
            abandon_save()
        if jax.process_index() == 0:
            self._remove_unfinished(step)
        whole = [s for s in self.steps() if s != step]
        kept = f"the checkpoint of step {whole[-1]} is whole" if whole else "there is no earlier checkpoint"
        return UserError(
            f"the checkpoint of step {step} could not be written to {self.directory}: {_reason(error)}; {kept}"
        )

    def _remove_unfinished(self, step: int | None) -> None:
        """Makes room: again and again, since other arrays of the failed save may still be on their way."""
        for _ in range(50):
            time.sleep(0.02)
            unfinished = list(self.directory.glob(f"{step}.*tmp*"))
            if not unfinished:
                return
            for path in unfinished:
                shutil.rmtree(path, ignore_errors=True)


def read_params(run_dir: pathlib.Path, shapes_of: Callable[[Config], Any]) -> tuple[Config, int, Any]:
    """Config, step and parameters (the averaged ones where the run keeps them) of the newest whole checkpoint.

    Args:
      run_dir: a run directory.
      shapes_of: from the config to the parameters' ShapeDtypeStructs, which may say how to shard them.

    Raises:
      UserError: there is none.
    """
    directory = pathlib.Path(os.path.realpath(run_dir)) / "checkpoints"
    for step in reversed(list_steps(directory)):
        with _damage_is_skipped(directory / str(step), [], step):
            meta = read_meta(directory / str(step))
            config = make_config(meta["config"])
            shapes = shapes_of(config)
            name = "params"
            if config.optimizer.ema:
                name = "ema"
                shapes = jax.tree.map(lambda s: s.update(dtype=jnp.float32), shapes)
            return config, step, _read_arrays(directory / str(step) / name, shapes, name, meta["checksums"])
    raise UserError(f"{run_dir} holds no readable checkpoint (looked for {directory}/STEP)")


def list_steps(directory: pathlib.Path) -> list[int]:
    """Steps of the checkpoints in `checkpoints/`, oldest first; other names are not ours."""
    found = directory.glob("*") if directory.is_dir() else ()
    return sorted(int(p.name) for p in found if re.fullmatch(r"0|[1-9]\d*", p.name))


def checkpoint_meta(
    step: int, config: dict[str, Any], data_fingerprint: str, data_state: Any, checksums: Mapping[str, int]
) -> dict[str, Any]:
    """The meta of a checkpoint, as `read_meta` checks it."""
    meta = {
        "format": _FORMAT,
        "step": step,
        "config": config,
        "data_fingerprint": data_fingerprint,
        "data_digest": json_digest(data_state),
        "checksums": dict(checksums),
    }
    return {**meta, "digest": json_digest(meta)}


def read_meta(checkpoint: pathlib.Path) -> Mapping[str, Any]:
    """The meta of a checkpoint.

    Raises:
      ValueError, OSError: it is damaged, or of another step or format.
    """
    meta = _read_json(checkpoint / "meta")
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise ValueError(f"the format of its meta is not {_FORMAT}")
    if meta.pop("digest", None) != json_digest(meta):
        raise ValueError("its meta differs from its checksum")
    if str(meta["step"]) != checkpoint.name:
        raise ValueError(f"it is of step {meta['step']}")
    return meta


def _items(state: Mapping[str, Any]) -> dict[str, Any]:
    """The items that the arrays of a state are saved as."""
    alone = {name: state[name] for name in ("params", "ema") if name in state}
    return {**alone, "rest": {k: v for k, v in state.items() if k not in alone}}


def _state(items: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_items`."""
    return {**items["rest"], **{k: v for k, v in items.items() if k != "rest"}}


def _read_json(item: pathlib.Path) -> Any:
    return json.loads((item / "metadata").read_text(encoding="utf-8"))


def _read_arrays(item: pathlib.Path, shapes: Any, name: str, checksums: Mapping[str, int]) -> Any:
    """The arrays of an item, sharded as `shapes` says, seen to match the checksums of the state they are part of."""
    with _together(), _one_error_only(), _reader() as reader:
        leaves, structure = jax.tree.flatten(reader.restore(item, args=ocp.args.StandardRestore(shapes)))
    for i, leaf in enumerate(leaves):
        leaves[i] = jnp.copy(leaf)  # the checkpoint library's buffers cannot be donated; one at a time, to save memory
    tree = jax.tree.unflatten(structure, leaves)
    found = examine(tree if name == "rest" else {name: tree}).checksums
    if wrong := sorted(path for path, value in found.items() if checksums.get(path) != value):
        raise ValueError(f"{len(wrong)} arrays differ from their checksums, {wrong[0]} first")
    return tree


def _reader() -> ocp.Checkpointer:
    """Reads this process's part and waits for no other: one whose part is damaged would never come (`_together`)."""
    if jax.process_count() == 1:
        return ocp.Checkpointer(ocp.StandardCheckpointHandler())
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"reader-{own}"
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """What fails in one process fails in all of them, so that they go on with the same checkpoint."""
    if jax.process_count() == 1:
        yield
        return
    from jax.experimental import multihost_utils

    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    others = multihost_utils.process_allgather(np.array([failed is not None]))
    if failed is not None:
        raise failed
    if others.any():
        raise ValueError(f"process {int(np.flatnonzero(others.ravel())[0])} cannot read it")


@contextlib.contextmanager
def _one_error_only() -> Iterator[None]:
    """When a read fails, the others are cancelled, and each would print a traceback of its own: at once through
    asyncio's log, or later, when it ends and finds its event loop closed. The first error is raised anyway."""
    logger = logging.getLogger("asyncio")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except BaseException:
        _ignore_late_reads()
        raise
    finally:
        logger.setLevel(level)


def _ignore_late_reads() -> None:
    before = sys.unraisablehook
    if isinstance(before, _LateReads):
        return
    sys.unraisablehook = _LateReads(before)


class _LateReads:
    """A hook for exceptions that nobody can catch, which keeps those of late reads to itself."""

    def __init__(self, before: Callable[[Any], Any]):
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and "Event loop is closed" in str(error)):
            self._before(unraisable)


@contextlib.contextmanager
def _damage_is_skipped(checkpoint: pathlib.Path, skipped: list[int], step: int) -> Iterator[None]:
    """Warns and goes on where reading fails because of what is in the files.

    Not where the memory of host or device does not suffice, nor where the config is of another version of this program:
    these say nothing about the files.
    """
    try:
        yield
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # damaged files make tensorstore and Orbax raise many types
        _log.warning(
            "skipping checkpoint %s, which is cut short or damaged (%s); trying the one before",
            checkpoint,
            _reason(error),
        )
        skipped.append(step)


def _reason(error: Exception) -> str:
    """What an error of Orbax or TensorStore says, without its page of details: the operating system's words if any."""
    if found := re.search(r"os.error(?:_code=')? ?(\d+)", str(error), re.IGNORECASE):
        return os.strerror(int(found[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(str(error).split(" See full TensorStore details")[0] or type(error).__name__)


def merge_data_states(local: Any) -> Any:
    """One state of the data for any number of processes, from each process's own."""
    if jax.process_count() == 1:
        return local
    from jax.experimental import multihost_utils

    from mhar_jax.data.state import merge_states

    text = np.frombuffer(json.dumps(local).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([text.size]))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: text.size] = text
    gathered = multihost_utils.process_allgather(padded).reshape(jax.process_count(), -1)
    return merge_states(
        [json.loads(bytes(row[: int(size)]).decode()) for row, size in zip(gathered, sizes.ravel(), strict=True)]
    )
