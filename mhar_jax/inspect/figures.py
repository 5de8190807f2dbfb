"""The pictures of a report. Each says in its caption what is shown, in which unit, and over how many tokens."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from matplotlib.figure import Figure

from mhar_jax.inspect.ablation import Ablation
from mhar_jax.inspect.maps import ATTENTION, LINES, MLP, OTHER, Panel, draw_maps, new_chart, strongest, styled
from mhar_jax.inspect.probe import LAYOUTS, Probe
from mhar_jax.inspect.statistics import Routing, finite_mean


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure, its file name, and how to read it."""

    name: str
    figure: Figure
    reading: str


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that a report shows."""

    title: str  # of the model
    text: str  # name of the text
    routing: Routing
    probe: Probe
    ablation: Ablation | None


def pictures(results: Results) -> Iterator[Picture]:
    """All pictures that apply, in the order of the report."""
    r = results.routing
    several_heads = r.weight.shape[2] > 1
    ablated = results.ablation is not None
    for draw, applies in (
        (head_mean, True),
        (by_head, several_heads),
        (deviation, several_heads),
        (profile, True),
        (kinds, True),
        (gates, r.added is not None),
        (probe_by_site, True),
        (ablated_sources, ablated),
        (mass_against_loss, ablated),
        (ablated_heads_and_sites, ablated),
    ):
        if applies:
            with styled():
                picture = draw(results)
            yield picture


def head_mean(results: Results) -> Picture:
    """The first picture: which sources each site reads."""
    r = results.routing
    figure = draw_maps(
        [Panel("", r.head_mean, r.sites)],
        r.columns,
        title="Where each site reads",
        caption=f"Mean depth weight (each row sums to 1) over {r.tokens:,} tokens of {results.text}"
        f"{_over_heads(r)}. {results.title}. Grey: no such source. A row is the site before that sublayer; a column is "
        "the embedding or an earlier sublayer's output.",
        label="mean depth weight",
        limit=strongest(r.head_mean, r.counts > 1),
    )
    return Picture(
        "routing",
        figure,
        "Follow a row to the right: the darker a cell, the more of that source the sublayer gets. Evenly coloured rows "
        "read everything alike, as an untrained model does.",
    )


def by_head(results: Results) -> Picture:
    """One map a head."""
    r = results.routing
    heads = r.weight.shape[2]
    figure = draw_maps(
        [Panel(f"head {h + 1}", r.weight[:, :, h], r.sites) for h in range(heads)],
        r.columns,
        title="Where each head of each site reads",
        caption=f"Mean depth weight over {r.tokens:,} tokens of {results.text}; head h reads slice h of the width. "
        f"{results.title}.",
        label="mean depth weight",
        limit=strongest(r.weight, r.counts > 1),
    )
    return Picture(
        "heads", figure, "Heads that differ in a row read different sources for different parts of the width."
    )


def deviation(results: Results) -> Picture:
    """Each head against the mean of its site."""
    r, p = results.routing, results.probe
    heads = r.weight.shape[2]
    several = r.counts > 1
    largest = float(np.nanmax(np.abs(r.deviation)))
    null = p.deviation[1:, several].max(axis=1) if several.any() and p.draws else np.array([np.nan])
    figure = draw_maps(
        [Panel(f"head {h + 1}", r.deviation[:, :, h], r.sites) for h in range(heads)],
        r.columns,
        title="How each head deviates from the mean of its site",
        caption=f"Mean depth weight of the head minus the mean over {heads} heads, {r.tokens:,} tokens of "
        f"{results.text}. Largest deviation {largest:.3f}; random queries of the same norm: {null.mean():.3f} "
        f"({p.draws} draws, {null.min():.3f} to {null.max():.3f}, {p.tokens:,} tokens). {results.title}.",
        label="deviation of mean depth weight",
        limit=largest,
        signed=True,
    )
    return Picture(
        "deviation",
        figure,
        "Orange: the head reads less of this source than the site does on average; purple: more. Random queries of the "
        "same norm deviate too, by the amount in the caption.",
    )


def profile(results: Results) -> Picture:
    """Entropy, and mass on the newest source, the embedding and the null source, by layer."""
    r = results.routing
    quantities: list[tuple[str, np.ndarray, np.ndarray | None]] = [
        ("entropy / log(sources)", r.normalized_entropy, None),
        ("weight on the newest source", r.mass("newest"), 1 / r.counts),
        ("weight on the embedding", r.mass("embedding"), 1 / r.counts),
    ]
    if "null" in r.columns:
        quantities.append(("weight on the null source", r.mass("null"), 1 / r.counts))
    figure, area = new_chart(
        10,
        1.0 + 1.75 * len(quantities),
        f"Means over {r.tokens:,} tokens of {results.text}, one thin line a head, the thick one their mean; dashed: "
        f"equal weights. Sites with one source have no entropy to speak of and are left out of the first row. "
        f"{results.title}.",
        "How sharply, how recent, how far back",
    )
    grid = area.subplots(len(quantities), 2, sharex=True, sharey="row", squeeze=False)
    for row, (name, values, uniform) in enumerate(quantities):
        for column, (kind, chosen, colour) in enumerate(_kinds(r)):
            axes = grid[row, column]
            layers = np.arange(1, chosen.sum() + 1)
            for h in range(values.shape[1]):
                axes.plot(
                    layers, values[chosen, h], color=LINES[h % 8], linewidth=0.8, alpha=0.8, label=f"head {h + 1}"
                )
            axes.plot(
                layers,
                finite_mean(values[chosen], -1),
                color=colour,
                linewidth=2.2,
                marker="o",
                markersize=3,
                label="mean",
            )
            final = ~(r.attention_sites | r.mlp_sites)
            if column == 1 and final.any():
                x = layers[-1] + 1
                axes.plot([x] * values.shape[1], values[final][0], ".", color=OTHER, markersize=4)
                axes.plot([x], finite_mean(values[final], -1), "D", color=OTHER, markersize=5, label="final site")
            if uniform is not None:
                axes.plot(layers, uniform[chosen], color="black", linestyle="--", linewidth=0.8, label="equal weights")
            axes.set_ylim(-0.02, 1.02)
            axes.grid(alpha=0.25, linewidth=0.5)
            if row == 0:
                axes.set_title(kind, fontsize=9)
            if column == 0:
                axes.set_ylabel(name, fontsize=8)
            if row == len(quantities) - 1:
                axes.set_xlabel("layer", fontsize=8)
                axes.xaxis.get_major_locator().set_params(integer=True)
            if row == min(1, len(quantities) - 1) and column == 1:
                axes.legend(fontsize=6, ncols=2, loc="upper right", framealpha=0.7)
    return Picture(
        "profile",
        figure,
        "Entropy 1 means equal weights, 0 one single source. Weight on the newest source is what an ordinary chain of "
        "layers would have at 1.",
    )


def kinds(results: Results) -> Picture:
    """Attention sites against MLP sites: what kind of source, and how far back."""
    r = results.routing
    figure, area = new_chart(
        10,
        3.9,
        f"Mean depth weight over {r.tokens:,} tokens of {results.text}{_over_heads(r)}; sites with several sources. "
        "Black ticks: what equal weights would give. Distance 1 is the newest source; the null source has none. "
        f"{results.title}.",
        "Attention sites against MLP sites",
    )
    left, right = area.subplots(1, 2)
    columns = _source_kinds(r.columns)
    names = [k for k in ("null", "embedding", "attention outputs", "MLP outputs", "blocks") if (columns == k).any()]
    mean = r.head_mean
    present = np.isfinite(mean)
    uniform = np.where(present, 1 / r.counts[:, None], 0)
    filled = np.where(present, mean, 0)
    several = r.counts > 1
    groups = [(kind, chosen & several, colour) for kind, chosen, colour in _kinds(r)]
    width = 0.8 / len(groups)
    for k, (kind, chosen, colour) in enumerate(groups):
        x = np.arange(len(names)) + (k - (len(groups) - 1) / 2) * width
        masses = lambda m, chosen=chosen: [m[chosen][:, columns == n].sum(1).mean() for n in names]
        if not chosen.any():
            continue
        left.bar(x, masses(filled), width * 0.95, color=colour, label=kind)
        left.plot(x, masses(uniform), "_", color="black", markersize=12)
        right.plot(*_by_distance(r, chosen), marker="o", markersize=3, color=colour, label=kind)
    right.plot(
        *_by_distance(r, several, equal=True), linestyle="--", color="black", linewidth=0.9, label="equal weights"
    )
    left.set_xticks(range(len(names)), names, fontsize=8)
    left.set_ylabel("share of the weight", fontsize=8)
    right.set_xlabel("distance: sources back", fontsize=8)
    right.set_ylabel("mean weight of a source", fontsize=8)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.legend(fontsize=7)
    return Picture(
        "kinds",
        figure,
        "Left: what kind of source the two kinds of site read. Right: how the weight falls with distance.",
    )


def gates(results: Results) -> Picture:
    """Gates of the delta forms, and what passes them."""
    r = results.routing
    assert r.added is not None
    shown = [("gate", r.gate)] if r.gate is not None else []
    figure, area = new_chart(
        10,
        3.6,
        "Gate: the learned scalar (0: closed, where it starts). |gate · mix| / |stream|: root mean square of what is "
        f"added over that of the stream it is added to, {r.tokens:,} tokens of {results.text}. {results.title}.",
        "Gates of the additive form",
    )
    shown.append(("|gate · mix| / |stream|", r.added))
    for axes, (name, values) in zip(area.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for offset, (kind, chosen, colour) in zip((-0.2, 0.2), _kinds(r), strict=True):
            axes.bar(np.arange(1, chosen.sum() + 1) + offset, values[chosen], 0.4, color=colour, label=kind)
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_xlabel("layer", fontsize=8)
        axes.set_ylabel(name, fontsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=7)
    return Picture("gates", figure, "A gate's sign and size alone say little: what it lets through is beside it.")


def probe_by_site(results: Results) -> Picture:
    """Width disagreement against the null, by site."""
    r, p = results.routing, results.probe
    figure, area = new_chart(
        10,
        3.9,
        f"KL(slice alone || softmax), nats, mean over {p.slices} slices, softmaxes and {p.tokens:,} tokens of "
        f"{results.text}. Null: random queries of the same norm, {p.draws} draws; band and error bars: ± one "
        f"standard deviation over draws. {results.title}.",
        "Would parts of the width rather read elsewhere?",
    )
    left, right = area.subplots(1, 2, width_ratios=(2, 1))
    several = p.counts > 1
    x = np.flatnonzero(several)
    for layout, colour in zip(LAYOUTS, (LINES[0], LINES[4]), strict=True):
        values = finite_mean(p.disagreement[layout], -1)  # [1 + R, S]
        left.plot(x, values[0][several], color=colour, marker="o", markersize=3, label=f"trained, {layout}")
        if layout == "contiguous" and p.draws:
            mean, sd = values[1:].mean(0)[several], values[1:].std(0, ddof=min(1, p.draws - 1))[several]
            left.fill_between(x, mean - sd, mean + sd, color="#999999", alpha=0.4, label="random queries", linewidth=0)
            left.plot(x, mean, color="#666666", linestyle="--", linewidth=1)
    every = max(1, len(r.sites) // 25)
    left.set_xticks(range(0, len(r.sites), every), r.sites[::every], rotation=90, fontsize=6)
    left.set_ylabel("width disagreement, nats", fontsize=8)
    left.legend(fontsize=7)
    names, bars = [], []
    for matched in (False, True):
        for layout in LAYOUTS:
            summary = p.summary(layout, matched=matched)
            if summary.sites:
                names.append(layout + (f"\n{p.matched_sources} sources" if matched else "\nall sources"))
                bars.append(summary)
    y = np.arange(len(bars))
    right.barh(y, [b.excess for b in bars], xerr=[np.nan_to_num(b.null_sd) for b in bars], color=LINES[0], height=0.6)
    right.set_yticks(y, names, fontsize=7)
    right.invert_yaxis()
    right.axvline(0, color="black", linewidth=0.8)
    right.set_xlabel("learned excess over the null, nats", fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.25, linewidth=0.5)
    return Picture(
        "probe",
        figure,
        "Above the band, the slices of a query disagree more than chance would have them: one softmax is a compromise "
        "between parts of the width. The right side repeats it on equal numbers of sources.",
    )


def ablated_sources(results: Results) -> Picture:
    """The change in loss without a source at a site."""
    r, a = results.routing, results.ablation
    assert a is not None
    change = a.source[..., 0]
    limit, beyond = _robust_limit(change)
    figure = draw_maps(
        [Panel("", change, r.sites)],
        r.columns,
        title="What the loss says: without one source at one site",
        caption=f"Change in loss, nats a token (intact {a.loss:.3f}), when the weight is set to 0 in all heads and the "
        f"others are renormalised; the same {a.tokens:,} tokens of {results.text} for all. {_noise(a)} "
        f"{results.title}.",
        label="change in loss, nats a token",
        limit=limit,
        beyond=beyond,
        signed=True,
        number=".2f" if limit >= 0.05 else ".3f",
    )
    return Picture(
        "ablated_sources",
        figure,
        "Purple: the model does worse without this source here; orange: better. Compare with the first picture: weight "
        "is not importance, since other sources can stand in and sources differ in size.",
    )


def mass_against_loss(results: Results) -> Picture:
    """Importance beside mass."""
    r, a = results.routing, results.ablation
    assert a is not None
    mass, change, error = r.head_mean, a.source[..., 0], a.source[..., 1]
    valid = np.isfinite(change) & np.isfinite(mass)
    rank = _rank_correlation(mass[valid], change[valid])
    figure, area = new_chart(
        7.2,
        4.6,
        f"One point a source at a site. Mass: mean depth weight{_over_heads(r)} ({r.tokens:,} tokens); change in loss "
        f"without it ({a.tokens:,} tokens of {results.text}; bars: ± one standard error over {a.sequences} sequences). "
        f"Rank correlation {rank:.2f}. {results.title}.",
        "Mass beside importance",
    )
    axes = area.subplots()
    for kind, chosen, colour in [*_kinds(r), ("final site", ~(r.attention_sites | r.mlp_sites), OTHER)]:
        here = valid & chosen[:, None]
        if not here.any():
            continue
        bars = np.nan_to_num(error[here])
        axes.errorbar(
            mass[here], change[here], bars, fmt="o", markersize=3, color=colour, elinewidth=0.5, alpha=0.8, label=kind
        )
    axes.axhline(0, color="black", linewidth=0.6)
    span = float(np.abs(change[valid]).max()) if valid.any() else 1.0
    noise = float(np.nan_to_num(a.noise))
    if span > 20 * noise > 0:
        axes.set_yscale("symlog", linthresh=noise)
    if valid.any():
        low, high = float(change[valid].min()), float(change[valid].max())
        room = max(noise, 0.05 * span, 1e-9)
        axes.set_ylim(min(low * 1.3, 0) - (noise or room), high * 1.5 if high > 0 else room)
        axes.set_xlim(0, 1.04 * float(mass[valid].max()))
    axes.set_xlabel("mean depth weight", fontsize=8)
    axes.set_ylabel("change in loss without it, nats a token", fontsize=8)
    axes.legend(fontsize=7, loc="lower right")
    axes.grid(alpha=0.25, linewidth=0.5)
    strong = np.argsort(-np.where(valid, change, -np.inf), axis=None)[:3]
    for flat in strong[np.isfinite(change.ravel()[strong])]:
        site, source = np.unravel_index(flat, change.shape)
        axes.annotate(
            f"{r.sites[site]} reads {r.columns[source]}",
            (mass[site, source], change[site, source]),
            textcoords="offset points",
            xytext=(5, 3) if mass[site, source] < 0.6 * mass[valid].max() else (-5, 3),
            ha="left" if mass[site, source] < 0.6 * mass[valid].max() else "right",
            fontsize=6,
        )
    return Picture("mass_and_loss", figure, "Points far to the right and low are read much and needed little.")


def ablated_heads_and_sites(results: Results) -> Picture:
    """The change in loss without what a head, or a whole site, has learned."""
    r, a = results.routing, results.ablation
    assert a is not None
    heads = r.weight.shape[2]
    several_heads = np.isfinite(a.head_uniform[..., 0]).any()
    figure, area = new_chart(
        10,
        6.2 if several_heads else 3.6,
        f"Change in loss, nats a token (intact {a.loss:.3f}), over the same {a.tokens:,} tokens of {results.text}; "
        f"bars: ± one standard error over {a.sequences} sequences. Equal weights: all sources alike, what learning "
        f"them is worth. Nothing: the mix is 0. {results.title}.",
        "What the loss says: sites" + (" and heads" if several_heads else ""),
    )
    grid = area.subplots(2 if several_heads else 1, 2, squeeze=False, sharex=True)
    x = np.arange(len(r.sites))
    colours = [
        ATTENTION if att else MLP if mlp else OTHER for att, mlp in zip(r.attention_sites, r.mlp_sites, strict=True)
    ]
    for column, (name, site, head) in enumerate(
        (("equal weights", a.site_uniform, a.head_uniform), ("nothing", a.site_off, a.head_off))
    ):
        axes = grid[0, column]
        axes.bar(x, site[:, 0], yerr=np.nan_to_num(site[:, 1]), color=colours, error_kw={"elinewidth": 0.6})
        axes.set_title(f"the site reads {name}" if name == "nothing" else f"the site has {name}", fontsize=9)
        _log_if_wide(axes, site[:, 0])
        if several_heads:
            axes = grid[1, column]
            for h in range(heads):
                axes.plot(
                    x,
                    head[:, h, 0],
                    color=LINES[h % 8],
                    marker="o",
                    markersize=2.5,
                    linewidth=0.8,
                    label=f"head {h + 1}",
                )
            axes.set_title(f"one head reads {name}" if name == "nothing" else f"one head has {name}", fontsize=9)
            axes.legend(fontsize=6, ncols=4)
            _log_if_wide(axes, head[..., 0])
    every = max(1, len(r.sites) // 25)
    for axes in grid.flat:
        axes.axhline(0, color="black", linewidth=0.6)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.set_xticks(range(0, len(r.sites), every), r.sites[::every], rotation=90, fontsize=6)
        axes.set_ylabel("change in loss", fontsize=8)
    return Picture(
        "ablated_heads_and_sites",
        figure,
        "Blue: attention sites, orange: MLP sites, grey: the final site. A site whose loss does not move under equal "
        "weights has learned nothing that the loss needs.",
    )


def _kinds(r: Routing) -> list[tuple[str, np.ndarray, str]]:
    return [("attention sites", r.attention_sites, ATTENTION), ("MLP sites", r.mlp_sites, MLP)]


def _source_kinds(columns: list[str]) -> np.ndarray:
    names: list[tuple[Callable[[str], bool], str]] = [
        (lambda c: c == "null", "null"),
        (lambda c: c == "embed", "embedding"),
        (lambda c: c.endswith("attn"), "attention outputs"),
        (lambda c: c.endswith("mlp"), "MLP outputs"),
        (lambda c: c.startswith("block"), "blocks"),
    ]
    return np.array([next(kind for test, kind in names if test(c)) for c in columns])


def _by_distance(r: Routing, chosen: np.ndarray, equal: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Distances from 1 (the newest source), and the mean weight at each over the chosen sites."""
    mean, first = r.head_mean, int(r.columns[0] == "null")
    most = int(r.counts[chosen].max()) - first if chosen.any() else 0
    values = []
    for distance in range(1, most + 1):
        sites = [i for i in np.flatnonzero(chosen) if r.counts[i] - distance >= first]
        values.append(np.mean([1 / r.counts[i] if equal else mean[i, r.counts[i] - distance] for i in sites]))
    return np.arange(1, most + 1), np.array(values)


