"""The probe of learned queries: how differently the slices of a query would read, were each on its own.

Width disagreement (arXiv 2607.27230, "forced compromise"): a softmax's query is cut into S slices; slice s alone would
read a_s = softmax_n <q[s], key_n[s]>, where the softmax reads alpha = softmax_n <q, key_n>. The number is the mean of
KL(a_s || alpha), in nats, over slices, tokens, softmaxes and sites. A site with H heads has H softmaxes, each of its
own part of the width, so that with one head this is the paper's probe. Sites with one source have nothing to disagree
about and are left out.

A random query disagrees too. The null is a normal random query, scaled to the norm of the softmax's own before the
key-norm scale; learned excess = trained − null. Disagreement can grow with the number of sources, so a control repeats
the probe on the same number M of sources everywhere: M evenly spaced ones of every site that has as many, the others
masked.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhar_jax.errors import UserError
from mhar_jax.inspect.statistics import finite_mean
from mhar_jax.inspect.text import Windows
from mhar_jax.inspect.walk import HIGHEST, SiteInput, Walk, inverse_rms, quick_jit, stack_sources, support

LAYOUTS = ("contiguous", "interleaved")


class Summary(NamedTuple):
    """One number of the probe, in nats, over all sites that count."""

    trained: float
    null: float  # mean over draws
    null_sd: float  # standard deviation over draws
    excess: float  # trained − null
    excess_sd: float  # uncertainty of the excess that comes from the draws: null_sd / sqrt(draws)
    sites: int  # how many sites the mean is over


@dataclasses.dataclass(frozen=True)
class Probe:
    """Results, float64. S sites, G softmaxes, R draws of a random query; NaN where a site has no such softmax."""

    slices: int
    matched_sources: int  # M
    tokens: int
    counts: np.ndarray  # int [S]: sources of each site
    disagreement: dict[str, np.ndarray]  # layout -> [1 + R, S, G]: the trained query first
    matched: dict[str, np.ndarray]  # the same on M sources, NaN at sites with fewer
    cosine: np.ndarray  # [S]: mean cosine between two of a site's sources, the null source left out; NaN below two
    deviation: np.ndarray  # [1 + R, S]: largest |a softmax's token-averaged weight − mean over softmaxes|

    @property
    def draws(self) -> int:
        """R."""
        return self.deviation.shape[0] - 1

    def summary(self, layout: str, *, matched: bool = False) -> Summary:
        """The probe's number for a layout of the slices, "contiguous" or "interleaved"."""
        values = (self.matched if matched else self.disagreement)[layout]
        counted = self.counts >= max(2, self.matched_sources if matched else 0)
        if not counted.any():
            nothing = float("nan")
            return Summary(nothing, nothing, nothing, nothing, nothing, 0)
        by_site = finite_mean(values[:, counted], 2)  # [1 + R, sites]
        trained, null = by_site[0].mean(), by_site[1:].mean(axis=1)
        sd = float(null.std(ddof=1)) if len(null) > 1 else float("nan")
        return Summary(
            float(trained),
            float(null.mean()),
            sd,
            float(trained - null.mean()),
            sd / np.sqrt(len(null)),
            int(counted.sum()),
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON values: numbers, and per site the means over softmaxes."""
        numbers = {
            name: {layout: self.summary(layout, matched=matched)._asdict() for layout in LAYOUTS}
            for name, matched in (("width_disagreement", False), (f"on_{self.matched_sources}_sources", True))
        }
        per_site = {
            layout: {
                "trained": _plain(finite_mean(self.disagreement[layout][0], -1)),
                "null": _plain(finite_mean(self.disagreement[layout][1:].mean(axis=0), -1)),
            }
            for layout in LAYOUTS
        }
        several = self.counts > 1
        return {
            "unit": "nats",
            "slices": self.slices,
            "draws": self.draws,
            "tokens": self.tokens,
            "matched_sources": self.matched_sources,
            **numbers,
            "source_collinearity": {
                "mean": _plain(finite_mean(self.cosine)[None])[0],
                "last_site": _plain(self.cosine[-1:])[0],
            },
            "largest_head_deviation": {
                "trained": float(np.max(self.deviation[0][several], initial=0)),
                "null": [float(np.max(d[several], initial=0)) for d in self.deviation[1:]],
            },
            "per_site": {"sources": self.counts.tolist(), "collinearity": _plain(self.cosine), **per_site},
        }

    def table(self) -> str:
        """A Markdown table, with the paper's numbers beneath."""
        rows = [
            "| nats | trained | random query of the same norm | learned excess | sites |",
            "|---|---|---|---|---|",
        ]
        for matched in (False, True):
            for layout in LAYOUTS:
                s = self.summary(layout, matched=matched)
                name = f"{self.slices} {layout} slices" + (f", {self.matched_sources} sources" if matched else "")
                if s.sites:
                    rows.append(
                        f"| {name} | {s.trained:.4f} | {s.null:.4f} ± {s.null_sd:.4f} "
                        f"| {s.excess:+.4f} ± {s.excess_sd:.4f} | {s.sites} |"
                    )
                else:
                    rows.append(f"| {name} | – | – | – | 0 |")
        cosine = float(finite_mean(self.cosine))
        return "\n".join(rows) + (
            f"\n\n± after a null: standard deviation over {self.draws} draws; after an excess: that over "
            f"√{self.draws}. {self.tokens:,} tokens. Mean cosine between two sources of a site: {cosine:.3f}."
            "\n\nThe paper (arXiv 2607.27230), one head, 4 slices, learned excess: 0.235 (100M), 0.281 (d768/L12), "
            "0.512 (350M), 0.606 (1B); cosine 0.060 / 0.063 / 0.114 / 0.087. Other models and text: not a target.\n"
        )


def probe(
    walk: Walk, windows: Windows, *, slices: int = 4, draws: int = 8, matched_sources: int = 8, seed: int = 0
) -> Probe:
    """Runs the probe over the windows.

    Raises:
      UserError: a softmax has fewer channels than slices.
    """
    widths = [int(support(walk.config, i)[0].sum()) for i in range(len(walk.shapes))]
    if min(widths) < slices:
        raise UserError(
            f"--slices must not exceed the channels of a routing head, got {slices} slices of {min(widths)} channels"
        )
    sites, heads = len(walk.shapes), max(s.softmaxes for s in walk.shapes)
    counts = np.array([len(s.sources) for s in walk.shapes])
    matched_sources = min(matched_sources, int(counts.max()))
    queries = [_random_queries(walk, i, draws, seed) for i in range(sites)]
    subsets = [_subset(int(c), matched_sources, walk.max_sources) for c in counts]
    layouts = [[_slice_masks(support(walk.config, i), slices, name) for name in LAYOUTS] for i in range(sites)]
    site_function = functools.partial(_probe_site, eps=walk.config.norm_eps)
    sums: list[Any] = [None] * sites
    for tokens, mask in zip(windows.tokens, windows.mask, strict=True):
        found: list[Any] = [None] * sites
        counted = jnp.asarray(mask)

        def visit(site: int, given: SiteInput, weights, found=found, mask=counted) -> None:
            del weights
            parts = [site_function(given, queries[site], m, subsets[site], mask) for m in layouts[site]]
            found[site] = parts, _cosine(given, mask)

        walk.run(*walk.start(jnp.asarray(tokens[:, :-1])), visit=visit)
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(found))
        sums = wide if sums[0] is None else jax.tree.map(np.add, sums, wide)

    count = windows.count
    disagreement = {layout: np.full((1 + draws, sites, heads), np.nan) for layout in LAYOUTS}
    matched = {layout: np.full((1 + draws, sites, heads), np.nan) for layout in LAYOUTS}
    deviation, cosine = np.zeros((1 + draws, sites)), np.full(sites, np.nan)
    for i, (parts, cosine_sum) in enumerate(sums):
        own = walk.shapes[i].softmaxes
        for layout, part in zip(LAYOUTS, parts, strict=True):
            disagreement[layout][:, i, :own] = part["all"] / count
            if counts[i] >= matched_sources:
                matched[layout][:, i, :own] = part["matched"] / count
        mean = parts[0]["weight"] / count  # [1 + R, N, G]
        deviation[:, i] = np.abs(mean - mean.mean(axis=2, keepdims=True)).max(axis=(1, 2))
        if counts[i] - ("null" in walk.shapes[i].sources) > 1:
            cosine[i] = cosine_sum / count
    return Probe(slices, matched_sources, count, counts, disagreement, matched, cosine, deviation)


