"""Tile sizes of the kernels: explicit argument, else tuned table, else heuristic.

The tables are JSON files under `tuned/`, one per backend, written by `python -m mhar_kernels.tune` on the chip itself.
An entry belongs to one device kind and one key: direction, D, H, dtype, and buckets of N and of the token count, either
of which may be "any". Looking an entry up is all that happens when a call is traced: nothing is timed there.
"""

import functools
import json
import pathlib
from collections.abc import Mapping

TABLES = pathlib.Path(__file__).parent / "tuned"
_SOURCE_BUCKETS = (1, 2, 4, 9, 16, 25, 49, 73, 129)
_TOKEN_BUCKETS = (64, 1024, 8192)

Key = Mapping[str, int | str]


def choose(
    backend: str,
    device_kind: str | None,
    key: Key,
    heuristic: Mapping[str, int],
    explicit: Mapping[str, int] | None,
) -> dict[str, int]:
    """The tile for one kernel call: the heuristic, overridden by the tuned table, overridden by the explicit choice.

    Args:
      backend: "pallas_tpu" or "triton", which names the table.
      device_kind: as JAX names the chip ("NVIDIA H200"); None where it is not known, which skips the table.
      key: what the tile may depend on; `bucketed` makes it.
      heuristic: every tile size the kernel knows, with its default.
      explicit: sizes the caller fixed.

    Raises:
      ValueError: `explicit` names a size the kernel does not have.
    """
    unknown = sorted(set(explicit or {}) - set(heuristic))
    if unknown:
        raise ValueError(f"tile may only name {', '.join(heuristic)} for {backend}, got {', '.join(unknown)}")
    tuned = {} if device_kind is None else _entry(table(backend).get(device_kind, {}), key)
    return {**heuristic, **{k: v for k, v in tuned.items() if k in heuristic}, **(explicit or {})}


def _entry(entries: Mapping[str, dict[str, int]], key: Key) -> dict[str, int]:
    """The most specific entry of the key."""
    for general in ((), ("sources",), ("tokens",), ("sources", "tokens")):
        found = entries.get(spell({**key, **dict.fromkeys(general, "any")}))
        if found is not None:
            return found
    return {}


def bucketed(
    direction: str, *, dim: int, num_heads: int, sources: int, tokens: int, dtype: str
) -> dict[str, int | str]:
    """The key of a call: sources and tokens rounded up to a bucket, the last bucket taking all that is larger."""
    return {
        "direction": direction,
        "dim": dim,
        "heads": num_heads,
        "dtype": dtype,
        "sources": next((b for b in _SOURCE_BUCKETS if b >= sources), _SOURCE_BUCKETS[-1]),
        "tokens": next((b for b in _TOKEN_BUCKETS if b >= tokens), _TOKEN_BUCKETS[-1]),
    }


def spell(key: Key) -> str:
    """The key as the table writes it: "direction=forward dim=1280 ..."."""
    return " ".join(f"{k}={v}" for k, v in key.items())


@functools.cache
def table(backend: str) -> dict[str, dict[str, dict[str, int]]]:
    """The tuned table of a backend: device kind -> key -> tile; empty if none is shipped.

    Raises:
      ValueError: the file holds something else.
    """
    path = TABLES / f"{backend}.json"
    if not path.exists():
        return {}
    try:
        tiles = json.loads(path.read_text())["tiles"]
        sizes = [size for entries in tiles.values() for tile in entries.values() for size in tile.values()]
    except (ValueError, KeyError, TypeError, AttributeError):
        sizes = [None]
    if not all(type(size) is int and size >= 1 for size in sizes):
        raise ValueError(
            f"{path} must hold tiles of positive integers; remove it, and python -m mhar_kernels.tune writes it anew"
        )
    return tiles
