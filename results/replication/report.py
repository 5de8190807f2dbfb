"""The page of the replication, from the committed JSON alone.

python -m results.replication.report [--check]          rewrites docs/replication.md and its pictures, or compares them
python -m results.replication.report --run-dirs=DIR     writes run directories for `python -m mhar_jax.compare`
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mhar_jax.errors import UserError, command
from results.replication import claims, paper
from results.replication.chart import Line, svg
from results.replication.effects import NOT_RUN, Effect, Results, half_rate, of
from results.replication.method import method
from results.replication.plan import SEEDS, VARIANTS, WIDTHS, plan
from results.replication.results import RUNS, Result, compared, read_results, write_run_directories

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "replication.md"


def build(results: Results) -> dict[str, str]:
    """The page and its pictures: file name in docs/ -> content."""
    pictures = {f"replication_{name}.svg": content for name, content in charts(results).items()}
    sections = [
        head(results),
        finding(results),
        claims.beside_the_paper(results),
        losses(results, pictures),
        heads_gap(results),
        rates(results),
        head_counts(results, pictures),
        others(results),
        speed(results, pictures),
        probes(results),
        connections(results),
        method(results),
        missing(results),
    ]
    return {"replication.md": "\n\n".join(s for s in sections if s) + "\n", **pictures}


def head(results: Results) -> str:
    """Title and what the page is."""
    made = sum(r.planned.stage != "pilot" for r in results.values())
    wanted = sum(r.stage != "pilot" for r in plan())
    return (
        "# Does it reproduce?\n\n"
        "The claim of the paper (Luo, Cai, Hu, arXiv 2607.27230) is an ordering: many routing heads below "
        "one head, one "
        "head below the additive baseline at small scale, and a gap between many heads and one that widens with width. "
        "This page tries it at two widths of one depth, on one H200 GPU, with about 105M tokens a run. "
        f"{made} of {wanted} runs of the plan are made. Everything below is written by "
        "`python -m results.replication.report` from the JSON in `results/replication/runs/`; the losses are held-out, "
        "in nats a token, and a tail-mean is the mean of a run's last eleven evaluations (the last quarter "
        "of its steps)."
    )


def finding(results: Results) -> str:
    """What agrees, what does not, what cannot be told: first."""
    lines = []
    for width in WIDTHS:
        base = of(results, width, "additive")
        for variant in VARIANTS[1:]:
            effect = Effect(base, of(results, width, variant))
            if effect.by_seed:
                lines.append(f"- Width {width}, `{variant}` against `additive`: {effect.word()}, {effect.cell()}.")
        effect = Effect(of(results, width, "attention_residuals"), of(results, width, "mhar"))
        if effect.by_seed:
            lines.append(
                f"- Width {width}, many heads (`mhar`, H = 4) against one (`attention_residuals`): {effect.word()}, "
                f"{effect.cell()}."
            )
        effect = Effect(half_rate(results, width), of(results, width, "mhar"))
        if effect.by_seed:
            lines.append(
                f"- Width {width}, many heads against one at half its peak rate, which the paper finds it may need: "
                f"{effect.word()}, {effect.cell()}."
            )
    lines += [
        f"- `{name}` diverged and is in no comparison: {r.diverged}"
        for name, r in results.items()
        if r.diverged and r.planned.stage != "pilot"
    ]
    if verdict := claims.widening(results):
        lines.append(f"- The gap between many heads and one, from width {WIDTHS[0]} to {WIDTHS[1]}: {verdict}.")
    if not lines:
        return "## Finding\n\nNone yet: no pair of runs that could be compared has been made."
    rule = (
        "\n\n“At every seed” asks for two seeds of one sign, each beyond twice what the difference moves from one "
        "evaluation to another; with two seeds that is a description, not a test. Negative is better. In "
        "brackets: each "
        "seed, and the standard deviation of a single evaluation's paired difference."
    )
    return "## Finding\n\n" + "\n".join(lines) + rule


def losses(results: Results, pictures: dict[str, str]) -> str:
    """The table beside the paper's."""
    rows = [
        "## Losses\n",
        "| variant | d 512, tail-mean by seed | against additive | d 768, tail-mean by seed | against additive "
        "| paper, 100M: v1 / v2 | paper, 100M, paired (v1, 5e-4) |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        cells = [f"`{variant}`"]
        for width in WIDTHS:
            runs = of(results, width, variant)
            cells.append(" / ".join(_tail(r) for r in runs) or NOT_RUN)
            cells.append("–" if variant == "additive" else Effect(of(results, width, "additive"), runs).cell())
        cells += [paper.LOSSES_100M[variant], paper.PAIRED_100M[variant]]
        rows.append("| " + " | ".join(cells) + " |")
    text = "\n".join(rows) + (
        "\n\nThe paper's losses are of other text, another tokeniser and 25 times as many tokens; only the "
        "signs and the "
        "rough size of its differences can be set beside ours. Its 350M and 1B models, where one head is "
        "worse than the "
        "baseline (v1), are out of reach here."
    )
    return (
        text
        + _picture(pictures, "steps", "Held-out loss against steps")
        + _picture(pictures, "differences", "Held-out loss minus the additive run's")
    )


def heads_gap(results: Results) -> str:
    """Many heads against one, by width."""
    rows = ["## Many heads against one\n", "| width | `mhar` (H = 4) − `attention_residuals` |", "|---|---|"]
    for width in WIDTHS:
        effect = Effect(of(results, width, "attention_residuals"), of(results, width, "mhar"))
        rows.append(f"| {width} | {effect.cell()} |")
        effect = Effect(half_rate(results, width), of(results, width, "mhar"))
        rows.append(f"| {width}, one head at half the rate | {effect.cell()} |")
    rows += [f"| paper, {scale} | {gap} |" for scale, gap in paper.HEADS_GAP]
    return "\n".join(rows)


def rates(results: Results) -> str:
    """Whether the baseline is healthy, and whether one head suffers from the shared rate."""
    rows = [
        "## Learning rates\n",
        "| run | peak rate | tail-mean | against the preset's rate, seed 0 |",
        "|---|---|---|---|",
    ]
    for width, variant, factors in (
        (512, "additive", ("0.5", "2")),
        (512, "attention_residuals", ("0.5",)),
        (768, "attention_residuals", ("0.5",)),
    ):
        base = of(results, width, variant)[:1]
        for r in base:
            rows.append(f"| `{r.planned.name}` | {r.run.config.optimizer.peak_lr:g} | {_tail(r)} | – |")
        for factor in factors:
            found = of(results, width, variant, middle=f"-lr-x{factor}")
            name = f"d{width}-{variant}-lr-x{factor}-s0"
            if not found:
                rows.append(f"| `{name}` | x {factor} | {NOT_RUN} | – |")
            for r in found:
                effect = Effect(base, [r])
                rows.append(f"| `{name}` | {r.run.config.optimizer.peak_lr:g} | {_tail(r)} | {effect.cell()} |")
    text = "\n".join(rows)
    checks = [
        Effect(of(results, 512, "additive")[:1], of(results, 512, "additive", middle=f"-lr-x{f}")) for f in ("0.5", "2")
    ]
    if all(c.by_seed for c in checks):
        beaten = [f for f, c in zip(("half", "twice"), checks, strict=True) if c.mean < 0]
        text += "\n\nThe baseline's rate is " + (
            f"beaten by {' and '.join(beaten)} of it: the baseline is not at its best, and differences to it are too "
            "favourable by up to that much."
            if beaten
            else "not beaten by half or twice of it."
        )
    pilots = [r for r in results.values() if r.planned.stage == "pilot"]
    if pilots:
        text += (
            "\n\nBefore, a quarter of the tokens on a schedule of their own: "
            + "; ".join(f"`{r.planned.variant}` at {r.run.config.optimizer.peak_lr:g}: {_tail(r)}" for r in pilots)
            + "."
        )
    return text


def head_counts(results: Results, pictures: dict[str, str]) -> str:
    """The U in H."""
    curve = claims.head_curve(results)
    rows = ["## Number of heads\n", "| H (d 512, seed 0) | tail-mean | against H = 4 |", "|---|---|---|"]
    base = of(results, 512, "mhar")[:1]
    for h, r in curve:
        rows.append(f"| {h} | {_tail(r)} | {'–' if h == 4 else Effect(base, [r]).cell()} |")
    if len(curve) < 3:
        return "\n".join([*rows, "", "Fewer than three values of H show no shape."])
    best = min(curve, key=lambda point: point[1].run.tail)[0]
    inside = best not in (curve[0][0], curve[-1][0])
    word = "inside the range, as a U would have it" if inside else "at an end of the range: no U"
    text = "\n".join(rows) + (
        f"\n\nLowest at H = {best}, {word}; one seed, so neighbours are not told apart unless they differ by far more "
        "than a seed moves a loss (above). H = 1 is `attention_residuals`, the same operations. The paper "
        "finds a U with a "
        "flat bottom at 4 to 8."
    )
    return text + _picture(pictures, "heads", "Tail-mean against the number of routing heads")


def others(results: Results) -> str:
    """The other forms, once each."""
    rows = [
        "## Other forms\n",
        "| d 512, seed 0 | tail-mean | against additive | against `mhar` |",
        "|---|---|---|---|",
    ]
    for variant in ("block_mhar", "mhar_headwise"):
        found = of(results, 512, variant)
        effects = [Effect(of(results, 512, v)[:1], found).cell() for v in ("additive", "mhar")]
        rows.append(f"| `{variant}` | {' / '.join(_tail(r) for r in found) or NOT_RUN} | {' | '.join(effects)} |")
    return "\n".join(rows)


def speed(results: Results, pictures: dict[str, str]) -> str:
    """Loss against time, not only against steps."""
    rows = [
        "## Speed\n",
        "| run | tokens/s | of additive | seconds of training | seconds to additive's tail-mean | peak memory, GB |",
        "|---|---|---|---|---|---|",
    ]
    shown = [
        r for r in results.values() if r.planned.stage in ("main", "other variants") and r.planned.seed == SEEDS[0]
    ]
    for r in shown:
        base = of(results, r.planned.width, "additive")[:1]
        if r.speed is None or r.train_seconds is None:
            continue
        ratio = f"{r.speed / base[0].speed:.3f}" if base and base[0].speed else "–"
        reached = "–"
        if base:
            step = next((e.step for e in r.run.evaluations if e.loss <= base[0].run.tail), None)
            per_step = r.train_seconds / r.run.config.steps
            reached = "never" if step is None else f"{step * per_step:.0f} (step {step})"
        memory = r.values["memory_peak_bytes"]
        peak = "–" if memory is None else f"{memory / 1e9:.1f}"
        rows.append(f"| `{r.planned.name}` | {r.speed:,.0f} | {ratio} | {r.train_seconds:.0f} | {reached} | {peak} |")
    if len(rows) == 3:
        return "\n".join([*rows, "", "No run yet."])
    text = "\n".join(rows) + (
        "\n\nTokens a second: median over a run while it trains, from its own log; runs are hours apart and "
        "may have had "
        "a neighbour on the second GPU, so a few percent mean nothing here (`python -m "
        "mhar_jax.bench training` measures "
        "ratios side by side). Compilation, evaluation and saving are left out of the seconds."
    )
    return text + _picture(pictures, "time", "Held-out loss against seconds of training")


def probes(results: Results) -> str:
    """Width disagreement with its null."""
    rows = [
        "## Width disagreement of single-head queries\n",
        "| run | trained | random query of the same norm | learned excess | source collinearity |",
        "|---|---|---|---|---|",
    ]
    for width in WIDTHS:
        for r in of(results, width, "attention_residuals"):
            if "probe" not in r.values["weights"]:
                continue
            found = r.values["weights"]["probe"]
            s = found["width_disagreement"]["contiguous"]
            rows.append(
                f"| `{r.planned.name}` | {s['trained']:.4f} | {s['null']:.4f} ± {s['null_sd']:.4f} "
                f"| {s['excess']:+.4f} ± {s['excess_sd']:.4f} | {found['source_collinearity']['mean']:.3f} |"
            )
    rows += [f"| paper, {scale} | | | {excess} | {cosine} |" for scale, excess, cosine in paper.PROBE]
    return "\n".join(rows) + (
        "\n\nNats, 4 slices (`mhar_jax.inspect.probe`), on held-out text; ± after a null is the standard "
        "deviation over 8 "
        "draws, after an excess that over √8. How far a query has come decides how much it can disagree: the paper's "
        "queries have had three times as many steps."
    )


def connections(results: Results) -> str:
    """Hyper-connections that never learn would be no baseline."""
    rows = [
        "## Hyper-connections have moved\n",
        "| run | read: mean / largest change | carry | write | least moved sublayer: read / carry / write |",
        "|---|---|---|---|---|",
    ]
    for width in WIDTHS:
        for r in of(results, width, "hyper_connections"):
            if "hyper_connections" not in r.values["weights"]:
                continue
            h = r.values["weights"]["hyper_connections"]
            cells = [f"{h['mean_change'][n]:.3f} / {h['largest_change'][n]:.3f}" for n in ("read", "carry", "write")]
            least = " / ".join(f"{h['least_moved_sublayer'][n]:.3f}" for n in ("read", "carry", "write"))
            rows.append(f"| `{r.planned.name}` | {' | '.join(cells)} | {least} |")
    if len(rows) == 3:
        rows += ["", "No run yet."]
    return (
        "\n".join(rows) + "\n\nChanges are from where they start: one stream read, the identity carried, ones written."
    )


def missing(results: Results) -> str:
    """What the plan asks for and nobody has run."""
    names = [f"`{run.name}`" for run in plan() if run.name not in results]
    diverged = [f"`{name}`: {r.diverged}" for name, r in results.items() if r.diverged]
    text = "## Missing\n\n" + (
        f"Not run yet: {', '.join(names)}." if names else "Nothing: every run of the plan is made."
    )
    return text + ("\n\nDiverged: " + "; ".join(diverged) if diverged else "")


def charts(results: Results) -> dict[str, str]:
    """Pictures by name; those without runs are left out."""
    found: dict[str, str] = {}
    by_time: Callable[[Result, int], float] = lambda r, step: step * (r.train_seconds or 0) / r.run.config.steps
    for name, axis, value in (("steps", "step", lambda r, step: float(step)), ("time", "seconds of training", by_time)):
        lines, tails = [], []
        for width in WIDTHS:
            for k, variant in enumerate(VARIANTS):
                for r in of(results, width, variant):
                    if name == "time" and (r.train_seconds is None or r.planned.seed != SEEDS[0]):
                        continue
                    late = [e for e in r.run.evaluations if e.step >= 0.25 * r.run.config.steps]
                    tails += [e.loss for e in late]
                    x = [value(r, e.step) for e in late]
                    colour = k + len(VARIANTS) * WIDTHS.index(width)
                    label = f"d{width} {variant}"
                    lines.append(Line(label, x, [e.loss for e in late], colour, thin=r.planned.seed != SEEDS[0]))
        if lines:
            limits = (min(tails) - 0.02, _quantile(tails, 0.97))
            found[name] = svg(f"Held-out loss against {axis}", lines, x=axis, y="nats a token", limits=limits)
    lines = []
    for width in WIDTHS:
        for k, variant in enumerate(VARIANTS[1:], 1):
            pairs = [
                d for c in compared(of(results, width, "additive"), of(results, width, variant)) for d in c.differences
            ]
            if pairs:
                losses_of = lambda run: np.array([e.loss for e in run.evaluations])
                mean = np.mean([losses_of(d.second) - losses_of(d.first) for d in pairs], axis=0)
                points = [(e.step, m) for e, m in zip(pairs[0].second.evaluations, mean, strict=True) if e.step > 0]
                at, differences = zip(*points, strict=True)
                lines.append(Line(f"d{width} {variant}", at, differences, k + len(VARIANTS) * WIDTHS.index(width)))
    if lines:
        late_y = [v for line in lines for v in line.y[len(line.y) // 10 :]] + [0.0]
        limits = (min(late_y) - 0.01, max(late_y) + 0.01)
        title = "Held-out loss minus the additive run's at the same seed, mean over seeds"
        found["differences"] = svg(title, lines, x="step", y="nats a token", limits=limits)
    curve = claims.head_curve(results)
    if len(curve) > 2:
        line = Line("mhar, d512", [h for h, _ in curve], [r.run.tail for _, r in curve], 1, marks=True)
        base = [r.run.tail for r in of(results, 512, "additive")[:1]]
        level = [Line("additive, d512", [curve[0][0], curve[-1][0]], base * 2, 0)] if base else []
        found["heads"] = svg("Tail-mean against routing heads", [line, *level], x="H", y="nats a token", log2=True)
    return found


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.floor(share * len(values)))]


def _tail(r: Result) -> str:
    return "diverged" if r.diverged else f"{r.run.tail:.4f}"


def _picture(pictures: dict[str, str], name: str, text: str) -> str:
    file = f"replication_{name}.svg"
    return f"\n\n![{text}]({file})" if file in pictures else ""


def stale(built: dict[str, str], directory: pathlib.Path) -> list[str]:
    """Files that differ from what is built, or should not be there."""
    there = {f.name for f in directory.glob("replication_*.svg")}
    wrong = [n for n, t in built.items() if not (directory / n).is_file() or (directory / n).read_text("utf-8") != t]
    return sorted({*wrong, *(there - built.keys())})


def write(built: dict[str, str], directory: pathlib.Path) -> None:
    """Writes what is built, and removes pictures that are no longer made."""
    for file in directory.glob("replication_*.svg"):
        if file.name not in built:
            file.unlink()
    for name, text in built.items():
        (directory / name).write_text(text, encoding="utf-8")


@command
def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the command; with --check, 1 where the page is not what the JSON says."""
    p = argparse.ArgumentParser(prog="python -m results.replication.report", description="Rebuild docs/replication.md.")
    p.add_argument("--runs", type=pathlib.Path, default=RUNS, help="directory of the results")
    p.add_argument("--docs", type=pathlib.Path, default=PAGE.parent, help="directory to write to")
    p.add_argument("--check", action="store_true", help="write nothing; 1 if the page is not what the JSON says")
    p.add_argument("--run-dirs", type=pathlib.Path, help="write run directories for mhar_jax.compare, and nothing else")
    o = p.parse_args(None if arguments is None else list(arguments))
    results = read_results(o.runs)
    if o.run_dirs:
        write_run_directories(results.values(), o.run_dirs)
        return 0
    built = build(results)
    if o.check:
        if wrong := stale(built, o.docs):
            raise UserError(f"{', '.join(wrong)}: not what the JSON says; run python -m results.replication.report")
        return 0
    write(built, o.docs)
    print(f"{len(results)} results -> {o.docs / PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
