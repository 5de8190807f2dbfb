"""Sharding as data: the mesh, one table of rules for parameters, and names for activation axes.

Axes of the mesh (always all three, most of size 1): `data` splits the batch, `fsdp` splits the batch and the state,
`tensor` splits heads and hidden widths. All are Auto axes: the compiler places the collectives.
"""

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")

# Logical names of activation axes, and the mesh axes that split them.
ACTIVATION_AXES = {
    "batch": ("data", "fsdp"),
    "heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
    None: None,
}


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Pins the layout of an activation, one name of ACTIVATION_AXES an axis; does nothing without a mesh in scope.

    An axis that the mesh does not divide is left to the compiler.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or any(t == AxisType.Manual for t in mesh.axis_types):
        return x
    spec = []
    for size, name in zip(x.shape, names, strict=True):
        axes = ACTIVATION_AXES[name]
        if axes is None:
            spec.append(None)
            continue
        group = axes if isinstance(axes, tuple) else (axes,)
        ways = 1
        for a in group:
            ways *= mesh.shape[a]
        spec.append(axes if size % ways == 0 else P.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(x, P(*spec))
