"""A routed decoder, walked sublayer by sublayer, with every site open to be looked at or edited.

The pieces (attention, MLP, one site) are compiled once each: a site's sources are padded to the most that any site has,
so neither depth nor the number of edits adds a compilation. A walk can start at any sublayer from a saved state, which
is why ablating a late site costs little.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhar_jax.config.schema import ModelConfig
from mhar_jax.errors import UserError
from mhar_jax.models import Decoder
from mhar_jax.models.flows import make_flow
from mhar_jax.models.rotary import rotary_tables
from mhar_jax.models.sites import (
    Site,
    depth_rows,
    heads_of_site,
    is_grouped_site,
    num_sites,
    num_sublayers,
    site_labels,
    source_labels,
)
from mhar_jax.models.sublayers import TokenContext, attention_sublayer, mlp_sublayer, rms_norm

HIGHEST = jax.lax.Precision.HIGHEST
# On GPUs, XLA compiles and times dozens of kernels of its own for every matrix product that it has not met. These
# programs run for seconds, so that they take cuBLAS's at once. Elsewhere the option is without effect.
QUICKLY_COMPILED = {"xla_gpu_enable_triton_gemm": False}
quick_jit = functools.partial(jax.jit, compiler_options=QUICKLY_COMPILED)


class Edit(NamedTuple):
    """How a site's weights are changed before they are used. N sources, G softmaxes."""

    keep: np.ndarray  # bool [N, G]; False: the weight becomes 0 and the others are renormalised
    uniform: np.ndarray  # bool [G]; True: the kept sources get equal weights
    scale: np.ndarray  # float32 [G]; the softmax's part of the mix is multiplied by this, 0: it reads nothing


class SiteInput(NamedTuple):
    """Arrays of one site as it is read; a pytree, the same shapes at every site (of a kind)."""

    queries: jax.Array  # float32 [G, D]: each softmax's query over the full width, 0 outside its slice
    norm_scale: jax.Array  # float32 [D]
    null_source: jax.Array | None  # [D]
    gate: jax.Array | None  # scalar
    sources: jax.Array  # [N, B, T, D], without the null source, padded with zeros
    present: np.int32  # how many of [null, *sources] are real


@dataclasses.dataclass(frozen=True)
class SiteShape:
    """What is static about a site."""

    name: str
    sources: tuple[str, ...]  # names, in the order of the weights
    softmaxes: int  # G: heads, or KV groups at an attention site of mhar_headwise
    grouped: bool  # each softmax reads the full width


Visit = Callable[[int, SiteInput, jax.Array], None]  # (site, its input, weights [N, B, T, G] float32)


