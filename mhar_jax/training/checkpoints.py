"""Checkpoints of a run: Orbax, asynchronous, each whole or not there, each verified when it is read.

`checkpoints/STEP` holds four items: `params`, `rest` (optimizer, averaged weights, step, RNG), `data` (the state of the
data iterator) and `meta` (config, data fingerprint, and a checksum of every array).
"""

import json
import logging
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from mhar_jax.config.load import differences, make_config, to_dict
from mhar_jax.config.schema import Config
from mhar_jax.errors import UserError

_log = logging.getLogger("mhar_jax")
_FORMAT = 1


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, run_dir: str | pathlib.Path, *, keep: int = 3):
        """Raises UserError if the directory cannot be written."""
        self.directory = pathlib.Path(run_dir).absolute() / "checkpoints"
        self._pending: int | None = None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            step_prefix=None,
            create=True,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        try:
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        except (OSError, ValueError) as error:
            raise UserError(f"checkpoint directory {self.directory} cannot be used: {_line(error)}") from None

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: dict[str, Any], config: Config, data_state: Any, data_fingerprint: str) -> None:
        """Starts to save; returns once the arrays are copied out of the devices.

        Raises:
          UserError: this or the save before it could not be written (disk full, permission).
        """
        step = int(state["step"])
        rest = {k: v for k, v in state.items() if k != "params"}
        meta = {
            "format": _FORMAT,
            "config": json.loads(json.dumps(to_dict(config))),
            "data_fingerprint": data_fingerprint,
            "checksums": checksums(state),
        }
        self.wait()
        self._pending = step
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state["params"]),
                    rest=ocp.args.StandardSave(rest),
                    data=ocp.args.JsonSave(data_state),
                    meta=ocp.args.JsonSave(meta),
                ),
            )
        except Exception as error:  # tensorstore and Orbax raise many types for a failed write
            raise self._failed(error) from None

    def wait(self) -> None:
        """Until what was started is on disk.

        Raises:
          UserError: it could not be written; the checkpoints before it are whole.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from None
        self._pending = None

    def close(self) -> None:
        """Waits and releases threads."""
        self.wait()
        self._manager.close()

    def restore(
        self, shapes: dict[str, Any], config: Config, data_fingerprint: str
    ) -> tuple[dict[str, Any], Any] | None:
        """The newest whole checkpoint as (state, data state), or None where there is none.

        A checkpoint that cannot be read, or whose arrays do not match their checksums, is skipped with a warning for
        the one before it.

        Raises:
          UserError: a readable checkpoint is of another config or of other data, or none of those present is readable.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                meta = self._meta(step)
                _check_meta(meta)
            except Exception as error:
                _warn_skipped(self.directory / str(step), error)
                continue
            if changed := differences(meta["config"], config):
                raise UserError(
                    f"run_dir {self.directory.parent} holds a checkpoint of another config ({'; '.join(changed)}); "
                    "use another run_dir, or set these fields back"
                )
            if meta["data_fingerprint"] != data_fingerprint:
                raise UserError(
                    f"run_dir {self.directory.parent} holds a checkpoint trained on other data (fingerprint "
                    f"{meta['data_fingerprint']}, now {data_fingerprint}); use another run_dir or the same text"
                )
            try:
                state, data_state = self._read(step, shapes)
                _check_sums(state, meta["checksums"])
            except Exception as error:
                _warn_skipped(self.directory / str(step), error)
                continue
            return state, data_state
        if steps:
            raise UserError(
                f"none of the checkpoints in {self.directory} can be read (steps {', '.join(map(str, steps))}); "
                "move the directory away to start again"
            )
        return None

    def _read(self, step: int, shapes: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        rest = {k: v for k, v in shapes.items() if k != "params"}
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(shapes["params"]),
                rest=ocp.args.StandardRestore(rest),
                data=ocp.args.JsonRestore(),
            ),
        )
        # The checkpoint library's buffers may not be donated; a copy by the compiler may.
        state = jax.tree.map(jnp.copy, {"params": restored["params"], **restored["rest"]})
        return state, restored["data"]

    def _meta(self, step: int) -> Mapping[str, Any]:
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def _failed(self, error: Exception) -> UserError:
        self._manager.reload()
        whole = [s for s in self.steps() if s != self._pending]
        kept = f"the checkpoint of step {whole[-1]} is whole" if whole else "there is no earlier checkpoint"
        return UserError(
            f"the checkpoint of step {self._pending} could not be written to {self.directory}: {_line(error)}; {kept}"
        )


def read_params(run_dir: pathlib.Path) -> tuple[Config, int, Any]:
    """Config, step and parameters (the averaged ones where the run keeps them) of the newest whole checkpoint.

    Raises:
      UserError: there is none.
    """
    directory = run_dir.absolute() / "checkpoints"
    steps = sorted((int(p.name) for p in directory.glob("*") if re.fullmatch(r"\d+", p.name)), reverse=True)
    for step in steps:
        try:
            meta = json.loads((directory / str(step) / "meta" / "metadata").read_text())
            _check_meta(meta)
            config = make_config(meta["config"])
            item = "rest" if config.optimizer.ema else "params"
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
                tree = reader.restore(directory / str(step) / item)
            params = tree["ema"] if config.optimizer.ema else tree
            prefix = "ema" if config.optimizer.ema else "params"
            _check_sums({prefix: params}, {k: v for k, v in meta["checksums"].items() if k.startswith(f"{prefix}/")})
        except Exception as error:
            _warn_skipped(directory / str(step), error)
            continue
        return config, step, params
    raise UserError(f"{run_dir} holds no readable checkpoint (looked for {directory}/STEP)")


def checksums(state: Any) -> dict[str, int]:
    """A 32-bit number for each array, by path: a sum of its bits weighted by position, modulo 2³².

    The sum does not depend on how the array is sharded, so that a checkpoint can be verified on another mesh.
    """
    sums = jax.device_get(_checksums(state))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): int(value)
        for path, value in jax.tree_util.tree_leaves_with_path(sums)
    }


@jax.jit
def _checksums(state: Any) -> Any:
    def one(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
        position = jnp.zeros(x.shape, jnp.uint32)
        for axis, size in enumerate(x.shape):
            position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        return jnp.sum(bits.astype(jnp.uint32) * (2 * position + 1), dtype=jnp.uint32)

    return jax.tree.map(one, state)


def _check_sums(state: Any, expected: Mapping[str, int]) -> None:
    found = checksums(state)
    if wrong := sorted(k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k)):
        raise ValueError(f"{len(wrong)} arrays differ from their checksums, {wrong[0]} first")


def _check_meta(meta: Any) -> None:
    if not isinstance(meta, Mapping) or meta.get("format") != _FORMAT:
        raise ValueError(f"checkpoint format must be {_FORMAT}")


def _warn_skipped(path: pathlib.Path, error: Exception) -> None:
    _log.warning(
        "skipping checkpoint %s, which is cut short or damaged (%s); trying the one before", path, _line(error)
    )


def _line(error: BaseException) -> str:
    """The first words of an error, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "…"


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
