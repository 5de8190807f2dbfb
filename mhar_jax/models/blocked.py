"""Routing by passes: sources are read once for many sites, where `depth_stack` does not fit.

Queries are parameters, so what a source gives to a site can be made as soon as the source exists, and a softmax over
depth merges from parts (`mhar_kernels.parts`). A pass serves a run of sites with a run of sources:

- block_mhar and delta_block: when a depth block starts, all its sites read the sources before it.
- delta and mhar_headwise, whose sites read every earlier output: halves of halves. When site i comes up and 2^k is the
  largest power of two that divides it, the last 2^k sources before i serve the 2^k sites from i on. So a source is read
  about log2(sites) / 2 times, not once a site.
- The same under layer remat: halves of halves inside runs of four layers, before each of which all its sites read all
  sources there are. So parts do not outlive a run, and are made again with it.

What no pass has covered, the newest source, a running sum, or the null source, a site adds by itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mhar_jax.config.schema import ModelConfig
from mhar_jax.models.routing import Reader, axes_of_tokens
from mhar_jax.models.sites import (
    Site,
    heads_of_site,
    is_grouped_site,
    layers_per_block,
    num_sites,
    num_sublayers,
)
from mhar_kernels.parts import Part, blocked_implementation, depth_mix, merge, one_source

_RUN = 8  # sublayers


class Pass(NamedTuple):
    """Some sources, read once for some sites."""

    sources: range
    sites: range


def passes(config: ModelConfig) -> dict[int, Pass]:
    """The pass that is made when a site comes up, for sites that have one."""
    sites, sublayers = num_sites(config), num_sublayers(config)
    found = {}
    if config.variant in ("block_mhar", "delta_block"):
        per_block = 2 * layers_per_block(config)
        for block, first in enumerate(range(0, sublayers, per_block)):
            found[first] = Pass(range(block + 1), range(first, min(first + per_block, sublayers)))
        if sites > sublayers:
            found[sites - 1] = Pass(range(len(found) + 1), range(sites - 1, sites))
        return found
    if config.remat != "layer":
        for site in range(1, sites):
            size = site & -site
            found[site] = Pass(range(site - size, site), range(site, min(site + size, sites)))
        return found
    for site in range(1, sublayers):
        size = min(site & -site, _RUN)
        first = 0 if size == _RUN else site - size
        found[site] = Pass(range(first, site), range(site, min(site + size, sublayers)))
    if sites > sublayers:
        found[sites - 1] = Pass(range(sites - 1), range(sites - 1, sites))
    return found


def can_block(config: ModelConfig, dtype) -> bool:
    """Whether a variant's sites can be read by passes with the implementation asked for."""
    if config.variant not in ("block_mhar", "delta_block", "delta", "mhar_headwise"):
        return False
    heads = {heads_of_site(config, i) for i in range(num_sites(config)) if not is_grouped_site(config, i)}
    if config.variant == "mhar_headwise":
        heads.add(1)
    return all(
        blocked_implementation(config.routing_implementation, dtype, config.d_model, h) is not None for h in heads
    )


