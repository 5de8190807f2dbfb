"""Results of single items, on disk: what paired tests need and tables of averages throw away."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from mhar_jax.errors import UserError, one_line, writing

_KIND = "mhar_jax evaluation"


@dataclasses.dataclass(frozen=True)
class Item:
    """One question, or one document."""

    task: str
    number: int  # within its task
    content: str  # hash of what was asked, so that results of other questions are not paired
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything an evaluation found."""

    checkpoint: str
    variant: str
    settings: Mapping[str, Any]  # what else decides the numbers: window, stride, examples before each item, ...
    summary: Mapping[str, Any]  # averages
    items: list[Item]


def content_hash(content: Any) -> str:
    """Equal for equal text or JSON values."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def items_of_harness(samples: Mapping[str, list[Mapping[str, Any]]]) -> list[Item]:
    """Items from the `samples` of the harness: every metric of a sample that is one number."""
    return [
        Item(
            task,
            int(sample["doc_id"]),
            content_hash(sample["doc"]),
            {
                name: float(sample[name])
                for name in sample.get("metrics", ())
                if isinstance(sample.get(name), int | float)
            },
        )
        for task, rows in samples.items()
        for sample in rows
    ]


def write_results(results: Results, path: str | pathlib.Path) -> None:
    """One JSON file.

    Raises:
      UserError: it cannot be written.
    """
    with writing("the results", path):
        text = json.dumps({"kind": _KIND, **dataclasses.asdict(results)}, indent=1, default=str)
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def read_results(path: str | pathlib.Path) -> Results:
    """The inverse of `write_results`.

    Raises:
      UserError: not such a file.
    """
    try:
        found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.pop("kind", None) != _KIND:
            raise ValueError("it was not written by mhar_jax.evaluate --out")
        return Results(**(found | {"items": [Item(**item) for item in found["items"]]}))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} holds no results of an evaluation: {one_line(error)}") from None
