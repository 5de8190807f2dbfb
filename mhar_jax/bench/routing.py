"""python -m mhar_jax.bench routing: time of depth_route, and of a whole model's routing, on this device.

Every candidate's result is held against float64 before it is timed, and a wrong one gets no time.
"""

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mhar_jax.bench import common, shapes
from mhar_jax.bench.report import Report, Row, environment
from mhar_jax.command_line import parser
from mhar_jax.errors import UserError, one_line, out_of_memory

if TYPE_CHECKING:
    from mhar_jax.bench.candidates import Candidate

LAYOUTS = ("stacked", "separate", "site_by_site", "blocked")
SLOW_SITES = 24  # on GPUs XLA compiles more sites of plain jnp for minutes, and any blocked stack of it


def make_parser() -> argparse.ArgumentParser:
    """Of the subcommand."""
    p = parser("bench routing", "Time depth_route and a whole model's routing, forward and forward + backward.")
    everywhere = "None: tiny on a CPU, 100m,350m,1b,8b-delta elsewhere"
    p.add_argument("--presets", metavar="NAMES", help=f"of {', '.join(shapes.PRESETS)}; {everywhere}")
    p.add_argument("--shapes", metavar="NxDxH", help="single sites instead, sources x D x heads: 24x4096x1,9x512x4")
    p.add_argument("--delta", action="store_true", help="with --shapes: the form with residual and gate")
    p.add_argument("--sources", metavar="INTS", help="sources of the single sites; None: the presets' own")
    p.add_argument("--tokens", metavar="INT", type=int, help="tokens of a single site; None: the presets' own")
    p.add_argument("--dtype", default="bfloat16", choices=shapes.DTYPES, help="storage of the sources")
    p.add_argument(
        "--implementations",
        metavar="NAMES",
        help="None: xla and the platform's kernels; on a CPU all at the first single site, xla elsewhere",
    )
    p.add_argument("--module", metavar="NAME", help="Python module to import first; it may register candidates")
    words = "stacked, separate: sources of a single site as one array or many; site_by_site, blocked: a whole model"
    p.add_argument("--layouts", metavar="NAMES", default="stacked,site_by_site,blocked", help=words)
    p.add_argument("--blocks", metavar="INTS", help="sites a block; None: as each implementation chooses")
    slow = f"on GPUs also xla blocked, and site by site over more than {SLOW_SITES} sites"
    p.add_argument("--slow-compiles", action="store_true", help=slow)
    p.add_argument("--samples", metavar="INT", type=int, default=12, help="timings of each, at least 10")
    p.add_argument("--threads", metavar="INT", type=int, default=1, help="programs compiled at once")
    p.add_argument("--profile", action="store_true", help="time of each kernel, from a trace")
    common.add_common(p)
    return p


def main(arguments: Sequence[str], begun: float) -> int:
    """Runs the subcommand, begun at that reading of `time.monotonic`."""
    options = make_parser().parse_args(list(arguments))
    clock = common.Clock(begun)
    report = run(options, ["routing", *arguments], clock)
    return common.finish(report, options.out, {"routing": clock.seconds()})


