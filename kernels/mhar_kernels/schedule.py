"""The depth-blocked schedule: a whole stack as one differentiable function that reads each source a few times in all.

Queries are parameters, so they are known before any source exists, and a softmax over depth can be merged from parts.
The sites are cut into blocks of S. Forward, when a block starts, one pass over all earlier sources serves all its S
sites; each site then adds the at most S sources inside the block. Backward, when a block is about to be entered, one
pass over all later sites' cotangents serves all its S sources; each source then adds the sites inside the block, and is
finished when its own site's cotangent arrives. Nothing is pushed: there is no history-sized gradient accumulator.

What moves bytes are the stages, one implementation a backend: `stages_xla`, `stages_triton`, `stages_pallas`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

Sublayer = Callable[[Any, jax.Array], jax.Array]


class Plan(NamedTuple):
    """What is static about a stack."""

    sublayers: tuple[Sublayer, ...]
    num_heads: int
    eps: float
    block_size: int
    remat: str
    interpret: bool = False

    @property
    def num_sites(self) -> int:
        """A site before each sublayer, and the final one; as many as there are sources."""
        return len(self.sublayers) + 1

    def blocks(self) -> list[range]:
        """The sites, and sources, of each block."""
        n, s = self.num_sites, self.block_size
        return [range(start, min(start + s, n)) for start in range(0, n, s)]

    def block_of(self, site: int) -> range:
        """The block that holds a site."""
        return self.blocks()[site // self.block_size]


class Stages(Protocol):
    """What a backend computes. The histories are pytrees of its own; buffers in them are updated in place.

    Arrays keep their leading axes `...`; only `query_gradient` adds over them.
    """

    def start(self, plan: Plan, x: jax.Array, queries: jax.Array, low: jax.Array | None) -> Any:
        """An empty history for sources like x [..., D]; effective queries [sites, D] float32, and what they lost."""

    def mix(self, plan: Plan, history: Any, block: range) -> Any:
        """What the sources before the block give to the mixes of all its sites: one pass over them."""

    def merge(self, plan: Plan, history: Any, site: int, source: jax.Array, outside: Any) -> tuple[Any, jax.Array]:
        """Source `site` enters the history; the history, and the site's mix [..., D] over sources 0 to `site`.

        outside: of `mix` for the site's block, or None in the first block.
        """

    def begin(self, plan: Plan, history: Any) -> Any:
        """The empty backward history."""

    def pull(self, plan: Plan, history: Any, later: Any, block: range) -> tuple[Any, Any]:
        """What all sites behind the block give to the gradients of its sources: one pass over their cotangents."""

    def finish(
        self, plan: Plan, history: Any, later: Any, site: int, mix: jax.Array, cotangent: jax.Array, outside: Any
    ) -> tuple[Any, jax.Array]:
        """The cotangent of site `site`'s mix enters the backward history; that, and the gradient of source `site`.

        mix: what `merge` gave. outside: of `pull` for the site's block, or None in the last block.
        """

    def query_gradient(self, plan: Plan, history: Any, later: Any) -> jax.Array:
        """The gradient [sites, D] float32 of the effective queries, from complete histories."""


class _Kept(NamedTuple):
    """What the forward pass keeps: one mix a site, one vjp a sublayer."""

    history: Any
    mixes: list[jax.Array]
    vjps: list[Any]


def run(
    plan: Plan, stages: Stages, params: Sequence[Any], x: jax.Array, queries: jax.Array, low: jax.Array | None
) -> jax.Array:
    """The final site's mix [..., D]; differentiable in params, x and the effective queries [sites, D] float32.

    low: what rounding queries * norm_scales to float32 lost, or None; a constant.
    """

    @jax.custom_vjp
    def stack(params, x, queries, low):
        return _forward(plan, stages, params, x, queries, low)[0]

    stack.defvjp(
        lambda params, x, queries, low: _forward(plan, stages, params, x, queries, low),
        lambda kept, d_out: (*_backward(plan, stages, kept, d_out), None),
    )
    return stack(list(params), x, queries, low)


def _forward(plan: Plan, stages: Stages, params, x, queries, low) -> tuple[jax.Array, _Kept]:
    mixes: list[jax.Array] = []
    vjps = []
    history, source = stages.start(plan, x, queries, low), x
    for block in plan.blocks():
        outside = stages.mix(plan, history, block) if block.start else None
        for site in block:
            history, mix = stages.merge(plan, history, site, source, outside)
            mixes.append(mix)
            if site == len(plan.sublayers):
                break
            sublayer = plan.sublayers[site]
            run_sublayer = sublayer if plan.remat == "none" else jax.checkpoint(sublayer)
            source, vjp = jax.vjp(run_sublayer, params[site], mix)
            check_output(site, source, x)
            vjps.append(vjp)
    assert len(mixes) == plan.num_sites
    return mixes[-1], _Kept(history, mixes, vjps)


def _backward(plan: Plan, stages: Stages, kept: _Kept, d_out: jax.Array):
    history, later = kept.history, stages.begin(plan, kept.history)
    d_params: list[Any] = [None] * len(plan.sublayers)
    cotangent, d_source = d_out, d_out  # of the mix of the site at hand, of the source at hand
    for block in reversed(plan.blocks()):
        outside = None
        if block.stop < plan.num_sites:
            later, outside = stages.pull(plan, history, later, block)
        for site in reversed(block):
            # Source `site` is read by the sites from its own on, and the cotangents of all of them are here now.
            later, d_source = stages.finish(plan, history, later, site, kept.mixes[site], cotangent, outside)
            if site:
                d_params[site - 1], cotangent = kept.vjps[site - 1](d_source)
    return d_params, d_source, stages.query_gradient(plan, history, later)


def check_output(site: int, output: jax.Array, x: jax.Array) -> None:
    """Raises ValueError unless a sublayer's output has the shape and dtype of its input."""
    if output.shape != x.shape or output.dtype != x.dtype:
        raise ValueError(
            f"sublayer {site} must return an array like x, {x.dtype.name}{list(x.shape)}, "
            f"got {output.dtype.name}{list(output.shape)}"
        )
