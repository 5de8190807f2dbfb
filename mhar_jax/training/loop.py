"""The training loop: one linear main, from a config to a finished run directory."""

import contextlib
import dataclasses
import json
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from mhar_jax.config.load import to_yaml
from mhar_jax.config.schema import Config
from mhar_jax.data import describe_data, load_tokenizer, make_eval_batches, make_train_iterator
from mhar_jax.data.tokenizers import Tokenizer
from mhar_jax.distributed import progress as got_further
from mhar_jax.errors import UserError, writing
from mhar_jax.models import count_parameters
from mhar_jax.routing_map import RoutingPictures
from mhar_jax.sampling import sample_text
from mhar_jax.sharding import check_batch, data_share, make_mesh
from mhar_jax.training.checkpoints import Checkpoints, merge_data_states
from mhar_jax.training.compiling import watch_compiling
from mhar_jax.training.memory import check_memory
from mhar_jax.training.metrics import MetricsWriter, NoMetrics, Progress, check_wandb
from mhar_jax.training.reports import Clock, Evaluation, Reports, due
from mhar_jax.training.run_directory import prepare_run_dir, unless_it_fails, write_file
from mhar_jax.training.start import read_start
from mhar_jax.training.step import State, Trainer, evaluated_params, make_trainer


def train(config: Config) -> None:
    """Trains to `config.steps`, continuing from the newest whole checkpoint in `config.run_dir`.

    Writes `config.yaml`, `data.json`, `metrics.jsonl`, `checkpoints/` and, for a routed model, `routing.png`, which
    every evaluation replaces.

    Raises:
      UserError: something about the config, the data, the devices or the disk; or the loss is not finite.
    """
    # ---- Devices and layout.
    mesh = make_mesh(config.mesh)
    check_batch(config, mesh)
    check_wandb(config)
    first_process = jax.process_index() == 0
    here = data_share(mesh, config.batch_size)

    # ---- Data: the tokenizer decides the vocabulary, and with it the model.
    tokenizer = None if _needs_no_tokenizer(config) else load_tokenizer(config.data.tokenizer, config.data.eos_token)
    config = with_vocabulary(config, tokenizer)
    check_memory(config, mesh, config.batch_size // here["process_count"])
    iterator = make_train_iterator(config, tokenizer, **here)
    held_out = make_eval_batches(config, tokenizer, **here)
    data = describe_data(config, tokenizer)

    # ---- Model: traced here, so that what cannot run has been refused before anything is written.
    trainer = make_trainer(config, mesh)
    trainer.step.trace(trainer.shapes, trainer.batch)

    with contextlib.ExitStack() as resources:
        resources.enter_context(contextlib.closing(iterator))
        terminated = resources.enter_context(_terminated())  # also while the state is read and the step compiled

        # ---- Run directory: from here on the run leaves traces. Each process looks, the first one writes.
        begun = resources.enter_context(unless_it_fails(config.run_dir, write=first_process))
        run_dir = prepare_run_dir(config.run_dir, write=first_process)
        checkpoints = resources.enter_context(Checkpoints(run_dir, keep=config.checkpoint.keep))

        # ---- State: resume first, since a fresh state would cost its memory twice.
        state, start = _resume(config, checkpoints, trainer, iterator, str(data["fingerprint"]))
        if first_process:
            write_file(run_dir / "config.yaml", "the resolved config", to_yaml(config))
            write_file(run_dir / "data.json", "the description of the data", json.dumps(data, indent=1) + "\n")
        writer = MetricsWriter(config, run_dir, first_step=start + 1 if start else 0) if first_process else NoMetrics()
        resources.enter_context(contextlib.closing(writer))
        progress = resources.enter_context(contextlib.closing(Progress(config.steps, start, quiet=not first_process)))
        for line in _headline(config, trainer, data, start):
            progress.say(line)
        clock = Clock()
        reports = Reports(trainer, writer, progress, clock)
        eval_batches = [_to_devices(batch, trainer) for batch in held_out]
        pictures = None
        if config.model.is_routed and first_process:
            pictures = resources.enter_context(RoutingPictures(config.model, run_dir / "routing.png"))
        evaluate = Evaluation(trainer, eval_batches, writer, progress, pictures)
        profiler = resources.enter_context(contextlib.closing(_Profiler(config, run_dir)))

        def save(state: State) -> None:
            reports.flush()  # a loss that is not finite stops here, before it is saved
            checkpoints.save(state, config, merge_data_states(iterator.get_state()), str(data["fingerprint"]))
            begun()

        # ---- Loop. The numbers of a step are read after the next one is dispatched: the device never waits for us.
        if start == 0:
            evaluate(0, state)
        clock.start()
        for step in range(start + 1, config.steps + 1):
            profiler.before(step)
            tokens = _to_devices(next(iterator), trainer)
            if step == start + 1:
                with watch_compiling() as compilation:
                    state, metrics = trainer.step(state, tokens)
                if compilation.programs:
                    progress.say(f"step {compilation}")
            else:
                state, metrics = trainer.step(state, tokens)
            reports.add(step, metrics)
            profiler.after(step, metrics)
            if step > start + 1:  # the numbers of the first step have been read
                begun()
            progress.advance()
            got_further()
            last, stop = step == config.steps, terminated(step)
            if last or due(step, config.eval.every):
                reports.flush()
                with clock.paused(metrics):
                    evaluate(step, state)
                    got_further()
            if last or stop or due(step, config.checkpoint.every):
                with clock.paused(metrics):
                    save(state)
                    got_further()
            if stop and not last:
                checkpoints.wait()
                progress.say(f"stopped by a signal after step {step}, which is saved; the same command continues")
                return
        checkpoints.wait()

        # ---- What the run shows at its end.
        if config.model.is_routed and start == config.steps:  # nothing was left to do; the picture may be missing
            evaluate.picture(state)
        if pictures is not None:
            pictures.finish()
            progress.say(f"routing map: {run_dir / 'routing.png'}")
        if config.sample.tokens and tokenizer is not None:
            progress.say(f"sample: {sample_text(config, trainer, evaluated_params(state, config), tokenizer)}")


def with_vocabulary(config: Config, tokenizer: Tokenizer | None) -> Config:
    """The config with `model.vocab_size` set: the tokenizer's, up to a multiple of 128 that matrix units like."""
    if config.model.vocab_size is not None:
        return config
    assert tokenizer is not None  # see _needs_no_tokenizer
    rows = -(-tokenizer.vocab_size // 128) * 128
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=rows))


