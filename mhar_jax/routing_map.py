"""What the routing of a model does on some text: the map of mean depth weights, and its picture."""

import concurrent.futures
import dataclasses
import pathlib
import threading
from typing import Any

import jax
import numpy as np

from mhar_jax.config.schema import ModelConfig
from mhar_jax.errors import UserError
from mhar_jax.inspect.drawing import MapFile, drawer
from mhar_jax.inspect.maps import Panel, strongest
from mhar_jax.inspect.walk import column_labels
from mhar_jax.models.sites import site_labels, source_labels
from mhar_jax.training.step import Trainer


@dataclasses.dataclass(frozen=True)
class RoutingMap:
    """Depth weights averaged over tokens."""

    weights: np.ndarray  # [sites, sources, heads], NaN where a site has no such source or head
    entropy: float  # mean over tokens, heads and sites with a choice; a share of the most there can be, 0 to 1
    newest_mass: float  # mean weight on the newest source of those sites
    tokens: int  # how many the means are over


def measure(trainer: Trainer, params: Any, tokens: jax.Array) -> tuple[dict[str, Any], RoutingMap]:
    """The sums of an evaluation of a batch [batch_size, seq_len + 1], and the map of the same forward pass."""
    sums, summary = jax.device_get(trainer.summarise(params, tokens))
    return sums, RoutingMap(
        weights=summary.weights,
        entropy=float(summary.normalized_entropy),
        newest_mass=float(summary.newest_mass),
        tokens=tokens.shape[0] * (tokens.shape[1] - 1),
    )


def picture_of(config: ModelConfig, routing: RoutingMap, path: pathlib.Path) -> MapFile:
    """One panel a head: a row for each site, a column for each source, darker where it reads more.

    The scale ends at the largest weight of a site that has a choice: a site with one source is at 1 by definition.
    """
    heads = routing.weights.shape[2]
    counts = np.array([len(labels) for labels in source_labels(config)])
    title = lambda head: f"head {head + 1}" if heads > 1 else ""
    return MapFile(
        path=path,
        what="the routing map",
        panels=[Panel(title(h), routing.weights[:, :, h], site_labels(config)) for h in range(heads)],
        columns=column_labels(config),
        title="Where each head of each site reads" if heads > 1 else "Where each site reads",
        caption=f"{config.variant}: mean depth weight over {routing.tokens:,} held-out tokens; each row sums to 1. "
        f"Grey: no such source. Entropy {routing.entropy:.2f} of uniform, weight on the newest source "
        f"{routing.newest_mass:.2f} (sites with more than one source).",
        label="mean depth weight",
        limit=strongest(routing.weights, counts > 1),
    )


class RoutingPictures:
    """Has the newest map drawn into one file by another process, while the devices go on training.

    A map that comes while the one before is being drawn waits, and takes the place of one that is waiting already. A
    context manager that waits for the last picture.
    """

    def __init__(self, config: ModelConfig, path: pathlib.Path):
        self._config, self._path = config, path
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="routing-map")
        self._newest: RoutingMap | None = None
        self._lock = threading.Lock()
        self._jobs: list[concurrent.futures.Future[None]] = []

    def submit(self, routing: RoutingMap) -> None:
        """Takes a map and returns at once.

        Raises:
          UserError: an earlier picture could not be written.
        """
        with self._lock:
            self._newest = routing
        finished = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if not job.done()] + [self._thread.submit(self._draw)]
        for job in finished:
            job.result()

    def finish(self) -> None:
        """Waits for the last picture; no other may come.

        Raises:
          UserError: it could not be written.
        """
        self._thread.shutdown()
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def __enter__(self) -> "RoutingPictures":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Waits; an error that is on its way already is the one told."""
        try:
            self.finish()
        except UserError:
            if kind is None:
                raise

    def _draw(self) -> None:
        """Draws the newest map, unless an earlier job has."""
        with self._lock:
            routing, self._newest = self._newest, None
        if routing is None:
            return
        drawer().draw(picture_of(self._config, routing, self._path))
