"""`DepthRouter`: depth routing as one Flax NNX module, for anybody's model."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from mhar_kernels import depth_route


class DepthRouter(nnx.Module):
    """One routing site: a learned query whose H heads each weigh the sources for their own slice of the width.

    A fresh router has a zero query and returns the sources' mean. In a model, keep the list of sublayer outputs and let
    every sublayer read a router's mix of it in place of the residual stream:

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from mhar_jax import DepthRouter
    >>> class Net(nnx.Module):
    ...     def __init__(self, dim, depth, *, rngs):
    ...         self.layers = nnx.List([nnx.Linear(dim, dim, rngs=rngs) for _ in range(depth)])
    ...         self.routers = nnx.List([DepthRouter(dim, 4, rngs=rngs) for _ in range(depth + 1)])
    ...     def __call__(self, x):
    ...         sources = [x]
    ...         for layer, router in zip(self.layers, self.routers):
    ...             sources.append(jax.nn.relu(layer(router(sources))))
    ...         return self.routers[-1](sources)
    >>> net = Net(16, 3, rngs=nnx.Rngs(0))
    >>> net(jnp.ones((2, 5, 16))).shape
    (2, 5, 16)

    Parameters: `query` [dim] zeros; with `norm_scale`, `norm_scale` [dim] ones; with `null_source`, `null_source` [dim]
    zeros; with `gate`, `gate` [] zero.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
        norm_scale: bool = True,
        null_source: bool = False,
        gate: bool = False,
        eps: float = 1e-6,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        implementation: str | None = None,
    ):
        """Makes a router that returns the mean of its sources.

        Args:
          dim: width D of the sources.
          num_heads: H, a divisor of D; 1 is Attention Residuals, the KV heads are MHAR's default.
          rngs: taken for uniformity with other modules; every initial value is a constant.
          norm_scale: learn the scale of the keys' RMSNorm.
          null_source: learn one more source, the same for every token.
          gate: learn a scalar that multiplies the mix, closed (0) at the start; for use with a residual.
          eps: added to the mean square of the keys.
          param_dtype: dtype of the parameters.
          implementation: as in `mhar_kernels.depth_route`.

        Raises:
          ValueError: num_heads does not divide dim.
        """
        del rngs
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads must be a positive divisor of dim, got num_heads={num_heads} and dim={dim}")
        self.dim, self.num_heads, self.eps, self.implementation = dim, num_heads, eps, implementation
        self.query = nnx.Param(jnp.zeros((dim,), param_dtype))
        self.norm_scale = nnx.Param(jnp.ones((dim,), param_dtype)) if norm_scale else None
        self.null_source = nnx.Param(jnp.zeros((dim,), param_dtype)) if null_source else None
        self.gate = nnx.Param(jnp.zeros((), param_dtype)) if gate else None

    def __call__(self, sources: jax.Array | Sequence[jax.Array], residual: jax.Array | None = None) -> jax.Array:
        """The mix [..., D] in the sources' dtype; with a residual, residual + gate · mix.

        Args:
          sources: [N, ..., D], or a sequence of N arrays [..., D], oldest first.
          residual: [..., D] in the sources' dtype.
        """
        value = lambda p: None if p is None else p[...]
        return depth_route(
            sources,
            self.query[...],
            num_heads=self.num_heads,
            norm_scale=value(self.norm_scale),
            eps=self.eps,
            residual=residual,
            gate=value(self.gate),
            null_source=value(self.null_source),
            implementation=self.implementation,
        )
