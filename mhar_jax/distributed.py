"""Several processes as one run: how they find each other, and how the rest end when one of them is gone.

Each process has a thread that tells the others, through the coordinator, that it lives and how far it is. A collective
waits for ever for a process that is gone or stands still; the thread does not, and ends the process with one sentence.
All times are of the monotonic clock, so a jump of the wall clock changes nothing.
"""

import contextlib
import ctypes
import dataclasses
import functools
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from mhar_jax.errors import UserError, one_line

PEER_LOST = 3  # exit code: this process is well, another is not, or did not come; start the same command in all of them

_PREFIX = "mhar_jax/"
_NOT_FOUND = "the processes of the run did not find each other"
_LAST_WORDS = 6.0  # seconds that process 0 stays after a mistake, so that the others can read why
_LOST = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket closed|peer|barrier|unavailable|"
    r"deadline.exceeded|coordination service|heartbeat",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Processes:
    """Where this process stands among those of the run."""

    coordinator: str | None = None  # HOST:PORT of process 0; None: found by JAX (Slurm, Cloud TPU)
    count: int | None = None  # number of processes; None: found by JAX
    index: int | None = None  # of this process, from 0; None: found by JAX
    peer_timeout: float = 60.0  # seconds after which a silent process is taken for gone
    stall_timeout: float = (
        1800.0  # seconds without progress, compilation included, after which a run is taken for stuck
    )


