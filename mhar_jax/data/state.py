"""The checkpointable state of a data iterator: JSON, a few numbers.

    {"identity": {...}, "next_batch": k}                                        packed and synthetic tokens
    {"identity": {...}, "next_batch": k, "rows": {"0": [document, token], ...}}  raw text tokenised on the fly

`identity` is what decides the batches. A state says nothing about processes, workers or prefetching, so a run goes on
with other numbers of them. `rows` has only the rows of the process that wrote it: see `merge_states`.
"""

from collections.abc import Sequence
from typing import Any

from mhar_jax.errors import UserError


def check_identity(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Refuses a state of other data.

    Raises:
      UserError: naming every field that differs.
    """
    if not isinstance(state, dict) or not isinstance(state.get("identity"), dict) or "next_batch" not in state:
        raise UserError(f"the saved state of the data is none of ours: {state!r}")
    saved = state["identity"]
    differing = [
        f"{name} was {saved.get(name)!r} and is {identity.get(name)!r}"
        for name in sorted(saved.keys() | identity.keys())
        if saved.get(name) != identity.get(name)
    ]
    if differing:
        raise UserError(f"the data differs from the checkpoint's: {'; '.join(differing)}")


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state for any process, from the states that all processes of a run saved at one step.

    Needed only when a run goes on with another number of processes; the state of packed tokens is the same in each.

    Raises:
      UserError: the states are not of one run and step.
    """
    first = states[0]
    merged = {**first}
    for state in states:
        if state["identity"] != first["identity"] or state["next_batch"] != first["next_batch"]:
            raise UserError("the processes' saved states of the data are not of one run and one step")
    if "rows" in first:
        merged["rows"] = {row: position for state in states for row, position in state["rows"].items()}
    return merged
