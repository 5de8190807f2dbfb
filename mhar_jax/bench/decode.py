"""python -m mhar_jax.bench decode: what depth routing costs in prefill and decode, against the additive model.

Decode is timed as one compiled loop of greedy steps on the device, so that no dispatch from the host hides or adds
anything. The variants are timed in turns, so that a slow moment of the machine hits all of them.
"""

import argparse
import dataclasses
import gc
import pathlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mhar_jax.bench import breakdown, common, timing
from mhar_jax.bench.configs import SMALL_MODEL, with_variant
from mhar_jax.bench.instructions import Program
from mhar_jax.bench.intervals import ratio_of_medians
from mhar_jax.bench.profile import device_events
from mhar_jax.bench.report import Report, Row, Status, describe, environment, refused, timed
from mhar_jax.command_line import VARIANTS, parser
from mhar_jax.config.load import load_config
from mhar_jax.config.schema import ROUTED_VARIANTS, ModelConfig
from mhar_jax.errors import UserError, one_line, writing
from mhar_kernels import IMPLEMENTATIONS


def make_parser() -> argparse.ArgumentParser:
    """Of the subcommand."""
    p = parser("bench decode", "Time prefill and decode of several variants of one preset; random weights.")
    p.add_argument("--preset", help="config whose model section is timed; None: mhar_1b, on a CPU tiny")
    p.add_argument("--variants", default="additive,mhar", help=f"the first is the baseline; of {', '.join(VARIANTS)}")
    p.add_argument("--implementation", choices=IMPLEMENTATIONS, help="of depth_route; None: the best for the device")
    p.add_argument("--set", metavar="F=V", action="append", default=[], help="override of a config field, repeatable")
    p.add_argument("--batches", help="batch sizes of decode; None: 1,64, on a CPU 2")
    p.add_argument("--prefill", help="batch and length of prefill; None: 8x1024, on a CPU 2x16")
    p.add_argument("--prompt", metavar="INT", type=int, help="tokens cached before decode; None: 512, on a CPU 16")
    p.add_argument("--steps", metavar="INT", type=int, help="tokens decoded in one timing; None: 128, on a CPU 4")
    p.add_argument("--repeats", metavar="INT", type=int, default=10, help="timings of each")
    p.add_argument("--threads", metavar="INT", type=int, default=4, help="variants compiled at once")
    p.add_argument("--profile", metavar="DIR", help="trace one run of each there; say what takes the time")
    common.add_common(p)
    return p


def main(arguments: Sequence[str], begun: float) -> int:
    """Runs the subcommand, begun at that reading of `time.monotonic`."""
    options = make_parser().parse_args(list(arguments))
    clock = common.Clock(begun)
    report = run(options, ["decode", *arguments], clock)
    code = common.finish(report, options.out, {"decode": clock.seconds()})
    if table := breakdown.markdown(report):
        print("\n" + "\n".join(table))
        if options.out:
            path = pathlib.Path(options.out) / "decode_profile.md"
            with writing("the profile", path):
                head = f"{describe(report.environment)}: `{' '.join(report.environment['command'])}`"
                path.write_text("\n".join([head, "", *table]) + "\n", encoding="utf-8")
            print(f"wrote {path}")
    return code


def run(options: argparse.Namespace, command: Sequence[str], clock: common.Clock) -> Report:
    """Times everything that the options ask for.

    Raises:
      UserError: an option cannot be used.
    """
    variants = common.names(options.variants, "variants", VARIANTS)
    for option in ("prompt", "steps"):
        if getattr(options, option) is not None:
            common.at_least(option, getattr(options, option), 1)
    common.at_least("threads", options.threads, 1)
    if options.profile is not None and pathlib.Path(options.profile).is_file():
        raise UserError(f"--profile must be a directory, got the file {options.profile}")
    common.check_out(options.out)
    common.check_out(options.profile, "the trace")
    notes = common.start()
    environment_now = {**environment(command, options.revision), "compile_threads": options.threads}
    import jax

    cpu = jax.default_backend() == "cpu"
    common.at_least("repeats", options.repeats, 1 if cpu else 10)  # there, times mean nothing
    batches = common.integers(options.batches or ("2" if cpu else "1,64"), "batches")
    prefill = options.prefill or ("2x16" if cpu else "8x1024")
    try:
        rows, length = (int(part) for part in prefill.split("x"))
        if min(rows, length) < 1 or max(rows, length) > common.LARGEST:
            raise ValueError
    except ValueError:
        raise UserError(f"--prefill must be like 8x1024, got {prefill!r}") from None
    prompt, steps = options.prompt or (16 if cpu else 512), options.steps or (4 if cpu else 128)
    preset = options.preset or ("tiny" if cpu else "mhar_1b")
    base = load_config(preset, [*(SMALL_MODEL if cpu and options.preset is None else []), *options.set]).model
    changes: dict[str, Any] = {"vocab_size": base.vocab_size or 151_936, "remat": "none"}
    changes |= {"context": max(base.context, length, prompt + steps), "param_dtype": base.compute_dtype}
    try:
        base = dataclasses.replace(base, **changes)
    except ValueError as error:
        raise UserError(f"this preset cannot have so long a context: {one_line(error)}") from None

    named = {v: options.implementation if v in ROUTED_VARIANTS else None for v in variants}
    models = {v: _Placed(with_variant(base, v, named[v])) for v in variants}
    found: list[Row] = []
    for kind, batch, tokens in [("prefill", rows, length), *(("decode", b, prompt) for b in batches)]:
        if clock.over():
            notes.append(f"left out for want of time: {kind} of batch {batch}")
            continue
        clock.say(f"{preset}: {kind}, batch {batch}")
        common_part = {"preset": preset, "kind": kind, "batch": batch, "tokens": tokens}
        common_part |= {"steps": steps} if kind == "decode" else {}
        common_part |= common.overrides(options.set)
        of = {v: {**common_part, "variant": v, "implementation": named[v]} for v in variants}
        found += _measure(of, models, steps, options)
        common.keep(Report("decode", environment_now, found, notes), options.out)
        gc.collect()
    return Report("decode", environment_now, found, notes)


