"""JSON files of a checkpoint, which are small: what claims to be larger is not read."""

import json
from pathlib import Path
from typing import Any

from mhar_jax.errors import UserError, one_line

MOST_BYTES = 100_000_000  # as for a safetensors header


def read_json(path: Path) -> Any:
    """The parsed file.

    Raises:
      UserError: it cannot be read, is larger than MOST_BYTES, or is not JSON.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or one_line(error)}") from None
    if len(text) > MOST_BYTES:
        raise UserError(f"{path} must have at most {MOST_BYTES} bytes, and has {path.stat().st_size}")
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise UserError(f"{path} is not JSON: {reason}") from None


def read_object(path: Path) -> dict[str, Any]:
    """A parsed file that must be a JSON object; errors as for `read_json`."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path} must be a JSON object, got {type(found).__name__}")
    return found
