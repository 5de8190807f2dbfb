"""What the routing of a model does on some text: the map of mean depth weights, and its picture."""

import dataclasses
import pathlib
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mhar_jax.config.schema import ModelConfig
from mhar_jax.errors import writing
from mhar_jax.models.sites import site_labels, source_labels
from mhar_jax.training.step import ROUTING_ROWS, Trainer


@dataclasses.dataclass(frozen=True)
class RoutingMap:
    """Depth weights averaged over tokens."""

    weights: np.ndarray  # [sites, sources, heads], NaN where a site has no such source or head
    entropy: float  # mean over tokens, heads and sites with a choice; a share of the most there can be, 0 to 1
    newest_mass: float  # mean weight on the newest source of those sites
    tokens: int  # how many the means are over


def measure(trainer: Trainer, params: Any, tokens: jax.Array) -> RoutingMap:
    """The map over the first sequences of a batch [batch_size, seq_len + 1]; one forward pass."""
    summary = jax.device_get(trainer.summarise(params, tokens))
    return RoutingMap(
        weights=summary.weights,
        entropy=float(summary.normalized_entropy),
        newest_mass=float(summary.newest_mass),
        tokens=min(ROUTING_ROWS, tokens.shape[0]) * (tokens.shape[1] - 1),
    )


def draw(config: ModelConfig, routing: RoutingMap, path: pathlib.Path) -> None:
    """Writes a picture, one panel a head: a row for each site, a column for each source, darker where it reads more.

    The scale ends at the largest weight of a site that has a choice: a site with one source is at 1 by definition.

    Raises:
      UserError: the file cannot be written.
    """
    rows, columns = site_labels(config), _column_labels(config)
    heads = routing.weights.shape[2]
    across = min(heads, 4)
    down = -(-heads // across)
    cell = 0.24 if len(rows) <= 32 else 0.1
    size = (1.9 + across * (cell * len(columns) + 0.2), 1.5 + down * (cell * len(rows) + 0.5))
    figure = Figure(size, layout="constrained")  # not pyplot: no window system, no state
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    colours = matplotlib.colormaps["magma_r"].copy()
    colours.set_bad("white")
    every = max(1, round(len(rows) / 36))
    has_choice = np.isfinite(routing.weights).sum(axis=(1, 2)) > np.isfinite(routing.weights).any(axis=1).sum(axis=1)
    top = float(np.nanmax(routing.weights[has_choice])) if has_choice.any() else 1.0
    image = None
    for head, panel in enumerate(axes.flat):
        if head >= heads:
            panel.set_visible(False)
            continue
        image = panel.imshow(routing.weights[:, :, head], cmap=colours, vmin=0, vmax=top, aspect="equal")
        panel.set_title(f"head {head + 1}" if heads > 1 else "one head", fontsize=9)
        panel.set_xticks(range(0, len(columns), every), columns[::every], rotation=90, fontsize=6)
        panel.set_yticks(range(0, len(rows), every), rows[::every], fontsize=6)
        panel.spines[:].set_visible(False)
    assert image is not None
    beyond = "max" if top < 1 else "neither"
    figure.colorbar(image, ax=axes, label="mean depth weight", shrink=0.8, aspect=30, extend=beyond)
    figure.supxlabel("source: what is read", fontsize=9)
    figure.supylabel("site: who reads", fontsize=9)
    figure.suptitle(
        f"{config.variant}: mean depth weight over {routing.tokens:,} held-out tokens\n"
        f"entropy {routing.entropy:.2f} of uniform, weight on the newest source {routing.newest_mass:.2f}",
        fontsize=9,
    )
    with writing("the routing map", path):
        figure.savefig(path, dpi=160)


def _column_labels(config: ModelConfig) -> list[str]:
    """Names of the columns: those of the site that has most sources."""
    return max(source_labels(config), key=len)
