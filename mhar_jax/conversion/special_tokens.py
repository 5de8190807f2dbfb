"""The ids of special tokens, which a Hugging Face directory has in generation_config.json, config.json or both.

Stock code takes them from generation_config.json, and from config.json only where that file is not there.
"""

import json
from pathlib import Path
from typing import Any

from mhar_jax.errors import UserError
from mhar_jax.huggingface.gguf import GGUFFile
from mhar_jax.huggingface.json_files import read_json

GENERATION = "generation_config.json"
_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id")
_IN_GGUF = {"bos": "bos", "eos": "eos", "pad": "padding"}  # tokenizer.ggml.*_token_id


def read_ids(path: Path) -> dict[str, Any]:
    """The ids of a JSON file, each a number or a list of numbers; none where the file is missing or something else."""
    found = _read_object(path) or {}
    return {name: found[name] for name in _NAMES if _is_ids(found.get(name))}


def complete(directory: Path, ids: dict[str, Any]) -> None:
    """Puts ids that the directory's generation_config.json lacks into it; without any, the file stays as it is."""
    path = directory / GENERATION
    known = _read_object(path) if path.is_file() else {}
    if known is None:  # a copy of what somebody else's code will complain about
        return
    missing = {name: value for name, value in ids.items() if known.get(name) is None}
    if missing:
        path.write_text(json.dumps(known | missing, indent=2) + "\n", encoding="utf-8")


def gguf_ids(file: GGUFFile, tokens: int) -> dict[str, int]:
    """The special ids of a GGUF file of so many tokens, by the names of generation_config.json.

    Raises:
      UserError: an id that is none of the tokens'.
    """
    found = {
        f"{ours}_token_id": file.token_id(f"tokenizer.ggml.{name}_token_id", tokens) for ours, name in _IN_GGUF.items()
    }
    return {name: value for name, value in found.items() if value is not None}


def _is_ids(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(type(v) is int and 0 <= v < 2**31 for v in values)


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        found = read_json(path)
    except UserError:
        return None
    return found if isinstance(found, dict) else None
