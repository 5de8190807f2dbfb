"""Which runs the replication is made of, in the order of their worth.

A run's name says what it is: width, variant, what differs from the preset, seed. H = 1 is not run as `mhar`: it is
`attention_residuals`, to the last operation.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mhar_jax.config.load import load_config, to_dict
from mhar_jax.config.schema import Config
from mhar_jax.models import train_flops_per_token

VARIANTS = ("additive", "hyper_connections", "attention_residuals", "mhar")
WIDTHS = (512, 768)
SEEDS = (0, 1)
HEADS = (2, 8, 16)  # beside 1 and 4, which the main table has
PILOTS = (("additive", "2e-3"), ("mhar", "2e-3"), ("additive", "1e-3"), ("additive", "4e-3"))
PILOT_STEPS = 1600  # of a quarter of the tokens, on a schedule of their own

# For planning only. Tokens a second of a variant that no run has measured yet: the baseline's rate of useful arithmetic
# on one H200 (FLOP/s; measured at width 512, a guess at 768) and how much longer a step takes than the baseline's
# (measured for mhar, guesses for the others).
_RATE = {512: 308e12, 768: 340e12}
_LONGER = {"additive": 1.0, "hyper_connections": 1.4, "attention_residuals": 1.1, "mhar": 1.1, "block_mhar": 1.2}
_LONGER |= {"mhar_headwise": 1.6}
_FORWARD = 1 / 3  # of a step's time, for as many tokens
_START = 30.0  # seconds to start, read the programs of another run, save, and hash the batches: measured, `additive`
_COMPILE = 30.0  # seconds more where programs are compiled: measured, `mhar`; also where another run has left them
_WEIGHTS = 25.0  # seconds for the probe and the routing map: a guess


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run."""

    name: str
    stage: str  # of the plan: pilot, main, learning rate, heads, other variants
    width: int
    variant: str
    seed: int
    overrides: tuple[str, ...] = ()  # beside variant and seed, as `field=value`
    rate: float = 1.0  # peak learning rate as a multiple of the preset's

    def config(self, extra: Sequence[str] = ()) -> Config:
        """The resolved config but for `run_dir`, with further overrides for all runs."""
        given = [f"model.variant={self.variant}", f"seed={self.seed}", *self.overrides, *extra]
        config = load_config(f"replicate_d{self.width}", given)
        if self.rate == 1:
            return config
        peak = self.rate * config.optimizer.peak_lr
        return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, peak_lr=peak))

    @property
    def overhead(self) -> float:
        """Seconds to start, compile, save and measure the weights, whatever the number of steps."""
        if self.variant == "additive":
            return _START
        return _START + _COMPILE + (0 if self.variant == "hyper_connections" else _WEIGHTS)

    def seconds(self, extra: Sequence[str] = (), tokens_per_s: float | None = None) -> float:
        """About how long it takes on one H200.

        Args:
          extra: overrides for all runs.
          tokens_per_s: of training, as a like run has measured it; None: a guess from the baseline's.
        """
        config = self.config(["model.vocab_size=49152", *extra])
        if tokens_per_s is None:
            flops = train_flops_per_token(dataclasses.replace(config.model, variant="additive"), config.seq_len)
            tokens_per_s = _RATE[self.width] / flops / _LONGER[self.variant]
        evaluations = 1 + config.steps // config.eval.every
        batches = config.steps + _FORWARD * evaluations * config.eval.batches
        return self.overhead + batches * config.batch_size * config.seq_len / tokens_per_s


def _main(width: int, seed: int) -> list[Planned]:
    return [Planned(f"d{width}-{variant}-s{seed}", "main", width, variant, seed) for variant in VARIANTS]


def plan() -> list[Planned]:
    """Every run, most wanted first."""
    pilot = [
        Planned(
            f"d512-{variant}-pilot-lr{rate}-s0",
            "pilot",
            512,
            variant,
            0,
            (
                f"optimizer.peak_lr={rate}",
                f"steps={PILOT_STEPS}",
                f"optimizer.warmup_steps={PILOT_STEPS // 20}",
                f"eval.every={PILOT_STEPS // 40}",
                "checkpoint.every=0",
            ),
        )
        for variant, rate in PILOTS
    ]
    rates = [
        Planned(f"d{width}-{variant}-lr-x{rate:g}-s0", "learning rate", width, variant, 0, rate=rate)
        for width, variant, rate in (
            (512, "additive", 0.5),
            (512, "additive", 2.0),
            (512, "attention_residuals", 0.5),
            (768, "attention_residuals", 0.5),
        )
    ]
    heads = [Planned(f"d512-mhar-h{h}-s0", "heads", 512, "mhar", 0, (f"model.routing_heads={h}",)) for h in HEADS]
    others = [Planned(f"d512-{v}-s0", "other variants", 512, v, 0) for v in ("block_mhar", "mhar_headwise")]
    main = [run for width in WIDTHS for seed in SEEDS for run in _main(width, seed)]
    return [*pilot, *main, *rates, *heads, *others]


def planned(name: str) -> Planned:
    """A run by its name.

    Raises:
      KeyError: there is none.
    """
    return {run.name: run for run in plan()}[name]


def comparable(config: Config) -> dict[str, Any]:
    """A config's values without those that only say where things lie and how the model's rows were counted."""
    plain = {k: v for k, v in to_dict(config).items() if k not in ("run_dir", "mesh", "log", "checkpoint", "sample")}
    return plain | {"model": {k: v for k, v in plain["model"].items() if k != "vocab_size"}}