def find_processes(given: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> Processes | None:
    """What options and environment say about the processes of the run; None: this is the only one.

    Options are `coordinator`, `processes`, `process`, `distributed` (auto, on, off), `peer_timeout`, `stall_timeout`.
    Without them JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID count, then a Slurm step of several tasks
    or a TPU slice of several hosts. `distributed=on` leaves the search to JAX.

    Raises:
      UserError: an option that is no number, out of range, or given without the others.
    """
    mode = given.get("distributed", "auto")
    if mode not in ("auto", "on", "off"):
        raise UserError(f"--distributed must be auto, on or off, got {mode!r}")
    times = {name: _number(given, name, float) for name in ("peer_timeout", "stall_timeout") if name in given}
    for name, seconds in times.items():
        if not 1 <= seconds < 1e9:
            raise UserError(f"--{name} must be at least 1 second, got {seconds:g}")
    if mode == "off":
        return None
    explicit = {
        "coordinator": given.get("coordinator") or environment.get("JAX_COORDINATOR_ADDRESS"),
        "count": given.get("processes") or environment.get("JAX_NUM_PROCESSES"),
        "index": given.get("process") or environment.get("JAX_PROCESS_ID"),
    }
    if explicit["count"] is not None and explicit["index"] is not None:
        count, index = (_number({"processes": explicit["count"]}, "processes", int), None)
        index = _number({"process": explicit["index"]}, "process", int)
        if not 0 <= index < count:
            raise UserError(f"--process must be from 0 to --processes - 1 = {count - 1}, got {index}")
        if count == 1:
            return None
        address = explicit["coordinator"]
        found = re.fullmatch(r".+:(\d{1,5})", address or "")
        if not found or not 1 <= int(found[1]) <= 65535:
            raise UserError(
                f"--coordinator must be HOST:PORT of process 0 with a port from 1 to 65535, got {address!r}"
            )
        return Processes(address, count, index, **times)
    if any(given.get(name) for name in ("coordinator", "processes", "process")):
        raise UserError("--coordinator, --processes and --process go together, one of them is missing")
    slurm = environment.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in environment
    tpu = "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    return Processes(**times) if mode == "on" or slurm or tpu else None


def _number(given: Mapping[str, str], name: str, kind: type) -> Any:
    try:
        return kind(given[name])
    except ValueError:
        raise UserError(f"--{name} must be a number, got {given[name]!r}") from None


def tells_of_a_lost_peer(error: BaseException) -> bool:
    """Whether an error, raised wherever the processes meet, says that another of them is gone."""
    return _LOST.search(str(error)) is not None


def _within[T](seconds: float, call: Callable[[], T]) -> T:
    """What a call of the coordination service returns; JAX would wait for its answer far longer.

    Raises:
      TimeoutError: it has not returned; its thread is left behind.
    """
    result: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            result.append(call())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="call", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not result:
        raise TimeoutError(f"no answer for {seconds:.0f} s")
    return result[0]


class Peers:
    """The other processes of the run, watched by a thread."""

    def __init__(self, client: Any, index: int, count: int, processes: Processes):
        self._client, self._index, self._count, self._processes = client, index, count, processes
        self._progress = 0
        self._code = PEER_LOST
        self._told: float | None = None  # when another process was first seen to end with a sentence
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def progress(self) -> None:
        """Something that takes part in collectives got one further."""
        self._progress += 1

    def close(self) -> None:
        """Stops watching."""
        self._ended.set()
        self._thread.join(10)

    def fail(self, sentence: str, code: int) -> None:
        """Tells the others why this process ends; what they do from now on is not its end."""
        self._code = code
        self._ended.set()
        with contextlib.suppress(Exception):
            name = f"{_PREFIX}failed/{self._index}"
            _within(_LAST_WORDS, lambda: self._client.key_value_set(name, sentence, allow_overwrite=True))

    def first_said(self, sentence: str) -> bool:
        """Whether process 0 ended for this reason too."""
        deadline = time.monotonic() + _LAST_WORDS / 2
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                return _within(1, lambda: self._client.key_value_try_get(f"{_PREFIX}failed/0")) == sentence
            time.sleep(0.2)
        return False

    def lost(self, sentence: str) -> NoReturn:
        """Ends this process at once: no destructor may wait for the others."""
        with self._lock:
            if not self._ended.is_set():
                print(f"error: {sentence}; start the same command in all processes to continue", file=sys.stderr)
                self._ended.set()
            leave(self._code)

    def explain(self, error: BaseException) -> NoReturn:
        """Ends after an error of a collective, with what the other processes say about it if they do within seconds."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                self._look(_within(1, lambda: self._client.key_value_dir_get(f"{_PREFIX}failed/")), patience=0)
            time.sleep(0.2)
        self.lost(f"process {self._index} of {self._count} lost another process: {one_line(error)}")

    def _look(self, entries: Any, patience: float = 3.0) -> None:
        """Ends if another process did, after a while in which this one may find the same mistake by itself."""
        for name, sentence in entries:
            number = name.rsplit("/", 1)[1]
            if "failed/" not in name or number == str(self._index):
                continue
            self._told = time.monotonic() if self._told is None else self._told
            if time.monotonic() - self._told >= patience:
                self.lost(f"process {number} of {self._count} ended: {sentence}")

    def _exchange(self, beat: str) -> Any:
        """Tells that this process lives, and returns what all of them told."""
        self._client.key_value_set(f"{_PREFIX}alive/{self._index}", beat, allow_overwrite=True)
        return self._client.key_value_dir_get(_PREFIX)

    def _watch(self) -> None:
        count, begun = 0, time.monotonic()
        heard = dict.fromkeys(range(self._count), ("", begun))
        moved = dict.fromkeys(range(self._count), ("", begun))
        answered = begun
        period = min(1.0, self._processes.peer_timeout / 5)
        while not self._ended.wait(period):
            count += 1
            beat = f"{count} {self._progress}"
            left = answered + self._processes.peer_timeout - time.monotonic()
            try:
                entries = _within(max(left, period), functools.partial(self._exchange, beat))
                answered = time.monotonic()
            except Exception as error:
                if self._ended.is_set():
                    return
                if isinstance(error, TimeoutError):
                    error = TimeoutError(f"nothing was heard for {self._processes.peer_timeout:.0f} s")
                silent = isinstance(error, TimeoutError) or time.monotonic() - answered > self._processes.peer_timeout
                if silent or "refused" in str(error):
                    self.lost(f"process 0, which coordinates the {self._count}, does not answer: {one_line(error)}")
                continue
            self._look(entries)
            now = time.monotonic()
            for name, value in entries:
                if "alive/" not in name:
                    continue
                number = int(name.rsplit("/", 1)[1])
                beat, progress = value.split()
                heard[number] = (beat, now) if heard[number][0] != beat else heard[number]
                moved[number] = (progress, now) if moved[number][0] != progress else moved[number]
            self._judge(heard, moved, now)

    def _judge(self, heard: dict[int, tuple[str, float]], moved: dict[int, tuple[str, float]], now: float) -> None:
        silent = [n for n, (_, at) in heard.items() if now - at > self._processes.peer_timeout]
        if silent:
            names = ", ".join(map(str, silent))
            limit = self._processes.peer_timeout
            self.lost(f"nothing was heard for {limit:.0f} s of process {names} of {self._count} (stopped, or cut off)")
        if all(now - at > self._processes.stall_timeout for _, at in moved.values()):
            slowest = min(moved, key=lambda n: int(moved[n][0] or 0))
            self.lost(
                f"no process got further for {self._processes.stall_timeout:.0f} s; process {slowest} of {self._count} "
                "is behind"
            )


def leave(code: int) -> NoReturn:
    """Ends the process without waiting for anybody."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_peers: Peers | None = None


def progress() -> None:
    """Tells that this process got one step, evaluation or save further; nothing where it is alone."""
    if _peers is not None:
        _peers.progress()


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


@_HANDLER
def _aborted(number: int) -> None:
    if _peers is not None:
        _peers.lost("the process that coordinates the others, process 0, is gone, or took this one for gone")
    if _joining:
        _not_found("JAX ended this process, for the reason above")
    leave(128 + number)


def _name_aborts() -> None:
    """Has the last word when JAX's client aborts, as it does at once without its coordinator.

    JAX prints a page of log before. Its own hook for this moment ends in another abort in jaxlib 0.11 (`bad_cast`), and
    a handler of Python's runs only between two instructions of the main thread, which never comes back.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = (ctypes.c_int, _HANDLER)
    library.signal(signal.SIGABRT, _aborted)


_joining = False


def _not_found(reason: str) -> NoReturn:
    """Ends a process that did not become part of the run."""
    print(f"error: {_NOT_FOUND}: {reason}; start the same command in all of them", file=sys.stderr)
    leave(PEER_LOST)


@contextlib.contextmanager
def _found_within(seconds: float, processes: Processes) -> Iterator[None]:
    """Ends this process where what is inside, which waits for all of them, lasts longer.

    JAX has a limit too, whose end is a page of log and an abort.
    """
    global _joining
    found = threading.Event()

    def wait() -> None:
        if not found.wait(seconds):
            _not_found(_who_is_missing(processes, seconds))

    _joining = True
    threading.Thread(target=wait, name="joining", daemon=True).start()
    try:
        yield
    finally:
        found.set()
        _joining = False


def _who_is_missing(processes: Processes, seconds: float) -> str:
    """As far as this process can know."""
    if processes.coordinator is None or not processes.count:
        return f"not all of them came within {seconds:.0f} s"
    host, _, port = processes.coordinator.rpartition(":")
    missing = f"not all {processes.count} of them came to {processes.coordinator} within {seconds:.0f} s"
    if processes.index == 0:
        return missing
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError as error:
        return f"process 0 does not answer at {processes.coordinator} within {seconds:.0f} s ({one_line(error)})"
    return missing


def _resolve(coordinator: str, seconds: float) -> None:
    """Waits until the coordinator's host is known: where all start at once, its name may come later.

    Raises:
      UserError: it is not known in time.
    """
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--coordinator must be HOST:PORT of process 0, and no host {host!r} was known for {seconds:.0f} s "
                    f"({one_line(error)})"
                ) from None
        time.sleep(0.5)


@contextlib.contextmanager
def joined(processes: Processes | None) -> Iterator[None]:
    """Inside, all processes are one run. An error inside ends this process here, since the others cannot be waited for.

    Raises:
      UserError: the processes cannot find each other. Where one of them does not come in time, this one ends here.
    """
    global _peers
    if processes is None:
        yield
        return
    import jax

    patience = max(processes.peer_timeout, 10)
    if processes.coordinator is not None:
        _resolve(processes.coordinator, patience)
    _name_aborts()
    # JAX's own limits are the longer ones: what it has to say is a page of its log.
    limit = int(4 * processes.peer_timeout) + 60
    try:
        with _found_within(patience, processes):
            jax.distributed.initialize(
                processes.coordinator,
                processes.count,
                processes.index,
                # One device a process is Slurm's and Open MPI's habit, which JAX knows; nobody else's.
                cluster_detection_method="deactivate" if processes.count is not None else None,
                initialization_timeout=int(patience) + 60,
                heartbeat_timeout_seconds=limit,
                shutdown_timeout_seconds=limit,
            )
    except (RuntimeError, ValueError) as error:
        if "start RPC server" in str(error):
            error = RuntimeError(f"process 0 cannot listen at the port of {processes.coordinator} (is it in use?)")
        raise UserError(f"{_NOT_FOUND}: {one_line(error)}") from None
    from jax._src import distributed  # the key-value store has no public name

    index, count = jax.process_index(), jax.process_count()
    if index:  # one log
        logging.getLogger("mhar_jax").setLevel(logging.ERROR)
    _peers = Peers(distributed.global_state.client, index, count, processes)
    try:
        yield
    except UserError as error:
        _peers.fail(one_line(error, 500), 2)
        if index == 0:
            print(f"error: {one_line(error, 1000)}", file=sys.stderr)
            time.sleep(_LAST_WORDS)  # process 0 holds what the others read
        elif not _peers.first_said(one_line(error, 500)):
            print(f"error: process {index} of {count}: {one_line(error, 1000)}", file=sys.stderr)
        leave(2)
    except Exception as error:
        if tells_of_a_lost_peer(error):
            _peers.explain(error)
        traceback.print_exc()
        _peers.fail(f"{type(error).__name__}: {one_line(error)}", 1)
        time.sleep(_LAST_WORDS if index == 0 else 0)
        leave(1)
    except KeyboardInterrupt:
        _peers.fail("interrupted", 130)
        print("error: interrupted", file=sys.stderr)
        leave(130)
    _peers.close()
    _peers = None
    jax.distributed.shutdown()
