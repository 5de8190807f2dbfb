"""The order of things for every candidate: compile, compare with float64, and only then time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mhar_jax.bench import check, report, timing
from mhar_jax.bench.candidates import Candidate
from mhar_jax.bench.report import Row
from mhar_kernels import UnsupportedInputError


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    samples: int
    threads: int  # programs compiled at once
    copy: float  # TB/s, measured in the same run
    profile: bool = False


@dataclass(frozen=True)
class Job:
    """One candidate, one shape, one pass."""

    of: dict[str, Any]  # of its row
    candidate: Candidate
    lower: Callable[[], Any]  # one call: for compile time and memory
    lower_many: Callable[[], Any]  # several calls on different inputs: for the time; may be `lower`
    calls: int  # in the latter
    run: Callable[[Any], Any]  # queues a run of a compiled `lower_many`
    errors: Callable[[Any], dict[str, float]]  # of a compiled `lower_many`, against float64
    tolerance: Callable[[str], float]  # of each of them
    bytes_moved: float
    flops: float
    more: Callable[[Any], dict[str, Any]] = lambda program: {}  # further metrics, of a compiled `lower_many`


def measure(jobs: Sequence[Job], settings: Settings) -> list[Row]:
    """A row for each job; those whose results are wrong, or that cannot be compiled or run, get no time."""
    to_compile: dict[Any, Callable[[], Any]] = {("one", i): job.lower for i, job in enumerate(jobs)}
    to_compile |= {("many", i): job.lower_many for i, job in enumerate(jobs) if job.lower_many is not job.lower}
    interpreted = [key for key in to_compile if jobs[key[1]].candidate.interpreted]
    compiled = timing.compile_all(to_compile, settings.threads, interpreted)

    rows: dict[int, Row] = {}
    right: dict[int, tuple[timing.Compiled, Any, dict[str, float]]] = {}
    for i, job in enumerate(jobs):
        one = compiled["one", i]
        many = compiled.get(("many", i), one)
        if isinstance(one, Exception) or isinstance(many, Exception):
            rows[i] = _refusal(job.of, one if isinstance(one, Exception) else many)
            continue
        try:
            errors = job.errors(many.program)
        except Exception as error:  # a candidate's mistake must not end the others' run
            rows[i] = _refusal(job.of, error)
            continue
        if (problem := check.complaint(errors, job.tolerance)) is not None:
            rows[i] = report.refused(job.of, "wrong", problem, errors=errors)
        else:
            right[i] = (one, many.program, errors)

    times = _times(jobs, {i: found[1] for i, found in right.items()}, settings.samples)
    for i, (one, program, errors) in right.items():
        rows[i] = _row(jobs[i], times[i], one, errors, jobs[i].more(program), settings.copy)
    return [rows[i] for i in range(len(jobs))]


def _times(jobs: Sequence[Job], programs: dict[int, Any], samples: int) -> dict[int, list[float] | Exception]:
    """In turns; interpreted ones once each, since minutes would go by for numbers that mean nothing."""
    runs = {i: partial(jobs[i].run, program) for i, program in programs.items()}
    apart = {i: run for i, run in runs.items() if jobs[i].candidate.interpreted}
    together = {i: run for i, run in runs.items() if i not in apart}
    found = timing.time_in_turns(together, {i: jobs[i].calls for i in together}, samples)
    return found | {i: [timing.once(run) / jobs[i].calls] for i, run in apart.items()}


def _row(
    job: Job,
    samples: list[float] | Exception,
    compiled: timing.Compiled,
    errors: dict[str, float],
    more: dict[str, Any],
    copy: float,
) -> Row:
    if isinstance(samples, Exception):
        return _refusal(job.of, samples)
    row = report.timed(job.of, samples)
    bandwidth = job.bytes_moved / row.median_ms / 1e9
    return report.timed(
        job.of,
        samples,
        bytes=job.bytes_moved,
        flops=job.flops,
        tb_per_s=bandwidth,
        of_copy=bandwidth / copy,
        peak_bytes=compiled.peak_bytes,
        compile_s=compiled.seconds,
        error=check.worst(errors),
        errors=errors,
        interpreted=job.candidate.interpreted,
        **more,
    )


def _refusal(of: dict[str, Any], error: Any) -> Row:
    if isinstance(error, UnsupportedInputError):
        return report.refused(of, "unsupported", error)
    return report.refused(of, "failed", timing.sentence(error))
