"""Line charts as SVG, made by arithmetic alone: the same numbers give the same bytes with any library version."""

import dataclasses
import html
import math
from collections.abc import Sequence

# Colours that stay apart for colour-blind readers (Okabe and Ito), and dashes for the second dozen.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B")
_LEFT, _TOP, _BOTTOM, _LEGEND = 58, 34, 44, 190


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int  # of COLOURS
    thin: bool = False  # drawn thin, and left out of the legend
    marks: bool = False  # a dot at each point


def svg(
    title: str,
    lines: Sequence[Line],
    *,
    x: str,
    y: str,
    limits: tuple[float, float] | None = None,
    log2: bool = False,
    width: int = 760,
    height: int = 360,
) -> str:
    """A chart; `limits` of y cut what lies outside, `log2` is of x."""
    scale_x = (lambda v: math.log2(v)) if log2 else (lambda v: float(v))
    xs = [scale_x(v) for line in lines for v in line.x]
    ys = [v for line in lines for v in line.y]
    low_x, high_x = min(xs), max(xs)
    low_y, high_y = limits or _padded(min(ys), max(ys))
    right, bottom = width - _LEGEND, height - _BOTTOM

    def at(vx: float, vy: float) -> tuple[float, float]:
        return (
            _LEFT + (scale_x(vx) - low_x) / ((high_x - low_x) or 1) * (right - _LEFT),
            bottom - (vy - low_y) / ((high_y - low_y) or 1) * (bottom - _TOP),
        )

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><title>{html.escape(title)}</title>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{html.escape(title)}</text>',
        f'<clipPath id="area"><rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}"/>'
        "</clipPath>",
    ]
    for tick in _ticks(low_y, high_y):
        _, py = at(lines[0].x[0], tick)
        out.append(f'<path d="M{_LEFT} {py:.1f}H{right}" stroke="#dddddd"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{_label(tick)}</text>')
    ticks_x = sorted({v for line in lines for v in line.x}) if log2 else _ticks(low_x, high_x)
    for tick in ticks_x:
        px, _ = at(tick, low_y)
        out.append(f'<path d="M{px:.1f} {bottom}v4" stroke="#000000"/>')
        out.append(f'<text x="{px:.1f}" y="{bottom + 16}" text-anchor="middle">{_label(tick)}</text>')
    out.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#000000"/>')
    out.append(f'<text x="{(_LEFT + right) / 2:.0f}" y="{height - 8}" text-anchor="middle">{html.escape(x)}</text>')
    middle = (_TOP + bottom) / 2
    out.append(f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{html.escape(y)}</text>')
    out.append('<g clip-path="url(#area)" fill="none">')
    for line in lines:
        points = [at(a, b) for a, b in zip(line.x, line.y, strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        colour = COLOURS[line.colour % len(COLOURS)]
        stroke = "0.8" if line.thin else "1.6"
        out.append(f'<polyline points="{path}" stroke="{colour}" stroke-width="{stroke}"/>')
        if line.marks:
            out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
    out.append("</g>")
    for row, line in enumerate(line for line in lines if not line.thin):
        py = _TOP + 10 + 17 * row
        out.append(
            f'<path d="M{right + 12} {py}h18" stroke="{COLOURS[line.colour % len(COLOURS)]}" stroke-width="2"/>'
            f'<text x="{right + 36}" y="{py + 4}">{html.escape(line.name)}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * ((high - low) or 1)
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers between two."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step = next(s for s in (step, 2 * step, 5 * step, 10 * step) if span / s <= 8)
    return [round(k * step, 10) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _label(value: float) -> str:
    return f"{value:g}" if abs(value) < 10000 else f"{value:,.0f}"
