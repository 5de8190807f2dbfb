"""Training runs side by side: what they reached, and whether the difference between two of them is a paired one.

Two runs are paired if they saw the same batches in the same order under the same schedule and were evaluated on the
same text at the same steps, so that they differ in the model (and its peak learning rate) alone.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from mhar_jax.config.load import make_config, read_file, to_dict
from mhar_jax.config.schema import Config
from mhar_jax.data.fingerprints import what_differs
from mhar_jax.errors import UserError, one_line
from mhar_jax.evaluation.statistics import TAIL, MeanStd, mean_std, tail_mean
from mhar_jax.models import train_flops_per_token
from mhar_jax.training.run_directory import read_fingerprint, read_held_out_fingerprint

# What is compared, and may differ between paired runs; the comparison says that it does.
COMPARED = ("model", "optimizer.peak_lr")
# What changes neither batches nor schedule nor what an evaluation means. Text is known by its fingerprint.
NEUTRAL = (
    "run_dir",
    "mesh",
    "checkpoint",
    "log",
    "sample",
    "optimizer.accumulate",
    "data.path",
    "data.tokenizer",
    "data.workers",
    "data.prefetch",
)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One pass over the held-out text."""

    step: int
    loss: float  # nats a token
    tokens: int | None


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory's config, evaluations and data."""

    path: str
    config: Config
    evaluations: list[Evaluation]
    fingerprint: str | None  # of the text; None where no readable data.json says it
    held_out_fingerprint: str | None = None  # of a held-out text of its own, where data.json says it

    @property
    def tail(self) -> float:
        """Mean of the last eleven evaluations, or of all where there are fewer."""
        return tail_mean([e.loss for e in self.evaluations])

    @property
    def method(self) -> tuple[tuple[str, str], ...]:
        """Everything that decides the run but its seed; runs of one method are repetitions of each other."""
        rest = (f for f in _fields(self.config) if not _is_in(f[0], (*NEUTRAL, "seed")))
        return tuple(sorted((name, repr(value)) for name, value in rest))

    @property
    def shape(self) -> tuple[Any, ...]:
        """The backbone's size: equal for the variants of one scale."""
        model = self.config.model
        sizes = (model.num_layers, model.d_model, model.num_heads, model.num_kv_heads, model.ffn_dim)
        return (*sizes, self.config.seq_len, self.config.batch_size, self.config.steps)

    @property
    def flops(self) -> float:
        """Model FLOPs of the whole run."""
        config = self.config
        tokens = config.steps * config.batch_size * config.seq_len
        return train_flops_per_token(config.model, config.seq_len) * tokens


def read_run(path: str | pathlib.Path) -> Run:
    """A run directory.

    Raises:
      UserError: no such directory, no config.yaml or metrics.jsonl, no evaluation yet, or one of the tail-mean that
        is not finite.
    """
    directory = pathlib.Path(path)
    for name in ("config.yaml", "metrics.jsonl"):
        if not (directory / name).is_file():
            raise UserError(f"{directory} is no run directory: it has no {name}")
    config = make_config(read_file(directory / "config.yaml"))
    evaluations = _evaluations(directory / "metrics.jsonl")
    if not evaluations:
        raise UserError(f"{directory} has no evaluation in its metrics.jsonl")
    for evaluation in evaluations[-TAIL:]:
        if not math.isfinite(evaluation.loss):
            raise UserError(
                f"{directory} cannot be averaged: its held-out loss at step {evaluation.step} is {evaluation.loss}"
            )
    return Run(str(directory), config, evaluations, read_fingerprint(directory), read_held_out_fingerprint(directory))


def _evaluations(path: pathlib.Path) -> list[Evaluation]:
    """In order of steps; of several of one step, which a resumed run may leave, the last."""
    return sorted({e.step: e for e in _lines(path)}.values(), key=lambda e: e.step)


def _lines(path: pathlib.Path) -> Iterator[Evaluation]:
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError(f"it is not a JSON object: {one_line(text, 40)}")
            if "val_loss" in line:
                yield Evaluation(int(line["step"]), float(line["val_loss"]), line.get("val_tokens"))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read at line {number}: {one_line(error)}") from None


def _fields(config: Config) -> Iterator[tuple[str, Any]]:
    def leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    return leaves(to_dict(config), "")


def _is_in(name: str, fields: tuple[str, ...]) -> bool:
    return any(name == f or name.startswith(f"{f}.") for f in fields)


