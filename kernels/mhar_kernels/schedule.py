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
    norm_eps: float = 1e-6  # of the norm of what a sublayer reads
    keep: bool = True  # what only a backward pass needs

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

    Arrays keep their leading axes `...`; only gradients of queries and norms add over them.
    """

    def start(self, plan: Plan, x: jax.Array, queries: jax.Array, low: jax.Array | None) -> Any:
        """An empty history for sources like x [..., D]; effective queries [sites, D] float32, and what they lost."""

    def mix(self, plan: Plan, history: Any, block: range) -> Any:
        """What the sources before the block give to the mixes of all its sites: one pass over them."""

    def merge(
        self, plan: Plan, history: Any, site: int, source: jax.Array, outside: Any, norm: jax.Array | None
    ) -> tuple[Any, jax.Array, jax.Array | None]:
        """Source `site` enters the history, and the site's mix over sources 0 to `site` is finished.

        outside: of `mix` for the site's block, or None in the first block.
        norm: scale [D] float32 of the RMSNorm that the mix goes through, or None.

        Returns: the history; what is read at the site [..., D], the mix through its norm; and what else `finish` needs,
        None where it takes all from what is read.
        """

    def begin(self, plan: Plan, history: Any) -> Any:
        """The empty backward history."""

    def pull(self, plan: Plan, history: Any, later: Any, block: range) -> tuple[Any, Any]:
        """What all sites behind the block give to the gradients of its sources: one pass over their cotangents."""

    def finish(
        self,
        plan: Plan,
        history: Any,
        later: Any,
        site: int,
        read: jax.Array,
        kept: jax.Array | None,
        cotangent: jax.Array,
        outside: Any,
        norm: jax.Array | None,
    ) -> tuple[Any, jax.Array, jax.Array | None]:
        """The cotangent of what was read at site `site` goes back through the norm into the backward history.

        read, kept: what `merge` gave. outside: of `pull` for the site's block, or None in the last block.

        Returns: the backward history; the gradient of source `site`; the gradient [D] float32 of `norm`, None without.
        """

    def query_gradient(self, plan: Plan, history: Any, later: Any) -> jax.Array:
        """The gradient [sites, D] float32 of the effective queries, from complete histories."""


class _Kept(NamedTuple):
    """What the forward pass keeps: of a site what was read and what else `finish` needs, of a sublayer its vjp."""

    history: Any
    reads: list[jax.Array]
    extras: list[jax.Array | None]
    vjps: list[Any]
    norms: list[jax.Array] | None


def run(
    plan: Plan,
    stages: Stages,
    params: Sequence[Any],
    x: jax.Array,
    queries: jax.Array,
    low: jax.Array | None,
    norms: jax.Array | None,
) -> jax.Array:
    """What is read at the final site [..., D]; differentiable in params, x, queries and norms.

    queries: effective, [sites, D] float32. low: what rounding queries * norm_scales to float32 lost, or None; a
    constant. norms: scales [sites, D] float32 of the norms that the mixes go through, or None.
    """

    @jax.custom_vjp
    def stack(params, x, queries, low, norms):
        return forward(plan, stages, params, x, queries, low, norms)

    stack.defvjp(
        lambda *inputs: _forward(plan, stages, *inputs),
        lambda kept, d_out: _backward(plan, stages, kept, d_out),
    )
    return stack(list(params), x, queries, low, norms)


def forward(plan: Plan, stages: Stages, params, x, queries, low, norms) -> jax.Array:
    """As `run`, with nothing made for a backward pass, and each sublayer called as it is: it may have effects."""
    return _forward(plan._replace(keep=False), stages, params, x, queries, low, norms)[0]


def _forward(plan: Plan, stages: Stages, params, x, queries, low, norms) -> tuple[jax.Array, _Kept]:
    history, source = stages.start(plan, x, queries, low), x
    kept = _Kept(None, [], [], [], None if norms is None else list(jax.lax.unstack(norms)))
    for block in plan.blocks():
        outside = stages.mix(plan, history, block) if block.start else None
        for site in block:
            norm = None if kept.norms is None else kept.norms[site]
            history, read, extra = stages.merge(plan, history, site, source, outside, norm)
            kept.reads.append(read)
            kept.extras.append(extra)
            if site == len(plan.sublayers):
                break
            sublayer = plan.sublayers[site]
            if plan.keep:
                run_sublayer = sublayer if plan.remat == "none" else jax.checkpoint(sublayer)
                source, vjp = jax.vjp(run_sublayer, params[site], read)
                kept.vjps.append(vjp)
            else:
                source = sublayer(params[site], read)
            check_output(site, source, x)
    assert len(kept.reads) == plan.num_sites
    return kept.reads[-1], kept._replace(history=history)


def _backward(plan: Plan, stages: Stages, kept: _Kept, d_out: jax.Array):
    history, later = kept.history, stages.begin(plan, kept.history)
    d_params: list[Any] = [None] * len(plan.sublayers)
    d_norms: list[Any] = [None] * plan.num_sites
    cotangent, d_source = d_out, d_out  # of what was read at the site at hand, of the source at hand
    for block in reversed(plan.blocks()):
        outside = None
        if block.stop < plan.num_sites:
            later, outside = stages.pull(plan, history, later, block)
        for site in reversed(block):
            # Source `site` is read by the sites from its own on, and the cotangents of all of them are here now.
            read, extra = kept.reads[site], kept.extras[site]
            norm = None if kept.norms is None else kept.norms[site]
            later, d_source, d_norms[site] = stages.finish(
                plan, history, later, site, read, extra, cotangent, outside, norm
            )
            if site:
                d_params[site - 1], cotangent = kept.vjps[site - 1](d_source)
    # Site 0 reads one source, whose weight is 1 whatever the query.
    d_queries = stages.query_gradient(plan, history, later).at[0].set(0.0)
    return d_params, d_source, d_queries, None, None if kept.norms is None else jax.numpy.stack(d_norms)


def check_output(site: int, output: jax.Array, x: jax.Array) -> None:
    """Raises ValueError unless a sublayer's output has the shape and dtype of its input."""
    if output.shape != x.shape or output.dtype != x.dtype:
        raise ValueError(
            f"sublayer {site} must return an array like x, {x.dtype.name}{list(x.shape)}, "
            f"got {output.dtype.name}{list(output.shape)}"
        )
