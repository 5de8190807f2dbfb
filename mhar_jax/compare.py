"""python -m mhar_jax.compare RUN_A RUN_B ...: training runs, or results of evaluations, against the first one."""

import argparse
import itertools
import math
import pathlib
import sys
from collections.abc import Sequence

from mhar_jax.command_line import parser
from mhar_jax.errors import UserError, command
from mhar_jax.platforms import prefer_present_hardware


def _parser() -> argparse.ArgumentParser:
    p = parser(
        "compare",
        "Compare run directories (tail-means, paired differences, seeds), or files that mhar_jax.evaluate --out wrote "
        "(exact McNemar tests and paired bootstraps over items). The first one is the baseline.",
    )
    p.add_argument("paths", metavar="RUN", nargs="+", help="run directories, or files of results; at least two")
    p.add_argument("--require-paired", action="store_true", help="exit with code 2 unless every comparison is paired")
    p.add_argument("--gain", action="store_true", help="also the compute-equivalent gain, from runs at several scales")
    p.add_argument(
        "--sigma", metavar="FLOAT", type=float, default=0.005, help="standard deviation of a loss for --gain, nats"
    )
    return p


@command
def main(arguments: list[str] | None = None) -> None:
    """Runs the command; wrong input is one line on standard error and exit code 2."""
    options = _parser().parse_args(arguments)
    if len(options.paths) < 2:
        raise UserError("give at least two runs or two files of results to compare")
    if len({pathlib.Path(path).resolve() for path in options.paths}) < len(options.paths):
        raise UserError("a run or file is given twice")
    prefer_present_hardware()
    files = [pathlib.Path(path).is_file() for path in options.paths]
    if all(files):
        reasons = _compare_results(options.paths)
    elif any(files):
        raise UserError("give either run directories or files of results, not both")
    else:
        reasons = _compare_runs(options.paths, options)
    if reasons and options.require_paired:
        raise UserError(f"not paired: {reasons[0]}")