def run(options: argparse.Namespace, command: Sequence[str], clock: common.Clock) -> Report:
    """Times everything that the options ask for.

    Raises:
      UserError: an option cannot be used.
    """
    common.at_least("samples", options.samples, 10)
    common.at_least("threads", options.threads, 1)
    layouts = common.names(options.layouts, "layouts", LAYOUTS)
    blocks = common.integers(options.blocks, "blocks") if options.blocks else [None]
    sources = common.integers(options.sources, "sources") if options.sources else None
    if options.tokens is not None:
        common.at_least("tokens", options.tokens, 1)
    if options.shapes and (options.presets or options.sources):
        raise UserError("--shapes says all about the sites: give it without --presets and --sources")
    if options.delta and not options.shapes:
        raise UserError("--delta belongs to --shapes; the preset of delta form is 8b-delta")
    common.check_out(options.out)
    notes = common.start()
    found = {**environment(command, options.revision), "compile_threads": options.threads}
    import jax

    from mhar_jax.bench import candidates
    from mhar_jax.bench.measure import Job, Settings, measure
    from mhar_jax.bench.measure_model import model_jobs
    from mhar_jax.bench.measure_site import measure_site
    from mhar_jax.bench.timing import copy_bandwidth

    if options.module:
        try:
            importlib.import_module(options.module)
        except ImportError as error:
            raise UserError(f"--module {options.module} cannot be imported: {one_line(error)}") from None
    platform = jax.default_backend()
    chosen = [candidates.find(name) for name in _implementations(options.implementations, platform)]
    given = options.presets or ("tiny" if platform == "cpu" else "100m,350m,1b,8b-delta")
    presets = {} if options.shapes else {n: shapes.preset(n) for n in common.names(given, "presets")}
    sites = _sites(options, presets, sources)
    copy = copy_bandwidth()
    settings = Settings(options.samples, options.threads, copy, options.profile)
    clock.say(f"copy {copy:.3f} TB/s")

    rows: list[Row] = []
    models = {name: replace(p.model, dtype=options.dtype) for name, p in presets.items()}

    def measure_models(layout: str) -> None:
        jobs: list[Job] = []
        for name, model in models.items():
            every = options.implementations is not None
            runs, left_out = model_runs(name, model, chosen, layout, blocks, platform, options.slow_compiles, every)
            notes.extend(left_out)
            if runs and clock.over():
                notes.append(f"left out for want of time: all sites of {name}, {layout}")
            elif runs:
                clock.say(f"{name}: all {model.sites} sites, {layout}")
                jobs += model_jobs(name, model, runs, settings)
        rows.extend(measure(jobs, settings))
        common.keep(Report("routing", found, rows, notes, copy), options.out)

    # What compiles longest, and says least, comes last: a deadline leaves it out.
    if "blocked" in layouts:
        measure_models("blocked")
    for i, (name, site) in enumerate(sites):
        # An interpreter takes seconds for times that mean nothing: once shows that it runs.
        all_of = i == 0 or options.implementations is not None
        those = [c for c in chosen if all_of or not c.interpreted]
        for layout in (x for x in layouts if x in ("stacked", "separate")):
            if clock.over():
                notes.append(f"left out for want of time: {site.sources} sources of {name}, {layout}")
                continue
            clock.say(f"{name}: {site.sources} sources, D {site.dim}, {layout}")
            try:
                rows += measure_site(name, site, layout, those, settings)
            except Exception as error:
                if out_of_memory(error) is None:
                    raise
                notes.append(f"left out, memory does not suffice: {site.sources} sources of {name}, {layout}")
            common.keep(Report("routing", found, rows, notes, copy), options.out)
    if "site_by_site" in layouts:
        measure_models("site_by_site")
    order = list(presets)
    rows.sort(key=lambda r: (r.of["what"] != "site", order.index(r.of["preset"]) if order else 0))
    return Report("routing", found, rows, notes, copy)


def model_runs(
    name: str,
    model: shapes.ModelShape,
    chosen: Sequence["Candidate"],
    layout: str,
    blocks: Sequence[int | None],
    platform: str,
    slow: bool,
    all_of: bool,
) -> tuple[list[tuple["Candidate", int | None]], list[str]]:
    """How a whole model is run: candidates with the sites of a block (None: site by site); and notes on what is not.

    Args:
      layout: "site_by_site" or "blocked".
      slow: also what takes minutes to compile.
      all_of: also what is interpreted, which takes minutes for nothing.
    """
    runs: list[tuple[Candidate, int | None]] = []
    notes = []
    for candidate in chosen:
        if (layout == "blocked" and (model.delta or candidate.stack is None)) or (candidate.interpreted and not all_of):
            continue
        long = platform == "gpu" and candidate.name == "xla" and (layout == "blocked" or model.sites > SLOW_SITES)
        if long and not slow:
            notes.append(f"left out, XLA compiles it for minutes: xla {layout} of {name} (--slow-compiles)")
        elif layout == "site_by_site":
            runs.append((candidate, None))
        else:
            runs += [(candidate, min(b or candidate.block(model.sites), model.sites)) for b in blocks]
    return runs, notes


def _implementations(given: str | None, platform: str) -> list[str]:
    if given is not None:
        return common.names(given, "implementations")
    return {"gpu": ["triton", "xla"], "tpu": ["pallas_tpu", "xla"]}.get(platform, ["xla", "triton", "pallas_tpu"])


def _sites(
    options: argparse.Namespace, presets: dict[str, shapes.Preset], sources: list[int] | None
) -> list[tuple[str, shapes.SiteShape]]:
    """The single sites to time, with the name they go by."""
    if options.shapes:
        tokens = options.tokens or 8192
        parse = lambda text: shapes.parse_site(text, tokens, options.dtype, options.delta)
        return [("custom", parse(text)) for text in common.names(options.shapes, "shapes")]
    found = []
    for name, p in presets.items():
        for site in p.sites(options.dtype):
            for n in sources or [site.sources]:
                item = (name, replace(site, sources=n, tokens=options.tokens or site.tokens))
                if item not in found:
                    found.append(item)
    return found
