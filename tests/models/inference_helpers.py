"""Placed models that compile fast, on one device or on a mesh of simulated ones."""

import functools

import jax
from flax import nnx

from mhar_jax.config.schema import MeshConfig
from mhar_jax.inference import PlacedModel
from mhar_jax.sharding import make_mesh
from model_helpers import build, scramble, tiny


class FastPlaced(PlacedModel):
    """Compiled without backend optimisation: half the time, the same arithmetic."""

    def jit(self, name, function, **options):
        return super().jit(name, function, compiler_options={"xla_backend_optimization_level": 0}, **options)


def one_device():
    return make_mesh(MeshConfig(data=1), jax.devices()[:1])


@functools.cache
def tiny_model(variant="mhar", **changes):
    """Two layers, vocabulary 257 (bytes), context 64, every parameter away from its special start."""
    return scramble(build(tiny(variant, **{"num_layers": 2, "vocab_size": 257, "context": 64, **changes})))


def placed(model, mesh=None):
    return FastPlaced(nnx.to_pure_dict(nnx.state(model)), model.config, one_device() if mesh is None else mesh)
