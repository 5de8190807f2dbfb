"""Is a candidate right? Values and gradients of the program that is timed, against the definition in float64.

The program is given arguments in which a few random tokens are repeated all over, in no order. Some of its results are
held against float64 (`exact.py`), and every other token's against those of the token it repeats; gradients of
parameters are sums over all tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhar_jax.bench import exact

DISTINCT = 16  # tokens that are repeated
_SMALL = 2**25  # bytes that are compared on the host

# ||a - b|| / ||b||. A site rounds its result once: 1.7e-3 in bfloat16, 2.1e-4 in float16, which is what all backends
# show, and some may round an intermediate once more. float32 is within 3e-7, but for queries that make large logits.
SITE_TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 5e-5}
# A chain of sites rounds at each of them, and later weights depend on what was rounded; but each mix is a mean of many
# sources, and their rounding averages out: at 73 sites of width 1280 plain jnp by blocks is within 2.4e-3 (the mix),
# 2.1e-3 (d_x) and 4.8e-3 (d_queries), and no site's query is off by more than 1.5e-2. Triton kernels (interpreted; 25
# sites of width 512, 73 of 128 and 256), whose partial sums pass between them in 16 bits: 3.1e-3, 4.0e-3, 1.4e-2, 4e-2.
# The stream of a delta model, rounded at each site, is within 6.1e-3 (64 sites; 16 of width 64).
MODEL_TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3, "float32": 5e-5}
_TIMES_FOR_QUERIES, _TIMES_AT_ONE_SITE = 2.0, 8.0
_OTHER_TOKENS, _AT_ONE_SITE = "tokens among each other", "at one site"

Arrays = dict[str, Any]
_WITH_TOKENS = ("sources", "residual", "x", "deltas")  # the other arrays are parameters
_OF_SITES = ("queries", "nulls", "gates")  # [sites, ...]
_LEAST_OF_SITES = 0.25  # a site's gradient is measured against at least this share of what a site's is in the mean


class Repeats(NamedTuple):
    """The first P tokens, repeated all over."""

    which: np.ndarray  # [T], which of the P stands there; in no order, so that no tile sees a pattern
    first: np.ndarray  # [P], where each stands first
    counts: np.ndarray  # [P], how often

    @classmethod
    def of(cls, tokens: int) -> "Repeats":
        """Of so many tokens; all different where they are few."""
        which = np.random.default_rng(tokens).permutation(np.arange(tokens) % min(tokens, DISTINCT))
        _, first, counts = np.unique(which, return_index=True, return_counts=True)
        return cls(which, first, counts)

    def spread(self, array: Any) -> Any:
        """[..., T, D], or a sequence of [T, D], with its first P tokens repeated."""
        if isinstance(array, list | tuple):
            return type(array)(self.spread(a) for a in array)
        return jnp.asarray(_near(array)[..., self.which, :])

    def rows(self, array: Any) -> np.ndarray:
        """float64 of [..., T, D] where each of the P tokens stands first: [..., P, D]. A sequence is stacked."""
        if isinstance(array, list | tuple):
            return np.stack([self.rows(a) for a in array])
        return np.asarray(_near(array)[..., self.first, :]).astype(np.float64)

    def distance(self, array: Any) -> float:
        """Of any token from the one that it repeats, as a share of its norm; of several rows a token, together."""
        rows = tuple(array) if isinstance(array, list | tuple) else (array,)
        if sum(a.nbytes for a in rows) > _SMALL:
            return float(_distance_on_device(rows, self.first[self.which]))
        return float(_distance(np, [np.asarray(a) for a in rows], self.first[self.which]))


class Answer(NamedTuple):
    """Arguments with repeated tokens, and what the definition makes of them in float64."""

    repeats: Repeats
    arrays: Arrays  # as a candidate gets them
    d_out: jax.Array  # [T, D]
    out: np.ndarray  # [P, D]
    grads: Arrays  # of what has tokens, [..., P, D]; of parameters, over all tokens

    def errors(self, out: Any, grads: Mapping[str, Any] | None) -> dict[str, float]:
        """Of a candidate's result, and of its gradients where there are any."""
        size = float(np.linalg.norm(self.repeats.rows(self.d_out)))
        found = {"out": _error(self.repeats.rows(out), self.out, 0.0)}
        apart = self.repeats.distance(out)
        for name, grad in (grads or {}).items():
            # A gradient that is zero (the query's at a single source) is held against the size of what came in.
            if name in _WITH_TOKENS:
                found[f"d_{name}"] = _error(self.repeats.rows(grad), self.grads[name], 1e-3 * size)
                apart = larger(apart, self.repeats.distance(grad))
                continue
            its, least = np.asarray(grad).astype(np.float64), 1e-3 * size * self.repeats.counts.max()
            found[f"d_{name}"] = _error(its, self.grads[name], least)
            if name in _OF_SITES:
                found[f"d_{name} {_AT_ONE_SITE}"] = _worst_site(its, self.grads[name], least)
        return {**found, _OTHER_TOKENS: apart}


