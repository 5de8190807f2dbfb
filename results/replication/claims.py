"""The paper's claims beside what the runs say of each: agrees, does not, or cannot be told at this size."""

from results.replication import paper
from results.replication.effects import NOT_RUN, Effect, Results, of
from results.replication.plan import WIDTHS
from results.replication.results import Result

AGREES, DIFFERS, UNTOLD = "agrees", "does not agree", "cannot be told"


def beside_the_paper(results: Results) -> str:
    """A line a claim."""
    rows = [
        "## Beside the paper\n",
        f"| the paper says | there | width {WIDTHS[0]} | width {WIDTHS[1]} |",
        "|---|---|---|---|",
    ]
    for claim, there, low, high in paper.ORDER:
        effects = [Effect(of(results, w, high), of(results, w, low)) for w in WIDTHS]
        rows.append(f"| {claim} | {there} | {' | '.join(_ordered(e) for e in effects)} |")
    excess = [_excess(results, w) for w in WIDTHS]
    words = [_all(e, [value > 2 * sd for value, sd in e]) for e in excess]
    there = " / ".join(value for _, value, _ in paper.PROBE[: len(WIDTHS)])
    rows.append(f"| one query disagrees with itself over the width, beyond chance | {there} | {' | '.join(words)} |")
    both = [
        ("many heads gain more over one in a wider model", "v1: yes; v2: not steadily", widening(results) or NOT_RUN),
        ("one query disagrees more in a wider model", there, _more_at_the_wider(*excess)),
        ("the loss is U-shaped in H", "flat at 4 to 8", _u(head_curve(results))),
    ]
    rows += [f"| {claim} | {there} | {word} | |" for claim, there, word in both]
    return "\n".join(rows) + (
        "\n\nThe paper's differences are of tail-means at 100M, version 1 / version 2, and of the query at the two "
        "widths. A difference agrees or does not where it is told apart, by the rule above; that it is as large as the "
        "paper's is not asked. The last three lines are about both widths, and about the numbers of heads at width 512."
    )


def widening(results: Results) -> str | None:
    """What may be said of the gap between many heads and one at the two widths; None before it is run at both."""
    gaps = [Effect(of(results, w, "attention_residuals"), of(results, w, "mhar")) for w in WIDTHS]
    if not all(g.by_seed for g in gaps):
        return None
    small, large = gaps
    if higher := [str(w) for w, g in zip(WIDTHS, gaps, strict=True) if g.apart and g.mean > 0]:
        return f"does not hold: many heads are above one at width {' and '.join(higher)}"
    if not all(g.apart for g in gaps):
        return "cannot be told: at one width at least, the gap itself is not told apart from nothing"
    separate = max(large.by_seed) < min(small.by_seed) or min(large.by_seed) > max(small.by_seed)
    return ("widens" if large.mean < small.mean else "does not widen") + (
        " (the seeds of the two widths do not overlap)" if separate else " (the seeds overlap: not told apart)"
    )


def head_curve(results: Results) -> list[tuple[int, Result]]:
    """The number of heads and the run of seed 0, at width 512."""
    named = {1: "d512-attention_residuals-s0", 2: "d512-mhar-h2-s0", 4: "d512-mhar-s0"}
    named |= {8: "d512-mhar-h8-s0", 16: "d512-mhar-h16-s0"}
    return [(h, results[name]) for h, name in named.items() if name in results and not results[name].diverged]


def _ordered(effect: Effect) -> str:
    """Of a difference that the paper has below zero."""
    if not effect.by_seed:
        return NOT_RUN
    if not effect.apart:
        return f"{UNTOLD}: {effect.mean:+.3f}"
    return f"{AGREES if effect.mean < 0 else DIFFERS}: {effect.mean:+.3f}"


def _excess(results: Results, width: int) -> list[tuple[float, float]]:
    """Learned excess of width disagreement and its noise, by seed."""
    weights = [r.values["weights"] for r in of(results, width, "attention_residuals")]
    slices = [w["probe"]["width_disagreement"]["contiguous"] for w in weights if "probe" in w]
    return [(s["excess"], s["excess_sd"]) for s in slices]


def _all(found: list[tuple[float, float]], holds: list[bool]) -> str:
    if not found:
        return NOT_RUN
    values = " / ".join(f"{value:.3f}" for value, _ in found)
    return f"{AGREES if all(holds) else DIFFERS}: {values}"


def _more_at_the_wider(small: list[tuple[float, float]], large: list[tuple[float, float]]) -> str:
    if not (small and large):
        return NOT_RUN
    low, high = [v for v, _ in small], [v for v, _ in large]
    if min(high) > max(low):
        return AGREES
    return DIFFERS if max(high) < min(low) else f"{UNTOLD}: the seeds overlap"


def _u(curve: list[tuple[int, Result]]) -> str:
    """One seed: a lowest point inside is no more than what a U would show."""
    if len(curve) < 5:
        return NOT_RUN
    best = min(curve, key=lambda point: point[1].run.tail)[0]
    spread = max(r.run.tail for _, r in curve) - min(r.run.tail for _, r in curve)
    return f"{UNTOLD} with one seed: lowest at H = {best}, {spread:.3f} from lowest to highest"
