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


def measure_model(name: str, shape: ModelShape, runs: Sequence[Run], settings: Settings) -> list[Row]:
    """A row for each run and pass."""
    arrays, d_out = _delta_arrays(shape) if shape.delta else _arrays(shape)
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
            errors = _delta_errors if shape.delta else partial(_errors, candidate, block, which)
            job = Job(
                of=of,
                candidate=candidate,
                lower=lower,
                lower_many=lower,
                calls=1,
                run=lambda program: program(arrays, d_out),
                errors=partial(errors, shape, arrays, d_out),
                tolerance=partial(check.model_tolerance, shape.dtype),
                bytes_moved=traffic.model_bytes(shape, which, block),
                flops=traffic.routing_flops(shape.reads, shape.dim, shape.tokens, which),
                more=partial(_more, shape, arrays, d_out, settings.profile and not candidate.interpreted),
            )
            jobs.append(job)
    return measure(jobs, settings)


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
    sublayers: list[Any] = [lambda p, h: h] * (shape.sites - 1)
    run = _stack(candidate, block, shape.heads)
    return lambda arrays: run(sublayers, [None] * len(sublayers), arrays["x"], arrays["queries"])


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
        out, vjp = jax.vjp(f, arrays)
        return out, vjp(d_out)[0]

    return jax.jit(forward if which == "forward" else both).lower(arrays, d_out)


def _errors(
    candidate: Candidate,
    block: int | None,
    which: traffic.Pass,
    shape: ModelShape,
    arrays: Any,
    d_out: jax.Array,
    program: Any,
) -> dict[str, float]:
    """Of a short stack, same width and block, whose sources differ; and what is known of the timed program's result."""
    sites = min(shape.sites, 6 if block is None else 2 * block + 2)
    run = _stack(candidate, None if block is None else min(block, sites), shape.heads)
    errors = check.chain_errors(run, sites, shape.dim, shape.heads, shape.dtype, which)
    out, grads = program(arrays, d_out)
    passed = check.passed_through(arrays["x"], out, d_out, None if grads is None else grads["x"])
    return {**errors, **{f"{k} of the whole stack": e for k, e in passed.items()}}


def _delta_errors(shape: ModelShape, arrays: Any, d_out: jax.Array, program: Any) -> dict[str, float]:
    """Of the program that is timed, at some tokens."""
    tokens = check.some_tokens(shape.tokens)
    masked = check.only_at(tokens, d_out)
    out, grads = program(arrays, masked)
    return check.delta_errors(shape.reads, arrays, shape.heads, tokens, out, masked, grads)


def _copies(text: str, shape: ModelShape) -> int:
    """Copies of history-sized arrays in a compiled program: there should be none."""
    found = 0
    for dims in re.findall(r"= (?:bf16|f16|f32)\[([\d,]+)\]\S* copy\(", text):
        count = 1
        for part in dims.split(","):
            count *= int(part)
        found += count >= shape.sites * shape.tokens * shape.dim
    return found
