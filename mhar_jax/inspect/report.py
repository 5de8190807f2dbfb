"""The report: one HTML file that needs no network, and the same numbers as JSON."""

import base64
import dataclasses
import html
import json
import pathlib
import string
from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.colors import to_hex

from mhar_jax.errors import UserError, writing
from mhar_jax.inspect.figures import Results, pictures
from mhar_jax.inspect.maps import AMOUNTS, DIFFERENCES, save, strongest
from mhar_jax.inspect.probe import Probe
from mhar_jax.inspect.statistics import Routing, finite_mean
from mhar_jax.inspect.walk import Walk

_TEMPLATE = pathlib.Path(__file__).with_name("report.html")


@dataclasses.dataclass(frozen=True)
class TokenView:
    """Depth weights of every token of a short text."""

    texts: list[str]  # [T]
    weights: np.ndarray  # uint8 [T, sum over sites of sources x softmaxes]: 255 times the weight, site by site


def view_tokens(walk: Walk, ids: np.ndarray, texts: list[str]) -> TokenView:
    """The weights of each token of `ids`, int32 [T]; one forward pass."""
    found: dict[int, np.ndarray] = {}

    def visit(site: int, given: Any, weights: Any) -> None:
        found[site] = np.asarray(weights[:, 0])  # [N, T, G]

    walk.run(*walk.start(jnp.asarray(ids[None])), visit=visit)
    rows = [
        np.moveaxis(found[i][: len(shape.sources)], 1, 0).reshape(len(ids), -1) for i, shape in enumerate(walk.shapes)
    ]
    return TokenView(texts, np.round(255 * np.concatenate(rows, axis=1)).astype(np.uint8))


def make_out_dir(path: str) -> pathlib.Path:
    """The directory of a report, made.

    Raises:
      UserError: it cannot be.
    """
    out = pathlib.Path(path).expanduser()
    with writing("the report", out):
        out.mkdir(parents=True, exist_ok=True)
        if not out.is_dir():
            raise UserError(f"--out must be a directory, got {out}")
    return out


def write_report(results: Results, view: TokenView, out: pathlib.Path) -> list[pathlib.Path]:
    """Writes everything; returns the files, the report first.

    Raises:
      UserError: something cannot be written.
    """
    figures, files = [], []
    for picture in pictures(results):
        vector = save(picture.figure, out / picture.name)
        files += [out / f"{picture.name}.png", out / f"{picture.name}.svg"]
        data = base64.b64encode(vector.encode()).decode()
        figures.append(
            f'<figure><img alt="{html.escape(picture.reading)}" src="data:image/svg+xml;base64,{data}">'
            f"<figcaption>{html.escape(picture.reading)} "
            f'(<a href="{picture.name}.png">PNG</a>, <a href="{picture.name}.svg">SVG</a>)</figcaption></figure>'
        )
    page = _page(results, view, "\n".join(figures))
    for name, text in (
        ("report.html", page),
        ("report.json", json.dumps(as_dict(results), indent=1, allow_nan=False)),
        ("probe.json", json.dumps(results.probe.as_dict(), indent=1, allow_nan=False)),
        ("probe.md", results.probe.table()),
    ):
        files.insert(0 if name == "report.html" else len(files), out / name)
        with writing("the report", out / name):
            (out / name).write_text(text, encoding="utf-8")
    return files


def as_dict(results: Results) -> dict[str, Any]:
    """All numbers of a report as JSON values; null where there is nothing."""
    r, a = results.routing, results.ablation
    numbers: dict[str, Any] = {
        "model": results.title,
        "text": results.text,
        "routing": {
            "tokens": r.tokens,
            "loss_nats": r.loss,
            "sites": r.sites,
            "sources": r.columns,
            "source_counts": r.counts.tolist(),
            "weight": _nested(r.weight),
            "weight_sd_over_tokens": _nested(r.weight_sd),
            "entropy_nats": _nested(r.entropy),
            "normalized_entropy": _nested(r.normalized_entropy),
            "newest": _nested(r.mass("newest")),
            "embedding": _nested(r.mass("embedding")),
            "null": _nested(r.mass("null")),
            "gate": None if r.gate is None else _nested(r.gate),
            "added_over_stream": None if r.added is None else _nested(r.added),
        },
        "probe": results.probe.as_dict(),
    }
    if a is not None:
        numbers["ablation"] = {
            "unit": "change in loss, nats a token, and its standard error over sequences",
            "tokens": a.tokens,
            "sequences": a.sequences,
            "loss_nats": a.loss,
            **{
                name: _nested(getattr(a, name))
                for name in ("source", "head_uniform", "head_off", "site_uniform", "site_off")
            },
            "mass": _nested(r.head_mean),
        }
    return numbers


