"""Where numbers go while training: JSON lines, TensorBoard, Weights & Biases, and a progress bar."""

import json
import os
import pathlib
import sys
from typing import Any

from tqdm import tqdm

from mhar_jax.config.schema import Config
from mhar_jax.errors import UserError


class MetricsWriter:
    """Writes one line of `metrics.jsonl` a call, and the same numbers to the other outputs that are on."""

    def __init__(self, config: Config, *, start_step: int):
        """Lines after `start_step` are of a continuation that is about to be repeated, and are dropped."""
        self.path = pathlib.Path(config.run_dir) / "metrics.jsonl"
        _keep_lines_until(self.path, start_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard: Any = None
        self._wandb: Any = None
        if config.log.tensorboard:
            from tensorboardX import SummaryWriter

            self._tensorboard = SummaryWriter(str(pathlib.Path(config.run_dir) / "tensorboard"), purge_step=start_step)
        if config.log.wandb_project is not None:
            self._wandb = _start_wandb(config)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One object with `step` and `values`; on disk when this returns."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        """Flushes every output."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


class NoMetrics:
    """The writer of all processes but the first."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Progress:
    """A bar on a terminal; off one, a line at each report."""

    def __init__(self, total: int, done: int, *, quiet: bool = False):
        """`quiet`: nothing at all (processes but the first)."""
        self._terminal = sys.stderr.isatty() and not quiet
        self._quiet = quiet
        self._bar = tqdm(total=total, initial=done, disable=not self._terminal, dynamic_ncols=True, unit="step")

    def advance(self) -> None:
        """One step is done."""
        self._bar.update(1)

    def report(self, step: int, values: dict[str, float]) -> None:
        """Shows the numbers of a step."""
        shown = {k: f"{v:.4g}" for k, v in values.items() if k in ("loss", "val_loss", "lr", "tokens_per_s", "mfu")}
        if self._terminal:
            self._bar.set_postfix(shown)
        else:
            self.say(f"step {step}: " + ", ".join(f"{k} {v}" for k, v in shown.items()))

    def say(self, message: str) -> None:
        """A line of its own, above the bar."""
        if self._quiet:
            return
        if self._terminal:
            self._bar.write(message)
        else:
            print(message, flush=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


def _keep_lines_until(path: pathlib.Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line cut short by a kill
    aside = path.with_suffix(".jsonl.tmp")
    aside.write_text("".join(kept), encoding="utf-8")
    os.replace(aside, path)


def _start_wandb(config: Config) -> Any:
    try:
        import wandb
    except ModuleNotFoundError:
        raise UserError("log.wandb_project needs the package wandb; install mhar-jax[wandb] or leave it out") from None
    from mhar_jax.config.load import to_dict

    return wandb.init(project=config.log.wandb_project, dir=config.run_dir, config=to_dict(config))
