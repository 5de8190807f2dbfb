"""AdamW, its schedules, and which parameters decay."""

import re
from typing import Any

import jax
import optax

from mhar_jax.config.schema import Config

# What `decay_mask: matrices` decays: linear maps of the sublayers and an untied head. Not embeddings, norms, queries,
# null sources, gates or hyper-connections.
_MATRICES = re.compile(r"(^|/)(w_\w+|head)$")


def make_schedule(config: Config) -> optax.Schedule:
    """Step to learning rate: linear warm-up to the peak, then cosine, constant-then-linear, or linear to the end."""
    o = config.optimizer
    warmup = min(o.warmup_steps, config.steps - 1)
    last = o.final_lr_ratio * o.peak_lr
    rest = max(config.steps - warmup, 1)
    if o.schedule == "cosine":
        decay = optax.cosine_decay_schedule(o.peak_lr, rest, alpha=o.final_lr_ratio)
    elif o.schedule == "linear":
        decay = optax.linear_schedule(o.peak_lr, last, rest)
    else:
        fall = max(round(o.decay_fraction * config.steps), 1)
        decay = optax.linear_schedule(o.peak_lr, last, fall, transition_begin=max(rest - fall, 0))
    if warmup == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, o.peak_lr, warmup), decay], [warmup])


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW with decoupled weight decay; moments in the parameters' dtype."""
    o = config.optimizer
    adamw = optax.adamw(
        make_schedule(config),
        b1=o.beta1,
        b2=o.beta2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        mask=decay_mask if o.decay_mask == "matrices" else None,
    )
    return adamw if o.clip_norm is None else optax.chain(optax.clip_by_global_norm(o.clip_norm), adamw)


def decay_mask(params: Any) -> Any:
    """True where a parameter decays under `decay_mask: matrices`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: bool(_MATRICES.search(jax.tree_util.keystr(path, simple=True, separator="/"))), params
    )