def _resume(
    config: Config, checkpoints: Checkpoints, trainer: Trainer, iterator: Any, fingerprint: str
) -> tuple[State, int]:
    """The state to go on from and its step, with the iterator set to match; a fresh state where nothing is saved."""
    run_dir = checkpoints.directory.parent
    if not config.checkpoint.resume and checkpoints.steps():
        raise UserError(
            f"run_dir {run_dir} holds checkpoints and checkpoint.resume is false; let it resume, or use another run_dir"
        )
    found = checkpoints.restore(trainer.shapes, config, fingerprint)
    if found is None and config.init_from is not None:
        return trainer.start(read_start(config, trainer)), 0
    if found is None:
        return trainer.init(), 0
    if found.step > config.steps:
        raise UserError(
            f"run_dir {run_dir} holds a checkpoint of step {found.step}, which is past steps={config.steps}; "
            "raise steps, or use another run_dir"
        )
    iterator.set_state(found.data)
    return found.state, found.step


class _Profiler:
    """Traces from log.profile_steps' first step to its last, both included, into run_dir/profile."""

    def __init__(self, config: Config, run_dir: pathlib.Path):
        self._steps, self._directory = config.log.profile_steps, run_dir / "profile"
        self._running = False

    def before(self, step: int) -> None:
        """Starts if this is the first step to trace."""
        if self._steps is not None and step == self._steps[0]:
            with writing("the profile", self._directory):
                jax.profiler.start_trace(self._directory)
            self._running = True

    def after(self, step: int, metrics: Any) -> None:
        """Stops if this was the last step to trace, once the device is done with it."""
        if self._running and self._steps is not None and step == self._steps[1]:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        """Writes the trace if one is running."""
        if self._running:
            self._running = False
            with writing("the profile", self._directory):
                jax.profiler.stop_trace()


def _to_devices(batch: dict[str, np.ndarray], trainer: Trainer) -> jax.Array:
    """The global batch [batch_size, seq_len + 1], from this process's rows."""
    return jax.make_array_from_process_local_data(trainer.batch.sharding, batch["tokens"])


def _needs_no_tokenizer(config: Config) -> bool:
    return config.data.format == "synthetic" and config.model.vocab_size is not None


def _headline(config: Config, trainer: Trainer, data: dict[str, Any], start: int) -> Iterator[str]:
    device = trainer.mesh.devices.flat[0]
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    mesh = ", ".join(f"{axis}={size}" for axis, size in trainer.mesh.shape.items())
    yield f"{trainer.mesh.size} x {device.device_kind} ({device.platform}){processes}, mesh {mesh}"
    tokens = "endless" if data["tokens_per_epoch"] is None else f"{data['tokens_per_epoch']:,} tokens an epoch"
    yield f"data: {data['source']}, {tokens}"
    per_step = config.batch_size * config.seq_len
    heads = f", {config.model.heads_of_depth} routing heads" if config.model.is_routed else ""
    yield (
        f"model: {config.model.variant}{heads}, {count_parameters(config.model):,} parameters, "
        f"{per_step:,} tokens a step, {config.steps} steps"
    )
    if start:
        yield f"resuming after step {start}"


@contextlib.contextmanager
def _terminated() -> Iterator[Callable[[int], bool]]:
    """A function that says after each step whether SIGTERM has come; the run saves and ends after the current step.

    Of several processes, one that is told tells the others, and all end after the same step: JAX's notice of preemption
    takes the signal.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        yield multihost_utils.reached_preemption_sync_point
        return
    seen: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    except ValueError:  # not the main thread: somebody else handles signals
        yield lambda step: False
        return
    try:
        yield lambda step: bool(seen)
    finally:
        signal.signal(signal.SIGTERM, before)
