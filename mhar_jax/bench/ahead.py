"""python -m mhar_jax.bench compile: a train step compiled by the real TPU compiler for a slice that is not there.

Memory, FLOPs, traffic and collectives of one chip are the compiler's; the time is a roofline estimate from them and
from data sheets, and no chip has run anything.
"""

import argparse
import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

from mhar_jax.bench import common
from mhar_jax.bench.chips import Chip, chip_of, roofline
from mhar_jax.bench.configs import MICRO_BATCHES
from mhar_jax.bench.report import Report, Row, environment, refused
from mhar_jax.command_line import parser
from mhar_jax.config.load import load_config
from mhar_jax.config.schema import Config
from mhar_jax.errors import UserError

NOTE = (
    "No chip has run this. Estimate: the largest of the model's FLOPs, the memory traffic that the compiler counts "
    "(bodies of loops once), and what collectives send, each at the data sheet's rate and perfectly overlapped: a step "
    "takes longer."
)
# Of `tiny`, so that its kernels are those of the larger models and it compiles within a minute.
_TINY = ["model.num_layers=1", "model.compute_dtype=bfloat16", "model.vocab_size=256"]


def make_parser() -> argparse.ArgumentParser:
    """Of the subcommand."""
    p = parser("bench compile", "Compile a train step for a TPU slice that is not there: minutes at full size.")
    p.add_argument("--topology", metavar="NAMES", help="chip and shape of the slice, as v5e:16x16 or v5p:8x8x8")
    p.add_argument("--presets", metavar="NAMES", default="mhar_1b", help="configs whose step is compiled")
    ours = "unless overridden: no accumulation, state split over all chips, 1 to 8 sequences a chip"
    words = f"override of a config field, repeatable; {ours}"
    p.add_argument("--set", metavar="F=V", action="append", default=[], help=words)
    common.add_common(p)
    return p


def main(arguments: Sequence[str], begun: float) -> int:
    """Runs the subcommand, begun at that reading of `time.monotonic`: 1 if a step does not fit."""
    options = make_parser().parse_args(list(arguments))
    clock = common.Clock(begun)
    report = run(options, ["compile", *arguments], clock)
    return common.finish(report, options.out, {"compile": clock.seconds()})


def run(options: argparse.Namespace, command: Sequence[str], clock: common.Clock) -> Report:
    """Compiles everything that the options ask for.

    Raises:
      UserError: an option cannot be used.
    """
    found = environment(command, options.revision)  # of the source that is loaded now, whatever happens to it meanwhile
    topologies = common.names(options.topology, "topology")
    chips = {topology: chip_of(topology) for topology in topologies}
    presets = common.names(options.presets, "presets")
    common.check_out(options.out)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows: list[Row] = []
    for topology, chip in chips.items():
        for preset in presets:
            clock.say(f"{preset} on {topology}")
            rows.append(_compile(preset, topology, chip, options.set))
            common.keep(Report("compile", found, rows, [NOTE]), options.out)
    return Report("compile", found, rows, [NOTE])


def _compile(preset: str, topology: str, chip: Chip, overrides: list[str]) -> Row:
    from mhar_jax.topology import Footprint, compile_step

    config = _config(preset, topology, overrides)
    sizes = ("batch_size", "seq_len")
    of: dict[str, Any] = {"preset": preset, "topology": topology, "variant": config.model.variant}
    of |= {"mesh": dataclasses.asdict(config.mesh), **{name: getattr(config, name) for name in sizes}}
    of |= common.overrides(overrides)
    try:
        found: Footprint = compile_step(config, topology)
    except UserError as error:
        if "does not fit" not in str(error):
            raise
        return refused(of, "failed", error, chip_bytes=chip.hbm_bytes)
    sent = network_bytes(found.collectives, found.chips // (config.mesh.tensor * config.mesh.context))
    least = roofline(chip, flops=found.flops, hbm_bytes=found.counted_bytes, network_bytes=sent)
    metrics: dict[str, Any] = {
        "chips": found.chips,
        "state_bytes": found.state,
        "batch_bytes": found.batch,
        "temporary_bytes": found.temporary,
        "total_bytes": found.total,
        "chip_bytes": chip.hbm_bytes,
        "model_flops": found.flops,
        "counted_flops": found.counted_flops,
        "bytes": found.counted_bytes,
        "collective_count": len(found.collectives),
        "collectives": _by_kind(found.collectives),
        "network_bytes": sent,
        "history_moves": found.history_moves(),
        "compile_s": found.seconds,
        "estimate_ms": least.seconds * 1e3,
        "estimate_parts_ms": {name: 1e3 * seconds for name, seconds in least._asdict().items()},
        "bound_by": least.bound_by,
        "estimate_mfu": found.flops / chip.flops / least.seconds,
    }
    return Row(of, metrics=metrics)


def _config(preset: str, topology: str, overrides: list[str]) -> Config:
    """The preset, laid out over the slice unless overrides say how."""
    given = {override.split("=")[0].removeprefix("--") for override in overrides}
    ours = ["optimizer.accumulate=1", *(_TINY if preset == "tiny" else [])]
    if not any(name.startswith("mesh.") for name in given):
        ours += ["mesh.data=1", "mesh.fsdp=-1"]
    config = load_config(preset, [*ours, *overrides])
    if config.model.vocab_size is None:
        raise UserError(f"{preset} needs --set model.vocab_size=N here, since no tokenizer is read")
    if "batch_size" in given:
        return config
    try:
        sizes = [int(part) for part in topology.partition(":")[2].split("x")]
        if min(sizes) < 1:
            raise ValueError
    except ValueError:
        raise UserError(f"--topology must be like v5e:16x16, got {topology!r}") from None
    ways = math.prod(sizes) // max(1, config.mesh.tensor) // max(1, config.mesh.context)
    return dataclasses.replace(config, batch_size=MICRO_BATCHES.get(preset, 1) * ways)


def network_bytes(collectives: Sequence[Any], group: int) -> float:
    """Bytes that one chip sends, if each collective is a ring over `group` chips.

    Of n chips that end up with B bytes each: all-gather (n - 1) / n of B, all-reduce twice that, reduce-scatter n - 1
    times B (each ends with its share), an exchange or a shift at most B.
    """
    share = (group - 1) / group
    times = {"all-gather": share, "all-reduce": 2 * share, "reduce-scatter": group - 1}
    return sum(times.get(c.kind, 1.0) * c.bytes for c in collectives)


def _by_kind(collectives: Sequence[Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for c in collectives:
        one = found.setdefault(c.kind, {"count": 0, "bytes": 0})
        one["count"] += 1
        one["bytes"] += c.bytes
    return found