def site_answer(inputs: Mapping[str, Any], d_out: jax.Array, num_heads: int) -> Answer:
    """Of one call: sources, query and, in delta form, residual and gate."""
    repeats, arrays, d_out, wide, d_wide = _repeated(inputs, d_out)
    rest = {name: value for name, value in wide.items() if name not in ("sources", "query")}
    done = exact.site(wide["sources"], wide["query"], num_heads, **rest)
    grads = exact.site_grads(done, d_wide, repeats.counts)
    return Answer(repeats, arrays, d_out, done.out, grads)


def stack_answer(arrays: Mapping[str, Any], at: Sequence[int], d_out: jax.Array, num_heads: int) -> Answer:
    """Of all sites of a model in replacement form: x, queries, and what the sublayers `at` add."""
    repeats, arrays, d_out, wide, d_wide = _repeated(arrays, d_out)
    added = dict(zip(at, wide["added"], strict=True))
    out, grads = exact.stack(wide["x"], wide["queries"], added, num_heads, d_wide, repeats.counts)
    return Answer(repeats, arrays, d_out, out, grads)


def delta_answer(arrays: Mapping[str, Any], reads: Sequence[int], d_out: jax.Array, num_heads: int) -> Answer:
    """Of all sites of a delta model: the arrays of `candidates.delta_sites`."""
    repeats, arrays, d_out, wide, d_wide = _repeated(arrays, d_out)
    out, grads = exact.delta_sites(reads, wide, num_heads, d_wide, repeats.counts)
    return Answer(repeats, arrays, d_out, out, grads)


def _repeated(given: Mapping[str, Any], d_out: jax.Array) -> tuple[Repeats, Arrays, jax.Array, Arrays, np.ndarray]:
    """The same with repeated tokens: as a candidate gets them, and in float64 the distinct ones alone."""
    repeats = Repeats.of(d_out.shape[0])
    arrays = {name: repeats.spread(a) if name in _WITH_TOKENS else a for name, a in given.items()}
    d_out = repeats.spread(d_out)
    wide = {
        name: repeats.rows(a) if name in _WITH_TOKENS else np.asarray(a).astype(np.float64)
        for name, a in arrays.items()
    }
    return repeats, arrays, d_out, wide, repeats.rows(d_out)


def _near(array: Any) -> Any:
    """On the host if it is small: there nothing is compiled."""
    return np.asarray(array) if array.nbytes <= _SMALL else array


def _distance(xp: Any, rows: Sequence[Any], same: np.ndarray) -> Any:
    """`Repeats.distance` of arrays [..., T, D] in NumPy or jax.numpy, float32; token t should be as token same[t]."""
    wide = [a.astype(xp.float32) for a in rows]
    there = [a[..., same, :] for a in wide]
    norm = lambda of: xp.sqrt(sum((a * a).sum(axis=-1).reshape(-1, len(same)).sum(axis=0) for a in of))
    size = norm(there)
    return xp.max(norm([a - b for a, b in zip(wide, there, strict=True)]) / xp.maximum(size, 1e-3 * xp.mean(size)))


_distance_on_device = jax.jit(lambda rows, same: _distance(jnp, rows, same))


def _error(found: np.ndarray, right: np.ndarray, least: float) -> float:
    return float(np.linalg.norm(found - right) / max(np.linalg.norm(right), least, 1e-300))


def _worst_site(found: np.ndarray, right: np.ndarray, least: float) -> float:
    """Of gradients [sites, ...]: one site's may be a hundredth of another's, so that all together say little of it."""
    norms = lambda a: np.linalg.norm(a.reshape(len(a), -1), axis=1)
    sizes = norms(right)
    floor = max(_LEAST_OF_SITES * float(np.sqrt(np.mean(sizes**2))), least)
    return float(np.max(norms(found - right) / np.maximum(sizes, floor)))


def larger(a: float, b: float) -> float:
    """The larger; infinite if one is not a number."""
    return max(a, b) if a == a and b == b else float("inf")


def worst(errors: Mapping[str, float]) -> float:
    """The largest; infinite if one is not a number."""
    return reduce(larger, errors.values(), 0.0)


def site_tolerance(dtype: str, name: str) -> float:
    """What an output or gradient of one site may be off by; between two that are right it is twice as much."""
    return SITE_TOLERANCE[dtype] * (2.0 if name == _OTHER_TOKENS else 1.0)


def model_tolerance(dtype: str, name: str) -> float:
    """What one of a chain of sites may be off by."""
    times = _TIMES_AT_ONE_SITE if name.endswith(_AT_ONE_SITE) else _TIMES_FOR_QUERIES if name == "d_queries" else 1.0
    return MODEL_TOLERANCE[dtype] * times


def complaint(errors: Mapping[str, float], tolerance: Callable[[str], float]) -> str | None:
    """What is wrong, for the table; None if nothing is."""
    bad = [
        f"{name} is off by {error:.1e} where {tolerance(name):.0e} is allowed"
        for name, error in errors.items()
        if not error <= tolerance(name)
    ]
    return f"wrong against float64, as a share of its norm: {', '.join(bad)}" if bad else None
