"""Inside shard_map: over which mesh axes a value varies, and marking values as varying."""

from typing import Any

import jax


def axes(tree: Any) -> frozenset[str]:
    """The manual mesh axes that any array of the tree varies over; empty outside shard_map."""
    return frozenset[str]().union(*(jax.typeof(a).mat.varying for a in jax.tree.leaves(tree)))


def over(names: frozenset[str], tree: Any) -> Any:
    """The tree with every array marked as varying over these axes; its cotangent is the sum over them."""

    def mark(a: jax.Array) -> jax.Array:
        missing = tuple(names - axes(a))
        return jax.lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(mark, tree)
