"""`depth_stack`: a whole stack of sublayers, each reading a learned mixture of all earlier outputs."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mhar_kernels.api import depth_route

Sublayer = Callable[[Any, jax.Array], jax.Array]


def depth_stack(
    sublayers: Sequence[Sublayer],
    params: Sequence[Any],
    x: jax.Array,
    queries: jax.Array,
    norm_scales: jax.Array | None = None,
    *,
    num_heads: int,
    eps: float = 1e-6,
    block_size: int | None = None,
    remat: Literal["none", "sublayer"] = "none",
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Runs n sublayers with a routing site before each and one after the last.

    Source 0 is `x`; source i + 1 is `sublayers[i](params[i], mix_i)`; mix_i is `depth_route` over sources 0..i with
    `queries[i]`. The same values and gradients as n + 1 calls of `depth_route`.

    Args:
      sublayers: n pure functions `(params_i, h [..., D]) -> [..., D]`, in x's dtype.
      params: n parameter pytrees.
      x: [..., D], the embedding.
      queries, norm_scales: [n + 1, D]; norm_scales None means ones.
      num_heads: H, a divisor of D.
      eps: added to the mean square of the keys.
      block_size: sites a depth block; has no effect on the result.
      remat: "none", or "sublayer": the insides of each sublayer are computed again in the backward pass.
      implementation, interpret: as in `depth_route`.

    Returns:
      The final site's mix [..., D].

    Raises:
      ValueError: counts or shapes do not agree.
      UnsupportedInputError: as in `depth_route`.
    """
    n = len(sublayers)
    if len(params) != n:
        raise ValueError(f"params must hold one entry a sublayer, got {len(params)} for {n} sublayers")
    for name, value in (("queries", queries), ("norm_scales", norm_scales)):
        if value is not None and value.shape != (n + 1, x.shape[-1]):
            raise ValueError(
                f"{name} must be [sublayers + 1, D] = {(n + 1, x.shape[-1])}: one row a site and one for the final "
                f"site, got {value.shape}"
            )
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if remat not in ("none", "sublayer"):
        raise ValueError(f"remat must be 'none' or 'sublayer', got {remat!r}")

    def site(i: int, sources: list[jax.Array]) -> jax.Array:
        return depth_route(
            sources,
            queries[i],
            num_heads=num_heads,
            norm_scale=None if norm_scales is None else norm_scales[i],
            eps=eps,
            implementation=implementation,
            interpret=interpret,
        )

    sources = [jnp.asarray(x)]
    for i, (sublayer, p) in enumerate(zip(sublayers, params, strict=True)):
        run = jax.checkpoint(sublayer) if remat == "sublayer" else sublayer
        out = run(p, site(i, sources))
        if out.shape != x.shape or out.dtype != x.dtype:
            raise ValueError(
                f"sublayer {i} must return an array like x, {x.dtype.name}{list(x.shape)}, "
                f"got {out.dtype.name}{list(out.shape)}"
            )
        sources.append(out)
    return site(n, sources)