def summary_lines(results: Results) -> list[tuple[str, str]]:
    """The numbers that are shown first: name and value."""
    r, p, a = results.routing, results.probe, results.ablation
    lines = [
        ("loss on this text", f"{r.loss:.4f} nats a token, {r.tokens:,} tokens"),
        (
            "entropy of the depth weights",
            f"{finite_mean(r.normalized_entropy):.3f} of the most there can be (1: all sources alike), "
            "sites with more than one source",
        ),
    ]
    several = r.counts > 1
    for kind in ("newest", "embedding", "null"):
        mass = finite_mean(r.mass(kind)[several])
        if np.isfinite(mass):
            equal = float(np.mean(1 / r.counts[several]))
            lines.append((f"weight on the {kind} source", f"{mass:.3f} (equal weights: {equal:.3f})"))
    s = p.summary("contiguous")
    if s.sites:
        lines.append(
            (
                f"width disagreement, {p.slices} slices",
                f"{s.trained:.3f} nats; random queries {s.null:.3f} ± {s.null_sd:.3f}; learned excess {s.excess:+.3f}",
            )
        )
    if a is not None and np.isfinite(a.source[..., 0]).any():
        worst = np.unravel_index(np.nanargmax(a.source[..., 0]), a.source.shape[:2])
        change, error = a.source[worst]
        spread = f" ± {error:.3f}" if np.isfinite(error) else " (one sequence, so no error bar)"
        lines.append(
            (
                "most needed source",
                f"{r.columns[worst[1]]} at {r.sites[worst[0]]}: {change:+.3f}{spread} nats without it, "
                f"at a weight of {r.head_mean[worst]:.2f}",
            )
        )
    return lines


def _page(results: Results, view: TokenView, figures: str) -> str:
    r = results.routing
    template = string.Template(_TEMPLATE.read_text(encoding="utf-8"))
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in summary_lines(results)
    )
    return template.substitute(
        title=html.escape(f"Depth routing: {results.title}"),
        heading="What the depth routing learned",
        subtitle=html.escape(f"{results.title}. Text: {results.text}."),
        numbers=rows,
        interactive_caption=html.escape(
            f"Depth weights, dimensionless; average over {r.tokens:,} tokens of {results.text}; single tokens: "
            f"the first {len(view.texts)} of the text, weights to 1/255. Grey: no such source."
        ),
        open=" open" if len(r.sites) <= 30 else "",
        sites=len(r.sites),
        most=_most(r),
        most_caption=html.escape(
            f"Mean depth weight over {r.tokens:,} tokens and all heads; × is the multiple of equal weights."
        ),
        figures=figures,
        probe=_probe_table(results.probe),
        data=_data(r, view).replace("<", "\\u003c"),
    )


def _most(r: Routing) -> str:
    """For each site, the three sources with most weight."""
    lines = ["<tr><th>site</th><th colspan=3>reads most</th></tr>"]
    for i, site in enumerate(r.sites):
        row = r.head_mean[i, : r.counts[i]]
        cells = "".join(
            f"<td>{html.escape(r.columns[n])} {row[n]:.2f} (× {row[n] * r.counts[i]:.1f})</td>"
            for n in np.argsort(-row)[:3]
        )
        lines.append(f"<tr><td>{html.escape(site)}</td>{cells}</tr>")
    return "".join(lines)


def _probe_table(p: Probe) -> str:
    """The Markdown table as HTML."""
    table, _, rest = p.table().partition("\n\n")
    rows = [line.strip("|").split("|") for line in table.splitlines() if not line.startswith("|---")]
    cells = [
        "<tr>" + "".join(f"<{tag}>{html.escape(c.strip())}</{tag}>" for c in row) + "</tr>"
        for row, tag in zip(rows, ["th"] + ["td"] * (len(rows) - 1), strict=True)
    ]
    notes = "".join(f'<p class="note">{html.escape(part)}</p>' for part in rest.strip().split("\n\n"))
    return f"<table>{''.join(cells)}</table>{notes}"


def _data(r: Routing, view: TokenView) -> str:
    softmaxes = np.isfinite(r.entropy).sum(axis=1)
    packed = np.concatenate(
        [r.weight[i, :n, :g].ravel() for i, (n, g) in enumerate(zip(r.counts, softmaxes, strict=True))]
    )
    palette = lambda name: [to_hex(c) for c in matplotlib.colormaps[name](np.arange(256))]
    return json.dumps(
        {
            "sites": r.sites,
            "columns": r.columns,
            "counts": r.counts.tolist(),
            "softmaxes": softmaxes.tolist(),
            "count": r.tokens,
            "mean": np.round(packed, 4).tolist(),
            "mean_limit": strongest(r.head_mean, r.counts > 1),
            "difference_limit": 0.5,
            "tokens": view.texts,
            "selected": len(view.texts) // 2,
            "weights": base64.b64encode(view.weights.tobytes()).decode(),
            "amounts": palette(AMOUNTS),
            "differences": palette(DIFFERENCES),
        }
    )


def _nested(x: np.ndarray) -> Any:
    """Nested lists with None for NaN."""
    if x.ndim == 0:
        return float(x) if np.isfinite(x) else None
    return [_nested(part) for part in x]
