"""Writes a checkpoint parameter by parameter, in the layout that training saves and `load_model` reads.

Orbax saves a tree of arrays that are all there at once. An 8B model in float32 is not there at once on most hosts, so
the arrays are written with TensorStore, as Orbax does it (zarr arrays in one OCDBT store), slice by slice, and the two
small JSON files beside them are written here. Orbax reads them back; a test compares them with what it writes itself.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import AbstractMesh, AxisType

from mhar_jax.config.load import to_dict, to_yaml
from mhar_jax.config.schema import Config
from mhar_jax.errors import UserError, one_line, writing
from mhar_jax.huggingface.keys import Path as ParameterPath
from mhar_jax.huggingface.safetensors import MOST_AT_ONCE, row_slices
from mhar_jax.sharding import AXES, state_shardings
from mhar_jax.training.checkpoints import checkpoint_meta
from mhar_jax.training.checksums import part_checksum

NOT_TRAINED = "none: converted, not trained"  # where a run's checkpoint has the fingerprint of its data
_DICT_KEY = 2  # Orbax's number for a key of a dictionary


class CheckpointWriter:
    """The checkpoint of step 0 in a run directory, with parameters only."""

    def __init__(self, run_dir: Path, *, fsdp: int = 1, tensor: int = 1):
        """`fsdp` and `tensor`: axes of the mesh that will read it. The pieces on disk are then those of its shards, or
        of parts of them; any other mesh can read them too.

        Raises:
          UserError: they are no sizes of a mesh.
        """
        if min(fsdp, tensor) < 1 or fsdp * tensor >= 2**31:
            raise UserError(f"fsdp x tensor must be from 1 to 2147483647 devices, got {fsdp} x {tensor}")
        self._run_dir = run_dir
        self._checkpoint = run_dir / "checkpoints" / "0"
        self._mesh: Any = AbstractMesh((1, fsdp, 1, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES))
        self._shapes: dict[ParameterPath, tuple[int, ...]] = {}
        self._checksums: dict[str, int] = {}
        (self._checkpoint / "params").mkdir(parents=True)

    def write(self, path: ParameterPath, value: np.ndarray, dtype: np.dtype) -> bool:
        """Writes one parameter, rounded to `dtype`; says whether all of it is finite.

        `value` may be a view; at most 64 MiB of it are laid out and converted at a time.

        Raises:
          UserError: it cannot be written.
        """
        names = list(map(str, path))
        assert path not in self._shapes, path
        chunks = self._chunks("/".join(names), value.shape, dtype)
        checksum, first, finite = 0, 0, True
        try:
            store = ts.open(self._spec(".".join(names), value.shape, chunks, dtype), create=True).result()
            for part in row_slices(value.shape, dtype.itemsize, chunks[0] if chunks else 1):
                with np.errstate(over="ignore"):  # the caller names what becomes infinite
                    piece = np.ascontiguousarray(value[part]).astype(dtype, copy=False)
                finite = finite and bool(np.isfinite(piece).all())
                checksum += part_checksum(piece, first)
                first += piece.size
                store[part].write(piece).result()
        except ValueError as error:  # what TensorStore raises for a failed write
            raise UserError(f"the parameter {'/'.join(names)} cannot be written: {one_line(error)}") from None
        self._shapes[path] = tuple(value.shape)
        self._checksums["/".join(("params", *names))] = checksum % 2**32
        return finite

    def finish(self, config: Config) -> None:
        """Writes what makes the parameters a checkpoint of a run with this config."""
        tree = {
            str(tuple(map(str, path))): {
                "key_metadata": [{"key": str(key), "key_type": _DICT_KEY} for key in path],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(shape)},
            }
            for path, shape in self._shapes.items()
        }
        described = {
            "tree_metadata": tree,
            "use_ocdbt": True,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        meta = checkpoint_meta(0, to_dict(config), NOT_TRAINED, None, self._checksums)
        with writing("the checkpoint", self._run_dir):
            (self._checkpoint / "meta").mkdir()
            (self._checkpoint / "meta" / "metadata").write_text(json.dumps(meta))
            (self._checkpoint / "params" / "_METADATA").write_text(json.dumps(described))
            (self._run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

    def _chunks(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> list[int]:
        """Pieces of at most 64 MiB whose rows divide a shard's."""
        if not shape:
            return []
        leaf = jax.ShapeDtypeStruct(shape, dtype)
        rows, *rest = state_shardings(self._mesh, {name: leaf})[name].shard_shape(shape)
        most = max(MOST_AT_ONCE // max(math.prod(shape[1:]) * dtype.itemsize, 1), 1)
        return [_rows_of_a_piece(rows, most), *rest]

    def _spec(self, name: str, shape: Sequence[int], chunks: Sequence[int], dtype: np.dtype) -> dict[str, Any]:
        store = parameter_store(self._checkpoint / "params", name)
        metadata = {"shape": list(shape), "chunks": list(chunks), "compressor": {"id": "zstd"}}
        return {**store, "metadata": metadata, "dtype": jnp.dtype(dtype).name, "store_data_equal_to_fill_value": True}


def parameter_store(item: Path, name: str) -> dict[str, Any]:
    """The TensorStore spec of one array of an Orbax item; `name` has dots between the keys of the tree."""
    directory = os.path.realpath(item)  # TensorStore refuses `..`
    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}, "path": f"{name}/"}
    return {"driver": "zarr", "kvstore": kvstore}


def _rows_of_a_piece(rows: int, most: int) -> int:
    """The largest divisor of `rows` up to `most`; `most` where all divisors are much smaller."""
    if rows <= most:
        return max(rows, 1)
    best = next(n for n in range(most, 0, -1) if rows % n == 0)
    return best if 8 * best >= most else most
