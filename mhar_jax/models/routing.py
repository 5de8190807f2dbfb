"""The one place where a model computes a depth softmax, and where it counts that it did."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from mhar_jax.config.schema import ModelConfig
from mhar_jax.models.sites import Site, heads_of_site, num_sites, source_labels
from mhar_kernels import depth_route

Record = Callable[[int, jax.Array], None]  # (site index, weights [sources, B, T, H] float32)


class SiteReader:
    """Routes site by site; each site exactly once for each forward pass, which `check` asserts."""

    def __init__(self, config: ModelConfig, record: Record | None = None):
        """`record` is called with every site's depth weights as they are made."""
        self.config, self.record = config, record
        self.counts = [len(labels) for labels in source_labels(config)]
        self.seen: list[int] = []

    def __call__(
        self, site: int, row: Site, sources: Sequence[jax.Array], residual: jax.Array | None = None
    ) -> jax.Array:
        """The site's mix [B, T, D], or residual + gate · mix; [B, T, KV, D] at an attention site of mhar_headwise."""
        assert len(sources) + (row.null_source is not None) == self.counts[site], (site, len(sources))
        self.seen.append(site)
        if row.query.ndim == 2:
            by_group = jax.vmap(lambda q: self._route(row._replace(query=q), sources, 1, residual))
            out, weights = by_group(row.query)
            out, weights = jnp.moveaxis(out, 0, -2), None if weights is None else jnp.moveaxis(weights[..., 0], 0, -1)
        else:
            out, weights = self._route(row, sources, heads_of_site(self.config, site), residual)
        if self.record is not None:
            self.record(site, weights)
        return out

    def _route(self, row: Site, sources: Sequence[jax.Array], num_heads: int, residual: jax.Array | None):
        result = route_under_mesh(
            sources,
            row,
            residual,
            num_heads=num_heads,
            eps=self.config.norm_eps,
            implementation=self.config.routing_implementation,
            return_weights=self.record is not None,
        )
        return result if self.record is not None else (result, None)

    def check(self) -> None:
        """Every site was read, once."""
        expected = list(range(num_sites(self.config)))
        assert sorted(self.seen) == expected, f"routing sites read: {self.seen}, expected each of {expected} once"


def route_under_mesh(
    sources: Sequence[jax.Array],
    row: Site,
    residual: jax.Array | None,
    *,
    num_heads: int,
    eps: float,
    implementation: str | None,
    return_weights: bool,
):
    """`depth_route` on sharded arrays.

    The jnp implementations are partitioned by the compiler: tokens are independent and need no communication. A kernel
    is opaque to it, and under a mesh of several devices belongs inside `jax.shard_map` over the token axes: here.
    """
    call = functools.partial(
        depth_route,
        list(sources),
        row.query,
        num_heads=num_heads,
        norm_scale=row.norm_scale,
        eps=eps,
        residual=residual,
        gate=row.gate,
        null_source=row.null_source,
        implementation=implementation,
    )
    return call(return_weights=True) if return_weights else call()
