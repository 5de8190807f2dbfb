"""Moving chunks of sources between HBM and a ring of VMEM slots, one DMA a source."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mhar_kernels.pallas_plan import Plan

Ref = Any  # a Pallas reference, or None where a call has none; JAX has no public type for it
Index = jax.Array | int


@dataclass(frozen=True)
class Ring:
    """Chunks in order: item k of a core is chunk k % M of its tile k // M, and lives in slot k % slots."""

    plan: Plan
    buffer: Ref  # [slots, chunk, rows, D]
    first_tile: jax.Array  # of this core
    tiles: jax.Array  # of this core

    def load_first(self, sources: "SourceRefs", semaphores: Ref) -> None:
        """Starts the copies that fill every slot."""
        if self.plan.chunks > 1:
            pl.loop(0, self.plan.slots)(lambda item: self.load(sources, semaphores, item))
        else:
            for item in range(self.plan.slots):
                self.load(sources, semaphores, jnp.int32(item), 0)

    def load(self, sources: "SourceRefs", semaphores: Ref, item: jax.Array, chunk: int | None = None) -> None:
        """Starts the copies of an item into its slot; does nothing past the core's last item.

        `chunk` is the item's index within its tile, where that is known when compiled.
        """

        def ends(tile: jax.Array, n: Any, slot: jax.Array, i: int) -> tuple[Ref, ...]:
            return sources.at(n, tile), self.buffer.at[slot, i], semaphores.at[slot]

        self._start(sources, item, chunk, ends)

    def store(self, sources: "SourceRefs", semaphores: Ref, item: jax.Array, chunk: int | None = None) -> None:
        """Starts the copies of an item's slot out to HBM."""

        def ends(tile: jax.Array, n: Any, slot: jax.Array, i: int) -> tuple[Ref, ...]:
            return self.buffer.at[slot, i], sources.at(n, tile), semaphores.at[slot]

        self._start(sources, item, chunk, ends)

    def wait(
        self, sources: "SourceRefs", semaphores: Ref, item: jax.Array, count: int, *, stored: bool = False
    ) -> None:
        """Waits for the `count` copies of an item. A wait needs only their size, so any source stands for them."""
        slot = jax.lax.rem(item, self.plan.slots)
        for i in range(count):
            here, there = self.buffer.at[slot, i], sources.any()
            source, destination = (here, there) if stored else (there, here)
            pltpu.make_async_copy(source, destination, semaphores.at[slot]).wait()

    def wait_stored(self, sources: "SourceRefs", semaphores: Ref, item: jax.Array, chunk: int | None = None) -> None:
        """Waits for an item to be stored."""
        plan, index = self.plan, jax.lax.rem(item, self.plan.chunks)
        if chunk is None or chunk == 0:
            wait = lambda: self.wait(sources, semaphores, item, plan.first, stored=True)
            wait() if chunk == 0 else pl.when(index == 0)(wait)
        if plan.chunks > 1 and chunk != 0:
            wait = lambda: self.wait(sources, semaphores, item, plan.chunk, stored=True)
            wait() if chunk is not None else pl.when(index != 0)(wait)

    def _start(
        self,
        sources: "SourceRefs",
        item: jax.Array,
        chunk: int | None,
        ends: Callable[[jax.Array, Any, jax.Array, int], tuple[Ref, ...]],
    ) -> None:
        plan = self.plan
        in_core, slot = jax.lax.div(item, plan.chunks), jax.lax.rem(item, plan.slots)

        def start(index: Any, count: int) -> None:
            first = plan.first_source(index)
            for i in range(count):
                source, destination, semaphore = ends(self.first_tile + in_core, first + i, slot, i)
                pltpu.make_async_copy(source, destination, semaphore).start()

        def bisect(index: jax.Array, low: int, high: int) -> None:
            """The chunk's sources by comparing its index: which reference to copy must be known when compiled."""
            if high - low == 1:
                start(low, plan.first if low == 0 else plan.chunk)
            elif sources.stacked and low > 0:
                start(index, plan.chunk)
            else:
                middle = 1 if sources.stacked else (low + high) // 2
                pl.when(index < middle)(lambda: bisect(index, low, middle))
                pl.when(index >= middle)(lambda: bisect(index, middle, high))

        @pl.when(in_core < self.tiles)
        def _():
            if chunk is None:
                bisect(jax.lax.rem(item, plan.chunks), 0, plan.chunks)
            else:
                bisect(item, chunk, chunk + 1)


@dataclass(frozen=True)
class SourceRefs:
    """N references [groups, tokens, D], or one [groups, N, tokens, D], in HBM."""

    refs: Sequence[Ref]
    stacked: bool
    group: jax.Array  # index into the first axis
    rows: int

    def at(self, n: int, tile: jax.Array) -> Ref:
        """[rows, D]: source n of one tile."""
        rows = pl.ds(pl.multiple_of(tile * self.rows, self.rows), self.rows)
        return self.refs[0].at[self.group, n, rows] if self.stacked else self.refs[n].at[self.group, rows]

    def any(self) -> Ref:
        """Some [rows, D] slice."""
        return self.at(0, jnp.int32(0))
