"""Results of single items, on disk: what paired tests need and tables of averages throw away."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from mhar_jax.errors import UserError, one_line, writing

_KIND = "mhar_jax evaluation"
_WEIGHTED = ("word_perplexity", "byte_perplexity", "bits_per_byte")  # pairs (log-likelihood, weight) in the harness


class Weighted(NamedTuple):
    """A log-likelihood and the words or bytes it covers: what the harness's perplexities are made of."""

    log_likelihood: float  # nats
    weight: float


@dataclasses.dataclass(frozen=True)
class Item:
    """One question, or one document."""

    task: str
    number: int  # within its task
    content: str  # hash of what was asked, so that results of other questions are not paired
    metrics: Mapping[str, float | Weighted]


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
    """Items from the `samples` of the harness: every metric of a sample that is one number, or a weighted one.

    The harness lists a question once for every filter of its answer (GSM8K has two). Here it is one item, and a metric
    of a filter other than "none" is "metric,filter", as in the harness's results.
    """
    metrics: dict[tuple[str, int], dict[str, float | Weighted]] = {}
    contents: dict[tuple[str, int], str] = {}
    for task, rows in samples.items():
        for sample in rows:
            place = task, int(sample["doc_id"])
            # With the prompt: other examples before the same question make it another one.
            contents[place] = content_hash([sample["doc"], sample.get("prompt_hash")])
            name_filter = sample.get("filter", "none")
            of_item = metrics.setdefault(place, {})
            for name in sample.get("metrics", ()):
                value = sample.get(name)
                full_name = name if name_filter == "none" else f"{name},{name_filter}"
                if isinstance(value, int | float):
                    of_item[full_name] = float(value)
                elif name in _WEIGHTED and isinstance(value, tuple | list) and len(value) == 2:
                    of_item[full_name] = Weighted(*map(float, value))
    return [Item(*place, contents[place], of_item) for place, of_item in metrics.items()]


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
        if not isinstance(found["settings"], dict):
            raise ValueError("its settings must be an object")
        return Results(**(found | {"items": [_item(item) for item in found["items"]]}))
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} holds no results of an evaluation: {one_line(error)}") from None


def _item(found: dict[str, Any]) -> Item:
    if not isinstance(found["task"], str):
        raise ValueError(f"the task of an item must be a string, got {found['task']!r}")
    metrics = {name: _metric(name, value) for name, value in dict(found["metrics"]).items()}
    return Item(**(found | {"number": int(found["number"]), "metrics": metrics}))


def _metric(name: str, value: Any) -> float | Weighted:
    if isinstance(value, list) and len(value) == 2:
        return Weighted(*map(float, value))
    if isinstance(value, int | float):
        return float(value)
    raise ValueError(f"the metric {name} of an item must be a number or a pair of them, got {value!r}")
