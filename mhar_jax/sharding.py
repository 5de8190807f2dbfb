"""Sharding as data: the mesh, one table of rules for parameters, and names for activation axes.

Axes of the mesh (always all four, most of size 1): `data` splits the batch, `fsdp` splits the batch and the state,
`context` splits sequences, `tensor` splits heads and hidden widths. All are Auto axes: the compiler places the
collectives.
"""

import math
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mhar_jax.config.schema import Config, MeshConfig
from mhar_jax.errors import UserError

AXES = ("data", "fsdp", "context", "tensor")
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
    "length": "context",
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
    return Mesh(_placed(sizes, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _placed(sizes: dict[str, int], devices: list[Any]) -> np.ndarray:
    """The devices by mesh position: neighbours on the last axes are neighbours in the machine.

    Slices (several TPU slices, or GPU hosts) are joined by a slower network, so only `data` crosses it, and `fsdp`
    where `data` is too small.
    """
    shape = tuple(sizes.values())
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        # An axis may be part of one of the torus' axes: 512 chips of 8x8x8 as 256 x 2.
        return mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    across = [1] * len(shape)
    left = slices
    for position, axis in enumerate(AXES):
        if axis in ("data", "fsdp"):
            across[position] = math.gcd(left, sizes[axis])
            left //= across[position]
    if left != 1:
        raise UserError(
            f"mesh data x fsdp = {sizes['data']} x {sizes['fsdp']} must be a multiple of the {slices} slices that the "
            "devices are in: other axes cannot cross their network"
        )
    within = tuple(size // over for size, over in zip(shape, across, strict=True))
    return mesh_utils.create_hybrid_device_mesh(within, tuple(across), devices=devices, allow_split_physical_axes=True)


def data_share(mesh: Mesh, batch_size: int) -> dict[str, int]:
    """Which part of each global batch this process reads, as `process_index` and `process_count` of the data.

    Processes that hold the same rows, since `context` or `tensor` spans them, read the same part.

    Raises:
      UserError: the mesh gives some processes rows that overlap only in part.
    """
    sharding = NamedSharding(mesh, BATCH)
    rows: dict[int, set[tuple[int, int]]] = {}  # by process: first and last + 1 of its devices' rows
    places: dict[Any, Any] = dict(sharding.devices_indices_map((batch_size,)))
    for device, index in places.items():
        rows.setdefault(device.process_index, set()).add(index[0].indices(batch_size)[:2])
    parts = sorted({tuple(sorted(r)) for r in rows.values()})
    sizes = [sum(end - begin for begin, end in part) for part in parts]
    if sum(sizes) != batch_size or len(set(sizes)) != 1:
        raise UserError(
            f"mesh {dict(mesh.shape)} gives the {len(rows)} processes parts of the batch that overlap or differ in "
            "size; make data x fsdp a multiple of the processes, or a divisor"
        )
    own = tuple(sorted(rows[jax.process_index()]))
    return {"process_index": parts.index(own), "process_count": len(parts)}


def check_batch(config: Config, mesh: Mesh) -> None:
    """Every micro-batch must split evenly over the batch axes, and every sequence over `context`.

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
    if config.seq_len % mesh.shape["context"]:
        raise UserError(f"seq_len must be a multiple of mesh.context = {mesh.shape['context']}, got {config.seq_len}")


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


def partitioned_mesh() -> AbstractMesh | None:
    """The mesh in scope, where its partitioner splits arrays: not of one device, and not inside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = any(t == AxisType.Manual for t in mesh.axis_types)
    return None if mesh.empty or mesh.size == 1 or manual else mesh


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Pins the layout of an activation, one name of ACTIVATION_AXES an axis; does nothing without a mesh in scope.

    An axis that the mesh does not divide is left to the compiler.
    """
    if (mesh := partitioned_mesh()) is None:
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
