"""The one place where a model computes a depth softmax, and where it counts that it did."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mhar_jax.config.schema import ModelConfig
from mhar_jax.models.sites import Site, heads_of_site, num_sites, source_labels
from mhar_jax.sharding import partitioned_mesh
from mhar_kernels import depth_route
from mhar_kernels.target import current_platform

TOKEN_AXES = (("data", "fsdp"), ("context",))  # mesh axes that split tokens [B, T]
KERNELS = ("pallas_tpu", "triton")  # implementations that the partitioner cannot see into
Record = Callable[[int, jax.Array], None]  # (site index, weights [sources, B, T, H] float32)


class Reader:
    """What every way of reading sites keeps account of."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.counts = [len(labels) for labels in source_labels(config)]
        self.seen: list[int] = []

    def account(self, site: int, row: Site, sources: Sequence[jax.Array]) -> None:
        """A site is read, from as many sources as it has."""
        assert len(sources) + (row.null_source is not None) == self.counts[site], (site, len(sources))
        self.seen.append(site)

    def check(self) -> None:
        """Every site was read, once."""
        expected = list(range(num_sites(self.config)))
        assert sorted(self.seen) == expected, f"routing sites read: {self.seen}, expected each of {expected} once"


class SiteReader(Reader):
    """Routes site by site; each site exactly once for each forward pass, which `check` asserts."""

    def __init__(self, config: ModelConfig, record: Record | None = None):
        """`record` is called with every site's depth weights as they are made."""
        super().__init__(config)
        self.record = record

    def __call__(
        self, site: int, row: Site, sources: Sequence[jax.Array], residual: jax.Array | None = None
    ) -> jax.Array:
        """The site's mix [B, T, D], or residual + gate · mix; [B, T, KV, D] at an attention site of mhar_headwise."""
        self.account(site, row, sources)
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


def kernels_need_shards(implementation: str | None) -> bool:
    """Whether `depth_route` may be a kernel on arrays that a mesh in scope splits over devices."""
    if partitioned_mesh() is None:
        return False
    return implementation in KERNELS or (implementation is None and current_platform() != "cpu")


def axes_of_tokens(implementation: str | None) -> tuple[tuple[str, ...], ...]:
    """TOKEN_AXES where `depth_route` must run on each device's own tokens, else none.

    A kernel must. So must plain jnp on split sequences: it takes batch and sequence as one axis of tokens, and two
    split axes are no split of their product, so the partitioner would fetch the sources of whole sequences.
    """
    if (mesh := partitioned_mesh()) is None:
        return ()
    return TOKEN_AXES if kernels_need_shards(implementation) or mesh.shape["context"] > 1 else ()


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
    """`depth_route` on arrays [B, T, D] whose batch and sequences a mesh may split.

    Tokens are independent and need no communication. Batches alone are split by the compiler, in jnp; a kernel is
    opaque to it. So there, and where sequences are split, each device routes its own tokens; gradients of the site's
    parameters are summed over devices.
    """

    def route(sources, row, residual):
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

    split = axes_of_tokens(implementation)
    if not split:
        return route(sources, row, residual)
    mesh = jax.sharding.get_abstract_mesh()
    ways = [math.prod(mesh.shape[axis] for axis in axes) for axes in split]
    lead = sources[0].shape[:-1]
    tokens = P(*(axes if n % w == 0 else None for axes, w, n in zip(split, ways, lead, strict=False)))
    out = (tokens, P(None, *tokens)) if return_weights else tokens
    # Without the check of what varies, cotangents would be summed over axes that do not split tokens (tensor): a source
    # sent at each site, for what every device has already.
    sharded = jax.shard_map(route, in_specs=(tokens, P(), tokens), out_specs=out)
    return sharded(list(sources), row, residual)