def _random_queries(walk: Walk, site: int, draws: int, seed: int) -> jax.Array:
    """[1 + R, G, D]: the site's own query, then random ones of each softmax's norm, all with the key-norm scale."""
    own = np.asarray(walk.query(site), np.float64)
    within = support(walk.config, site)
    random = np.random.default_rng([seed, site]).standard_normal((draws, *own.shape)) * within
    norms = np.linalg.norm(own, axis=-1) / np.linalg.norm(random, axis=-1)
    both = np.concatenate([own[None], random * norms[..., None]])
    return jnp.asarray(both * np.asarray(walk.rows[site].norm_scale, np.float64), jnp.float32)


def _slice_masks(within: np.ndarray, slices: int, layout: str) -> jax.Array:
    """float32 [G, D, S]: 1 where a channel of a softmax belongs to a slice. Uneven widths give uneven slices."""
    masks = np.zeros((*within.shape, slices), np.float32)
    for g, row in enumerate(within):
        channels = np.flatnonzero(row)
        k = np.arange(len(channels))
        which = k * slices // len(channels) if layout == "contiguous" else k % slices
        masks[g, channels, which] = 1
    return jnp.asarray(masks)


def _subset(count: int, wanted: int, padded: int) -> jax.Array:
    """bool [N]: `wanted` evenly spaced of the first `count` sources, the first and the newest among them."""
    chosen = np.zeros(padded, bool)
    chosen[np.round(np.linspace(0, count - 1, min(count, wanted))).astype(int)] = True
    return jnp.asarray(chosen)


