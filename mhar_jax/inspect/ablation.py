"""What the loss says: sources, heads and sites taken away one at a time, since mass is not importance.

Every ablation is on the same tokens as the intact model, so the change in loss is a paired difference; its standard
error is over sequences. Nothing is trained again.

- a source at a site: its weight is 0 in every head, the other weights are renormalised;
- a head at a site, "uniform": its weights are equal, what learning them is worth; "off": its part of the mix is 0;
- a site: the same two, for all of its heads. "off" leaves the stream alone in the delta forms, and gives the sublayer
  zeros in the replacement forms.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhar_jax.inspect.text import Windows
from mhar_jax.inspect.walk import Edit, Walk


@dataclasses.dataclass(frozen=True)
class Ablation:
    """Changes in loss, nats a token, float64, positive where the ablation hurts; NaN where there is nothing to ablate.

    Each array's last axis is (change, its standard error). S sites, N sources, G softmaxes.
    """

    loss: float  # of the intact model, nats a token
    tokens: int
    sequences: int  # that standard errors are over
    source: np.ndarray  # [S, N, 2]
    head_uniform: np.ndarray  # [S, G, 2]; NaN at sites with one softmax
    head_off: np.ndarray  # [S, G, 2]
    site_uniform: np.ndarray  # [S, 2]; NaN at sites with one source
    site_off: np.ndarray  # [S, 2]

    @property
    def noise(self) -> float:
        """Twice the median standard error of the sources' changes: what one cell of the map does not resolve."""
        errors = self.source[..., 1]
        return float(2 * np.nanmedian(errors)) if np.isfinite(errors).any() else float("nan")


@dataclasses.dataclass(frozen=True)
class _Job:
    """One ablation, and where its result belongs."""

    field: str
    index: tuple[int, ...]
    edit: Edit


def jobs_at(walk: Walk, site: int) -> Iterator[_Job]:
    """Every ablation of one site."""
    shape, nothing = walk.shapes[site], walk.no_edit(site)
    heads, several = shape.softmaxes, len(shape.sources) > 1
    for n in range(len(shape.sources) if several else 0):
        keep = nothing.keep.copy()
        keep[n] = False
        yield _Job("source", (site, n), nothing._replace(keep=keep))
    for h in range(heads if heads > 1 else 0):
        one = np.arange(heads) == h
        if several:
            yield _Job("head_uniform", (site, h), nothing._replace(uniform=one))
        yield _Job("head_off", (site, h), nothing._replace(scale=np.where(one, 0, 1).astype(np.float32)))
    if several:
        yield _Job("site_uniform", (site,), nothing._replace(uniform=np.ones(heads, bool)))
    yield _Job("site_off", (site,), nothing._replace(scale=np.zeros(heads, np.float32)))


def ablate(walk: Walk, windows: Windows) -> Ablation:
    """Runs every ablation over the windows, each from the state before its site."""
    sites, n = len(walk.shapes), walk.max_sources
    heads = max(s.softmaxes for s in walk.shapes)
    shapes: dict[str, tuple[int, ...]] = {
        "source": (sites, n),
        "head_uniform": (sites, heads),
        "head_off": (sites, heads),
        "site_uniform": (sites,),
        "site_off": (sites,),
    }
    rows: dict[tuple[str, tuple[int, ...]], list[np.ndarray]] = {}
    intact: list[np.ndarray] = []
    for tokens, mask in zip(windows.tokens, windows.mask, strict=True):
        targets, counts = jnp.asarray(tokens[:, 1:]), jnp.asarray(mask)
        states: list[Any] = []
        state, context = walk.start(jnp.asarray(tokens[:, :-1]))
        before = walk.losses(walk.run(state, context, states=states), targets, counts)
        intact.append(np.asarray(before, np.float64))
        for site in range(sites):
            waiting: list[tuple[_Job, jax.Array]] = []
            for job in jobs_at(walk, site):
                x = walk.run(states[site], context, first=site, edits={site: job.edit})
                waiting.append((job, walk.losses(x, targets, counts)))
            for job, losses in waiting:
                change = np.asarray(losses, np.float64) - intact[-1]
                rows.setdefault((job.field, job.index), []).append(change)

    lengths = windows.mask.sum(axis=-1).reshape(-1)
    results = {name: np.full((*shape, 2), np.nan) for name, shape in shapes.items()}
    for (field, index), changes in rows.items():
        results[field][index] = _mean_and_error(np.concatenate(changes), lengths)
    return Ablation(
        loss=float(np.concatenate(intact).sum() / windows.count),
        tokens=windows.count,
        sequences=int((lengths > 0).sum()),
        **results,
    )


def _mean_and_error(change: np.ndarray, lengths: np.ndarray) -> tuple[float, float]:
    """The mean change a token, and its standard error with sequences as the unit.

    A ratio of two sums over sequences: the error is that of the sum of residuals (Cochran, Sampling Techniques, 6.4).
    """
    change, lengths = change[lengths > 0], lengths[lengths > 0]
    mean = change.sum() / lengths.sum()
    n = len(lengths)
    if n < 2:
        return mean, np.nan
    residual = change - mean * lengths
    return mean, float(np.sqrt(n / (n - 1) * (residual**2).sum()) / lengths.sum())
