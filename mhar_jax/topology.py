"""python -m mhar_jax.topology CONFIG TOPOLOGY: compiles a run's train step for a TPU pod slice, without one.

The real TPU compiler (package libtpu, extra `tpu`) runs on any CPU. It refuses a step whose arrays do not fit a chip,
and says otherwise how much of each chip's memory the step takes.
"""

import os
import sys
import time
from typing import Any, NamedTuple

from mhar_jax.config.load import load_config
from mhar_jax.config.schema import Config
from mhar_jax.errors import UserError, command, one_line

USAGE = """\
usage: python -m mhar_jax.topology PRESET or FILE TOPOLOGY [--field=value ...]

TOPOLOGY is a kind of chip and a shape, as v5p:4x4x4 or v5e:16x16. Fields are those of train.py. A step at full size
takes minutes to compile.
"""

# libtpu asks what machine it is on, and complains at length where there is no answer; compiling does not depend on it.
_WITHOUT_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Footprint(NamedTuple):
    """What one chip holds while it runs a step, in bytes."""

    chips: int
    state: int  # parameters, moments, averaged weights: what stays between steps
    batch: int  # its rows of tokens
    temporary: int  # activations, gradients, gathered parameters: the most that exist at once
    seconds: float  # that compiling took

    @property
    def total(self) -> int:
        """State, batch and temporaries."""
        return self.state + self.batch + self.temporary


def compile_step(config: Config, topology: str) -> Footprint:
    """Compiles the train step of `config` for the chips of `topology`.

    Raises:
      UserError: no such topology, a mesh or batch that does not divide, or a step that does not fit.
    """
    for name, value in _WITHOUT_A_TPU.items():
        os.environ.setdefault(name, value)
    import jax
    from jax.experimental import topologies

    from mhar_jax.sharding import check_batch, make_mesh
    from mhar_jax.training.step import make_trainer
    from mhar_kernels import assume_platform

    try:
        devices: Any = list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the topology {topology} cannot be had (is libtpu installed?): {one_line(error)}") from None
    mesh = make_mesh(config.mesh, devices)
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
            raise UserError(f"the step does not fit a chip of {topology}: {one_line(error, 500)}") from None
    memory = compiled.memory_analysis()
    batch = trainer.batch.sharding.shard_shape(trainer.batch.shape)
    batch_bytes = batch[0] * batch[1] * trainer.batch.dtype.itemsize
    return Footprint(
        chips=len(devices),
        state=memory.argument_size_in_bytes - batch_bytes,
        batch=batch_bytes,
        temporary=memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        seconds=time.monotonic() - begun,
    )


@command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; wrong input is one line on standard error and exit code 2."""
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
    found = compile_step(config, plain[1])
    gigabytes = {name: getattr(found, name) / 1e9 for name in ("state", "batch", "temporary", "total")}
    print(f"{found.chips} chips of {plain[1]}, compiled in {found.seconds:.0f} s; GB on each chip:")
    for name, value in gigabytes.items():
        print(f"  {name:9} {value:8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
