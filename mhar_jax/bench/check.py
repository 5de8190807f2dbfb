"""Is a candidate right? Its values and gradients against the definition in float64, on a few tokens."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhar_jax.bench.candidates import Candidate, delta_sites
from mhar_kernels import reference

TOKENS = 16  # of a large call that are compared
CHAIN_TOKENS = 32  # of a small stack

# ||a - b|| / ||b||. A site rounds its result once: 1.7e-3 in bfloat16, 2.1e-4 in float16, which is what all backends
# show, and some may round an intermediate once more. float32 is within 3e-7, but for queries that make large logits.
SITE_TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 5e-5}
# A chain of sites rounds at each of them, and later weights depend on what was rounded: 18 blocked sites in plain jnp
# are within 3e-3, 64 delta sites within 6e-3 (the stream), 6 sites in float32 within 8e-7. Gradients of queries nearly
# cancel when summed: within 7e-3 in plain jnp, 1.4e-2 where partial sums pass between kernels in 16 bits.
MODEL_TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3, "float32": 5e-5}
_QUERIES_IN_A_MODEL = 2.0

Arrays = dict[str, Any]


def some_tokens(tokens: int, count: int = TOKENS) -> np.ndarray:
    """The first, the last, and evenly spread ones between."""
    return np.unique(np.linspace(0, tokens - 1, min(count, tokens)).round().astype(int))


def only_at(tokens: np.ndarray, cotangent: jax.Array) -> jax.Array:
    """The cotangent, zero elsewhere: the gradients of parameters are then sums over these tokens alone."""
    keep = np.zeros((cotangent.shape[0], 1), bool)
    keep[tokens] = True
    return jnp.where(keep, cotangent, jnp.zeros((), cotangent.dtype))


def rows_at(tokens: np.ndarray, array: Any) -> np.ndarray:
    """float64 of [..., T, D] at some tokens; a tuple of [T, D] is stacked."""
    if isinstance(array, list | tuple):
        return np.stack([rows_at(tokens, a) for a in array])
    return np.asarray(array[..., tokens, :]).astype(np.float64)


def site_errors(
    inputs: Mapping[str, Any], num_heads: int, tokens: np.ndarray, out: Any, d_out: Any, grads: Mapping[str, Any] | None
) -> dict[str, float]:
    """Errors of one call's result, and of its gradients where there are any.

    Args:
      inputs: sources, query and, in delta form, residual and gate, as the candidate got them.
      tokens: where results are compared; d_out is zero elsewhere.
      out, d_out: [T, D].
      grads: of sources, query and gate.
    """
    f = lambda arrays: _define(arrays, num_heads=num_heads, eps=1e-6)[0]
    return _compared(tokens, _exact(f, _at(tokens, inputs), rows_at(tokens, d_out)), out, d_out, grads)


def delta_errors(
    reads: tuple[int, ...],
    arrays: Mapping[str, Any],
    num_heads: int,
    tokens: np.ndarray,
    out: Any,
    d_out: Any,
    grads: Any,
) -> dict[str, float]:
    """The same for all sites of a delta model (`candidates.delta_sites`)."""
    f = lambda arrays: delta_sites(_DEFINITION, reads, arrays, num_heads=num_heads)
    return _compared(tokens, _exact(f, _at(tokens, arrays), rows_at(tokens, d_out)), out, d_out, grads)


def chain_errors(
    run: Callable[[list[Any], list[Any], jax.Array, jax.Array], jax.Array],
    sites: int,
    dim: int,
    num_heads: int,
    dtype: str,
    which: str,
) -> dict[str, float]:
    """Errors of a short stack whose sublayers each add a vector of their own, so that all sources differ.

    Args:
      run: (sublayers, params, x, queries) -> the final site's mix; blocks as in the stack that is timed.
      sites: of the short stack.
      which: "forward", or "forward_backward" for gradients too.
    """
    arrays, biases, d_out = _chain_arrays(sites, dim, num_heads, dtype)
    sublayers = [lambda p, h: h + p] * (sites - 1)
    chain = lambda arrays: run(sublayers, list(biases), arrays["x"], arrays["queries"])

    @jax.jit
    def both(arrays, d_out):
        if which == "forward":
            return chain(arrays), None
        out, vjp = jax.vjp(chain, arrays)
        return out, vjp(d_out)[0]

    out, grads = both(arrays, d_out)
    exact = _exact_chain(sites, dim, num_heads, dtype)
    return _compared(np.arange(CHAIN_TOKENS), exact, out, d_out, grads)


def _chain_arrays(sites: int, dim: int, num_heads: int, dtype: str) -> tuple[Arrays, jax.Array, jax.Array]:
    """x and queries, what each sublayer adds, and the cotangent of the result."""
    keys = jax.random.split(jax.random.key(1), 3)
    x, d_out = jax.random.normal(keys[0], (2, CHAIN_TOKENS, dim), dtype)
    queries = jax.random.normal(keys[1], (sites, dim)) * 2 * (num_heads / dim) ** 0.5
    return {"x": x, "queries": queries}, jax.random.normal(keys[2], (sites - 1, dim), dtype), d_out


@cache
def _exact_chain(sites: int, dim: int, num_heads: int, dtype: str) -> tuple[np.ndarray, Arrays]:
    """The chain's result and gradients; the same for all candidates."""
    arrays, biases, d_out = _chain_arrays(sites, dim, num_heads, dtype)
    tokens = np.arange(CHAIN_TOKENS)
    wide_biases = np.asarray(biases).astype(np.float64)

    def chain(arrays: Arrays) -> jax.Array:
        sources = [arrays["x"]]
        for i in range(sites):
            mix = _definition(sources, arrays["queries"][i], num_heads=num_heads)
            if i < sites - 1:
                sources.append(mix + wide_biases[i])
        return mix

    return _exact(chain, _at(tokens, arrays), rows_at(tokens, d_out))


