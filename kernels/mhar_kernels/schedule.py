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
        self,
        plan: Plan,
        history: Any,
        site: int,
        source: jax.Array,
        outside: Any,
        norm: jax.Array | None,
        fresh: bool = True,
    ) -> tuple[Any, jax.Array, Any]:
        """Source `site` enters the history, and the site's mix over sources 0 to `site` is finished.

        outside: of `mix` for the site's block, or None in the first block.
        norm: scale [D] float32 of the RMSNorm that the mix goes through, or None.
        fresh: False where the source is in the history already, and is only read once more.

        Returns: the history; what is read at the site [..., D], the mix through its norm; and what else `finish` needs
        of this site, a pytree of the backend's own.
        """

    def again(self, plan: Plan, history: Any, after: jax.Array) -> Any:
        """The history of a forward pass that kept only its sources, for another one that waits for `after`."""

    def source(self, plan: Plan, history: Any, site: int, like: jax.Array) -> jax.Array:
        """Source `site` of a history, as an array like `like`."""

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
        kept: Any,
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
    """What the forward pass keeps: of a site what was read and what else `finish` needs, of a sublayer its vjp.

    Where only sources are kept, the lists are empty until the backward pass makes them again, a block at a time.
    """

    history: Any
    reads: dict[int, jax.Array]
    extras: dict[int, Any]
    vjps: dict[int, Any]
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
        lambda *inputs: _run_forward(plan, stages, *inputs),
        lambda kept, d_out: _backward(plan, stages, kept[0], kept[1], d_out),
    )
    return stack(list(params), x, queries, low, norms)


def forward(plan: Plan, stages: Stages, params, x, queries, low, norms) -> jax.Array:
    """As `run`, with nothing made for a backward pass, and each sublayer called as it is: it may have effects."""
    return _forward(plan._replace(keep=False), stages, params, x, queries, low, norms)[0]


def _run_forward(plan: Plan, stages: Stages, params, x, queries, low, norms):
    """The result and what `_backward` takes: what was kept, and the sublayers' parameters where they run again."""
    if plan.remat != "sources":
        out, kept = _forward(plan, stages, params, x, queries, low, norms)
        return out, (kept, None)
    out, kept = _forward(plan._replace(keep=False), stages, params, x, queries, low, norms)
    return out, (kept._replace(reads={}, extras={}), params)


def _forward(plan: Plan, stages: Stages, params, x, queries, low, norms) -> tuple[jax.Array, _Kept]:
    history, source = stages.start(plan, x, queries, low), x
    kept = _Kept(history, {}, {}, {}, None if norms is None else list(jax.lax.unstack(norms)))
    for block in plan.blocks():
        outside = stages.mix(plan, kept.history, block) if block.start else None
        for site in block:
            kept = _merge(plan, stages, kept, site, source, outside)
            if site == len(plan.sublayers):
                break
            sublayer = plan.sublayers[site]
            if plan.keep:
                run_sublayer = sublayer if plan.remat == "none" else jax.checkpoint(sublayer)
                source, kept.vjps[site] = jax.vjp(run_sublayer, params[site], kept.reads[site])
            else:
                source = sublayer(params[site], kept.reads[site])
            check_output(site, source, x)
    assert len(kept.reads) == plan.num_sites
    return kept.reads[plan.num_sites - 1], kept


def _merge(
    plan: Plan, stages: Stages, kept: _Kept, site: int, source: jax.Array, outside: Any, fresh: bool = True
) -> _Kept:
    """A site is read; what the backward pass needs of it is kept."""
    norm = None if kept.norms is None else kept.norms[site]
    history, kept.reads[site], kept.extras[site] = stages.merge(plan, kept.history, site, source, outside, norm, fresh)
    return kept._replace(history=history)


def _backward(plan: Plan, stages: Stages, kept: _Kept, params: list[Any] | None, d_out: jax.Array):
    """params: of the sublayers, where only sources were kept; None: their vjps were."""
    later = stages.begin(plan, kept.history)
    d_params: list[Any] = [None] * len(plan.sublayers)
    d_norms: list[Any] = [None] * plan.num_sites
    cotangent, d_source = d_out, d_out  # of what was read at the site at hand, of the source behind it
    for block in reversed(plan.blocks()):
        if params is not None:
            kept = _read_again(plan, stages, kept, block, d_source)
        outside = None
        if block.stop < plan.num_sites:
            later, outside = stages.pull(plan, kept.history, later, block)
        for site in reversed(block):
            if site < len(plan.sublayers):
                if params is not None:
                    vjp = jax.vjp(plan.sublayers[site], params[site], kept.reads[site])[1]
                else:
                    vjp = kept.vjps[site]
                d_params[site], cotangent = vjp(d_source)
            # Source `site` is read by the sites from its own on, and the cotangents of all of them are here now.
            read, extra = kept.reads[site], kept.extras[site]
            norm = None if kept.norms is None else kept.norms[site]
            later, d_source, d_norms[site] = stages.finish(
                plan, kept.history, later, site, read, extra, cotangent, outside, norm
            )
    # Site 0 reads one source, whose weight is 1 whatever the query.
    d_queries = stages.query_gradient(plan, kept.history, later).at[0].set(0.0)
    return d_params, d_source, d_queries, None, None if kept.norms is None else jax.numpy.stack(d_norms)


def _read_again(plan: Plan, stages: Stages, kept: _Kept, block: range, after: jax.Array) -> _Kept:
    """The reads of a block's sites once more, from the sources; not before `after` exists, or it would save nothing."""
    kept = kept._replace(history=stages.again(plan, kept.history, after), reads={}, extras={})
    outside = stages.mix(plan, kept.history, block) if block.start else None
    for site in block:
        source = stages.source(plan, kept.history, site, after)
        kept = _merge(plan, stages, kept, site, source, outside, fresh=False)
    return kept


def check_output(site: int, output: jax.Array, x: jax.Array) -> None:
    """Raises ValueError unless a sublayer's output has the shape and dtype of its input."""
    if output.shape != x.shape or output.dtype != x.dtype:
        raise ValueError(
            f"sublayer {site} must return an array like x, {x.dtype.name}{list(x.shape)}, "
            f"got {output.dtype.name}{list(output.shape)}"
        )
