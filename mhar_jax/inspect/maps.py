"""Site x source maps, drawn so that one can say which source a row reads: at 9 sources, at 25 and at 73.

Colours are safe for colour-blind readers: magma for amounts, purple to orange for signed differences, and the Okabe-Ito
set for lines. Layout is by hand: an automatic one costs a second a figure.
"""

import dataclasses
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import Normalize, PowerNorm, TwoSlopeNorm
from matplotlib.figure import Figure

from mhar_jax.errors import writing

AMOUNTS = "magma_r"
DIFFERENCES = "PuOr"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe and Ito, 2008
ATTENTION, MLP, OTHER = "#0072B2", "#D55E00", "#555555"
ABSENT = "#e4e4e4"  # cells where a site has no such source
_STYLE: Any = {
    "svg.hashsalt": "mhar",
    "svg.fonttype": "path",
    "font.size": 9,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
}


@dataclasses.dataclass(frozen=True)
class Panel:
    """One map: values [rows, columns], NaN where there is nothing."""

    title: str
    values: np.ndarray
    rows: Sequence[str]


def draw_maps(
    panels: Sequence[Panel],
    columns: Sequence[str],
    *,
    title: str,
    caption: str,
    label: str,
    limit: float,
    signed: bool = False,
    number: str = ".2f",
    xlabel: str = "source: what is read",
    beyond: bool = False,
) -> Figure:
    """Draws maps side by side with one colour scale.

    Args:
      columns: their names.
      title, caption: above and below; the caption says unit and sample.
      label: of the colour bar.
      limit: the value at the end of the scale.
      signed: the scale goes from -limit to limit.
      number: format of the values written into the cells of a single, small map.
      beyond: some values lie outside the scale.
    """
    count = max(len(columns), max(len(p.rows) for p in panels))
    alone = len(panels) == 1
    cell = _cell(count, alone)
    font = min(8.0, max(4.2, 62 * cell * (0.75 if alone else 1)))
    every = max(1, int(np.ceil(1.25 * font / 72 / cell)))  # so many cells hold a line of text
    across = min(4 if len(columns) <= 28 else 2, len(panels))
    down = -(-len(panels) // across)
    gap, left, right = 0.18, 0.36 + 0.072 * font * _longest(panels[0].rows) / 8, 0.95
    below = 0.14 + 0.068 * font * _longest(columns) / 8
    width = left + across * (cell * len(columns)) + (across - 1) * gap + right
    width = max(width, 4.6)
    lines = _wrap(caption, width)
    heights = [cell * max(len(p.rows) for p in panels[r * across : (r + 1) * across]) for r in range(down)]
    top, foot = 0.4 + (0.22 if not alone else 0), below + 0.3 + 0.135 * len(lines)
    height = top + sum(heights) + (down - 1) * (0.3 + below) + foot
    with styled():
        figure = Figure((width, height), dpi=160)
    norm = _norm(limit, signed, len(columns))
    colours = matplotlib.colormaps[DIFFERENCES if signed else AMOUNTS].with_extremes(bad=ABSENT)
    image = None
    y = height - top
    for row in range(down):
        for column, panel in enumerate(panels[row * across : (row + 1) * across]):
            tall = cell * len(panel.rows)
            x = left + column * (cell * len(columns) + gap)
            axes = figure.add_axes((x / width, (y - tall) / height, cell * len(columns) / width, tall / height))
            image = axes.imshow(panel.values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
            axes.spines[:].set_visible(False)
            axes.tick_params(length=1.5, pad=1.5, width=0.5)
            if panel.title:
                axes.set_title(panel.title, fontsize=8, pad=3)
            same_rows = column > 0 and list(panel.rows) == list(panels[row * across].rows)
            _ticks(axes, columns, [] if same_rows else panel.rows, every, font)
            if len(columns) > 30:
                _guides(axes, panel.values.shape)
            if alone and cell >= 0.3:
                _numbers(axes, panel.values, norm, colours, number, signed)
        y -= heights[row] + 0.3 + below
    assert image is not None
    bar = figure.add_axes(
        ((width - right + 0.18) / width, (height - top - heights[0]) / height, 0.11 / width, heights[0] / height)
    )
    figure.colorbar(image, cax=bar, extend="max" if beyond and not signed else "both" if beyond else "neither")
    bar.set_ylabel(label, fontsize=8)
    bar.tick_params(labelsize=7, length=2)
    figure.text(0.12 / width, 1 - 0.12 / height, title, fontsize=10, va="top", weight="bold")
    figure.text(
        0.06 / width,
        (foot + (height - top - foot) / 2) / height,
        "site: who reads",
        fontsize=8,
        rotation=90,
        va="center",
    )
    figure.text(0.5, (foot - below) / height, xlabel, fontsize=8, ha="center", va="top")
    _captions(figure, lines, width, height)
    return figure


def new_chart(width: float, height: float, caption: str, title: str) -> tuple[Figure, Any]:
    """A figure with a title and a caption, and the part of it between them to draw charts into."""
    lines = _wrap(caption, width)
    foot = (0.135 * len(lines) + 0.12) / height
    with styled():
        figure = Figure((width, height), dpi=160, layout="constrained")
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0.01, foot, 0.98, 1 - foot - 0.34 / height))
    figure.text(0.12 / width, 1 - 0.1 / height, title, fontsize=10, va="top", weight="bold")
    _captions(figure, lines, width, height)
    return figure, figure


