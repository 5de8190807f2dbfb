"""What can be timed: the implementations of `mhar_kernels`, and whatever else is registered beside them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from mhar_jax.errors import UserError
from mhar_kernels import UnsupportedInputError, depth_route, depth_stack, stack, traffic

_HOME = {"triton": "gpu", "pallas_tpu": "tpu"}  # where a kernel backend runs without its interpreter


@dataclass(frozen=True)
class Candidate:
    """An implementation of depth routing.

    Attributes:
      name: in tables.
      route: called as `depth_route(sources, query, num_heads=, residual=, gate=, null_source=)`; differentiable.
      stack: called as `depth_stack(sublayers, params, x, queries, num_heads=, block_size=)`; None: it has no schedule
        of its own for a whole model and runs site by site only. Raises UnsupportedInputError where it cannot run.
      block: the sites of a block for so many sites, where the command does not say.
      interpreted: its times mean nothing.
    """

    name: str
    route: Callable[..., jax.Array]
    stack: Callable[..., jax.Array] | None = None
    block: Callable[[int], int] = lambda sites: min(8, sites)
    interpreted: bool = False


_registered: dict[str, Candidate] = {}


def register(candidate: Candidate) -> None:
    """Makes a candidate known to `--implementations`; a module named by `--module` calls this when it is imported."""
    _registered[candidate.name] = candidate


def find(name: str) -> Candidate:
    """The candidate of that name.

    Raises:
      UserError: naming those there are.
    """
    if name in _registered:
        return _registered[name]
    if name not in ("xla", "triton", "pallas_tpu", "reference"):
        known = ", ".join(("xla", "triton", "pallas_tpu", "reference", *_registered))
        raise UserError(f"--implementations must be of {known}, got {name!r}")
    interpret = name in _HOME and jax.default_backend() == "cpu"
    return Candidate(
        name,
        partial(depth_route, implementation=name, interpret=interpret),
        partial(_blocked, name, interpret),
        partial(_block, name),
        interpret,
    )


def site_by_site(
    candidate: Candidate, sublayers: list[Any], params: list[Any], x: jax.Array, queries: jax.Array, *, num_heads: int
) -> jax.Array:
    """What `depth_stack` computes, with one call of the candidate's op a site."""
    sources = [x]
    for sublayer, p, query in zip(sublayers, params, queries[:-1], strict=True):
        sources.append(sublayer(p, candidate.route(sources, query, num_heads=num_heads)))
    return candidate.route(sources, queries[-1], num_heads=num_heads)


def delta_sites(candidate: Candidate, reads: tuple[int, ...], arrays: dict[str, Any], *, num_heads: int) -> jax.Array:
    """The stream after all sites of a delta model: each adds its gated mix, sublayers left out.

    arrays: deltas, a list of [T, D]; x [T, D]; queries, nulls [sites, D]; gates [sites].
    """
    x = arrays["x"]
    for i, count in enumerate(reads):
        x = candidate.route(
            arrays["deltas"][:count],
            arrays["queries"][i],
            num_heads=num_heads,
            residual=x,
            gate=arrays["gates"][i],
            null_source=arrays["nulls"][i],
        )
    return x


def _blocked(name: str, interpret: bool, sublayers, params, x, queries, *, num_heads: int, block_size: int):
    """`depth_stack` where it runs by blocks; where it would run site by site, it is not that candidate."""
    stages, _ = stack.choose_stages(name, interpret, x, num_heads, len(queries), block_size)
    if stages is None:
        raise UnsupportedInputError(f"{name} runs stacks of this width, dtype and number of heads site by site")
    return depth_stack(
        sublayers,
        params,
        x,
        queries,
        num_heads=num_heads,
        block_size=block_size,
        implementation=name,
        interpret=interpret,
    )


def _block(name: str, sites: int) -> int:
    """As `depth_stack` chooses it."""
    if name == "triton":
        from mhar_kernels import stages_triton

        return min(traffic.best_block_size(sites, stages_triton.COSTS), sites)
    return min(8, sites)
