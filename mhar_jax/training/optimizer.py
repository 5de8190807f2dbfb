"""AdamW, its schedules, and which parameters decay."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mhar_jax.config.schema import Config

# What `decay_mask: matrices` decays: linear maps of the sublayers and an untied head. Not embeddings, norms, queries,
# null sources, gates or hyper-connections.
_MATRICES = re.compile(r"(^|/)(w_\w+|head)$")


def make_schedule(config: Config) -> optax.Schedule:
    """From the number of steps already done to the learning rate of the next one.

    Steps count from 1, and step s of S with W warm-up steps gets peak · s / W up to step W, so that no step has rate 0;
    from there the schedule falls from the peak, and the last step gets final_lr_ratio · peak exactly:

      cosine  final + (peak − final) · (1 + cos(π · (s − W) / (S − W))) / 2
      linear  peak + (final − peak) · (s − W) / (S − W)
      wsd     the peak, and over the last decay_fraction · S steps (or what warm-up leaves) linear

    In a run of no more steps than its warm-up, warm-up takes all steps but the last.
    """
    o = config.optimizer
    warmup = min(o.warmup_steps, config.steps - 1)
    last = o.final_lr_ratio * o.peak_lr
    rest = config.steps - warmup
    if o.schedule == "cosine":
        decay = optax.cosine_decay_schedule(o.peak_lr, rest, alpha=o.final_lr_ratio)
    elif o.schedule == "linear":
        decay = optax.linear_schedule(o.peak_lr, last, rest)
    else:
        fall = min(max(round(o.decay_fraction * config.steps), 1), rest)
        decay = optax.linear_schedule(o.peak_lr, last, fall, transition_begin=rest - fall)
    if warmup:
        decay = optax.join_schedules([optax.linear_schedule(0.0, o.peak_lr, warmup), decay], [warmup])
    return lambda done: decay(done + 1)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW with decoupled weight decay.

    Gradients are expected in float32. Moments are float32 whatever the parameters' dtype.
    """
    o = config.optimizer
    adamw = optax.adamw(
        make_schedule(config),
        b1=o.beta1,
        b2=o.beta2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        mask=decay_mask if o.decay_mask == "matrices" else None,
    )
    chained = adamw if o.clip_norm is None else optax.chain(optax.clip_by_global_norm(o.clip_norm), adamw)
    return optax.GradientTransformation(lambda params: chained.init(as_float32(params)), chained.update)


def decay_mask(params: Any) -> Any:
    """True where a parameter decays under `decay_mask: matrices`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: bool(_MATRICES.search(jax.tree_util.keystr(path, simple=True, separator="/"))), params
    )


def as_float32(tree: Any) -> Any:
    """Every leaf in float32: sums over steps or over many values would stop growing in bfloat16."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