class PassReader(Reader):
    """Routes by passes; each site exactly once for each forward pass, which `check` asserts. As `SiteReader`."""

    def __init__(self, config: ModelConfig, rows: Sequence[Site]):
        """rows: of all sites."""
        super().__init__(config)
        self.rows = rows
        self.passes = passes(config)
        self.parts: dict[int, list[Part]] = {}  # by site, as far as passes have made them
        self.covered = [0] * num_sites(config)  # how many of a site's sources those are

    def __call__(
        self, site: int, row: Site, sources: Sequence[jax.Array], residual: jax.Array | None = None
    ) -> jax.Array:
        """The site's mix [B, T, D], or residual + gate · mix; [B, T, KV, D] at an attention site of mhar_headwise."""
        self.account(site, row, sources)
        self.prepare(site, sources)
        parts = [*self.parts.pop(site, []), *(self._one(site, s) for s in sources[self.covered[site] :])]
        null = None if row.null_source is None else self._one(site, row.null_source)
        dtype, grouped = sources[0].dtype, is_grouped_site(self.config, site)

        @jax.checkpoint  # what it keeps are the parts, not their float32 copies
        def finish(parts: list[Part], null: Part | None, gate: jax.Array | None, residual: jax.Array | None):
            mix = merge(parts if null is None else [null, *parts])
            if grouped:
                mix = jnp.moveaxis(mix, 0, -2)
            if gate is not None:
                mix = gate.astype(jnp.float32) * mix
            return (mix if residual is None else residual.astype(jnp.float32) + mix).astype(dtype)

        return finish(parts, null, row.gate, residual)

    def spans(self) -> list[range]:
        """Runs of sublayers whose passes serve no others: depth blocks, or runs of layers under layer remat."""
        sublayers = num_sublayers(self.config)
        if self.config.variant in ("block_mhar", "delta_block"):
            starts = [site for site in sorted(self.passes) if site < sublayers]
        else:
            starts = list(range(0, sublayers, _RUN if self.config.remat == "layer" else sublayers))
        return [range(a, b) for a, b in zip(starts, [*starts[1:], sublayers], strict=True)]

    def prepare(self, site: int, sources: Sequence[jax.Array]) -> None:
        """Makes the pass of a site that comes up; where sites are read inside `jax.checkpoint`, this belongs before it.

        A pass of many sites would otherwise leak out of the first one's trace; that of an odd site serves it alone.
        """
        if site in self.passes:
            self._run(self.passes.pop(site), sources)

    def _run(self, one: Pass, sources: Sequence[jax.Array]) -> None:
        for site in one.sites:
            assert self.covered[site] == one.sources.start, (site, one)
            self.covered[site] = one.sources.stop
        rows = [sources[i] for i in one.sources]
        if len(rows) == 1:
            for site in one.sites:
                self.parts.setdefault(site, []).append(self._one(site, rows[0]))
            return
        for grouped in (False, True):
            sites = [i for i in one.sites if is_grouped_site(self.config, i) == grouped]
            if not sites:
                continue
            queries = jnp.concatenate([self._queries(i) for i in sites])
            implementation = self.config.routing_implementation
            made = depth_mix(
                rows,
                queries,
                num_heads=self._heads(sites[0]),
                eps=self.config.norm_eps,
                implementation=implementation,
                token_axes=axes_of_tokens(implementation),
            )
            if grouped:
                made = Part(*(a.reshape(len(sites), -1, *a.shape[1:]) for a in made))
            # The transpose of `unstack` is one stack; indexing would add up a full-size gradient a site.
            for site, mix, lse in zip(sites, jax.lax.unstack(made.mix), jax.lax.unstack(made.lse), strict=True):
                self.parts.setdefault(site, []).append(Part(mix, lse))

    def _one(self, site: int, source: jax.Array) -> Part:
        """The part of a single source [..., D] at a site."""
        queries, heads = self._queries(site), self._heads(site)
        if not is_grouped_site(self.config, site):
            return one_source(source, queries[0], num_heads=heads, eps=self.config.norm_eps)
        by_group = [one_source(source, q, num_heads=heads, eps=self.config.norm_eps) for q in queries]
        return Part(source[None], jnp.stack([part.lse for part in by_group]))

    def _queries(self, site: int) -> jax.Array:
        """Effective queries of a site, float32: [1, D], or [KV, D] where each KV group has its own."""
        row = self.rows[site]
        wide = row.query.astype(jnp.float32) * row.norm_scale.astype(jnp.float32)
        return wide if wide.ndim == 2 else wide[None]

    def _heads(self, site: int) -> int:
        """Depth softmaxes of each of those queries."""
        return 1 if is_grouped_site(self.config, site) else heads_of_site(self.config, site)