def _robust_limit(values: np.ndarray) -> tuple[float, bool]:
    """An end of the scale that a few extreme cells do not stretch, and whether some lie outside."""
    sizes = np.abs(values[np.isfinite(values)])
    if not sizes.size or sizes.max() == 0:
        return 1.0, False
    limit = float(np.quantile(sizes, 0.97))
    limit = limit if limit > 0 else float(sizes.max())
    return limit, bool(sizes.max() > limit * 1.001)


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, for values without ties."""
    if len(a) < 3:
        return float("nan")
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _noise(a: Ablation) -> str:
    """What a cell of the ablations does not resolve, as a sentence."""
    if not np.isfinite(a.noise):
        return "One sequence: nothing is known of the noise."
    return (
        f"Changes below about {a.noise:.4f} (twice the median standard error over {a.sequences} sequences) are noise."
    )


def _log_if_wide(axes, values: np.ndarray) -> None:
    """A symmetric logarithm where the largest change would hide the rest."""
    sizes = np.abs(values[np.isfinite(values)])
    if sizes.size and sizes.max() > 15 * np.median(sizes) > 0:
        axes.set_yscale("symlog", linthresh=max(float(np.median(sizes)), 1e-4))


def _over_heads(r: Routing) -> str:
    heads = r.weight.shape[2]
    return f", mean over {heads} heads" if heads > 1 else ""
