"""The pictures of a sweep's report."""

from collections.abc import Iterator, Sequence

import matplotlib
import numpy as np
from matplotlib.patches import Rectangle

from mhar_jax.inspect.figures import Picture
from mhar_jax.inspect.maps import LINES, new_chart, styled
from mhar_jax.sweep.grid import describe
from mhar_jax.sweep.results import WINDOW, Group, HeadCurve, head_curves

HEADS, KV = "model.routing_heads", "model.num_kv_heads"


def pictures(groups: Sequence[Group], baseline: Group | None) -> Iterator[Picture]:
    """All that apply."""
    with styled():
        yield loss_curves(groups)
        curves = head_curves(groups)
        if curves:
            yield heads(curves, baseline)
        for number, (rest, members) in enumerate(heat_maps(groups)):
            yield heat_map(rest, members, f"heads_and_kv{'' if number == 0 else f'_{number + 1}'}")


def loss_curves(groups: Sequence[Group]) -> Picture:
    """Held-out loss of every run, and the window of the tail-mean."""
    figure, area = new_chart(
        10,
        4.8,
        f"Held-out loss, nats a token; a thin line a seed, the thick one their mean ({_seeds(groups)}). Shaded: the "
        f"evaluations of the tail-mean ({_window(groups)}). Points on the right: tail-means, ± one standard deviation "
        "over seeds.",
        "Loss curves and tail-means",
    )
    left, right = area.subplots(1, 2, width_ratios=(3, 1))
    for k, group in enumerate(groups):
        colour = LINES[k % len(LINES)]
        style = "-" if k < len(LINES) else "--"
        for run in group.runs:
            left.plot(run.steps, run.losses, color=colour, linewidth=0.6, alpha=0.6, linestyle=style)
        common = [run for run in group.runs if np.array_equal(run.steps, group.runs[0].steps)]
        mean = np.mean([run.losses for run in common], axis=0)
        left.plot(common[0].steps, mean, color=colour, linewidth=1.8, linestyle=style, label=group.name)
        right.errorbar(group.tail.mean, k, xerr=np.nan_to_num(group.tail.std), fmt="o", color=colour, markersize=4)
    last = max(int(run.steps[-1]) for group in groups for run in group.runs)
    left.axvspan(WINDOW * last, last, color="#999999", alpha=0.2, linewidth=0)
    late = [x for g in groups for run in g.runs for x in run.losses[run.steps >= 0.1 * last]]
    left.set_ylim(min(late) - 0.05 * (max(late) - min(late) + 1e-9), max(late) + 0.05 * (max(late) - min(late) + 1e-9))
    left.set_xlabel("step", fontsize=8)
    left.set_ylabel("held-out loss, nats a token", fontsize=8)
    left.legend(fontsize=6)
    right.set_yticks(range(len(groups)), [g.name for g in groups], fontsize=6)
    right.invert_yaxis()
    right.set_xlabel("tail-mean", fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.25, linewidth=0.5)
    return Picture("curves", figure, "The vertical scale begins after a tenth of the steps.")


def heads(curves: Sequence[HeadCurve], baseline: Group | None) -> Picture:
    """Tail-mean against the number of routing heads."""
    figure, area = new_chart(
        7.5,
        4.6,
        "Tail-mean of the held-out loss, nats a token, ± one standard deviation over seeds "
        f"({_seeds([g for c in curves for g in c.groups])}). "
        + " ".join(f"{describe(c.rest) if c.rest else 'All'}: {c.verdict}" for c in curves[:3]),
        "Loss against the number of routing heads",
    )
    axes = area.subplots()
    for k, curve in enumerate(curves):
        mean = np.array([g.tail.mean for g in curve.groups])
        sd = np.nan_to_num([g.tail.std for g in curve.groups])
        axes.errorbar(
            curve.heads,
            mean,
            sd,
            color=LINES[k % len(LINES)],
            marker="o",
            capsize=3,
            label=describe(curve.rest) or None,
        )
    if baseline is not None:
        axes.axhline(baseline.tail.mean, color="black", linestyle="--", linewidth=0.9, label=baseline.name)
    axes.set_xscale("log", base=2)
    ticks = sorted({h for c in curves for h in c.heads})
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("routing heads H", fontsize=8)
    axes.set_ylabel("tail-mean, nats a token", fontsize=8)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.25, linewidth=0.5)
    return Picture("heads", figure, "Error bars are of single means; paired differences (the tables) are tighter.")


def heat_map(rest: Sequence[tuple[str, object]], groups: Sequence[Group], name: str) -> Picture:
    """Tail-mean over routing heads and KV heads."""
    rows = sorted({int(g.value(HEADS)) for g in groups})
    columns = sorted({int(g.value(KV)) for g in groups})
    values = np.full((len(rows), len(columns)), np.nan)
    for group in groups:
        values[rows.index(int(group.value(HEADS))), columns.index(int(group.value(KV)))] = group.tail.mean
    figure, area = new_chart(
        2.8 + 0.9 * len(columns),
        2.6 + 0.55 * len(rows),
        f"Tail-mean of the held-out loss, nats a token, mean over seeds ({_seeds(groups)}). Frame: H = KV heads, the "
        "default." + (f" {describe(rest)}." if rest else ""),
        "Routing heads and KV heads",
    )
    axes = area.subplots()
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#e4e4e4")
    image = axes.imshow(values, cmap=colours, aspect="auto")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            axes.text(
                j, i, f"{value:.3f}", ha="center", va="center", fontsize=8, color="white" if value < middle else "black"
            )
        if rows[i] == columns[j]:
            axes.add_patch(Rectangle((j - 0.48, i - 0.48), 0.96, 0.96, fill=False, edgecolor="#D55E00", lw=2))
    axes.set_xticks(range(len(columns)), [str(c) for c in columns])
    axes.set_yticks(range(len(rows)), [str(r) for r in rows])
    axes.set_xlabel("KV heads", fontsize=8)
    axes.set_ylabel("routing heads H", fontsize=8)
    figure.colorbar(image, ax=axes, label="tail-mean, nats a token")
    return Picture(
        name, figure, "Darker is lower, that is better. The table of routing and KV heads says what the noise resolves."
    )


def heat_maps(groups: Sequence[Group]) -> list[tuple[tuple[tuple[str, object], ...], list[Group]]]:
    """Groups by their other values, where both H and KV vary."""
    found: dict[tuple[tuple[str, object], ...], list[Group]] = {}
    for group in groups:
        if group.value(HEADS) is not None and group.value(KV) is not None:
            rest = tuple((n, v) for n, v in group.values if n not in (HEADS, KV))
            found.setdefault(rest, []).append(group)
    varies = lambda members, field: len({g.value(field) for g in members}) > 1
    return [(rest, m) for rest, m in found.items() if varies(m, HEADS) and varies(m, KV)]


def _seeds(groups: Sequence[Group]) -> str:
    counts = sorted({len(g.runs) for g in groups})
    return " or ".join(str(c) for c in counts) + (" seed" if counts == [1] else " seeds")


def _window(groups: Sequence[Group]) -> str:
    counts = sorted({run.tail_count for g in groups for run in g.runs})
    return " or ".join(str(c) for c in counts) + f", from {100 * WINDOW:.0f} % of the steps on, at most 11"
