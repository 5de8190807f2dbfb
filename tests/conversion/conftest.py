"""What the tests of this folder share: the command in this process, fixtures, and models written as Hugging Face's."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from mhar_jax import convert, load_model
from mhar_jax.config import ModelConfig
from mhar_jax.conversion.sources import open_source
from mhar_jax.huggingface.config import describe
from mhar_jax.huggingface.keys import key_table
from model_helpers import jit
from tests.commands import Outcome, captured

HF = Path(__file__).parent.parent / "fixtures" / "hf"
NAMES = ("tiny-qwen3", "tiny-llama31", "tiny-mhar-qwen3", "tiny-delta-block-llama")


class Tools:
    """Helpers that tests use through the fixture `tools`."""

    fixtures = HF

    def parameters(self, model: Any) -> dict[Any, np.ndarray]:
        """Every parameter by its path."""
        return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}

    def assert_same(self, a: dict[Any, np.ndarray], b: dict[Any, np.ndarray]) -> None:
        """Equal to the bit."""
        assert a.keys() == b.keys()
        for path, value in a.items():
            assert value.dtype == b[path].dtype, path
            assert value.tobytes() == b[path].tobytes(), path

    def same_files(self, a: Path, b: Path) -> bool:
        """Whether two directories hold the same safetensors bytes under the same names."""
        files = [{p.name: p.read_bytes() for p in d.glob("*.safetensors")} for d in (a, b)]
        return bool(files[0]) and files[0] == files[1]

    def logits(self, path: Path, tokens: np.ndarray) -> np.ndarray:
        """Of the model at a path, in float32."""
        model, _ = load_model(path)
        model.config = dataclasses.replace(model.config, compute_dtype="float32")
        graph, state = nnx.split(model)
        return np.asarray(jit(lambda s, t: nnx.merge(graph, s)(t))(state, tokens))

    def random_hf(
        self, config: ModelConfig, directory: Path, dtype: Any = np.float32, **changes: Any
    ) -> dict[Any, Any]:
        """Random tensors as a Hugging Face directory, written by the `safetensors` package; `changes` of config.json.

        Gives our parameters by path, float32.
        """
        draw, tensors = np.random.default_rng(0), {}
        parameters: dict[Any, Any] = {}
        for key in key_table(config):
            tensors[key.name] = draw.normal(size=key.shape).astype(dtype)
            ours = key.ours(tensors[key.name]).astype(np.float32)
            if key.row is None:
                parameters[key.path] = ours
            else:
                parameters.setdefault(key.path, {})[key.row] = ours
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / "model.safetensors")
        described = describe(config, dtype=np.dtype(dtype).name)
        (directory / "config.json").write_text(json.dumps(described))
        stack = lambda rows: np.stack([rows[i] for i in range(len(rows))])
        return {k: np.ascontiguousarray(stack(v) if isinstance(v, dict) else v) for k, v in parameters.items()}

    def read(self, path: Path) -> dict[Any, np.ndarray]:
        """Every parameter of a checkpoint by its path, as conversions read them."""
        found = open_source(path).parameters
        return {p: np.ascontiguousarray(found.read(p)) for p in found.paths}


@pytest.fixture(scope="session")
def tools() -> Tools:
    """See `Tools`."""
    return Tools()


@pytest.fixture
def run(capsys) -> Callable[..., Outcome]:
    """Runs `python -m mhar_jax.convert` in this process: run("import", source, out)."""

    def command(*arguments: Any) -> Outcome:
        return captured(convert.main, capsys, *arguments)

    return command
