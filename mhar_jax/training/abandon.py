"""Ends the threads of a save that failed, which Orbax leaves behind."""

import inspect
import logging
import threading
import time
from collections.abc import Callable
from types import CoroutineType
from typing import Any

from orbax.checkpoint._src.futures import future, signaling_client

_log = logging.getLogger("mhar_jax")


def abandon_save(patience: float = 10.0) -> None:
    """Ends every thread of Orbax's that waits for a directory which will not be made.

    Orbax 0.12 starts one thread for each part of a save, and each waits for the word that its directory is there. Where
    making it failed (disk full, no permission), nobody gives that word: they wait until their timeout, and the
    interpreter waits for them when it ends. Here they are told to do nothing, and then given the word. Those that are
    at work already are left alone: they end by themselves. For a run of one process only: between several the word
    would reach the others too.

    Args:
      patience: seconds to wait for the threads at most.
    """
    deadline = time.monotonic() + patience
    while left := [t for t in threading.enumerate() if isinstance(t, future._SignalingThread) and _waits(t)]:
        for thread in left:
            thread._cancelled = True
        for thread in left:  # only after all of them are told: none may go on to write
            future.set_signals(thread._receive_signals, operation_id=thread._operation_id)
        for thread in left:
            threading.Thread.join(thread, 0.1)  # their own `join` raises at once, since they are cancelled
            if not thread.is_alive():
                _close_coroutines(getattr(thread, "_target", None))
        if time.monotonic() > deadline:
            _log.warning("%d threads of the failed save have not ended", len(left))
            return


def _waits(thread: future._SignalingThread) -> bool:
    """Whether a thread has not begun: it was told here to do nothing, or a word it waits for has not been given."""
    if thread._cancelled or thread.loop is not None:
        return thread._cancelled
    client = signaling_client.get_signaling_client()
    key = future.AwaitableSignalsContract.get_unique_awaitable_singal_key
    return any(client.key_value_try_get(key(s, thread._operation_id)) is None for s in thread._receive_signals)


def _close_coroutines(work: Callable[[], Any] | None) -> None:
    """Closes what a thread was to run and did not; Python would print a warning for each."""
    for cell in getattr(work, "__closure__", None) or ():
        if inspect.isfunction(cell.cell_contents):
            _close_coroutines(cell.cell_contents)
        elif inspect.iscoroutine(cell.cell_contents):
            _close(cell.cell_contents)


def _close(coroutine: "CoroutineType[Any, Any, Any]") -> None:
    """One that has not begun, and those among its arguments."""
    arguments = list(coroutine.cr_frame.f_locals.values()) if coroutine.cr_frame else []
    coroutine.close()
    for argument in filter(inspect.iscoroutine, arguments):
        _close(argument)