def differing_fields(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """Config fields with different values, except those that decide nothing; `None` where only one has the field."""
    mine, yours = dict(_fields(a.config)), dict(_fields(b.config))
    names = sorted(n for n in mine.keys() | yours.keys() if not _is_in(n, NEUTRAL))
    return {n: (mine.get(n), yours.get(n)) for n in names if mine.get(n) != yours.get(n)}


def what_is_compared(a: Run, b: Run) -> str:
    """The fields that may differ and do, as "model.variant additive | mhar"."""
    found = {n: v for n, v in differing_fields(a, b).items() if _is_in(n, COMPARED)}
    return "; ".join(f"{name} {x} | {y}" for name, (x, y) in found.items()) or "nothing"


def reasons_against_pairing(a: Run, b: Run) -> list[str]:
    """Why two runs are not paired, one short clause each; empty if they are."""
    reasons = [
        f"{name} is {x!r} and {y!r}" for name, (x, y) in differing_fields(a, b).items() if not _is_in(name, COMPARED)
    ]
    for run in (a, b):
        if run.fingerprint is None:
            reasons.append(f"{run.path} has no readable data.json, so nothing says which text it saw")
        if run.evaluations[-1].step < run.config.steps:
            reasons.append(f"{run.path} ends at step {run.evaluations[-1].step} of {run.config.steps}")
    if None not in (a.fingerprint, b.fingerprint) and a.fingerprint != b.fingerprint:
        why = what_differs(str(a.fingerprint), str(b.fingerprint))
        reasons.append(f"they saw different text (fingerprints {a.fingerprint} and {b.fingerprint}{why})")
    held = a.held_out_fingerprint, b.held_out_fingerprint
    if None not in held and held[0] != held[1]:
        why = what_differs(*map(str, held))
        reasons.append(f"they were evaluated on different text (fingerprints {held[0]} and {held[1]}{why})")
    elif held[0] != held[1] and a.config.data.held_out_path is not None and b.config.data.held_out_path is not None:
        missing = a if held[0] is None else b
        reasons.append(f"the data.json of {missing.path} does not say on which held-out text it was evaluated")
    if "synthetic" in (a.fingerprint, b.fingerprint) and a.config.model.vocab_size != b.config.model.vocab_size:
        reasons.append("their random tokens are of vocabularies of different size")
    if [e.step for e in a.evaluations] != [e.step for e in b.evaluations]:
        reasons.append("they were evaluated at different steps")
    elif [e.tokens for e in a.evaluations] != [e.tokens for e in b.evaluations]:
        reasons.append("their evaluations read different numbers of tokens")
    return reasons


@dataclasses.dataclass(frozen=True)
class Difference:
    """One run against another at the same seed."""

    first: Run
    second: Run
    reasons: list[str]  # against calling it paired

    @property
    def tail(self) -> float:
        """Of the tail-means, second - first."""
        return self.second.tail - self.first.tail

    @functools.cached_property
    def by_evaluation(self) -> MeanStd:
        """Of the last eleven evaluations' differences. NaN where they are not at the same steps."""
        mine, yours = ({e.step: e.loss for e in run.evaluations[-TAIL:]} for run in (self.first, self.second))
        if mine.keys() != yours.keys():
            return MeanStd(math.nan, math.nan, 0)
        return mean_std([yours[step] - mine[step] for step in sorted(mine)])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All runs of one method against the baseline's, seed by seed."""

    differences: list[Difference]

    @property
    def paired(self) -> list[Difference]:
        """Those that are."""
        return [d for d in self.differences if not d.reasons]

    @property
    def over_seeds(self) -> MeanStd | None:
        """Paired differences of tail-means over seeds; None without any."""
        return mean_std([d.tail for d in self.paired]) if self.paired else None


def compare_runs(runs: list[Run]) -> list[Comparison]:
    """Every method against that of the first run, each run against the baseline's run of its seed.

    A run whose seed the baseline lacks is set against the baseline's first run, which is not a paired comparison.

    Raises:
      UserError: a run is given twice, or one method has two runs of a seed.
    """
    methods: dict[Any, dict[int, Run]] = {}
    for run in runs:
        of_method = methods.setdefault(run.method, {})
        if run.config.seed in of_method:
            other = of_method[run.config.seed]
            raise UserError(f"{other.path} and {run.path} are runs of one method with one seed, {run.config.seed}")
        of_method[run.config.seed] = run
    baseline = methods.pop(runs[0].method)
    comparisons = []
    for of_method in methods.values():
        pairs = [(baseline.get(seed, next(iter(baseline.values()))), run) for seed, run in of_method.items()]
        comparisons.append(Comparison([Difference(a, b, reasons_against_pairing(a, b)) for a, b in pairs]))
    return comparisons