def _compare_runs(paths: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Prints the table and the differences; returns why some of them are not paired."""
    from mhar_jax.evaluation.runs import compare_runs, read_run, what_is_compared
    from mhar_jax.evaluation.statistics import TAIL
    from mhar_jax.evaluation.tables import aligned

    runs = [read_run(path) for path in paths]
    comparisons = compare_runs(runs)
    names = dict(zip(paths, _letters(), strict=False))
    rows = [["", "run", "variant", "seed", "peak lr", "evaluations", "last", f"tail-mean ({TAIL})"]]
    for path, run in zip(paths, runs, strict=True):
        steps = f"{len(run.evaluations)} to step {run.evaluations[-1].step}"
        model, few = run.config.model, len(run.evaluations) < TAIL
        tail = f"{run.tail:.4f}" + (f" (of {len(run.evaluations)})" if few else "")
        peak_lr, last = f"{run.config.optimizer.peak_lr:g}", f"{run.evaluations[-1].loss:.4f}"
        rows.append([names[path], path, model.variant, str(run.config.seed), peak_lr, steps, last, tail])
    print(aligned(rows))
    name_of = {id(run): names[path] for path, run in zip(paths, runs, strict=True)}
    reasons: list[str] = []
    if not comparisons:
        reasons.append("the runs are of one method with different seeds, so there is no pair among them")
        print(f"\nNOT PAIRED: {reasons[0]}")
    for comparison in comparisons:
        print()
        for d in comparison.differences:
            pair = f"{name_of[id(d.second)]} - {name_of[id(d.first)]}"
            if d.reasons:
                print(f"{pair}   NOT PAIRED: {'; '.join(d.reasons)}")
                print(f"        tail-means differ by {d.tail:+.4f}, which other data or schedules may have made")
                reasons += d.reasons
                continue
            each = d.by_evaluation
            spread = "" if math.isnan(each.std) else f" ± {each.std:.4f} from one evaluation to another"
            print(f"{pair}   paired: {d.tail:+.4f}{spread}; compared: {what_is_compared(d.first, d.second)}")
        over = comparison.over_seeds
        if over is not None and over.count > 1:
            print(f"        {over.mean:+.4f} ± {over.std:.4f} over {over.count} seeds (mean ± standard deviation)")
        elif over is not None:
            print("        one seed: how far another seed would move this is not known; run three")
    if options.gain:
        _gain(runs, options.sigma)
    return reasons


def _gain(runs, sigma: float) -> None:
    """The compute-equivalent gain of every variant over the first run's."""
    from mhar_jax.evaluation.power_law import compute_equivalent_gain
    from mhar_jax.evaluation.runs import reasons_against_pairing
    from mhar_jax.evaluation.statistics import mean_std

    if not 0 <= sigma < math.inf:
        raise UserError(f"--sigma must be a number of at least 0, got {sigma}")
    scales: dict[str, dict] = {}
    for run in runs:
        scales.setdefault(run.config.model.variant, {}).setdefault(run.shape, []).append(run)
    first = runs[0].config.model.variant
    baseline = scales.pop(first)
    if not scales:
        raise UserError("--gain needs runs of two variants")
    for variant, by_shape in {first: baseline, **scales}.items():
        _check_one_method(variant, by_shape)
    for variant, by_shape in scales.items():
        shapes = sorted(baseline.keys() & by_shape.keys(), key=lambda s: baseline[s][0].flops)
        compute = [baseline[s][0].flops for s in shapes]
        losses = [[mean_std([r.tail for r in of[s]]).mean for s in shapes] for of in (baseline, by_shape)]
        gain = compute_equivalent_gain(compute, *losses, sigma=sigma)
        law = gain.law
        print(
            f"\n{variant} over {first}: compute-equivalent gain, on L = {law.amplitude:.4g} (C / {law.unit:.4g})^-",
            end="",
        )
        print(f"{law.exponent:.4g} + {law.floor:.4g} through {len(shapes)} scales (rms {law.residual:.2g})")
        for c, factor in zip(compute, gain.factors, strict=True):
            print(
                f"  C = {c:.3g}   {factor.value:.2f}   {factor.low:.2f} to {factor.high:.2f} (90 %, losses ± {sigma:g})"
            )
        print(f"  Warning: {gain.warning}.")
        for run in (run for s in shapes for run in by_shape[s]):
            pair = next((r for r in baseline[run.shape] if r.config.seed == run.config.seed), baseline[run.shape][0])
            if reasons := reasons_against_pairing(pair, run):
                print(f"  Warning: {run.path} and {pair.path} are NOT PAIRED: {'; '.join(reasons)}.")
        if len(shapes) == 3:
            print("  Warning: three numbers fitted to three points; the fit says nothing about its own error.")


def _check_one_method(variant: str, by_shape: dict) -> None:
    """Runs of one variant and one scale may differ in their seed only: others are not averaged."""
    from mhar_jax.evaluation.runs import differing_fields

    for first, *others in by_shape.values():
        for run in others:
            found = {n: values for n, values in differing_fields(first, run).items() if n != "seed"}
            if found:
                name, (x, y) = next(iter(found.items()))
                raise UserError(
                    f"--gain averages runs of one variant and scale over seeds, and {first.path} and {run.path} "
                    f"({variant}) differ in {name}, {x} and {y}; give runs of one method of each variant"
                )


def _compare_results(paths: Sequence[str]) -> list[str]:
    """Prints the tests of every file against the first; returns why some are not paired."""
    from mhar_jax.evaluation.items import read_results
    from mhar_jax.evaluation.paired_items import compare_items, reasons_against_pairing

    results = [read_results(path) for path in paths]
    reasons: list[str] = []
    tests = 0
    for path, other in zip(paths[1:], results[1:], strict=True):
        print(f"{path} ({other.variant}) against {paths[0]} ({results[0].variant})")
        against = reasons_against_pairing(results[0], other)
        if against:
            print(f"  NOT PAIRED: {'; '.join(against)}; so there is no test")
            reasons += against
            continue
        comparisons = list(compare_items(results[0], other))
        for found in comparisons:
            tests += found.p is not None
            print(f"  {found.sentence()}")
        if not comparisons:
            print("  no metric that both have is kept item by item, so there is no test")
    if tests > 1:
        print(f"{tests} tests: with no difference anywhere, {0.05 * tests:.2g} of them have p < 0.05 on average.")
    return reasons


def _letters():
    for size in itertools.count(1):
        yield from ("".join(letters) for letters in itertools.product("ABCDEFGHIJKLMNOPQRSTUVWXYZ", repeat=size))


if __name__ == "__main__":
    sys.exit(main())
