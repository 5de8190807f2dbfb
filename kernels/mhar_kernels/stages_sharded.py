"""Any backend's stages on a mesh: each device runs them on its own tokens.

The compiler's partitioner cannot look into a kernel, and tokens are independent, so every stage runs inside
`jax.shard_map` over the mesh axes that split the tokens. Between stages a device keeps its histories as they are: each
array gets an axis of devices in front, so that no backend has to say where in its layout the tokens are. Only the query
gradient adds over tokens: once, at the end, over all devices. Sublayers run outside, on whole arrays.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mhar_kernels.schedule import Plan, Stages

TokenAxes = Sequence[str] | Sequence[Sequence[str]]  # of the first axis, or of each leading axis


@dataclass(frozen=True)
class TokenShards:
    """How a mesh splits arrays [B, ..., D]: by axis, the mesh axes that split it; none, and every device has all."""

    split: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, token_axes: TokenAxes, x: jax.Array) -> "TokenShards | None":
        """For arrays like x and the mesh in scope; None where there is nothing to split.

        Raises:
          ValueError: the mesh in scope has no such axis.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if not token_axes or mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
            return None
        names = tuple(axis for axis in token_axes if isinstance(axis, str))
        by_axis = (names,) if names else tuple(tuple(axes) for axes in token_axes)
        named = [axis for axes in by_axis for axis in axes]
        if missing := set(named) - set(mesh.axis_names):
            raise ValueError(f"token_axes must be axes of the mesh, {mesh.axis_names}, got {sorted(missing)}")
        if len(set(named)) != len(named):
            raise ValueError(f"token_axes must name each axis of the mesh once, got {token_axes}")
        divides = lambda size, axes: size % math.prod(mesh.shape[axis] for axis in axes) == 0
        lead = x.shape[:-1]
        return cls(tuple(axes if divides(n, axes) else () for n, axes in zip(lead, by_axis, strict=False)))

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that split tokens."""
        return tuple(axis for axes in self.split for axis in axes)

    @property
    def tokens(self) -> P:
        """Of an array by token [B, ..., D]."""
        return P(*(axes or None for axes in self.split))

    @property
    def devices(self) -> P:
        """Of an array with an axis of devices in front."""
        return P(self.axes or None)

    def map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function on each device's own part; it is not differentiated."""
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def differentiable(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """As `map`, for one that is. A cotangent of what devices have whole is summed over those that split tokens.

        Without the check of what varies it would be summed over all: sources sent for what every device has already.
        """
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)


@dataclass(frozen=True)
class ShardedStages:
    """`schedule.Stages` that run another's on each device's own tokens."""

    stages: Stages
    shards: TokenShards

    def start(self, plan: Plan, x: jax.Array, queries: jax.Array, low: jax.Array | None) -> Any:
        """See `schedule.Stages`."""
        specs = (self.shards.tokens, P(), P())
        run = lambda x, queries, low: _stack(self.stages.start(plan, x, queries, low))
        return self.shards.map(run, specs, self.shards.devices)(x, queries, low)

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

        devices, tokens = self.shards.devices, self.shards.tokens
        result: tuple[Any, jax.Array, Any] = self.shards.map(
            run, (devices, tokens, devices, P()), (devices, tokens, devices)
        )(history, source, outside, norm)
        return result

    def again(self, plan: Plan, history: Any, after: jax.Array) -> Any:
        """See `schedule.Stages`."""
        run = lambda history, after: _stack(self.stages.again(plan, _own(history), after))
        devices = self.shards.devices
        return self.shards.map(run, (devices, self.shards.tokens), devices)(history, after)

    def source(self, plan: Plan, history: Any, site: int, like: jax.Array) -> jax.Array:
        """See `schedule.Stages`."""
        run = lambda history, like: self.stages.source(plan, _own(history), site, like)
        tokens = self.shards.tokens
        source: jax.Array = self.shards.map(run, (self.shards.devices, tokens), tokens)(history, like)
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

        def run(own: Any, by_token: Any, norm: jax.Array | None) -> tuple[Any, ...]:
            (history, later, kept, outside), (read, cotangent) = own, by_token
            later, d_source, d_norm = self.stages.finish(
                plan, _own(history), _own(later), site, read, _own(kept), cotangent, _own(outside), norm
            )
            return _stack(later), d_source, _stack(d_norm)

        devices, tokens = self.shards.devices, self.shards.tokens
        later, d_source, d_norm = self.shards.map(run, (devices, tokens, P()), (devices, tokens, devices))(
            (history, later, kept, outside), (read, cotangent), norm
        )
        return later, d_source, None if d_norm is None else jnp.sum(d_norm, axis=0)

    def query_gradient(self, plan: Plan, history: Any, later: Any) -> jax.Array:
        """See `schedule.Stages`."""

        def run(history: Any, later: Any) -> jax.Array:
            own = self.stages.query_gradient(plan, _own(history), _own(later))
            return jax.lax.psum(own, self.shards.axes) if self.shards.axes else own

        return self.shards.map(run, (self.shards.devices, self.shards.devices), P())(history, later)

    def _each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose arguments and results are all by device."""
        return self.shards.map(function, self.shards.devices, self.shards.devices)


def _stack(tree: Any) -> Any:
    """A device's arrays with the axis of devices in front."""
    return jax.tree.map(lambda a: a[None], tree)


def _own(tree: Any) -> Any:
    """Without it."""
    return jax.tree.map(lambda a: a[0], tree)
