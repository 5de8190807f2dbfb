"""Sharding as data: the mesh, one table of rules for parameters, and names for activation axes.

Axes of the mesh (always all three, most of size 1): `data` splits the batch, `fsdp` splits the batch and the state,
`tensor` splits heads and hidden widths. All are Auto axes: the compiler places the collectives.
"""

import math
import re
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_jax.config.schema import Config, MeshConfig
from mhar_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))

AnyMesh = Mesh | AbstractMesh
Layout = P | None  # None: not over a mesh

# The end of a parameter's path, and the mesh axes of its dimensions. First match wins; no match is replicated.
# Optimizer moments and averaged weights have the same path endings, so they follow their parameter.
PARAMETER_RULES = (
    (r"embedding$", P("tensor", "fsdp")),  # [V, D]
    (r"head$", P("fsdp", "tensor")),  # [D, V]
    (r"w_(q|k|v|gate|up)$", P("fsdp", "tensor")),  # [D, heads · K] and [D, F]
    (r"w_(o|down)$", P("tensor", "fsdp")),  # [heads · K, D] and [F, D]
)

# Logical names of activation axes, and the mesh axes that split them.
ACTIVATION_AXES = {
    "batch": ("data", "fsdp"),
    "heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
    None: None,
}


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """The mesh of a run over `devices` (default: all devices of all processes).

    Raises:
      UserError: the axes do not multiply to the number of devices.
    """
    devices = list(jax.devices()) if devices is None else devices
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    product = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    if -1 in sizes.values():
        if len(devices) % fixed:
            raise UserError(f"mesh {product} needs a multiple of {fixed} devices, and there are {len(devices)}")
        sizes = {axis: len(devices) // fixed if size == -1 else size for axis, size in sizes.items()}
    elif fixed != len(devices):
        raise UserError(
            f"mesh {product} needs {fixed} devices, and there are {len(devices)}; "
            "set one axis to -1 to take what is left"
        )
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def check_batch(config: Config, mesh: Mesh) -> None:
    """Every micro-batch must split evenly over the batch axes.

    Raises:
      UserError: it does not.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = config.batch_size // config.optimizer.accumulate
    if rows % ways:
        raise UserError(
            f"batch_size / optimizer.accumulate must be a multiple of data x fsdp = {ways} devices, got "
            f"{config.batch_size} / {config.optimizer.accumulate} = {rows}"
        )


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """A NamedSharding for every leaf of a training state (shapes suffice), by PARAMETER_RULES."""

    def sharding(path, leaf) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, fit(_rule(name), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding, state)


def parameter_layout(name: str, shape: tuple[int, ...]) -> Layout:
    """How a new parameter is laid out over the mesh in scope, by PARAMETER_RULES; None without such a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names != AXES or any(t != AxisType.Auto for t in mesh.axis_types):
        return None
    return fit(_rule(name), shape, mesh)


def with_layout(x: jax.Array, layout: Layout) -> jax.Array:
    """A new parameter, traced, laid out."""
    return x if layout is None else jax.lax.with_sharding_constraint(x, layout)


def _rule(name: str) -> P:
    return next((spec for pattern, spec in PARAMETER_RULES if re.search(pattern, name)), P())


def fit(spec: P, shape: tuple[int, ...], mesh: AnyMesh) -> P:
    """The rule's spec where the mesh divides the shape; an axis that does not divide moves to a dimension that does.

    D = 1280 over 512 devices: the rule's dimension cannot be split, the MLP's 5120 beside it can. An axis that fits
    nowhere is dropped: that parameter is replicated over it.
    """
    placed: list[list[str]] = [[] for _ in shape]
    divides = lambda dim, axis: shape[dim] % (mesh.shape[axis] * math.prod(mesh.shape[a] for a in placed[dim])) == 0
    for wanted, axis in enumerate(spec[: len(shape)]):
        if axis is None or mesh.shape[axis] == 1:
            continue
        others = sorted((d for d in range(len(shape)) if d != wanted), key=lambda d: -shape[d])
        home = next((d for d in (wanted, *others) if divides(d, axis)), None)
        if home is not None:
            placed[home].append(axis)
    return P(*(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in placed))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Pins the layout of an activation, one name of ACTIVATION_AXES an axis; does nothing without a mesh in scope.

    An axis that the mesh does not divide is left to the compiler.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or any(t == AxisType.Manual for t in mesh.axis_types):
        return x
    spec: list[Any] = []
    for size, name in zip(x.shape, names, strict=True):
        axes = ACTIVATION_AXES[name]
        if axes is None:
            spec.append(None)
            continue
        ways = math.prod(mesh.shape[a] for a in (axes if isinstance(axes, tuple) else (axes,)))
        spec.append(axes if size % ways == 0 else P.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(x, P(*spec))
