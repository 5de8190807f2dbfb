"""One routing site: several calls on different inputs in one program: no cache helps, and launches can overlap."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import jax

from mhar_jax.bench import check, traffic
from mhar_jax.bench.candidates import Candidate
from mhar_jax.bench.measure import Job, Settings, measure
from mhar_jax.bench.profile import kernel_times
from mhar_jax.bench.report import Row
from mhar_jax.bench.shapes import SiteShape

PROGRAM_BYTES = 1.6e9  # moved by one program: 0.4 ms at 4 TB/s, many launches, many times a cache
MOST_CALLS = 24


def measure_site(
    name: str, shape: SiteShape, layout: str, candidates: Sequence[Candidate], settings: Settings
) -> list[Row]:
    """A row for each candidate and pass.

    Args:
      name: of the preset.
      layout: "stacked" or "separate" sources.
    """
    inputs, cotangents = _inputs(shape, layout, _calls(shape))
    ends = sorted({0, len(inputs) - 1})
    answers = {i: check.site_answer(inputs[i], cotangents[i], shape.heads) for i in ends}
    jobs = []
    for candidate in candidates:
        calls = 1 if candidate.interpreted else len(inputs)
        arrays = (inputs[:calls], cotangents[:calls])
        for which in traffic.PASSES:
            lower = partial(_lower, candidate, shape, which)
            one = partial(lower, inputs[:1], cotangents[:1])
            named = {"preset": name, "what": "site", "pass": which, "implementation": candidate.name, "layout": layout}
            job = Job(
                of={**named, **asdict(shape)},
                candidate=candidate,
                lower=one,
                lower_many=one if calls == 1 else partial(lower, *arrays),
                calls=calls,
                run=partial(_run, arrays),
                errors=partial(_errors, answers, *arrays),
                tolerance=partial(check.site_tolerance, shape.dtype),
                bytes_moved=traffic.site_bytes(shape, which),
                flops=traffic.routing_flops((shape.sources,), shape.dim, shape.tokens, which),
                more=partial(_kernels, arrays, settings.profile and not candidate.interpreted),
            )
            jobs.append(job)
    return measure(jobs, settings)


def _run(arrays: tuple[Any, Any], program: Any) -> Any:
    return program(*arrays)


def _kernels(arrays: tuple[Any, Any], profile: bool, program: Any) -> dict[str, Any]:
    """Time of each kernel in one call, and its launches."""
    if not profile:
        return {}
    calls = len(arrays[0])
    found = kernel_times(lambda: program(*arrays))
    return {"kernels_ms": {name: [ms / calls, count / calls] for name, (ms, count) in found.items()}}


def _calls(shape: SiteShape) -> int:
    if jax.default_backend() == "cpu":
        return 2
    calls = round(PROGRAM_BYTES / traffic.site_bytes(shape, "forward"))
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:  # sources and their gradients in a quarter of the memory
        calls = min(calls, int(limit / 8 / (shape.sources * shape.row_bytes)))
    return max(2, min(MOST_CALLS, calls))


def _inputs(shape: SiteShape, layout: str, calls: int) -> tuple[list[dict[str, Any]], list[jax.Array]]:
    """Random arguments of every call, and cotangents."""
    row = (shape.tokens, shape.dim)

    @jax.jit
    def make(key):
        keys = jax.random.split(key, 5)
        sources = jax.random.normal(keys[0], (shape.sources, *row), shape.dtype)
        found: dict[str, Any] = {"sources": sources}
        found["query"] = jax.random.normal(keys[1], (shape.dim,)) * (shape.heads / shape.dim) ** 0.5
        if shape.delta:
            found["residual"] = jax.random.normal(keys[2], row, shape.dtype)
            found["gate"] = 0.5 + jax.random.uniform(keys[3])
        return found, jax.random.normal(keys[4], row, shape.dtype)

    made = [make(key) for key in jax.random.split(jax.random.key(shape.sources * shape.dim), calls)]
    if layout == "separate":  # one at a time: a program with so many results takes XLA minutes
        row_of = jax.jit(lambda sources, i: sources[i])
        for found, _ in made:
            found["sources"] = tuple(row_of(found["sources"], i) for i in range(shape.sources))
    return [m[0] for m in made], [m[1] for m in made]


def _lower(candidate: Candidate, shape: SiteShape, which: traffic.Pass, inputs: Any, cotangents: Any) -> Any:
    def route(arrays: dict[str, Any]) -> jax.Array:
        rest = {k: v for k, v in arrays.items() if k not in ("sources", "query")}
        return candidate.route(arrays["sources"], arrays["query"], num_heads=shape.heads, **rest)

    @jax.jit
    def forward(inputs, cotangents):
        return [(route(arrays), None) for arrays in inputs]

    @jax.jit
    def both(inputs, cotangents):
        results = []
        for arrays, d_out in zip(inputs, cotangents, strict=True):
            # The residual's gradient is d_out itself; as a result of the program it would be copied.
            rest = {k: v for k, v in arrays.items() if k == "residual"}
            of = {k: v for k, v in arrays.items() if k != "residual"}
            out, vjp = jax.vjp(lambda of, rest=rest: route({**of, **rest}), of)
            results.append((out, vjp(d_out)[0]))
        return results

    return (forward if which == "forward" else both).lower(inputs, cotangents)


def _errors(answers: Mapping[int, check.Answer], inputs: Any, cotangents: Any, program: Any) -> dict[str, float]:
    """Of the program that is timed: the worst of its first and its last call."""
    ends = {i: answer for i, answer in answers.items() if i < len(inputs)}
    arrays = [ends[i].arrays if i in ends else given for i, given in enumerate(inputs)]
    results = program(arrays, [ends[i].d_out if i in ends else given for i, given in enumerate(cotangents)])
    found: dict[str, float] = {}
    for i, answer in ends.items():
        found = {k: check.larger(e, found.get(k, 0.0)) for k, e in answer.errors(*results[i]).items()}
    return found
