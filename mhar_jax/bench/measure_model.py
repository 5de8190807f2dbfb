"""The routing of a whole model, timed: all its sites in one program, sublayers left out."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from mhar_jax.bench import candidates, check, traffic
from mhar_jax.bench.candidates import Candidate
from mhar_jax.bench.measure import Job, Settings, measure
from mhar_jax.bench.profile import kernel_times
from mhar_jax.bench.report import Row
from mhar_jax.bench.shapes import ModelShape

Run = tuple[Candidate, int | None]  # sites a block, or None for site by site
_DIFFERENTIATED = ("x", "queries", "gates", "nulls", "deltas")


def adding(sites: int) -> tuple[int, ...]:
    """The sublayers that add a vector of their own to their input, first and last among them; the others return it.

    Were all the identity, all sources would be equal, and a backend that reads half of them would be right. Each of
    these few, 3 of 24 and 5 of 72, writes a source anew: 2 rows a token, which no count of bytes holds.
    """
    count = min(2 + sites // 24, sites - 1)
    return tuple(sorted({round(k * (sites - 2) / max(1, count - 1)) for k in range(count)}))


def measure_model(name: str, shape: ModelShape, runs: Sequence[Run], settings: Settings) -> list[Row]:
    """A row for each run and pass."""
    return measure(model_jobs(name, shape, runs, settings), settings)


def model_jobs(name: str, shape: ModelShape, runs: Sequence[Run], settings: Settings) -> list[Job]:
    """The same, to be measured beside others, so that all are compiled side by side."""
    arrays, d_out = _delta_arrays(shape) if shape.delta else _stack_arrays(shape)
    if shape.delta:
        answer = check.delta_answer(arrays, shape.reads, d_out, shape.heads)
    else:
        answer = check.stack_answer(arrays, adding(shape.sites), d_out, shape.heads)
    jobs = []
    for candidate, block in runs:
        for which in traffic.PASSES:
            lower = partial(_lower, candidate, block, which, shape, arrays, d_out)
            of = {
                "preset": name,
                "what": "model",
                "pass": which,
                "implementation": candidate.name,
                "layout": "site_by_site" if block is None else "blocked",
                "sources": max(shape.reads),
                "sites": shape.sites,
                "dim": shape.dim,
                "heads": shape.heads,
                "tokens": shape.tokens,
                "delta": shape.delta,
                "dtype": shape.dtype,
                "block": block,
            }
            job = Job(
                of=of,
                candidate=candidate,
                lower=lower,
                lower_many=lower,
                calls=1,
                run=lambda program: program(arrays, d_out),
                errors=lambda program: answer.errors(*program(answer.arrays, answer.d_out)),
                tolerance=partial(check.model_tolerance, shape.dtype),
                bytes_moved=traffic.model_bytes(shape, which, block),
                flops=traffic.routing_flops(shape.reads, shape.dim, shape.tokens, which),
                more=partial(_more, shape, arrays, d_out, settings.profile and not candidate.interpreted),
            )
            jobs.append(job)
    return jobs


def _more(shape: ModelShape, arrays: Any, d_out: jax.Array, profile: bool, program: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"history_copies": _copies(program.as_text(), shape)}
    if profile:
        found["kernels_ms"] = kernel_times(lambda: program(arrays, d_out))
    return found


def _arrays(shape: ModelShape) -> tuple[dict[str, Any], jax.Array]:
    keys = jax.random.split(jax.random.key(shape.dim), 3)
    row = (shape.tokens, shape.dim)
    queries = jax.random.normal(keys[1], (shape.sites, shape.dim)) * 2 * (shape.heads / shape.dim) ** 0.5
    x, d_out = (jax.random.normal(k, row, shape.dtype) for k in (keys[0], keys[2]))
    return {"x": x, "queries": queries}, d_out


def _stack_arrays(shape: ModelShape) -> tuple[dict[str, Any], jax.Array]:
    arrays, d_out = _arrays(shape)
    # Twice the embedding's size, since sources that are mixes of many are small beside it.
    added = (len(adding(shape.sites)), shape.dim)
    arrays["added"] = 2 * jax.random.normal(jax.random.key(shape.dim + 1), added, shape.dtype)
    return arrays, d_out


def _delta_arrays(shape: ModelShape) -> tuple[dict[str, Any], jax.Array]:
    arrays, d_out = _arrays(shape)
    keys = jax.random.split(jax.random.key(shape.dim + 1), 2 + max(shape.reads))
    row = (shape.tokens, shape.dim)
    # Gates of this size let the stream grow by about its own size over all sites, as block deltas do.
    arrays["gates"] = (0.5 + jax.random.uniform(keys[0], (shape.sites,))) / shape.sites
    arrays["nulls"] = jax.random.normal(keys[1], (shape.sites, shape.dim))
    arrays["deltas"] = [jax.random.normal(k, row, shape.dtype) for k in keys[2:]]
    return arrays, d_out


def _function(candidate: Candidate, block: int | None, shape: ModelShape) -> Any:
    """The routing of the model as a function of its arrays."""
    if shape.delta:
        return lambda arrays: candidates.delta_sites(candidate, shape.reads, arrays, num_heads=shape.heads)
    run, at = _stack(candidate, block, shape.heads), adding(shape.sites)
    sublayers = [_add if i in at else _pass for i in range(shape.sites - 1)]

    def stack(arrays: dict[str, Any]) -> jax.Array:
        added = dict(zip(at, arrays["added"], strict=True))
        params = [added.get(i) for i in range(shape.sites - 1)]
        return run(sublayers, params, arrays["x"], arrays["queries"])

    return stack


def _add(vector: jax.Array, h: jax.Array) -> jax.Array:
    return h + vector


def _pass(nothing: None, h: jax.Array) -> jax.Array:
    return h


def _stack(candidate: Candidate, block: int | None, heads: int) -> Any:
    if block is None:
        return partial(candidates.site_by_site, candidate, num_heads=heads)
    assert candidate.stack is not None
    return partial(candidate.stack, num_heads=heads, block_size=block)


def _lower(
    candidate: Candidate, block: int | None, which: traffic.Pass, shape: ModelShape, arrays: Any, d_out: jax.Array
) -> Any:
    f = _function(candidate, block, shape)

    def forward(arrays, d_out):
        return f(arrays), None

    def both(arrays, d_out):
        of = {name: arrays[name] for name in _DIFFERENTIATED if name in arrays}
        out, vjp = jax.vjp(lambda of: f({**arrays, **of}), of)
        return out, vjp(d_out)[0]

    return jax.jit(forward if which == "forward" else both).lower(arrays, d_out)


def _copies(text: str, shape: ModelShape) -> int:
    """Copies of history-sized arrays in a compiled program: there should be none."""
    found = 0
    for dims in re.findall(r"= (?:bf16|f16|f32)\[([\d,]+)\]\S* copy\(", text):
        count = 1
        for part in dims.split(","):
            count *= int(part)
        found += count >= shape.sites * shape.tokens * shape.dim
    return found
