"""Compiling and timing on a device: queued runs, waited for at the end, candidate after candidate in turns."""

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax

from mhar_jax.errors import one_line

SAMPLES = 12
# Least device time of one sample, so that the clock and the last wait do not count; on a CPU, whose times are of no
# interest, not for long.
_SAMPLE_SECONDS, _CPU_SAMPLE_SECONDS = 0.03, 0.003
_MOST_RUNS = 64  # queued in one sample


class Compiled(NamedTuple):
    """A compiled program and what it took."""

    program: Any
    seconds: float  # tracing, lowering and compiling
    peak_bytes: int  # arguments, results and temporaries that exist at once


def compile_all[Key](
    jobs: Mapping[Key, Callable[[], Any]], threads: int = 1, untimed: Collection[Key] = ()
) -> dict[Key, "Compiled | Exception"]:
    """Compiles what each job lowers; what a job or the compiler raised stands in its place.

    Args:
      jobs: name -> a function that returns `jax.jit(f).lower(...)`. Lowered one after another, while those before
        are being compiled.
      threads: programs compiled at once.
      untimed: those whose speed is of no interest: on a CPU they are compiled in half the time.
    """
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None

    def compile_one(name: Key, lowered: Any, seconds: float) -> Compiled | Exception:
        begin = time.perf_counter()
        try:
            program = lowered.compile(compiler_options=quick if name in untimed else None)
        except Exception as error:  # a compiler that runs out of memory or registers is a result too
            return error
        return Compiled(program, seconds + time.perf_counter() - begin, peak_bytes(program))

    found: dict[Key, Compiled | Exception] = {}
    compiling: dict[Key, Future[Compiled | Exception]] = {}
    with ThreadPoolExecutor(threads) as pool:
        for name, job in jobs.items():
            begin = time.perf_counter()
            try:
                lowered = job()
            except Exception as error:  # reported in the candidate's row
                found[name] = error
                continue
            compiling[name] = pool.submit(compile_one, name, lowered, time.perf_counter() - begin)
        return found | {name: future.result() for name, future in compiling.items()}


def peak_bytes(program: Any) -> int:
    """Bytes that a compiled program needs at most, by the compiler's own account."""
    memory = program.memory_analysis()
    if memory is None:
        return 0
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return int(held - memory.alias_size_in_bytes)


def time_in_turns[Key](
    runs: Mapping[Key, Callable[[], Any]],
    calls: Mapping[Key, int],
    samples: int = SAMPLES,
    seconds: float | None = None,
) -> dict[Key, list[float] | Exception]:
    """Milliseconds a call, `samples` times for each program, in turns so that a slow moment hits all of them.

    Args:
      runs: name -> a function that queues one run of the program and returns its arrays.
      calls: name -> calls that one run holds.
      samples: of each.
      seconds: least length of a sample; a run that takes longer is a sample by itself.
    """
    if seconds is None:
        seconds = _CPU_SAMPLE_SECONDS if jax.default_backend() == "cpu" else _SAMPLE_SECONDS
    found: dict[Key, list[float] | Exception] = {}
    repeats: dict[Key, int] = {}
    for name, run in runs.items():
        try:
            jax.block_until_ready(run())
            begin = time.perf_counter()
            jax.block_until_ready(run())
            repeats[name] = max(1, min(_MOST_RUNS, int(seconds / (time.perf_counter() - begin))))
            found[name] = []
        except jax.errors.JaxRuntimeError as error:  # out of memory
            found[name] = error
    for _ in range(samples):
        for name, count in repeats.items():
            begin = time.perf_counter()
            for _ in range(count):
                last = runs[name]()
            jax.block_until_ready(last)
            row = found[name]
            assert isinstance(row, list)
            row.append((time.perf_counter() - begin) / count / calls[name] * 1e3)
            del last
    return found


def once(run: Callable[[], Any]) -> float:
    """Milliseconds of one run."""
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - begin) * 1e3


def copy_bandwidth() -> float:
    """TB/s of reading one large array of random bits and writing another: the better of two ways to copy."""
    platform = jax.default_backend()
    numbers = {"cpu": 2**22, "tpu": 2**28}.get(platform, 2**30)
    x = jax.random.bits(jax.random.key(0), (numbers,), "uint32")
    programs = {"copy": jax.jit(jax.numpy.copy), "flip": jax.jit(lambda x: x ^ 1)}
    times = time_in_turns({k: partial(f, x) for k, f in programs.items()}, dict.fromkeys(programs, 1))
    best = min(statistics.median(t) for t in times.values() if isinstance(t, list))
    return 2 * x.nbytes / best / 1e9


def sentence(error: Exception) -> str:
    """An error for a row of the table."""
    return f"{type(error).__name__}: {one_line(error, 300)}"
