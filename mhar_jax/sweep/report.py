"""The report of a sweep: tables with the noise in them, pictures, one HTML file, and the numbers as JSON.

It is a function of the losses and the configs alone: a sweep that was killed and continued gives the same bytes.
"""

import base64
import html
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from mhar_jax.errors import UserError, writing
from mhar_jax.inspect.maps import save
from mhar_jax.sweep import paper
from mhar_jax.sweep.figures import HEADS, KV, heat_maps, pictures
from mhar_jax.sweep.grid import Sweep, describe
from mhar_jax.sweep.results import (
    WINDOW,
    Difference,
    Group,
    best_by_variant,
    difference,
    groups_of,
    head_curves,
    read_run,
)


def write_report(sweep: Sweep, *, baseline: str | None = None) -> list[pathlib.Path]:
    """Writes `report/` below the sweep's directory; returns the files, the HTML first.

    Args:
      sweep: with at least one cell that is done.
      baseline: what others are compared with, as "variant=additive, ..."; None: the additive variant, else the first.

    Raises:
      UserError: no cell is done, or there is no such baseline.
    """
    runs, missing = [], []
    for cell in sweep.cells:
        run = read_run(cell, sweep.path(cell))
        if run is None:
            missing.append(cell.name)
        else:
            runs.append(run)
    if not runs:
        raise UserError(f"no cell of {sweep.directory} is done; run it first with `python -m mhar_jax.sweep run`")
    groups = groups_of(runs)
    base = _baseline(groups, baseline)
    out = sweep.directory / "report"
    with writing("the report", out):
        out.mkdir(exist_ok=True)
    sections = _sections(groups, base, missing)
    files, figures = [], []
    for picture in pictures(groups, base):
        vector = save(picture.figure, out / picture.name)
        files += [out / f"{picture.name}.png", out / f"{picture.name}.svg"]
        data = base64.b64encode(vector.encode()).decode()
        figures.append(
            f'<figure><img alt="{html.escape(picture.reading)}" src="data:image/svg+xml;base64,{data}">'
            f"<figcaption>{html.escape(picture.reading)}</figcaption></figure>"
        )
    texts = {
        "report.html": _html(sections, figures),
        "report.md": _markdown(sections),
        "report.json": json.dumps(_numbers(groups, base, missing), indent=1, allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        with writing("the report", out / name):
            (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in texts] + files


Table = list[list[str]]  # the first row is the head
Section = tuple[str, str, Table]  # title, what to know, table


def _sections(groups: Sequence[Group], base: Group, missing: Sequence[str]) -> list[Section]:
    one = groups[0].runs[0].cell.config
    setting = (
        f"{one.model.num_layers} layers of width {one.model.d_model}, {one.batch_size} sequences of {one.seq_len} "
        f"tokens a step, {one.steps} steps"
    )
    counts = sorted({run.tail_count for g in groups for run in g.runs})
    window = (
        f"Tail-mean: the mean of the last {' or '.join(map(str, counts))} evaluations (from {100 * WINDOW:.0f} % of "
        "the steps on, at most 11), nats a token. ± is one standard deviation over seeds."
    )
    if missing:
        window += f" Not done, and left out: {', '.join(missing)}."
    rows = [["group", "seeds", "tail-mean", "last evaluation"]]
    for g in groups:
        last = [float(run.losses[-1]) for run in g.runs]
        rows.append([g.name, str(len(g.runs)), _mean(g), f"{sum(last) / len(last):.4f}"])
    sections: list[Section] = [
        ("Held-out loss", f"{setting[0].upper()}{setting[1:]} (where not in the grid). {window}", rows)
    ]

    others = [g for g in groups if g is not base]
    if others:
        rows = [["group", f"minus {base.name}", "95 % interval", "seeds", "what the noise allows"]]
        rows += [[g.name, *_difference_cells(difference(g, base))] for g in others]
        note = (
            "Differences of tail-means, seed by seed on the same batches; interval: Student's t over seeds. "
            f"{len(others)} comparisons at 95 % each: with many, some resolve by chance."
        )
        sections.append((f"Paired with {base.name}", note, rows))

    for curve in head_curves(groups):
        rows = [["H", "tail-mean", "minus the lowest", "95 % interval", "seeds", "what the noise allows"]]
        for i, (h, g, d) in enumerate(zip(curve.heads, curve.groups, curve.against_best, strict=True)):
            cells = ["–", "–", str(len(g.runs)), "the lowest"] if i == curve.best else _difference_cells(d)
            rows.append([str(h), _mean(g), *cells])
        rows.append(["paper v2, 1B, 8 KV", "; ".join(f"H={h}: {x}" for h, x in paper.HEADS_V2.items()), *[""] * 4])
        where = f" ({describe(curve.rest)})" if curve.rest else ""
        note = (
            f"{curve.verdict[0].upper()}{curve.verdict[1:]} The intervals are at 95 % for the {len(curve.heads) - 1} "
            "comparisons together (Bonferroni), since the lowest is chosen after the fact."
        )
        sections.append((f"Loss against routing heads{where}", note, rows))

    for rest, members in heat_maps(groups):
        lowest = min(members, key=lambda g: g.tail.mean)
        rows = [["H", "KV heads", "tail-mean", "minus the lowest", "95 % interval", "seeds", "what the noise allows"]]
        for g in members:
            cells = ["–", "–", str(len(g.runs)), "the lowest"]
            if g is not lowest:
                cells = _difference_cells(difference(g, lowest, comparisons=len(members) - 1))
            rows.append([str(g.value(HEADS)), str(g.value(KV)), _mean(g), *cells])
        note = (
            f"The intervals are at 95 % for the {len(members) - 1} comparisons together (Bonferroni), since the lowest "
            "is chosen after the fact. Runs with other KV heads differ in their attention too."
        )
        where = f" ({describe(rest)})" if rest else ""
        sections.append((f"Routing heads and KV heads{where}", note, rows))

    best = best_by_variant(groups)
    known = [v for v in best if v in paper.LOSS_V1]
    if known:
        rows = [
            [
                "variant",
                "ours",
                "of",
                *(f"paper v1 {s}" for s in paper.SCALES),
                *(f"paper v2 {s}" for s in paper.SCALES),
                "minus additive, what the noise allows",
            ]
        ]
        for v in known:
            v2 = paper.LOSS_V2.get(v)
            verdict = "–"
            if v != "additive" and "additive" in best:
                verdict = difference(best[v], best["additive"], comparisons=max(1, len(known) - 1)).verdict
            theirs = [f"{x:.3f}" for x in paper.LOSS_V1[v]] + ([f"{x:.3f}" for x in v2] if v2 else ["–"] * 3)
            rows.append([v, _mean(best[v]), best[v].name, *theirs, verdict])
        note = (
            f"Ours: {setting}; the paper's: 20,000 steps, other sizes and texts, so only the order of the variants can "
            "be compared. Of several groups of a variant the one with the lowest tail-mean is shown, which favours "
            "variants with more groups."
        )
        sections.append(("Beside the paper's main tables", note, rows))
    paired = [v for v in known if v in paper.PAIRED_V1 and "additive" in best]
    if paired:
        rows = [["variant", "ours, minus additive", "95 % interval", "seeds", "what the noise allows"]]
        rows[0] += [f"paper v1 {s}" for s in paper.SCALES]
        for v in paired:
            theirs = [f"{m:+.3f} ± {s:.3f}" for m, s in paper.PAIRED_V1[v]]
            rows.append([v, *_difference_cells(difference(best[v], best["additive"])), *theirs])
        note = (
            f"{window} Of several groups of a variant the one with the lowest tail-mean is shown, chosen after the "
            "fact, and the intervals do not know that: they favour variants with more groups."
        )
        sections.append(("Beside the paper's paired seeds (v1, learning rate 5e-4, three seeds)", note, rows))
    return sections


def _difference_cells(d: Difference) -> list[str]:
    if not d.seeds:
        return ["–", "–", "0", d.verdict]
    spread = f" ± {d.std:.4f}" if d.seeds > 1 else ""
    interval = f"{d.low:+.4f} to {d.high:+.4f}" if d.seeds > 1 else "–"
    return [f"{d.mean:+.4f}{spread}", interval, str(d.seeds), d.verdict]


def _mean(group: Group) -> str:
    tail = group.tail
    return f"{tail.mean:.4f}" + (f" ± {tail.std:.4f}" if tail.count > 1 else "")


def _baseline(groups: Sequence[Group], name: str | None) -> Group:
    if name is None:
        return next((g for g in groups if g.runs[0].cell.config.model.variant == "additive"), groups[0])
    found = [g for g in groups if g.name.replace(" ", "") == name.replace(" ", "")]
    if not found:
        raise UserError(f"--baseline must be one of {'; '.join(g.name for g in groups)}, got {name!r}")
    return found[0]


def _numbers(groups: Sequence[Group], base: Group, missing: Sequence[str]) -> dict[str, Any]:
    finite = lambda x: x if math.isfinite(x) else None
    entries = []
    for g in groups:
        d = difference(g, base)
        entries.append(
            {
                "values": dict(g.values),
                "tail_mean": g.tail.mean,
                "tail_sd": finite(g.tail.std),
                "minus_baseline": None
                if g is base
                else {**{k: finite(v) for k, v in vars(d).items()}, "verdict": d.verdict},
                "runs": [
                    {
                        "seed": r.seed,
                        "tail_mean": r.tail,
                        "tail_count": r.tail_count,
                        "steps": r.steps.tolist(),
                        "val_loss": r.losses.tolist(),
                    }
                    for r in g.runs
                ],
            }
        )
    heads = [
        {"fixed": dict(c.rest), "heads": c.heads, "tail_mean": [g.tail.mean for g in c.groups], "verdict": c.verdict}
        for c in head_curves(groups)
    ]
    return {"baseline": dict(base.values), "groups": entries, "heads": heads, "missing": list(missing)}


def _markdown(sections: Sequence[Section]) -> str:
    parts = ["# Report of a sweep\n"]
    for title, note, (head, *rows) in sections:
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
        parts.append(f"## {title}\n\n{note}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _html(sections: Sequence[Section], figures: Sequence[str]) -> str:
    parts = []
    for title, note, (head, *rows) in sections:
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        heads = "".join(f"<th>{html.escape(c)}</th>" for c in head)
        parts.append(
            f"<h2>{html.escape(title)}</h2><p>{html.escape(note)}</p>"
            f'<div class="scroll"><table><tr>{heads}</tr>{body}</table></div>'
        )
        if len(parts) == 1:
            parts += figures
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Report of a sweep</title><style>'
        'body{font:15px/1.5 system-ui,"DejaVu Sans",sans-serif;max-width:1120px;margin:0 auto;padding:1.2rem}'
        "p,figcaption{max-width:85ch;color:#333;font-size:.92rem}table{border-collapse:collapse;font-size:.86rem}"
        "td,th{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #eee;vertical-align:top}"
        "th{border-bottom:1px solid #999}img{max-width:100%}.scroll{overflow-x:auto}</style></head><body>"
        f"<h1>Report of a sweep</h1>{''.join(parts)}</body></html>\n"
    )