def _measure(
    of: dict[str, dict[str, Any]], models: dict[str, "_Placed"], steps: int, options: argparse.Namespace
) -> list[Row]:
    """A row a variant: milliseconds of a prefill, or of a decoded token."""
    import jax

    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], Any]] = {}
    programs: dict[str, Any] = {}
    first_run: dict[str, float] = {}
    kind = next(iter(of.values()))["kind"]

    def prepare(variant: str) -> tuple[Callable[[], Any], float] | Exception:
        begin, named = time.perf_counter(), of[variant]
        try:
            run, programs[variant] = models[variant].prepare(kind, named["batch"], named["tokens"], steps)
            jax.block_until_ready(run())
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            return error
        return run, time.perf_counter() - begin

    with ThreadPoolExecutor(options.threads) as pool:
        prepared = dict(zip(of, pool.map(prepare, of), strict=True))
    for variant, found in prepared.items():
        if isinstance(found, Exception):
            status: Status = "unsupported" if isinstance(found, NotImplementedError) else "failed"
            rows[variant] = refused(of[variant], status, timing.sentence(found))
        else:
            runs[variant], first_run[variant] = found
    per = 1 if kind == "prefill" else steps
    times = timing.time_in_turns(runs, dict.fromkeys(runs, per), options.repeats)
    baseline = times.get(next(iter(of)))
    for variant in runs:
        samples = times[variant]
        if isinstance(samples, Exception):
            rows[variant] = refused(of[variant], "failed", timing.sentence(samples))
            continue
        ratio = ratio_of_medians(baseline, samples, paired=True) if isinstance(baseline, list) else None
        rows[variant] = timed(
            of[variant],
            samples,
            first_run_s=first_run[variant],
            ratio=None if ratio is None else ratio.value,
            ratio_interval=None if ratio is None or ratio.low != ratio.low else [ratio.low, ratio.high],
        )
        if options.profile:
            folder = f"{options.profile}/{kind}-{of[variant]['batch']}-{variant}"
            with jax.profiler.trace(folder):
                jax.block_until_ready(runs[variant]())
            events = device_events(folder, cpu=jax.default_backend() == "cpu")
            profile = breakdown.break_down(events, Program(programs[variant].as_text()), per)
            rows[variant].metrics.update(breakdown.metrics(profile))
    return [rows[variant] for variant in of]


class _Placed:
    """A model on the first device, built when it is first used."""

    def __init__(self, config: ModelConfig):
        self._config = config
        self._model: Any = None

    def prepare(self, kind: str, batch: int, tokens: int, steps: int) -> tuple[Callable[[], Any], Any]:
        """Something to time, one prefill or `steps` greedy tokens after one, and the compiled program that it runs."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        config = self._config
        assert config.vocab_size is not None
        prompts = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (batch, tokens)), jnp.int32)
        counts = jnp.full((batch,), tokens, jnp.int32)
        slots = tokens if kind == "prefill" else tokens + steps
        prefill = self._compiled(lambda model, t, n: model.prefill(t, n, slots=slots), prompts, counts)
        if kind == "prefill":
            return prefill
        logits, cache = prefill[0]()

        def loop(model, first, cache):
            def step(carry, _):
                token, cache = carry
                logits, cache = model.extend(token[:, None], cache)
                return (jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), cache), None

            return jax.lax.scan(step, (first, cache), None, length=steps)[0][0]

        return self._compiled(loop, jnp.argmax(logits, axis=-1).astype(jnp.int32), cache)

    def _compiled(self, function: Callable[..., Any], *arguments: Any) -> tuple[Callable[[], Any], Any]:
        """Runs `function(model, *arguments)`; compiled ahead, so that the program can be asked what its kernels are."""
        import jax

        placed = self._placed()
        with jax.set_mesh(placed.mesh):
            program = jax.jit(lambda p, *a: function(placed.merge(p), *a)).lower(placed.params, *arguments).compile()
        return lambda: program(placed.params, *arguments), program

    def _placed(self) -> Any:
        if self._model is None:
            import jax
            from flax import nnx

            from mhar_jax.config.schema import MeshConfig
            from mhar_jax.inference import PlacedModel
            from mhar_jax.models import build_model
            from mhar_jax.sharding import make_mesh

            model = build_model(self._config, rngs=nnx.Rngs(0))  # not in one jit: small programs, one a shape
            self._model = PlacedModel.of(model, make_mesh(MeshConfig(data=1), jax.devices()[:1]))
        return self._model
