"""python -m mhar_jax.bench training: what a train step costs, variant beside variant, implementation beside another.

All take the same micro-batch of random tokens, without accumulation, in turns: windows of several steps each, so that a
slow moment of the machine hits all of them. The first variant is the baseline. Routing is held against the definition
first (`check_training.py`).
"""

import argparse
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from mhar_jax.bench import check, check_training, common, timing
from mhar_jax.bench.configs import MICRO_BATCHES, SMALL_MODEL, with_variant
from mhar_jax.bench.intervals import ratio_of_medians
from mhar_jax.bench.report import Report, Row, Status, environment, refused, timed
from mhar_jax.command_line import VARIANTS, parser
from mhar_jax.config.load import load_config
from mhar_jax.config.schema import ROUTED_VARIANTS, Config
from mhar_jax.errors import UserError
from mhar_kernels import IMPLEMENTATIONS, UnsupportedInputError

# Losses of one variant's first step by two implementations: means over thousands of tokens of numbers near 10 that
# bfloat16 activations put off by some 1e-3 each.
LOSS_TOLERANCE = 2e-3


def make_parser() -> argparse.ArgumentParser:
    """Of the subcommand."""
    p = parser("bench training", "Time train steps of several variants of a preset, on random tokens.")
    words = f"of {', '.join(MICRO_BATCHES)}, or others; None: all three, on a CPU a small model"
    p.add_argument("--presets", metavar="NAMES", help=words)
    p.add_argument("--variants", default="additive,mhar", help=f"the first is the baseline; of {', '.join(VARIANTS)}")
    p.add_argument("--implementations", metavar="NAMES", default="best", help="of depth_route, for routed variants")
    p.add_argument("--set", metavar="F=V", action="append", default=[], help="override of a config field, repeatable")
    p.add_argument("--steps", metavar="INT", type=int, help="steps a window; None: 8, on a CPU 1")
    p.add_argument("--windows", metavar="INT", type=int, default=10, help="windows of each, after one to warm up")
    p.add_argument("--threads", metavar="INT", type=int, default=4, help="programs compiled at once")
    common.add_common(p)
    return p


def main(arguments: Sequence[str], begun: float) -> int:
    """Runs the subcommand, begun at that reading of `time.monotonic`."""
    options = make_parser().parse_args(list(arguments))
    clock = common.Clock(begun)
    report = run(options, ["training", *arguments], clock)
    return common.finish(report, options.out, {"training": clock.seconds()})


def run(options: argparse.Namespace, command: Sequence[str], clock: common.Clock) -> Report:
    """Times everything that the options ask for.

    Raises:
      UserError: an option cannot be used.
    """
    variants = common.names(options.variants, "variants", VARIANTS)
    implementations = common.names(options.implementations, "implementations", ("best", *IMPLEMENTATIONS))
    common.at_least("threads", options.threads, 1)
    if options.steps is not None:
        common.at_least("steps", options.steps, 1)
    common.check_out(options.out)
    notes = common.start()
    environment_now = {**environment(command, options.revision), "compile_threads": options.threads}
    import jax

    cpu = jax.default_backend() == "cpu"
    common.at_least("windows", options.windows, 1 if cpu else 10)  # there, times mean nothing
    small = [*SMALL_MODEL, "batch_size=8", "seq_len=32"] if cpu and options.presets is None else []
    presets = common.names(options.presets or ("tiny" if cpu else "mhar_100m,mhar_1b,mhar_350m"), "presets")
    pairs = [(v, i) for v in variants for i in (implementations if v in ROUTED_VARIANTS else [None])]
    configs = {p: _configs(p, pairs, [*small, *options.set], jax.device_count()) for p in presets}
    rows: list[Row] = []
    for preset, by_pair in configs.items():
        if clock.over():
            notes.append(f"left out for want of time: {preset}")
            continue
        clock.say(f"{preset}: {', '.join(v + (f' ({i})' if i else '') for v, i in pairs)}")
        rows += _measure(
            preset, by_pair, options.steps or (1 if cpu else 8), options.windows, options.threads, options.set
        )
        common.keep(Report("training", environment_now, rows, notes), options.out)
        gc.collect()
    return Report("training", environment_now, rows, notes)


Pair = tuple[str, str | None]  # variant, implementation


def _configs(preset: str, pairs: list[Pair], overrides: list[str], devices: int) -> dict[Pair, Config]:
    base = load_config(preset, ["data.format=synthetic", "optimizer.accumulate=1", *overrides])
    given = {override.split("=")[0].removeprefix("--") for override in overrides}
    if "batch_size" not in given and preset in MICRO_BATCHES:
        base = dataclasses.replace(base, batch_size=MICRO_BATCHES[preset] * devices)
    if base.batch_size % devices:
        raise UserError(f"batch_size must be a multiple of the {devices} devices, got {base.batch_size}")
    vocabulary = base.model.vocab_size or 151_936  # Qwen3's
    found = {}
    for variant, implementation in pairs:
        named = None if implementation == "best" else implementation
        model = dataclasses.replace(with_variant(base.model, variant, named), vocab_size=vocabulary)
        found[variant, implementation] = dataclasses.replace(base, model=model)
    return found


