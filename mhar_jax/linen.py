"""The same router for Flax Linen: a thin adapter with the same parameters and the same arithmetic."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhar_kernels import depth_route


class DepthRouter(nn.Module):
    """One routing site; see `mhar_jax.DepthRouter`. The width is the sources'.

    >>> import jax, jax.numpy as jnp
    >>> from mhar_jax.linen import DepthRouter
    >>> sources = [jnp.ones((2, 5, 16)), 3 * jnp.ones((2, 5, 16))]
    >>> router = DepthRouter(num_heads=4)
    >>> variables = router.init(jax.random.key(0), sources)
    >>> float(router.apply(variables, sources)[0, 0, 0])
    2.0
    """

    num_heads: int
    norm_scale: bool = True
    null_source: bool = False
    gate: bool = False
    eps: float = 1e-6
    param_dtype: jax.typing.DTypeLike = jnp.float32
    implementation: str | None = None

    @nn.compact
    def __call__(self, sources: jax.Array | Sequence[jax.Array], residual: jax.Array | None = None) -> jax.Array:
        """The mix [..., D]; with a residual, residual + gate · mix. Arguments as for `mhar_jax.DepthRouter`."""
        dim = sources.shape[-1] if hasattr(sources, "shape") else sources[0].shape[-1]
        zeros, ones, dtype = nn.initializers.zeros, nn.initializers.ones, self.param_dtype
        return depth_route(
            sources,
            self.param("query", zeros, (dim,), dtype),
            num_heads=self.num_heads,
            norm_scale=self.param("norm_scale", ones, (dim,), dtype) if self.norm_scale else None,
            eps=self.eps,
            residual=residual,
            gate=self.param("gate", zeros, (), dtype) if self.gate else None,
            null_source=self.param("null_source", zeros, (dim,), dtype) if self.null_source else None,
            implementation=self.implementation,
        )
