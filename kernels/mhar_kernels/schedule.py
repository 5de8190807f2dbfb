"""The depth-blocked schedule: a whole stack as one differentiable function that reads each source a few times in all.

Queries are parameters, so they are known before any source exists, and a softmax over depth can be merged from parts.
The sites are cut into blocks of S. Forward, when a block starts, one pass over all earlier sources serves all its S
sites; each site then adds the at most S sources inside the block. Backward, when a block is about to be entered, one
pass over all later sites' cotangents serves all its S sources; each source then adds the sites inside the block, and is
finished when its own site's cotangent arrives. Nothing is pushed: there is no history-sized gradient accumulator.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mhar_kernels import stages_xla as stages

Sublayer = Callable[[Any, jax.Array], jax.Array]


class Plan(NamedTuple):
    """What is static about a stack."""

    sublayers: tuple[Sublayer, ...]
    num_heads: int
    eps: float
    block_size: int
    remat: str

    @property
    def num_sites(self) -> int:
        """A site before each sublayer, and the final one; as many as there are sources."""
        return len(self.sublayers) + 1

    def blocks(self) -> list[range]:
        """The sites, and sources, of each block."""
        n, s = self.num_sites, self.block_size
        return [range(start, min(start + s, n)) for start in range(0, n, s)]


class History(NamedTuple):
    """All sources so far and what is known of them, in buffers of full depth that are updated in place."""

    sources: jax.Array  # [N, ..., D]
    inverse_rms: jax.Array  # [N, ...]
    logits: stages.Logits  # [N, sites, ..., H]; of site i >= source n

    def read(self, sources: slice, sites: slice) -> tuple[jax.Array, stages.Logits]:
        """Some sources, and their logits at some sites."""
        return self.sources[sources], jax.tree.map(lambda a: a[sources, sites], self.logits)


class _Kept(NamedTuple):
    """What the forward pass keeps, with one mix, one vjp a site and statistics stacked over sites."""

    queries: jax.Array
    low: jax.Array | None
    history: History
    mixes: list[jax.Array]
    statistics: stages.Statistics
    vjps: list[Any]


def run(plan: Plan, params: Sequence[Any], x: jax.Array, queries: jax.Array, low: jax.Array | None) -> jax.Array:
    """The final site's mix [..., D]; differentiable in params, x and the effective queries [sites, D] float32.

    low: what rounding queries * norm_scales to float32 lost, or None; a constant.
    """

    @jax.custom_vjp
    def stack(params, x, queries, low):
        return _forward(plan, params, x, queries, low)[0]

    stack.defvjp(lambda *inputs: _forward(plan, *inputs), lambda kept, d_out: _backward(plan, kept, d_out))
    return stack(list(params), x, queries, low)


def _forward(plan: Plan, params, x, queries, low) -> tuple[jax.Array, _Kept]:
    mixes, statistics, vjps = [], [], []
    history = _add(plan, _empty(plan, x), 0, x, queries, low)
    for block in plan.blocks():
        # One pass over the sources before the block, for all its sites.
        outside = None
        if block.start:
            outside = stages.mix(*history.read(slice(block.start), slice(block.start, block.stop)))
        for site in block:
            row = slice(site - block.start, site - block.start + 1)
            before = None if outside is None else jax.tree.map(lambda a, row=row: a[row], outside)
            partial = stages.mix(*history.read(slice(block.start, site + 1), slice(site, site + 1)), before)
            # Site 0 reads one source: its mix is that source, to the bit.
            mix = stages.finish(partial, x.dtype)[0] if site else x
            mixes.append(mix)
            statistics.append(partial.statistics)
            if site == len(plan.sublayers):
                break
            sublayer = plan.sublayers[site]
            run_sublayer = sublayer if plan.remat == "none" else jax.checkpoint(sublayer)
            output, vjp = jax.vjp(run_sublayer, params[site], mix)
            check_output(site, output, x)
            vjps.append(vjp)
            history = _add(plan, history, site + 1, output, queries, low)
    assert len(mixes) == plan.num_sites
    together = jax.tree.map(lambda *parts: jnp.concatenate(parts), *statistics)
    return mixes[-1], _Kept(queries, low, history, mixes, together, vjps)


def _empty(plan: Plan, x: jax.Array) -> History:
    n, lead = plan.num_sites, x.shape[:-1]
    logits = jnp.zeros((n, n, *lead, plan.num_heads), jnp.float32)
    low = jnp.zeros_like(logits) if x.dtype == jnp.float32 else None
    return History(jnp.zeros((n, *x.shape), x.dtype), jnp.zeros((n, *lead), jnp.float32), stages.Logits(logits, low))


def _add(plan: Plan, history: History, n: int, source: jax.Array, queries, low) -> History:
    """A new source: its 1/RMS and its logits at every site that will read it are made while it is at hand."""
    rest = None if low is None else low[n:]
    inverse_rms, logits = stages.score(source, queries[n:], rest, plan.num_heads, plan.eps)
    return History(
        history.sources.at[n].set(source),
        history.inverse_rms.at[n].set(inverse_rms),
        jax.tree.map(lambda buffer, new: buffer.at[n, n:].set(new[0]), history.logits, logits),
    )


def _backward(plan: Plan, kept: _Kept, d_out: jax.Array):
    history, n = kept.history, plan.num_sites
    cotangents = jnp.zeros_like(history.sources)  # dO of every site left so far
    deltas = jnp.zeros((n, *d_out.shape[:-1], plan.num_heads), jnp.float32)
    d_keys = jnp.zeros_like(history.logits.high)
    d_params: list[Any] = [None] * len(plan.sublayers)
    cotangent, d_source = d_out, d_out  # of the mix of the site at hand, of the source at hand

    def pull(sources: slice, sites: slice, before: stages.Pulled | None):
        rows, logits = history.read(sources, sites)
        statistics = jax.tree.map(lambda a: a[sites], kept.statistics)
        inverse_rms = history.inverse_rms[sources]
        queries = kept.queries[sites]
        return stages.pull(rows, inverse_rms, logits, queries, statistics, cotangents[sites], deltas[sites], before)

    for block in reversed(plan.blocks()):
        # One pass over the cotangents behind the block, for all its sources.
        outside = None
        if block.stop < n:
            here, behind = slice(block.start, block.stop), slice(block.stop, n)
            outside, d_key = pull(here, behind, None)
            d_keys = d_keys.at[here, behind].set(d_key)
        for site in reversed(block):
            cotangents = cotangents.at[site].set(cotangent)
            deltas = deltas.at[site].set(stages.output_dots(cotangent, kept.mixes[site], plan.num_heads))
            # Source `site` is read by the sites from its own on, and the cotangents of all of them are here now.
            row = slice(site - block.start, site - block.start + 1)
            before = None if outside is None else jax.tree.map(lambda a, row=row: a[row], outside)
            one, sites = slice(site, site + 1), slice(site, block.stop)
            pulled, d_key = pull(one, sites, before)
            d_keys = d_keys.at[one, sites].set(d_key)
            d_source = stages.source_gradients(history.sources[one], history.inverse_rms[one], pulled)[0]
            if site:
                d_params[site - 1], cotangent = kept.vjps[site - 1](d_source)

    d_low = None if kept.low is None else jnp.zeros_like(kept.low)
    return d_params, d_source, stages.query_gradient(history.sources, d_keys), d_low


def check_output(site: int, output: jax.Array, x: jax.Array) -> None:
    """Raises ValueError unless a sublayer's output has the shape and dtype of its input."""
    if output.shape != x.shape or output.dtype != x.dtype:
        raise ValueError(
            f"sublayer {site} must return an array like x, {x.dtype.name}{list(x.shape)}, "
            f"got {output.dtype.name}{list(output.shape)}"
        )