def _measure(
    preset: str, configs: dict[Pair, Config], steps: int, windows: int, threads: int, overrides: Sequence[str]
) -> list[Row]:
    import jax
    import numpy as np

    from mhar_jax.sharding import make_mesh
    from mhar_jax.training.step import make_trainer

    trainers = {pair: make_trainer(config, make_mesh(config.mesh)) for pair, config in configs.items()}
    routing = _RoutingCheck(configs)
    jobs = {pair: partial(t.step.lower, t.shapes, t.batch) for pair, t in trainers.items()}
    compiled = timing.compile_all({**routing.jobs, **jobs}, threads, routing.jobs)
    rows: dict[Pair, Row] = {}
    programs: dict[Pair, timing.Compiled] = {}
    states: dict[Pair, Any] = {}
    batches: dict[Pair, list[jax.Array]] = {}
    losses: dict[Pair, float] = {}
    errors: dict[Pair, dict[str, float]] = {}
    of: dict[Pair, dict[str, Any]] = {}
    for pair, config in configs.items():
        variant, implementation = pair
        of[pair] = {"preset": preset, "variant": variant, "implementation": implementation}
        of[pair] |= {"batch_size": config.batch_size, "seq_len": config.seq_len, **common.overrides(overrides)}
        program, trainer = compiled[pair], trainers[pair]
        try:
            if isinstance(program, Exception):
                raise program
            if variant in ROUTED_VARIANTS:
                errors[pair], problem = routing.errors(pair, compiled)
                if problem is not None:
                    rows[pair] = refused(of[pair], "wrong", problem, errors=errors[pair])
                    continue
            shape, vocabulary = trainer.batch.shape, config.model.vocab_size or 0
            tokens = np.random.default_rng(0).integers(0, vocabulary, (4, *shape), np.int32)
            batches[pair] = [jax.device_put(t, trainer.batch.sharding) for t in tokens]
            state, metrics = program.program(trainer.init(), batches[pair][0])
            losses[pair] = float(metrics["loss"])
        except Exception as error:  # one program's mistake must not end the others' run
            status: Status = "unsupported" if isinstance(error, UnsupportedInputError) else "failed"
            rows[pair] = refused(of[pair], status, timing.sentence(error))
            continue
        if (problem := _problem(pair, losses)) is not None:
            rows[pair] = refused(of[pair], "wrong", problem)
        else:
            states[pair], programs[pair] = state, program

    samples: dict[Pair, list[float]] = {pair: [] for pair in states}
    for window in range(windows + 1):
        for pair in states:
            program = programs[pair].program
            begin = time.perf_counter()
            for i in range(steps):
                states[pair], metrics = program(states[pair], batches[pair][i % 4])
            jax.block_until_ready(metrics)
            if window:
                samples[pair].append((time.perf_counter() - begin) / steps * 1e3)
    first = next(iter(configs))
    for pair in states:
        baseline = samples.get(first)
        more: dict[str, Any] = {"first_loss": losses[pair]}
        if pair in errors:
            more |= {"error": check.worst(errors[pair]), "errors": errors[pair]}
        rows[pair] = _row(of[pair], configs[pair], samples[pair], baseline, programs[pair], more)
    return [rows[pair] for pair in configs]


class _RoutingCheck:
    """Small models whose routing is held against the definition before anything is timed."""

    def __init__(self, configs: dict[Pair, Config]):
        import jax

        self._small = {
            pair: check_training.small(config, jax.device_count())
            for pair, config in configs.items()
            if pair[0] in ROUTED_VARIANTS
        }
        self.jobs: dict[Any, Any] = {}
        for pair, config in self._small.items():
            self.jobs["small", pair] = check_training.lower(config)
            self.jobs["exact", pair[0]] = check_training.lower(check_training.exact(config))

    def errors(self, pair: Pair, compiled: dict[Any, Any]) -> tuple[dict[str, float], str | None]:
        """Of one of them; and why that is wrong."""
        import jax

        config = self._small[pair]
        results = []
        for key in (("small", pair), ("exact", pair[0])):
            program = compiled[key]
            if isinstance(program, Exception):
                raise program
            results.append(jax.device_get(program.program(*check_training.arguments(config))))
        errors = check_training.errors(*results)
        return errors, check.complaint(errors, partial(check_training.tolerance, config.model.compute_dtype))


def _problem(pair: Pair, losses: dict[Pair, float]) -> str | None:
    """Why a first step is wrong: not finite, or not what another implementation of the variant got."""
    loss = losses[pair]
    if not math.isfinite(loss):
        return f"wrong: the loss of the first step is {loss}"
    for other, its in losses.items():
        if other[0] == pair[0] and math.isfinite(its) and abs(loss - its) > LOSS_TOLERANCE * abs(its):
            return f"wrong: the loss of the first step is {loss:.5f}, and {its:.5f} by {other[1]}"
    return None


def _row(
    of: dict[str, Any],
    config: Config,
    samples: list[float],
    baseline: list[float] | None,
    program: timing.Compiled,
    more: dict[str, Any],
) -> Row:
    import jax

    from mhar_jax.models.counting import train_flops_per_token
    from mhar_jax.training.hardware import peak_flops

    ms = statistics.median(samples)
    tokens = config.batch_size * config.seq_len
    flops = train_flops_per_token(config.model, config.seq_len) * tokens / jax.device_count()  # of one device
    peak = peak_flops(jax.devices()[0])
    ratio = None if baseline is None else ratio_of_medians(samples, baseline, paired=True)
    return timed(
        of,
        samples,
        tokens_per_s=tokens / ms * 1e3,
        tflops=flops / ms / 1e9,
        mfu=None if peak is None else flops / ms * 1e3 / peak,
        peak_bytes=program.peak_bytes,
        compile_s=program.seconds,
        ratio=None if ratio is None else ratio.value,
        ratio_interval=None if ratio is None or ratio.low != ratio.low else [ratio.low, ratio.high],
        **more,
    )