@functools.partial(quick_jit, static_argnames="eps")
def _probe_site(
    given: SiteInput, queries: jax.Array, masks: jax.Array, subset: jax.Array, counts: jax.Array, *, eps: float
) -> dict[str, jax.Array]:
    """Sums over tokens of one site: KL on all sources and on the subset [1 + R, G], and weights [1 + R, N, G]."""
    s = stack_sources(given)
    real = jnp.arange(s.shape[0]) < given.present
    sliced = jnp.einsum("mgd,gds->dmgs", queries, masks)  # each slice's query over the full width
    scale = inverse_rms(s, eps)[..., None, None, None]
    by_slice = jnp.einsum("nbtd,dmgs->nbtmgs", s, sliced, precision=HIGHEST) * scale

    def disagreement(present: jax.Array) -> tuple[jax.Array, jax.Array]:
        present = present.reshape(-1, *[1] * 5)
        log_softmax = lambda x: jax.nn.log_softmax(jnp.where(present, x, -jnp.inf), axis=0)
        log_slices, log_all = log_softmax(by_slice), log_softmax(jnp.sum(by_slice, axis=-1, keepdims=True))
        difference = jnp.where(present, log_slices - log_all, 0)
        kl = jnp.sum(jnp.exp(log_slices) * difference, axis=0)  # [B, T, 1 + R, G, S]
        return _over_tokens(jnp.mean(kl, axis=-1), counts), jnp.exp(log_all[..., 0])

    everything, weights = disagreement(real)
    return {
        "all": everything,
        "matched": disagreement(real & subset)[0],
        "weight": jax.vmap(lambda w: _over_tokens(w, counts))(weights).swapaxes(0, 1),
    }


@jax.jit
def _cosine(given: SiteInput, counts: jax.Array) -> jax.Array:
    """Sum over tokens of the mean cosine between two different sources, the null source left out.

    The sum of all pairs of unit vectors is |sum of them|² minus their number.
    """
    s = given.sources.astype(jnp.float32)
    real = given.present - (given.null_source is not None)
    norm = jnp.linalg.norm(s, axis=-1, keepdims=True)
    unit = jnp.where(norm > 0, s / jnp.where(norm > 0, norm, 1), 0)  # padding is 0
    lengths = jnp.sum(jnp.sum(unit * unit, axis=-1), axis=0)
    pairs = jnp.sum(jnp.sum(unit, axis=0) ** 2, axis=-1) - lengths
    return _over_tokens(pairs[..., None], counts)[0] / jnp.maximum(real * (real - 1), 1)


def _over_tokens(x: jax.Array, counts: jax.Array) -> jax.Array:
    """The sum over [B, T, ...] of tokens that count."""
    return jnp.sum(jnp.where(counts.reshape(*counts.shape, *[1] * (x.ndim - 2)), x, 0), axis=(0, 1))


def _plain(x: np.ndarray) -> list[float | None]:
    return [float(v) if np.isfinite(v) else None for v in x]
