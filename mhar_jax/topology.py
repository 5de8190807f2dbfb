"""python -m mhar_jax.topology CONFIG TOPOLOGY: compiles a run's train step for a TPU pod slice, without one.

The real TPU compiler (package libtpu, extra `tpu`) runs on any CPU. It refuses a step whose arrays do not fit a chip,
and says otherwise how much of each chip's memory the step takes, and what the chips send each other.
"""

import os
import sys
import time
from typing import Any, NamedTuple

from mhar_jax.collectives import Collective, Shapes, history_moves, read_collectives, role
from mhar_jax.config.load import load_config
from mhar_jax.config.schema import Config
from mhar_jax.errors import UserError, command, one_line

USAGE = """\
usage: python -m mhar_jax.topology PRESET or FILE TOPOLOGY [--field=value ...]

TOPOLOGY is a kind of chip and a shape, as v5p:4x4x4 or v5e:16x16. Fields are those of train.py. A step at full size
takes minutes to compile.

Exit code 1: the step does not fit a chip, or a collective moves the depth history. 2: wrong input.
"""

# libtpu asks what machine it is on, and complains at length where there is no answer; compiling does not depend on it.
_WITHOUT_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class DoesNotFit(UserError):
    """A step takes more memory than a chip has."""


class Footprint(NamedTuple):
    """What one chip holds while it runs a step, in bytes, and what the compiled step does."""

    chips: int
    state: int  # parameters, moments, averaged weights: what stays between steps
    batch: int  # its rows of tokens
    temporary: int  # activations, gradients, gathered parameters: the most that exist at once
    seconds: float  # that compiling took
    flops: float  # of the model, for one step: the analytic count, divided by the chips
    counted_flops: float  # by the compiler: bodies of loops once, kernels as they declare
    counted_bytes: float  # of memory traffic, by the compiler in the same way
    shapes: Shapes  # by which arrays are told apart
    collectives: tuple[Collective, ...]

    @property
    def total(self) -> int:
        """State, batch and temporaries."""
        return self.state + self.batch + self.temporary

    def history_moves(self) -> list[str]:
        """See `collectives.history_moves`: empty where no collective can be moving the depth history."""
        return history_moves(self.collectives, self.shapes)


def compile_step(config: Config, topology: str) -> Footprint:
    """Compiles the train step of `config` for the chips of `topology`.

    Raises:
      UserError: no such topology, or a mesh or batch that does not divide.
      DoesNotFit: the step takes more memory than a chip has.
    """
    import jax

    from mhar_jax.models.counting import train_flops_per_token
    from mhar_jax.sharding import check_batch, make_mesh
    from mhar_jax.training.step import make_trainer
    from mhar_kernels import assume_platform

    mesh = make_mesh(config.mesh, topology_devices(topology))
    check_batch(config, mesh)
    with assume_platform("tpu"):
        trainer = make_trainer(config, mesh)
        lowered = trainer.step.trace(trainer.shapes, trainer.batch).lower(lowering_platforms=("tpu",))
        begun = time.monotonic()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and "Hbm" not in str(error):
                raise
            raise DoesNotFit(f"the step does not fit a chip of {topology}: {one_line(error, 500)}") from None
        seconds = time.monotonic() - begun
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    rows, length = trainer.batch.sharding.shard_shape(trainer.batch.shape)
    batch_bytes = rows * length * trainer.batch.dtype.itemsize
    flops = train_flops_per_token(config.model, config.seq_len) * config.batch_size * config.seq_len
    return Footprint(
        chips=mesh.size,
        state=memory.argument_size_in_bytes - batch_bytes,
        batch=batch_bytes,
        temporary=memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        seconds=seconds,
        flops=flops / mesh.size,
        counted_flops=cost.get("flops", 0.0),
        counted_bytes=cost.get("bytes accessed", 0.0),
        shapes=shapes_on_a_device(config, mesh),
        collectives=read_collectives(compiled.as_text()),
    )


def shapes_on_a_device(config: Config, mesh: Any) -> Shapes:
    """What a device holds of a micro-batch's activations."""
    from mhar_jax.models.sites import num_sublayers

    rows = config.batch_size // config.optimizer.accumulate // (mesh.shape["data"] * mesh.shape["fsdp"])
    context, tensor = mesh.shape.get("context", 1), mesh.shape["tensor"]
    keys = config.model.num_kv_heads * config.model.attention_head_dim
    return Shapes(
        batch=rows,
        length=config.seq_len // context,
        width=config.model.d_model,
        keys=frozenset({keys, keys // tensor}),
        summed=num_sublayers(config.model) if context * tensor > 1 else 0,
    )


def topology_devices(topology: str) -> list[Any]:
    """The devices of a TPU slice that is not there, for compiling only.

    Raises:
      UserError: no such topology, or libtpu is not installed.
    """
    for name, value in _WITHOUT_A_TPU.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the topology {topology} cannot be had (is libtpu installed?): {one_line(error)}") from None


def describe(found: Footprint, topology: str) -> list[str]:
    """The lines that the command prints."""
    lines = [f"{found.chips} chips of {topology}, compiled in {found.seconds:.0f} s; GB on each chip:"]
    lines += [f"  {name:9} {getattr(found, name) / 1e9:8.3f}" for name in ("state", "batch", "temporary", "total")]
    lines.append(
        f"TFLOP of the model a chip and step {found.flops / 1e12:.3f}; the compiler counts "
        f"{found.counted_flops / 1e12:.3f} and {found.counted_bytes / 1e9:.2f} GB of traffic, loops once"
    )
    lines.append("collectives (number of arrays, MB that one chip has after them, loops once):")
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for collective in found.collectives:
        for array in collective.arrays:
            key = (collective.kind, role(array, found.shapes))
            count, size = sums.get(key, (0, 0))
            sums[key] = (count + 1, size + array.bytes)
    lines += [f"  {kind:20} {what:12} {n:5} {size / 1e6:10.1f}" for (kind, what), (n, size) in sorted(sums.items())]
    moves = found.history_moves()
    lines.append("depth history: " + ("no collective moves it" if not moves else "; ".join(moves)))
    return lines


def report(config: Config, topology: str) -> int:
    """Compiles the step of `config`, prints what was found and returns the exit code.

    That is 1, with a sentence on standard error, where the step does not fit or moves the depth history.
    """
    try:
        found = compile_step(config, topology)
    except DoesNotFit as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(describe(found, topology)))
    if moves := found.history_moves():
        more = f", and {len(moves) - 1} more such findings" if len(moves) > 1 else ""
        print(f"error: the compiled step moves the depth history: {moves[0]}{more}", file=sys.stderr)
        return 1
    return 0


@command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; wrong input is one line on standard error and exit code 2. See `report`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in given or "--help" in given:
        print(USAGE)
        return 0
    plain = [a for a in given if not a.startswith("--")]
    if len(plain) != 2:
        raise UserError(f"give a config and a topology, as midtrain_8b v5p:4x4x4, got {' '.join(plain) or 'nothing'}")
    config = load_config(plain[0], [a for a in given if a.startswith("--")])
    if config.model.vocab_size is None:
        raise UserError("model.vocab_size must be set here, since no tokenizer is read")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return report(config, plain[1])


if __name__ == "__main__":
    sys.exit(main())
