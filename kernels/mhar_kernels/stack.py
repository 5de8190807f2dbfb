"""`depth_stack`: a whole stack of sublayers, each reading a learned mixture of all earlier outputs."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mhar_kernels import pre_norm, schedule, stages_xla, traffic, varying
from mhar_kernels.api import depth_route
from mhar_kernels.stages_sharded import ShardedStages, TokenAxes, TokenShards
from mhar_kernels.target import current_platform
from mhar_kernels.twofloat import two_prod

Sublayer = Callable[[Any, jax.Array], jax.Array]

# Sites a block where block_size is None, but on GPUs, where `traffic.py` chooses. In plain jnp every stage is a few
# fused operations whatever S, so S only bounds how often a source is read again; on two CPU cores S = 3 and S = 9 took
# the same time on nine sites.
_BLOCK_SIZE = 8


def depth_stack(
    sublayers: Sequence[Sublayer],
    params: Sequence[Any],
    x: jax.Array,
    queries: jax.Array,
    norm_scales: jax.Array | None = None,
    *,
    num_heads: int,
    eps: float = 1e-6,
    pre_norms: jax.Array | None = None,
    pre_norm_eps: float | None = None,
    block_size: int | None = None,
    remat: Literal["none", "sublayer", "sources"] = "none",
    implementation: str | None = None,
    interpret: bool = False,
    token_axes: TokenAxes = (),
    inference: bool = False,
) -> jax.Array:
    """Runs n sublayers with a routing site before each and one after the last.

    Source 0 is `x`; source i + 1 is `sublayers[i](params[i], mix_i)`; mix_i is `depth_route` over sources 0..i with
    `queries[i]`. The same values and gradients as n + 1 calls of `depth_route`, to rounding, and differentiable in x,
    params, queries, norm_scales, pre_norms, and whatever the sublayers close over.

    The stack runs by blocks of sites (`schedule.py`), which moves far less than site by site. Site by site run:
    "reference"; "triton" with float32 storage or heads narrower than 16; and "pallas_tpu" where a block does not fit.

    Args:
      sublayers: n pure functions `(params_i, h [..., D]) -> [..., D]`, in x's dtype.
      params: n parameter pytrees.
      x: [..., D], the embedding.
      queries, norm_scales: [n + 1, D]; norm_scales None means ones.
      num_heads: H, a divisor of D.
      eps: added to the mean square of the keys.
      pre_norms: [n + 1, D]; sublayer i gets RMSNorm(mix_i) * pre_norms[i], and the result is the final mix's likewise.
        A Pre-LN sublayer needs its norm nowhere else, and the kernel that finishes a mix norms it on the way out. None:
        mixes are passed on as they are.
      pre_norm_eps: added to the mean square of the mixes; None: eps.
      block_size: sites a depth block; has no effect on the result beyond rounding. None: chosen.
      remat: what the backward pass computes again. "none"; "sublayer": the insides of each sublayer, from its mix;
        "sources": the mixes, too, so that of a sublayer only what it returned is kept.
      implementation, interpret: as in `depth_route`.
      token_axes: axes of the mesh in scope that split x's first axis, or for each leading axis those that split it, as
        (("data",), ("context",)). The compiler cannot partition a kernel: given these, each device runs it on its own
        tokens, inside `jax.shard_map`. Needed for kernels on a mesh.
      inference: nothing is made for a backward pass, and sublayers are called as they are, so that they may have
        effects, such as keeping a cache. The result is then not differentiable through kernels.

    Returns:
      The final site's mix [..., D], through its norm where there is one.

    Raises:
      ValueError: counts or shapes do not agree.
      UnsupportedInputError: as in `depth_route`.
    """
    x = jnp.asarray(x)
    n = len(sublayers)
    if len(params) != n:
        raise ValueError(f"params must hold one entry a sublayer, got {len(params)} for {n} sublayers")
    for name, value in (("queries", queries), ("norm_scales", norm_scales), ("pre_norms", pre_norms)):
        if value is not None and value.shape != (n + 1, x.shape[-1]):
            raise ValueError(
                f"{name} must be [sublayers + 1, D] = {(n + 1, x.shape[-1])}: one row a site and one for the final "
                f"site, got {value.shape}"
            )
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if remat not in ("none", "sublayer", "sources"):
        raise ValueError(f"remat must be 'none', 'sublayer' or 'sources', got {remat!r}")

    norm_eps = eps if pre_norm_eps is None else pre_norm_eps
    shards = TokenShards.of(token_axes, x)

    def site(i: int, sources: list[jax.Array]) -> jax.Array:
        def route(sources: list[jax.Array], query: jax.Array, norm_scale: jax.Array | None) -> jax.Array:
            return depth_route(
                sources,
                query,
                num_heads=num_heads,
                norm_scale=norm_scale,
                eps=eps,
                implementation=implementation,
                interpret=interpret,
            )

        if shards is not None:
            route = shards.differentiable(route, (shards.tokens, P(), P()), shards.tokens)
        return route(sources, queries[i], None if norm_scales is None else norm_scales[i])

    stages, size = choose_stages(implementation, interpret, x, num_heads, n + 1, block_size)
    if stages is not None:
        jax.eval_shape(lambda x: site(0, [x]), x)  # checks every argument as depth_route does
        if shards is not None:
            stages = ShardedStages(stages, shards)
        plan = schedule.Plan(tuple(sublayers), num_heads, float(eps), size, remat, interpret, float(norm_eps))
        return _in_blocks(plan, stages, params, x, queries, norm_scales, pre_norms, inference)

    def read(i: int, sources: list[jax.Array]) -> jax.Array:
        return pre_norm.apply(site(i, sources), None if pre_norms is None else pre_norms[i], norm_eps)

    def step(i: int) -> Callable:
        """From sources and parameters to the next source."""
        if remat == "none" or inference:
            return lambda sources, p: sublayers[i](p, read(i, sources))
        if remat == "sources":
            return jax.checkpoint(lambda sources, p: sublayers[i](p, read(i, sources)))
        run = jax.checkpoint(sublayers[i])
        return lambda sources, p: run(p, read(i, sources))

    sources = [x]
    for i, p in enumerate(params):
        out = step(i)(sources, p)
        schedule.check_output(i, out, x)
        sources.append(out)
    return read(n, sources)


def choose_stages(
    implementation: str | None, interpret: bool, x: jax.Array, num_heads: int, sites: int, block_size: int | None
) -> tuple[schedule.Stages | None, int]:
    """Whose stages run the stack by blocks, None for site by site; and the sites of a block."""
    platform = current_platform()
    size = min(block_size or _BLOCK_SIZE, sites)
    if x.dtype == jnp.float64 or implementation == "reference":
        return None, size
    has_triton = importlib.util.find_spec("jax_triton") is not None
    name = implementation or {"gpu": "triton" if has_triton else "xla", "tpu": "pallas_tpu"}.get(platform, "xla")
    if name == "xla":
        return stages_xla, size
    if name == "triton" and (interpret or (platform == "gpu" and has_triton)):
        from mhar_kernels import stages_triton

        if stages_triton.supports(x.dtype, x.shape[-1] // num_heads):
            return stages_triton, min(block_size or traffic.best_block_size(sites, stages_triton.COSTS), sites)
    if name == "pallas_tpu" and (interpret or platform == "tpu"):
        from mhar_kernels import stages_pallas

        kind = (x.dtype.name, x.shape[-1], num_heads, size)
        if stages_pallas.unsupported(*kind, interpret=interpret) is None:
            return stages_pallas, size
    return None, size


def _in_blocks(
    plan: schedule.Plan, stages: schedule.Stages, params, x, queries, norm_scales, pre_norms, inference: bool
) -> jax.Array:
    wide = queries.astype(jnp.float32)
    low = None
    if norm_scales is not None:
        scales = norm_scales.astype(jnp.float32)
        if x.dtype == jnp.float32:
            low = jax.lax.stop_gradient(two_prod(wide, scales).low)
        wide = wide * scales

    # Inside a caller's own shard_map, a query that all devices share gets the sum of their gradients.
    norms = None if pre_norms is None else pre_norms.astype(jnp.float32)
    arrays = (x, wide, low, norms)
    x, wide, low, norms = varying.over(varying.axes(arrays), arrays)
    if inference:
        return schedule.forward(plan, stages, params, x, wide, low, norms)

    # What a sublayer closes over becomes an argument: a custom_vjp must not close over what is differentiated.
    functions, inputs = [], []
    for sublayer, p in zip(plan.sublayers, params, strict=True):
        function, closed = jax.closure_convert(sublayer, p, x)
        functions.append(lambda arguments, h, f=function: f(arguments[0], h, *arguments[1]))
        inputs.append((p, closed))
    return schedule.run(plan._replace(sublayers=tuple(functions)), stages, inputs, x, wide, low, norms)