def styled() -> Any:
    """A context in which figures are made with the style of the report."""
    return matplotlib.rc_context(_STYLE)


def save(figure: Figure, path: pathlib.Path) -> str:
    """Writes `path`.png and `path`.svg, the same bytes for the same figure; returns the SVG.

    Raises:
      UserError: they cannot be written.
    """
    with styled():
        if figure.get_layout_engine() is not None:
            _freeze_layout(figure)
        vector = io.StringIO()
        figure.savefig(vector, format="svg", metadata={"Date": None, "Creator": None})
        with writing("a picture", path.with_suffix(".svg")):
            path.with_suffix(".svg").write_text(vector.getvalue(), encoding="utf-8")
        with writing("a picture", path.with_suffix(".png")):
            figure.savefig(path.with_suffix(".png"), metadata={"Software": None})
    return vector.getvalue()


def _freeze_layout(figure: Figure) -> None:
    """Lays the figure out once for all formats, and rounds: the solver's last digits differ from run to run."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position([round(float(edge), 3) for edge in axes.get_position().bounds])  # type: ignore[arg-type]


def strongest(values: np.ndarray, has_choice: np.ndarray) -> float:
    """The largest weight of the rows that have a choice (a site with one source is at 1 by definition)."""
    chosen = values[has_choice]
    return float(np.nanmax(chosen)) if np.isfinite(chosen).any() else 1.0


def _cell(count: int, alone: bool) -> float:
    """Inches of a cell."""
    if alone:
        return 0.38 if count <= 14 else 0.32 if count <= 28 else 0.2 if count <= 50 else 0.15
    return 0.24 if count <= 12 else 0.14 if count <= 28 else 0.09 if count <= 50 else 0.07


def _norm(limit: float, signed: bool, columns: int) -> Normalize:
    limit = limit if np.isfinite(limit) and limit > 0 else 1.0
    if signed:
        return TwoSlopeNorm(0, -limit, limit)
    if columns > 12:  # most weights are then far below the largest: a square root keeps them apart
        return PowerNorm(0.5, 0, limit)
    return Normalize(0, limit)


def _ticks(axes: Any, columns: Sequence[str], rows: Sequence[str], every: int, font: float) -> None:
    across = _shown(len(columns), every)
    axes.set_xticks(across, [columns[i] for i in across], rotation=90, fontsize=font)
    along = _shown(len(rows), every)
    axes.set_yticks(along, [rows[i] for i in along], fontsize=font)


def _shown(count: int, every: int) -> list[int]:
    return list(range(0, count, every))


def _guides(axes: Any, shape: tuple[int, ...]) -> None:
    """Hairlines every eight cells, for the eye to follow."""
    for i in range(8, shape[1], 8):
        axes.axvline(i - 0.5, color="#888888", linewidth=0.25)
    for i in range(8, shape[0], 8):
        axes.axhline(i - 0.5, color="#888888", linewidth=0.25)


def _numbers(axes: Any, values: np.ndarray, norm: Normalize, colours: Any, number: str, signed: bool) -> None:
    for (i, j), value in np.ndenumerate(values):
        if not np.isfinite(value):
            continue
        red, green, blue, _ = colours(norm(value))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        text = format(value, ("+" if signed else "") + number)
        text = "0" if signed and float(text) == 0 else text.replace("0.", ".", 1)
        axes.text(j, i, text, fontsize=5.5, ha="center", va="center", color="white" if dark else "black")


def _captions(figure: Figure, lines: list[str], width: float, height: float) -> None:
    figure.text(
        0.12 / width, 0.08 / height, "\n".join(lines), fontsize=7, color="#444444", va="bottom", linespacing=1.25
    )


def _wrap(text: str, width: float) -> list[str]:
    """Lines of a 7 point text for so many inches."""
    import textwrap

    return textwrap.wrap(text, max(30, int(17.5 * (width - 0.25))))


def _longest(labels: Sequence[str]) -> int:
    return max((len(label) for label in labels), default=0)
