"""The training loop: one linear main, from a config to a finished run directory."""

import contextlib
import dataclasses
import logging
import math
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mhar_jax.config.load import to_yaml
from mhar_jax.config.schema import Config
from mhar_jax.data import describe_data, load_tokenizer, make_eval_batches, make_train_iterator
from mhar_jax.data.tokenizers import Tokenizer
from mhar_jax.errors import UserError
from mhar_jax.models import count_parameters, train_flops_per_token
from mhar_jax.routing_map import RoutingMap, draw, measure
from mhar_jax.sampling import sample_text
from mhar_jax.sharding import check_batch, make_mesh
from mhar_jax.training.checkpoints import Checkpoints, merge_data_states
from mhar_jax.training.hardware import memory_in_use, peak_flops
from mhar_jax.training.metrics import MetricsWriter, NoMetrics, Progress
from mhar_jax.training.step import Trainer, make_trainer

_log = logging.getLogger("mhar_jax")
_ROUTING_ROWS = 4  # sequences of the first evaluation batch whose depth weights are summarised


def train(config: Config) -> None:
    """Trains to `config.steps`, continuing from the newest whole checkpoint in `config.run_dir`.

    Writes `config.yaml`, `metrics.jsonl`, `checkpoints/` and, for a routed model, `routing.png`.

    Raises:
      UserError: something about the config, the data, the devices or the disk; or the loss is not finite.
    """
    # ---- Devices and layout: checked before anything is written.
    mesh = make_mesh(config.mesh)
    check_batch(config, mesh)
    first_process = jax.process_index() == 0
    here = {"process_index": jax.process_index(), "process_count": jax.process_count()}

    # ---- Data: the tokenizer decides the vocabulary, and with it the model.
    tokenizer = None if _needs_no_tokenizer(config) else load_tokenizer(config.data.tokenizer, config.data.eos_token)
    config = with_vocabulary(config, tokenizer)
    iterator = make_train_iterator(config, tokenizer, **here)
    eval_batches = make_eval_batches(config, tokenizer, **here)
    data = describe_data(config, tokenizer)

    # ---- Run directory: from here on the run leaves traces.
    run_dir = prepare_run_dir(config, write=first_process)
    checkpoints = Checkpoints(run_dir, keep=config.checkpoint.keep)

    # ---- State: resume first, since a fresh state would cost its memory twice.
    trainer = make_trainer(config, mesh)
    found = checkpoints.restore(trainer.shapes, config, data["fingerprint"]) if config.checkpoint.resume else None
    if found is None:
        if not config.checkpoint.resume and checkpoints.steps():
            raise UserError(f"run_dir {run_dir} holds checkpoints; resume from them, or use another run_dir")
        state, start = trainer.init(), 0
    else:
        state, data_state = found
        start = int(state["step"])
        iterator.set_state(data_state)
    if first_process:
        (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    writer = MetricsWriter(config, start_step=start) if first_process else NoMetrics()
    progress = Progress(config.steps, start, quiet=not first_process)
    for line in _headline(config, trainer, data, start):
        progress.say(line)

    # ---- Loop. The metrics of a step are read after the next one is dispatched, so the device never waits for us.
    clock = _Clock(config)
    reports = _Reports(config, writer, progress, clock)
    evaluate = _Evaluation(trainer, eval_batches, writer, progress)
    with _terminated() as terminated, contextlib.closing(writer), contextlib.closing(progress):
        try:
            if start == 0:
                evaluate(0, state)
            clock.start()
            for step in range(start + 1, config.steps + 1):
                _profile(config, run_dir, step)
                tokens = _to_devices(next(iterator)["tokens"], trainer)
                state, metrics = trainer.step(state, tokens)
                reports.add(step, metrics)
                progress.advance()
                last = step == config.steps
                stop = terminated()
                if last or _due(step, config.eval.every):
                    reports.flush()
                    with clock.paused():
                        evaluate(step, state)
                if last or stop or _due(step, config.checkpoint.every):
                    reports.flush()  # a loss that is not finite stops here, before it is saved
                    with clock.paused():
                        checkpoints.save(
                            state, config, merge_data_states(iterator.get_state()), str(data["fingerprint"])
                        )
                if stop and not last:
                    checkpoints.close()
                    progress.say(f"stopped by a signal at step {step}; the checkpoint of this step is saved")
                    return
            reports.flush()
            checkpoints.close()
        finally:
            _profile(config, run_dir, None)
        if first_process:
            finish(config, trainer, state, tokenizer, eval_batches, run_dir, progress)


def finish(
    config: Config,
    trainer: Trainer,
    state: dict[str, Any],
    tokenizer: Tokenizer | None,
    eval_batches: list[dict[str, np.ndarray]],
    run_dir: pathlib.Path,
    progress: Progress,
) -> None:
    """The routing picture and a sample, at the end of a run."""
    params = state.get("ema", state["params"]) if config.eval.ema else state["params"]
    if config.model.is_routed:
        weights = measure(trainer, params, eval_batches[0]["tokens"][:_ROUTING_ROWS, :-1])
        draw(config.model, weights, run_dir / "routing.png")
        progress.say(f"routing map: {run_dir / 'routing.png'}")
    if config.sample.tokens and tokenizer is not None:
        text = sample_text(config, trainer, params, tokenizer)
        progress.say(f"sample: {text}")


def with_vocabulary(config: Config, tokenizer: Tokenizer | None) -> Config:
    """The config with `model.vocab_size` set: the tokenizer's, up to a multiple of 128 that matrix units like."""
    if config.model.vocab_size is not None:
        return config
    if tokenizer is None:
        raise UserError("model.vocab_size must be given when data.format is synthetic, got None")
    rows = -(-tokenizer.vocab_size // 128) * 128
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=rows))