def larger(a: float, b: float) -> float:
    """The larger; infinite if one is not a number."""
    return max(a, b) if a == a and b == b else float("inf")


def worst(errors: Mapping[str, float]) -> float:
    """The largest; infinite if one is not a number."""
    return reduce(larger, errors.values(), 0.0)


def site_tolerance(dtype: str, name: str) -> float:
    """What an output or gradient of one site may be off by."""
    return SITE_TOLERANCE[dtype]


def model_tolerance(dtype: str, name: str) -> float:
    """What one of a chain of sites may be off by."""
    return MODEL_TOLERANCE[dtype] * (_QUERIES_IN_A_MODEL if name == "d_queries" else 1.0)


def complaint(errors: Mapping[str, float], tolerance: Callable[[str], float]) -> str | None:
    """What is wrong, for the table; None if nothing is."""
    bad = [
        f"{name} is off by {error:.1e} where {tolerance(name):.0e} is allowed"
        for name, error in errors.items()
        if not error <= tolerance(name)
    ]
    return f"wrong against float64, as a share of its norm: {', '.join(bad)}" if bad else None


# Compiled once for each number of sources, where one operation after another would compile dozens of programs.
_define = jax.jit(reference.define, static_argnames=("num_heads", "eps"))


def _definition(sources, query, *, num_heads, residual=None, gate=None, null_source=None):
    given = {"residual": residual, "gate": gate, "null_source": null_source}
    arrays = {"sources": jnp.stack(sources), "query": query, **{k: v for k, v in given.items() if v is not None}}
    return _define(arrays, num_heads=num_heads, eps=1e-6)[0]


_DEFINITION = Candidate("definition", _definition)


def _exact(f: Callable[[Arrays], jax.Array], wide: Arrays, cotangent: np.ndarray) -> tuple[np.ndarray, Arrays]:
    """f's result, and the gradients of its arrays, in float64."""
    with _float64():
        out, vjp = jax.vjp(f, jax.tree.map(jnp.asarray, wide))
        return jax.device_get((out, vjp(jnp.asarray(cotangent))[0]))


def _compared(
    tokens: np.ndarray, exact: tuple[np.ndarray, Arrays], out: Any, d_out: Any, grads: Mapping[str, Any] | None
) -> dict[str, float]:
    # A gradient that is zero (the query's at a single source) is held against the size of what came in.
    least = 1e-3 * float(np.linalg.norm(rows_at(tokens, d_out)))
    errors = {"out": _error(rows_at(tokens, out), exact[0], 0.0)}
    for name, grad in (grads or {}).items():
        found = _at(tokens, {name: grad})[name]
        errors[f"d_{name}"] = _error(_stacked(found), _stacked(exact[1][name]), least)
    return errors


def _error(found: np.ndarray, exact: np.ndarray, least: float) -> float:
    return float(np.linalg.norm(found - exact) / max(np.linalg.norm(exact), least, 1e-300))


def _stacked(array: Any) -> np.ndarray:
    return np.stack(array) if isinstance(array, list | tuple) else array


def _at(tokens: np.ndarray, arrays: Mapping[str, Any]) -> Arrays:
    """What has tokens at those tokens, parameters whole; float64."""
    with_tokens = {"sources", "residual", "x"}
    found: Arrays = {}
    for name, array in arrays.items():
        if name == "deltas":
            found[name] = [rows_at(tokens, a) for a in array]
        elif name in with_tokens:
            found[name] = rows_at(tokens, array)
        else:
            found[name] = np.asarray(array).astype(np.float64)
    return found


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    """float64, on the host where JAX has it as a device."""
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave the host out
            undo.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        undo.enter_context(jax.enable_x64(True))
        yield


def passed_through(x: jax.Array, out: jax.Array, d_out: jax.Array, d_x: jax.Array | None) -> dict[str, float]:
    """Of a stack whose sublayers return their input: all sources are x, so out is x and x's gradient is d_out."""
    distance = jax.jit(_relative)
    errors = {"out": float(distance(out, x))}
    if d_x is not None:
        errors["d_x"] = float(distance(d_x, d_out))
    return errors


def _relative(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
