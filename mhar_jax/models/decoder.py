"""The decoder: Qwen3 and Llama-3.1 shapes, with every variant of depth routing behind one field."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mhar_jax.config.schema import ModelConfig
from mhar_jax.errors import UserError
from mhar_jax.models.blocked import PassReader, can_block
from mhar_jax.models.cache import CachedAttention, KVCache, empty_cache
from mhar_jax.models.embedding import embed
from mhar_jax.models.flows import make_flow
from mhar_jax.models.initialise import Initializer
from mhar_jax.models.loss import LossSums, cross_entropy
from mhar_jax.models.remat import between_layers, remat_block, remat_layer, remat_sublayer
from mhar_jax.models.rotary import rotary_tables
from mhar_jax.models.routing import Record, SiteReader, axes_of_tokens
from mhar_jax.models.score import score_chunks
from mhar_jax.models.sites import HyperParameters, RoutingParameters, depth_rows, num_sites, num_sublayers
from mhar_jax.models.sublayers import Layer, TokenContext, attention_sublayer, mlp_sublayer, rms_norm
from mhar_jax.sharding import constrain
from mhar_kernels import depth_stack

STACKED_VARIANTS = ("attention_residuals", "mhar")  # what `depth_stack` computes


class Decoder(nnx.Module):
    """A causal language model.

    Parameters (linear maps [in, out], in config.param_dtype): `embedding` [V, D]; `layers[i].attention` and
    `layers[i].mlp`; `final_norm` [D]; `head` [D, V] when untied; `routing` (routed variants) or `hyper`
    (hyper_connections), stacked over sites. At one seed the backbone is the same, to the bit, for every variant.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Fresh parameters: matrices N(0, init_std²), norms 1, queries, null sources and gates 0."""
        if config.vocab_size is None:
            raise UserError("model.vocab_size must be set to build a model, got None; take it from the tokenizer")
        self.config = config
        init = Initializer(rngs.params(), std=config.init_std, dtype=config.param_dtype)
        self.embedding = init.normal("embedding", config.vocab_size, config.d_model)
        self.layers = nnx.List([Layer(config, init.at("layers").at(str(i))) for i in range(config.num_layers)])
        self.final_norm = init.ones(config.d_model)
        if not config.tie_embeddings:
            self.head = init.normal("head", config.d_model, config.vocab_size)
        if config.is_routed:
            self.routing = RoutingParameters(config, init.at("routing"))
            assert self.routing.norm_scale.shape[0] == num_sites(config)
        if config.variant == "hyper_connections":
            self.hyper = HyperParameters(config, init.at("hyper"))

    def __call__(
        self, tokens: jax.Array, *, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Logits, float32 [B, T, V].

        Args:
          tokens: int32 [B, T], in [0, V).
          positions: int32 [B, T]; None: 0 to T - 1.
          segment_ids: int32 [B, T]; tokens attend within their own segment. None: one segment a row.
        """
        with self._precision():
            return self._logits(self._run(tokens, positions, segment_ids, isolate=True))

    def prefill(self, tokens: jax.Array, counts: jax.Array, *, slots: int) -> tuple[jax.Array, KVCache]:
        """The first tokens of each row, into a new cache.

        Args:
          tokens: int32 [B, T]; of row b the first `counts[b]` count and the rest is filling.
          counts: int32 [B], each from 1 to T.
          slots: tokens that a row will have room for, at least T.

        Returns:
          Logits after each row's last token, float32 [B, V], and the cache.
        """
        if tokens.shape[1] > slots:
            raise ValueError(f"slots must be at least the {tokens.shape[1]} tokens of a row, got {slots}")
        cache = empty_cache(self.config, tokens.shape[0], slots)
        attend = CachedAttention(cache, tokens.shape[1], self.config, empty=True)
        with self._precision():
            hidden = self._run(tokens, attend.positions, None, attend=attend)
            last = jnp.take_along_axis(hidden, (counts - 1)[:, None, None], axis=1)
            return self._logits(last)[:, 0], attend.cache(counts)

    def extend(self, tokens: jax.Array, cache: KVCache, counts: jax.Array | None = None) -> tuple[jax.Array, KVCache]:
        """The next tokens of each row, given those in the cache.

        Args:
          tokens: int32 [B, T]; of row b the first `counts[b]` count and the rest is filling.
          cache: with room for them in every row; what has no room is dropped and makes the logits wrong.
          counts: int32 [B]; None: T for every row.

        Returns:
          Logits float32 [B, T, V], and the cache with the new tokens in it.
        """
        attend = CachedAttention(cache, tokens.shape[1], self.config, empty=False)
        with self._precision():
            logits = self._logits(self._run(tokens, attend.positions, None, attend=attend))
            return logits, attend.cache(jnp.asarray(tokens.shape[1], jnp.int32) if counts is None else counts)

    def hidden(
        self, tokens: jax.Array, *, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """The final norm's output [B, T, D], in config.compute_dtype. Arguments as for a call."""
        return self._run(tokens, positions, segment_ids)

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        *,
        loss_weights: jax.Array | None = None,
        z_loss: float = 0.0,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        record: Record | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Summed cross-entropy of `targets` given `tokens`, in nats, without ever holding all logits.

        Args:
          tokens, targets: int32 [B, T].
          loss_weights: [B, T], 0 where a token does not count; None: all 1.
          z_loss: weight of logsumexp(logits)² in the sum.
          positions, segment_ids: as for a call.
          record: of a routed model, is called with the weights of every routing site as in `visit_sites`.

        Returns:
          The sum over tokens, and sums `nll`, `z` (logsumexp², without its weight) and `tokens` (of the weights), all
          float32 scalars. Only the first carries a gradient.
        """
        with self._precision():
            hidden = self._run(tokens, positions, segment_ids, record=record)
            head, vocab_axis = self._head()
            sums: LossSums = cross_entropy(
                hidden,
                head,
                targets,
                loss_weights,
                vocab_axis=vocab_axis,
                z_loss=z_loss,
                chunk=self.config.loss_chunk,
            )
        if loss_weights is None:
            count = jnp.asarray(targets.size, jnp.float32)
        else:
            count = jnp.sum(loss_weights, dtype=jnp.float32)
        return sums.total, {"nll": sums.nll, "z": sums.z, "tokens": count}

    def score(self, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """How likely each target is after the tokens up to it, from the logits of a call but never holding them all.

        Args:
          tokens, targets: int32 [B, T].

        Returns:
          log p(target), float32 [B, T] in nats, and whether it is the likeliest token, bool [B, T].
        """
        with self._precision():
            hidden = self._run(tokens, None, None)
            return score_chunks(hidden, targets, self._logits, chunk=self.config.loss_chunk)

    def depth_weights(
        self, tokens: jax.Array, *, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> list[jax.Array]:
        """The weights of every routing site, in order: float32 [sources, B, T, H], named by `sites.source_labels`.

        H is the number of depth softmaxes of the site: KV groups at an attention site of mhar_headwise.
        """
        found: dict[int, jax.Array] = {}
        self.visit_sites(tokens, found.__setitem__, positions=positions, segment_ids=segment_ids)
        return [found[i] for i in range(len(found))]

    def visit_sites(
        self,
        tokens: jax.Array,
        record: Record,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """`hidden`, calling `record(site, weights)` at every routing site, so that weights can be reduced at once."""
        if not self.config.is_routed:
            raise UserError(f"depth weights need a routed model, got model.variant={self.config.variant}")
        return self._run(tokens, positions, segment_ids, record=record)

    def _logits(self, hidden: jax.Array) -> jax.Array:
        """[B, T, D] to float32 [B, T, V]."""
        head, vocab_axis = self._head()
        contract = (((2,), (1 - vocab_axis,)), ((), ()))
        logits = jax.lax.dot_general(hidden, head.astype(hidden.dtype), contract, preferred_element_type=jnp.float32)
        return constrain(logits, "batch", "length", "vocab")

    def _head(self) -> tuple[jax.Array, int]:
        """The head's matrix and which of its axes is the vocabulary."""
        return (self.embedding[...], 0) if self.config.tie_embeddings else (self.head[...], 1)

    def _precision(self) -> contextlib.AbstractContextManager:
        """float32 means float32: no TF32 and no bfloat16 passes behind the user's back."""
        if self.config.compute_dtype == "float32":
            return jax.default_matmul_precision("highest")
        return contextlib.nullcontext()

    def _run(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        segment_ids: jax.Array | None,
        record: Record | None = None,
        isolate: bool = False,
        attend: CachedAttention | None = None,
    ) -> jax.Array:
        """The final norm's output; `isolate` has every sublayer compiled apart from what surrounds it.

        Fused differently, equal arithmetic differs in the last bit. Apart, a converted model whose gates are closed has
        the logits of the original, to the bit. Training does without: fusing is faster. `attend` replaces attention
        over `tokens` alone.
        """
        config = self.config
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers [B, T], got {tokens.dtype.name}{list(tokens.shape)}")
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        context = TokenContext(rotary_tables(positions, config), segment_ids)
        with self._precision():
            x = embed(self.embedding[...], tokens, config.compute_dtype)
            return self._sublayers(x, context, record, isolate, attend)

    def _sublayers(
        self,
        x: jax.Array,
        context: TokenContext,
        record: Record | None,
        isolate: bool,
        attend: CachedAttention | None,
    ) -> jax.Array:
        """From the embedding to the final norm's output."""
        config = self.config
        params = [p.arrays() for layer in self.layers for p in (layer.attention, layer.mlp)]

        def attention(p, h):
            return attention_sublayer(p, h, context, config)

        def mlp(p, h):
            return mlp_sublayer(p, h, config)

        if attend is not None:  # its sublayers have an effect, the cache, so nothing may trace them apart
            cached = [functools.partial(attend.sublayer, i, context=context) for i in range(config.num_layers)]
            pairs = [f for one in cached for f in (one, mlp)]
            if config.variant in STACKED_VARIANTS:
                return self._stack(pairs, params, x, inference=True)
            return self._normed(self._site_by_site(pairs, params, x, record, remat="none"))
        kinds = [_isolated(f) for f in (attention, mlp)] if isolate else [attention, mlp]
        remat = "none" if record is not None else config.remat  # what is recorded must not be traced apart
        stacked = config.variant in STACKED_VARIANTS and record is None and remat != "layer"
        sources_only = stacked and remat == "sources"
        sublayers = [f if sources_only else remat_sublayer(remat, f) for _ in self.layers for f in kinds]
        assert len(sublayers) == len(params) == num_sublayers(config)
        if stacked:
            return self._stack(sublayers, params, x, remat="sources" if sources_only else "none")
        x = self._site_by_site(sublayers, params, x, record, remat)
        return self._normed(jax.lax.optimization_barrier(x) if isolate else x)

    def _normed(self, x: jax.Array) -> jax.Array:
        """The final norm."""
        return rms_norm(x, self.final_norm[...], self.config.norm_eps).astype(self.config.compute_dtype)

    def _stack(
        self,
        sublayers: list[Callable],
        params: list[Any],
        x: jax.Array,
        *,
        inference: bool = False,
        remat: Literal["none", "sources"] = "none",
    ) -> jax.Array:
        config, routing = self.config, self.routing.arrays()
        norms = [*(p["norm"] for p in params), self.final_norm[...]]
        params = [{name: value for name, value in p.items() if name != "norm"} for p in params]
        assert routing["query"].shape[0] == len(sublayers) + 1 == num_sites(config)
        return depth_stack(
            sublayers,
            params,
            x,
            routing["query"],
            routing["norm_scale"],
            num_heads=config.heads_of_depth,
            eps=config.norm_eps,
            pre_norms=jnp.stack(norms),
            implementation=config.routing_implementation,
            token_axes=axes_of_tokens(config.routing_implementation),
            inference=inference,
            remat=remat,
        )

    def _site_by_site(
        self, sublayers: list[Callable], params: list[Any], x: jax.Array, record: Record | None, remat: str
    ) -> jax.Array:
        config = self.config
        flow = make_flow(config)
        depth = self.routing.arrays() if config.is_routed else self.hyper.arrays() if hasattr(self, "hyper") else {}
        rows = depth_rows(config, depth)
        by_pass = record is None and can_block(config, x.dtype)
        reader = PassReader(config, rows) if by_pass else SiteReader(config, record)

        def run_layer(first: int) -> Callable:
            def layer(state, layer_params, layer_rows):
                outputs = []
                for offset in range(2):
                    i, row = first + offset, layer_rows[offset]
                    y = sublayers[i](layer_params[offset], flow.read(state, i, row, reader))
                    state = flow.write(state, i, row, y)
                    outputs.append(y)
                return outputs

            return remat_layer(remat, layer)

        def run_block(state, sublayers_of: range, block_params, block_rows):
            for first in sublayers_of[::2]:
                pair = slice(first - sublayers_of.start, first - sublayers_of.start + 2)
                if isinstance(reader, PassReader):
                    reader.prepare(first, flow.sources(state))
                before, outputs = state, run_layer(first)(state, block_params[pair], block_rows[pair])
                for offset, y in enumerate(outputs):
                    state = flow.write(state, first + offset, block_rows[pair][offset], y)
                if remat == "layer":
                    state = between_layers(before, state)
            return state

        state = flow.start(x)
        spans = reader.spans() if isinstance(reader, PassReader) else [range(len(sublayers))]
        for span in spans:
            block: Callable = functools.partial(run_block, sublayers_of=span)
            if remat == "layer" and len(spans) > 1:
                block = remat_block(block)
            own = slice(span.start, span.stop)
            state = block(state, block_params=params[own], block_rows=rows[own])
        x = flow.finish(state, rows[-1], reader)
        reader.check()
        return x


def _isolated(sublayer: Callable) -> Callable:
    """The sublayer between two barriers that the compiler moves nothing across."""
    barrier = jax.lax.optimization_barrier
    return lambda p, h: barrier(sublayer(p, barrier(h)))


def build_model(config: ModelConfig, *, rngs: nnx.Rngs) -> Decoder:
    """A freshly initialised model; the same seed gives the same backbone for every variant."""
    return Decoder(config, rngs=rngs)