def prepare_run_dir(config: Config, *, write: bool = True) -> pathlib.Path:
    """The run directory, made and seen to be writable.

    Raises:
      UserError: it cannot be made or written.
    """
    run_dir = pathlib.Path(config.run_dir)
    if not write:
        return run_dir
    probe = run_dir / ".writable"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"run_dir {run_dir} cannot be written: {error.strerror or error}; choose another run_dir"
        ) from None
    return run_dir


class _Clock:
    """Seconds of training: compilation, evaluation and saving are left out."""

    def __init__(self, config: Config):
        self._tokens = config.batch_size * config.seq_len
        self._since: float | None = None
        self._seconds = 0.0
        self._step: int | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._stop()
        yield
        self.start()

    def tokens_per_second(self, step: int) -> float | None:
        """Since the last call; None at the first one, which had the compilation."""
        self._stop()
        seconds, steps = self._seconds, None if self._step is None else step - self._step
        self._seconds, self._step = 0.0, step
        self.start()
        return None if not steps else steps * self._tokens / max(seconds, 1e-9)

    def _stop(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None


class _Reports:
    """Reads the metrics of a step when the next one is on its way, and writes those that are due."""

    def __init__(self, config: Config, writer: MetricsWriter | NoMetrics, progress: Progress, clock: _Clock):
        self._config, self._writer, self._progress, self._clock = config, writer, progress, clock
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._flops_per_token = train_flops_per_token(config.model, config.seq_len)
        peak = peak_flops(jax.devices()[0])
        self._peak = None if peak is None else peak * jax.device_count()

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self.flush()
        self._pending = step, metrics

    def flush(self) -> None:
        """Raises UserError if the loss of a step is not finite."""
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        jax.block_until_ready(metrics)  # also keeps the queue of dispatched steps short
        first = step == 1 or self._clock._step is None
        if not (first or _due(step, self._config.log.every) or step == self._config.steps):
            return
        values = {k: float(v) for k, v in metrics.items()}
        if not self._config.optimizer.z_loss:
            del values["z"]
        if not math.isfinite(values["loss"]):
            raise UserError(
                f"the loss is {values['loss']} at step {step}, so training stops; the last checkpoint is from before; "
                "a lower optimizer.peak_lr or a longer optimizer.warmup_steps usually helps"
            )
        if speed := self._clock.tokens_per_second(step):
            values["tokens_per_s"] = speed
            values["tflops"] = speed * self._flops_per_token / 1e12
            if self._peak is not None:
                values["mfu"] = speed * self._flops_per_token / self._peak
        values |= memory_in_use()
        self._writer.write(step, values)
        self._progress.report(step, values)


class _Evaluation:
    """Mean loss over the fixed held-out batches, and what the routing does on the first of them."""

    def __init__(
        self,
        trainer: Trainer,
        batches: list[dict[str, np.ndarray]],
        writer: MetricsWriter | NoMetrics,
        progress: Progress,
    ):
        self._trainer, self._batches, self._writer, self._progress = trainer, batches, writer, progress

    def __call__(self, step: int, state: dict[str, Any]) -> None:
        trainer, config = self._trainer, self._trainer.config
        params = state.get("ema", state["params"]) if config.eval.ema else state["params"]
        sums = [trainer.evaluate(params, _to_devices(batch["tokens"], trainer)) for batch in self._batches]
        totals = [{k: float(v) for k, v in s.items()} for s in sums]
        tokens = sum(t["tokens"] for t in totals)
        values = {"val_loss": sum(t["nll"] for t in totals) / tokens, "val_tokens": tokens}
        if config.model.is_routed and jax.process_count() == 1:
            weights: RoutingMap = measure(trainer, params, self._batches[0]["tokens"][:_ROUTING_ROWS, :-1])
            values |= {"depth_entropy": weights.entropy, "depth_newest_mass": weights.newest_mass}
        self._writer.write(step, values)
        self._progress.report(step, values)


def _to_devices(tokens: np.ndarray, trainer: Trainer) -> jax.Array:
    return jax.make_array_from_process_local_data(trainer.batch_sharding, tokens)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _needs_no_tokenizer(config: Config) -> bool:
    return config.data.format == "synthetic" and config.model.vocab_size is not None


def _headline(config: Config, trainer: Trainer, data: dict[str, Any], start: int) -> Iterator[str]:
    device = jax.devices()[0]
    mesh = ", ".join(f"{axis}={size}" for axis, size in trainer.mesh.shape.items())
    yield f"{jax.device_count()} x {device.device_kind} ({device.platform}), mesh {mesh}"
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
def _terminated() -> Iterator[Any]:
    """A function that says whether SIGTERM has come; the run saves and ends at the next step."""
    seen: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    except ValueError:  # not the main thread: somebody else handles signals
        yield lambda: False
        return
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGTERM, before)


def _profile(config: Config, run_dir: pathlib.Path, step: int | None) -> None:
    """Starts and stops the profiler at log.profile_steps; `step=None` stops it if it runs."""
    if config.log.profile_steps is None:
        return
    begin, end = config.log.profile_steps
    if step == begin:
        jax.profiler.start_trace(run_dir / "profile")
    elif step == end or step is None:
        with contextlib.suppress(RuntimeError):  # not running
            jax.profiler.stop_trace()
