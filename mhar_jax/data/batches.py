"""The training iterators: Grain does threads, worker processes and Orbax checkpoints, the state is ours.

Every element travels with the position after it, so the state is that of the last batch handed out, whatever was
prefetched, and holds nothing of Grain's.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags
from grain.experimental import ThreadPrefetchIterDataset

from mhar_jax.data.packing import PackedTokens
from mhar_jax.data.state import check_identity
from mhar_jax.data.streams import Row, TextStream
from mhar_jax.errors import UserError

Positions = dict[int, tuple[int, int]]  # row of the global batch: (document, token)


class BatchIterator(grain.DatasetIterator):
    """Endless batches {"tokens": int32 [rows, seq_len + 1]} with the state described in `state`.

    Args:
      identity: what decides the batches; a state of another one is refused.
      parts: given the next batch and the rows' positions, the datasets whose elements make up a batch, rows in order.
      positions: where every row starts; empty for packed tokens, which need the batch number only.
    """

    def __init__(
        self,
        identity: dict[str, Any],
        parts: Callable[[int, Positions], Sequence[grain.IterDataset]],
        positions: Positions,
    ):
        super().__init__()
        self._identity = identity
        self._parts = parts
        self._positions = positions
        self._next_batch = 0
        self._running: list[grain.DatasetIterator] | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        self._assert_not_closed()
        elements = [next(part) for part in self._start()]
        for element in elements:
            if "positions" in element:
                self._positions.update(
                    {row: (document, token) for row, document, token in element["positions"].tolist()}
                )
        self._next_batch += 1
        tokens = [element["tokens"] for element in elements]
        return {"tokens": tokens[0] if len(tokens) == 1 else np.concatenate(tokens)}

    def get_state(self) -> dict[str, Any]:
        """See `state`."""
        state: dict[str, Any] = {"identity": dict(self._identity), "next_batch": self._next_batch}
        if self._positions:
            state["rows"] = {str(row): list(position) for row, position in self._positions.items()}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state, of the same process or from `merge_states`.

        Raises:
          UserError: the state is of other data, or lacks rows of this process.
        """
        check_identity(state, self._identity)
        rows = state.get("rows", {})
        if missing := [row for row in self._positions if str(row) not in rows]:
            raise UserError(
                f"the saved state of the data lacks row {missing[0]} of the batch, which another process saved; "
                "merge the states of all processes first"
            )
        self._stop()
        self._next_batch = int(state["next_batch"])
        self._positions = {row: (int(rows[str(row)][0]), int(rows[str(row)][1])) for row in self._positions}

    def start_prefetch(self) -> None:
        """Starts to make batches in the background."""
        for part in self._start():
            part.start_prefetch()

    def close(self) -> None:
        """Stops threads and worker processes; the iterator cannot be used any more."""
        super().close()
        self._stop()

    def _start(self) -> list[grain.DatasetIterator]:
        if self._running is None:
            self._running = [iter(part) for part in self._parts(self._next_batch, dict(self._positions))]
        return self._running

    def _stop(self) -> None:
        running, self._running = self._running, None
        for part in running or ():
            part.close()


class PackedBatches:
    """Random access to the batches of a process, as a Grain source."""

    def __init__(self, packed: PackedTokens, batch_size: int, rows: range):
        self._packed = packed
        self._batch_size = batch_size
        self._rows = rows

    def __len__(self) -> int:
        return sys.maxsize // 2

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        first = index * self._batch_size + self._rows.start
        return {"tokens": self._packed.windows(first, len(self._rows))}


class StreamDataset(grain.IterDataset):
    """Batches of some rows of a text stream; elements carry the rows' positions after them, int64 [rows, 3]."""

    def __init__(self, stream: TextStream, batch_size: int, seq_len: int, positions: Positions):
        super().__init__()
        self._stream = stream
        self._batch_size = batch_size
        self._seq_len = seq_len
        self._positions = positions

    def __iter__(self) -> "StreamIterator":
        rows = {row: Row(self._stream, self._batch_size, *place) for row, place in self._positions.items()}
        return StreamIterator(rows, self._seq_len)


class StreamIterator(grain.DatasetIterator):
    """See `StreamDataset`."""

    def __init__(self, rows: dict[int, Row], seq_len: int):
        super().__init__()
        self._rows = rows
        self._seq_len = seq_len

    def __next__(self) -> dict[str, np.ndarray]:
        tokens = np.stack([row.window(self._seq_len) for row in self._rows.values()])
        return {
            "tokens": tokens,
            "positions": np.array([(n, *row.position) for n, row in self._rows.items()], np.int64),
        }

    def get_state(self) -> dict[str, Any]:
        """Nothing: the positions travel with the elements. Grain's prefetching asks for it."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Not possible; a new iterator is made instead."""
        raise NotImplementedError


def packed_batches(
    packed: PackedTokens, identity: dict[str, Any], *, batch_size: int, rows: range, workers: int, prefetch: int
) -> BatchIterator:
    """The iterator over packed tokens; arguments as in `make_train_iterator`."""
    source = PackedBatches(packed, batch_size, rows)

    def parts(next_batch: int, _: Positions) -> list[grain.IterDataset]:
        dataset = grain.MapDataset.source(source)[next_batch:].to_iter_dataset(
            grain.ReadOptions(num_threads=min(prefetch, 16), prefetch_buffer_size=prefetch)
        )
        return [_in_workers(dataset, workers, -(-prefetch // max(workers, 1)))]

    return BatchIterator(identity, parts, {})


def stream_batches(
    stream: TextStream,
    identity: dict[str, Any],
    *,
    batch_size: int,
    seq_len: int,
    rows: range,
    workers: int,
    prefetch: int,
) -> BatchIterator:
    """The iterator over raw text; arguments as in `make_train_iterator`. Each worker process makes some of the rows."""

    def parts(_: int, positions: Positions) -> list[grain.IterDataset]:
        count = min(max(workers, 1), len(rows))
        datasets = []
        for group in np.array_split(np.array(rows), count):
            mine = {row: positions[row] for row in group.tolist()}
            dataset = StreamDataset(stream, batch_size, seq_len, mine)
            if workers:
                datasets.append(_in_workers(dataset, 1, prefetch))
            else:
                datasets.append(ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=prefetch))
        return datasets

    return BatchIterator(identity, parts, {row: (row, 0) for row in rows})


def _in_workers(dataset: grain.IterDataset, workers: int, buffer: int) -> grain.IterDataset:
    if not workers:
        return dataset
    if not flags.FLAGS.is_parsed():
        # Grain up to 0.2.18 reads an absl flag here, which fails in programs that parse none (its issue 1355).
        flags.FLAGS.mark_as_parsed()
    return dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=buffer))
