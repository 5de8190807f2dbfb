"""Reading the device's numbers without making it wait, and what a run says about itself."""

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import jax

from mhar_jax.errors import UserError
from mhar_jax.models import train_flops_per_token
from mhar_jax.routing_map import RoutingMap, RoutingPictures, measure
from mhar_jax.training.hardware import memory_in_use, peak_flops
from mhar_jax.training.metrics import MetricsWriter, NoMetrics, Progress
from mhar_jax.training.step import State, Trainer, evaluated_params

_HELD = 100  # steps whose numbers stay on the device at most
_MOST_SKIPPED = 10  # steps in a row that are not finite: no longer the data's fault
_log = logging.getLogger("mhar_jax")


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens at this one."""
    return every > 0 and step % every == 0


class Clock:
    """Seconds of training: compilation, evaluation and saving are left out."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0
        self._step: int | None = None

    def start(self) -> None:
        """Goes on counting."""
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def paused(self, pending: Any) -> Iterator[None]:
        """Does not count what is done inside, but the steps before it whole: waits for `pending`, what they make."""
        jax.block_until_ready(pending)
        self._stop()
        yield
        self.start()

    def seconds_per_step(self, step: int) -> float | None:
        """Since the last call. None at the first one, whose steps had the compilation."""
        self._stop()
        seconds, steps = self._seconds, 0 if self._step is None else step - self._step
        self._seconds, self._step = 0.0, step
        self.start()
        return seconds / steps if steps else None

    def _stop(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None


class Reports:
    """Keeps the numbers of each step on the device, and reads them when the next step is on its way.

    They are read at the steps that are written, so every step's are looked at, in one transfer, and none makes the
    device wait.
    """

    def __init__(self, trainer: Trainer, writer: MetricsWriter | NoMetrics, progress: Progress, clock: Clock):
        config = trainer.config
        self._config, self._writer, self._progress, self._clock = config, writer, progress, clock
        self._held: list[tuple[int, dict[str, jax.Array]]] = []
        self._started = False
        self._skipped = 0  # steps in a row
        self._tokens = config.batch_size * config.seq_len
        self._flops_per_token = train_flops_per_token(config.model, config.seq_len)
        peak = peak_flops(trainer.mesh.devices.flat[0])
        self._peak = None if peak is None else peak * trainer.mesh.size

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the numbers of a step just dispatched, and waits for the step before it.

        Raises:
          UserError: see `flush`.
        """
        if self._held:
            before = self._held[-1][0]
            if not self._started or self._is_written(before) or len(self._held) >= _HELD:
                self.flush()
            else:
                jax.block_until_ready(self._held[-1][1])  # keeps the queue of dispatched steps short
        self._held.append((step, metrics))

    def flush(self) -> None:
        """Waits for every step so far, and writes those that are due.

        Raises:
          UserError: the loss or the gradient of a step is not finite (`_is_finite`), or an output cannot be written.
        """
        held, self._held = self._held, []
        for step, numbers in jax.device_get(held):
            values = {name: float(value) for name, value in numbers.items()}
            finite = self._is_finite(step, values)
            self._skipped = 0 if finite else self._skipped + 1
            if self._is_written(step) or not self._started:
                speed = self._speed(step)
                self._started = True
            if self._is_written(step):
                if not self._config.optimizer.z_loss:
                    del values["z"]
                if not finite:
                    values = {"lr": values["lr"], "skipped": 1.0}
                values |= speed | memory_in_use()
                self._writer.write(step, values)
                self._progress.report(step, values)

    def _is_finite(self, step: int, values: dict[str, float]) -> bool:
        """Whether a step's numbers are; if not, it was skipped.

        Raises:
          UserError: by optimizer.not_finite the run ends, or too many steps in a row were skipped.
        """
        found = [
            f"the {words} is {values[name]} at step {step}"
            for name, words in (("loss", "loss"), ("grad_norm", "gradient norm"))
            if not math.isfinite(values[name])
        ]
        if not found:
            return True
        rows = self._config.batch_size
        where = f"batch {step - 1} of the data, sequences {(step - 1) * rows} to {step * rows - 1} in its order"
        helps = "a lower optimizer.peak_lr or a longer optimizer.warmup_steps usually helps"
        if self._config.optimizer.not_finite == "stop":
            raise UserError(
                f"{found[0]} ({where}), so training stops and keeps the checkpoints from before; {helps}, and "
                "optimizer.not_finite=skip leaves such steps out"
            )
        if self._skipped + 1 >= _MOST_SKIPPED:
            raise UserError(
                f"{found[0]} ({where}), as it was at the {self._skipped} steps before, all skipped, so training stops "
                f"and keeps the checkpoints from before; {helps}"
            )
        _log.warning("%s (%s), so the step is skipped", found[0], where)
        return False

    def _is_written(self, step: int) -> bool:
        return step == 1 or due(step, self._config.log.every) or step == self._config.steps

    def _speed(self, step: int) -> dict[str, float]:
        seconds = self._clock.seconds_per_step(step)
        if seconds is None:
            return {}
        tokens = self._tokens / max(seconds, 1e-9)
        flops = tokens * self._flops_per_token
        return {
            "tokens_per_s": tokens,
            "tflops": flops / 1e12,
            **({} if self._peak is None else {"mfu": flops / self._peak}),
        }


class Evaluation:
    """Mean loss over the fixed held-out batches, and what the routing does on the first of them."""

    def __init__(
        self,
        trainer: Trainer,
        batches: list[jax.Array],
        writer: MetricsWriter | NoMetrics,
        progress: Progress,
        pictures: RoutingPictures | None,
    ):
        """`pictures` draws the routing of a routed model; None in a process that writes nothing."""
        self._trainer, self._batches, self._writer, self._progress = trainer, batches, writer, progress
        self._pictures = pictures

    def __call__(self, step: int, state: State) -> None:
        """Evaluates the state after `step`, writes the result and has the routing drawn.

        Raises:
          UserError: the loss is not finite, or an output cannot be written.
        """
        params = evaluated_params(state, self._trainer.config)
        routing, first, rest = None, [], self._batches
        if self._trainer.config.model.is_routed:
            sums, routing = measure(self._trainer, params, self._batches[0])
            first, rest = [sums], self._batches[1:]
        totals = [*first, *jax.device_get([self._trainer.evaluate(params, tokens) for tokens in rest])]
        tokens = sum(float(t["tokens"]) for t in totals)
        values: dict[str, Any] = {"val_loss": sum(float(t["nll"]) for t in totals) / tokens, "val_tokens": int(tokens)}
        if not math.isfinite(values["val_loss"]):
            raise UserError(
                f"the held-out loss is {values['val_loss']} after step {step}, so training stops and keeps the "
                "checkpoints from before; a lower optimizer.peak_lr usually helps"
            )
        if routing is not None:
            self._draw(routing)
            values |= {"depth_entropy": routing.entropy, "depth_newest_mass": routing.newest_mass}
        self._writer.write(step, values)
        self._progress.report(step, values)

    def picture(self, state: State) -> None:
        """Measures the routing of a routed model and has it drawn; every process takes part.

        Raises:
          UserError: an earlier picture could not be written.
        """
        self._draw(measure(self._trainer, evaluated_params(state, self._trainer.config), self._batches[0])[1])

    def _draw(self, routing: RoutingMap) -> None:
        if self._pictures is not None:
            self._pictures.submit(routing)