class Walk:
    """The pieces of a model. N, the padded number of sources, is `max_sources`."""

    def __init__(self, model: Decoder):
        """Raises UserError if the model's variant has no depth weights."""
        config = model.config
        if not config.is_routed:
            raise UserError(
                f"model.variant={config.variant} has no depth routing, so there is nothing to inspect; "
                "give a checkpoint of a routed variant (mhar, attention_residuals, delta, ...)"
            )
        self.config: ModelConfig = config
        self.shapes = site_shapes(config)
        self.max_sources = max(len(shape.sources) for shape in self.shapes)
        self.rows: list[Any] = depth_rows(config, model.routing.arrays())
        self._model = model
        self._params = [p.arrays() for layer in model.layers for p in (layer.attention, layer.mlp)]
        self._flow = make_flow(config)
        self._sublayers = (
            quick_jit(lambda p, h, context: attention_sublayer(p, h, context, config)),
            quick_jit(lambda p, h, context: mlp_sublayer(p, h, config)),
        )
        # Stacked by a program of its own: fused into what reads them, dozens of arrays are long to compile on GPUs.
        self._stack = quick_jit(lambda *sources: jnp.stack(sources))
        self._read = quick_jit(
            functools.partial(_read_site, eps=config.norm_eps), static_argnames=("grouped", "with_weights")
        )
        self._finish = quick_jit(self._row_losses)
        self._zeros: dict[Any, jax.Array] = {}
        self._queries = [self._expand(i) for i in range(len(self.shapes))]
        self._unedited = [self.no_edit(i) for i in range(len(self.shapes))]

    def no_edit(self, site: int) -> Edit:
        """The edit that changes nothing."""
        heads = self.shapes[site].softmaxes
        keep = np.ones((self.max_sources, heads), bool)
        return Edit(keep, np.zeros(heads, bool), np.ones(heads, np.float32))

    def query(self, site: int) -> jax.Array:
        """Each softmax's query over the full width, without the key-norm scale: float32 [G, D]."""
        return self._queries[site]

    def start(self, tokens: jax.Array) -> tuple[Any, TokenContext]:
        """The state before the first sublayer, and what sublayers know of their tokens, int32 [B, T]."""
        with self._precision():
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            context = TokenContext(rotary_tables(positions, self.config), None)
            embedded = self._model.embedding[...][tokens].astype(self.config.compute_dtype)
            return self._flow.start(embedded), context

    def run(
        self,
        state: Any,
        context: TokenContext,
        *,
        first: int = 0,
        edits: Mapping[int, Edit] | None = None,
        visit: Visit | None = None,
        states: list[Any] | None = None,
    ) -> jax.Array:
        """The final norm's input [B, T, D], from the state before sublayer `first`.

        Args:
          state, context: of `start`, or a state kept by an earlier run.
          first: the sublayer to go on with.
          edits: site to Edit; the other sites read as they learned.
          visit: called at every site that is read.
          states: the state before every sublayer, and the last one, are appended to it.
        """
        edits = edits or {}
        route = self._route(edits, visit)
        last = num_sublayers(self.config)
        with self._precision():
            for i in range(first, last):
                if states is not None:
                    states.append(state)
                h = self._flow.read(state, i, self.rows[i], route)
                y = self._sublayers[i % 2](self._params[i], h, context)
                state = self._flow.write(state, i, self.rows[i], y)
            if states is not None:
                states.append(state)
            return self._flow.finish(state, self.rows[last], route)

    def read_site(self, state: Any, site: int, edit: Edit | None = None) -> jax.Array:
        """What a sublayer's site gives that sublayer, from the state before it: [B, T, D], or [B, T, KV, D]."""
        with self._precision():
            return self._flow.read(
                state, site, self.rows[site], self._route({} if edit is None else {site: edit}, None)
            )

    def _route(self, edits: Mapping[int, Edit], visit: Visit | None) -> Callable[..., jax.Array]:
        def route(site: int, row: Site, sources: Sequence[jax.Array], residual: jax.Array | None = None):
            given = self._input(site, row, sources)
            out, weights = self._read(
                given,
                edits.get(site, self._unedited[site]),
                residual,
                grouped=self.shapes[site].grouped,
                with_weights=visit is not None,
            )
            if visit is not None:
                visit(site, given, weights)
            return out

        return route

    def losses(self, x: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """Summed negative log-likelihood of each sequence, nats, float32 [B].

        Args:
          x: the final norm's input [B, T, D].
          targets: int32 [B, T].
          mask: bool [B, T], False where a token does not count.
        """
        head, vocab_axis = self._model._head()
        with self._precision():
            return self._finish(x, self._model.final_norm[...], head if vocab_axis == 0 else head.T, targets, mask)

    def _row_losses(self, x, scale, head, targets, mask):
        hidden = rms_norm(x, scale, self.config.norm_eps).astype(self.config.compute_dtype)

        def row(args):  # one sequence's logits at a time
            h, target, counts = args
            logits = jax.lax.dot_general(h, head.astype(h.dtype), (((1,), (1,)), ((), ()))).astype(jnp.float32)
            picked = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
            return jnp.sum(jnp.where(counts, jax.nn.logsumexp(logits, axis=-1) - picked, 0))

        return jax.lax.map(row, (hidden, targets, mask))

    def _input(self, site: int, row: Site, sources: Sequence[jax.Array]) -> SiteInput:
        real = len(sources) + (row.null_source is not None)
        assert real == len(self.shapes[site].sources), (site, real)
        key = (sources[0].shape, sources[0].dtype)
        if key not in self._zeros:  # made once: thousands of ablations read thousands of sites
            self._zeros = {key: jnp.zeros(*key)}
        padded = (*sources, *([self._zeros[key]] * (self.max_sources - real)))
        stacked = self._stack(*padded)
        return SiteInput(self._queries[site], row.norm_scale, row.null_source, row.gate, stacked, np.int32(real))

    def _expand(self, site: int) -> jax.Array:
        query = jnp.asarray(self.rows[site].query, jnp.float32)
        if query.ndim == 2:
            return query
        return jnp.asarray(support(self.config, site), jnp.float32) * query

    def _precision(self) -> contextlib.AbstractContextManager:
        return self._model._precision()


def site_shapes(config: ModelConfig) -> list[SiteShape]:
    """The static facts of every site."""
    names, sources = site_labels(config), source_labels(config)
    return [
        SiteShape(names[i], tuple(sources[i]), heads_of_site(config, i), is_grouped_site(config, i))
        for i in range(num_sites(config))
    ]


def column_labels(config: ModelConfig) -> list[str]:
    """Names of the columns of a site x source map. A block's column holds its sum so far while it is not complete."""
    longest = max(source_labels(config), key=len)
    return [label.removesuffix(" so far") for label in longest]


def support(config: ModelConfig, site: int) -> np.ndarray:
    """Which channels each softmax of a site reads and scores with: bool [G, D]."""
    heads = heads_of_site(config, site)
    if is_grouped_site(config, site):
        return np.ones((heads, config.d_model), bool)
    return np.repeat(np.eye(heads, dtype=bool), config.d_model // heads, axis=1)


def stack_sources(given: SiteInput) -> jax.Array:
    """[N, B, T, D] float32, the null source first, padding behind; traceable."""
    s = given.sources.astype(jnp.float32)
    if given.null_source is None:
        return s
    null = jnp.broadcast_to(given.null_source.astype(jnp.float32), (1, *s.shape[1:]))
    return jnp.concatenate([null, s])


def inverse_rms(s: jax.Array, eps: float) -> jax.Array:
    """1 / sqrt(mean(s²) + eps) over the last axis."""
    return jax.lax.rsqrt(jnp.mean(s * s, axis=-1) + eps)


def _read_site(
    given: SiteInput, edit: Edit, residual: jax.Array | None, *, eps: float, grouped: bool, with_weights: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The definition of depth routing (arXiv 2607.27230) with edited weights; out as a model's site gives it."""
    s = stack_sources(given)
    effective = given.queries * given.norm_scale.astype(jnp.float32)
    logits = jnp.einsum("nbtd,gd->nbtg", s, effective, precision=HIGHEST) * inverse_rms(s, eps)[..., None]
    real = (jnp.arange(s.shape[0]) < given.present)[:, None] & edit.keep
    logits = jnp.where(edit.uniform, 0, logits)
    weights = jax.nn.softmax(jnp.where(real[:, None, None], logits, -jnp.inf), axis=0)
    if grouped:
        mix = jnp.einsum("nbtg,nbtd->btgd", weights, s, precision=HIGHEST) * edit.scale[:, None]
    else:
        parts = s.reshape(*s.shape[:3], weights.shape[-1], -1)
        mix = jnp.sum(weights[..., None] * parts, axis=0) * edit.scale[:, None]
        mix = mix.reshape(s.shape[1:])
    if given.gate is not None:
        mix = given.gate.astype(jnp.float32) * mix
    if residual is not None:
        mix = residual.astype(jnp.float32) + mix
    return mix.astype(given.sources.dtype), weights if with_weights else None
