"""Any backend's stages on a mesh: each device runs them on its own tokens.

The compiler's partitioner cannot look into a kernel, and tokens are independent, so every stage runs inside
`jax.shard_map` over the mesh axes that split the tokens. Between stages a device keeps its histories as they are: each
array gets an axis of devices in front, so that no backend has to say where in its layout the tokens are. Only the query
gradient adds over tokens: once, at the end, over all devices. Sublayers run outside, on whole arrays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mhar_kernels.schedule import Plan, Stages


@dataclass(frozen=True)
class TokenShards:
    """How a mesh splits arrays [B, ..., D]: their first axis over these mesh axes; none, and every device has all."""

    axes: tuple[str, ...]

    @classmethod
    def of(cls, token_axes: Sequence[str], x: jax.Array) -> "TokenShards | None":
        """For arrays like x and the mesh in scope; None where there is nothing to split.

        Raises:
          ValueError: the mesh in scope has no such axis.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if not token_axes or mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
            return None
        if missing := set(token_axes) - set(mesh.axis_names):
            raise ValueError(f"token_axes must be axes of the mesh, {mesh.axis_names}, got {sorted(missing)}")
        ways = 1
        for axis in token_axes:
            ways *= mesh.shape[axis]
        divides = x.ndim > 1 and x.shape[0] % ways == 0
        return cls(tuple(token_axes) if divides else ())

    @property
    def spec(self) -> P:
        """Of an array by token, and of an array with an axis of devices in front."""
        return P(self.axes or None)

    def map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function on each device's own part. A cotangent of what every device has whole is summed over devices."""
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@dataclass(frozen=True)
class ShardedStages:
    """`schedule.Stages` that run another's on each device's own tokens."""

    stages: Stages
    shards: TokenShards

    def start(self, plan: Plan, x: jax.Array, queries: jax.Array, low: jax.Array | None) -> Any:
        """See `schedule.Stages`."""
        specs = (self.shards.spec, P(), P())
        run = lambda x, queries, low: _stack(self.stages.start(plan, x, queries, low))
        return self.shards.map(run, specs, self.shards.spec)(x, queries, low)

    def mix(self, plan: Plan, history: Any, block: range) -> Any:
        """See `schedule.Stages`."""
        return self._each(lambda history: _stack(self.stages.mix(plan, _own(history), block)))(history)

    def merge(
        self,
        plan: Plan,
        history: Any,
        site: int,
        source: jax.Array,
        outside: Any,
        norm: jax.Array | None,
        fresh: bool = True,
    ) -> tuple[Any, jax.Array, Any]:
        """See `schedule.Stages`."""

        def run(history: Any, source: jax.Array, outside: Any, norm: jax.Array | None) -> tuple[Any, ...]:
            history, read, kept = self.stages.merge(plan, _own(history), site, source, _own(outside), norm, fresh)
            return _stack(history), read, _stack(kept)

        spec = self.shards.spec
        result: tuple[Any, jax.Array, Any] = self.shards.map(run, (spec, spec, spec, P()), spec)(
            history, source, outside, norm
        )
        return result

    def again(self, plan: Plan, history: Any, after: jax.Array) -> Any:
        """See `schedule.Stages`."""
        run = lambda history, after: _stack(self.stages.again(plan, _own(history), after))
        return self._each(run)(history, after)

    def source(self, plan: Plan, history: Any, site: int, like: jax.Array) -> jax.Array:
        """See `schedule.Stages`."""
        run = lambda history, like: self.stages.source(plan, _own(history), site, like)
        source: jax.Array = self._each(run)(history, like)
        return source

    def begin(self, plan: Plan, history: Any) -> Any:
        """See `schedule.Stages`."""
        return self._each(lambda history: _stack(self.stages.begin(plan, _own(history))))(history)

    def pull(self, plan: Plan, history: Any, later: Any, block: range) -> tuple[Any, Any]:
        """See `schedule.Stages`."""
        run = lambda history, later: _stack(self.stages.pull(plan, _own(history), _own(later), block))
        return self._each(run)(history, later)

    def finish(
        self,
        plan: Plan,
        history: Any,
        later: Any,
        site: int,
        read: jax.Array,
        kept: Any,
        cotangent: jax.Array,
        outside: Any,
        norm: jax.Array | None,
    ) -> tuple[Any, jax.Array, jax.Array | None]:
        """See `schedule.Stages`."""

        def run(arrays: Any, norm: jax.Array | None) -> tuple[Any, ...]:
            history, later, read, kept, cotangent, outside = arrays
            later, d_source, d_norm = self.stages.finish(
                plan, _own(history), _own(later), site, read, _own(kept), cotangent, _own(outside), norm
            )
            return _stack(later), d_source, _stack(d_norm)

        arrays = (history, later, read, kept, cotangent, outside)
        later, d_source, d_norm = self.shards.map(run, (self.shards.spec, P()), self.shards.spec)(arrays, norm)
        return later, d_source, None if d_norm is None else jnp.sum(d_norm, axis=0)

    def query_gradient(self, plan: Plan, history: Any, later: Any) -> jax.Array:
        """See `schedule.Stages`."""

        def run(history: Any, later: Any) -> jax.Array:
            own = self.stages.query_gradient(plan, _own(history), _own(later))
            return jax.lax.psum(own, self.shards.axes) if self.shards.axes else own

        return self.shards.map(run, (self.shards.spec, self.shards.spec), P())(history, later)

    def _each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose arguments and results are all by token or by device."""
        return self.shards.map(function, self.shards.spec, self.shards.spec)


def _stack(tree: Any) -> Any:
    """A device's arrays with the axis of devices in front."""
    return jax.tree.map(lambda a: a[None], tree)


def _own(tree: Any) -> Any:
    """Without it."""
    return jax.tree.map(lambda a: a[0], tree)
