"""One tiny run for all tests of this folder, and compiled programs shared through a cache on disk."""

import dataclasses
import functools
import gc
import json
import logging
import math
import os
import pathlib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

from mhar_jax.config import Config, make_config
from mhar_jax.config.schema import MeshConfig
from mhar_jax.sharding import make_mesh
from mhar_jax.training import loop, main
from mhar_jax.training.step import Trainer, make_trainer
from tests import commands
from tests.commands import Outcome, Processes, captured, outcome

# Eight steps in two micro-batches, with averaged weights.
TINY: dict[str, Any] = {
    **commands.TINY,
    "steps": 8,
    "optimizer": {"warmup_steps": 3, "accumulate": 2, "ema": 0.9, "z_loss": 1e-4},
    "checkpoint": {"every": 0},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries, `changes` over `base`."""
    out = dict(base)
    for name, value in changes.items():
        inner = out.get(name)
        out[name] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return out


@functools.cache
def _programs(config: Config, mesh: Mesh) -> Trainer:
    return make_trainer(config, mesh)


def shared_trainer(config: Config, mesh: Mesh) -> Trainer:
    """`make_trainer`, with programs compiled once for all configs whose differences do not reach them."""
    plain = Config()
    same = {"run_dir": "-", "eval": plain.eval, "checkpoint": plain.checkpoint, "log": plain.log, "data": plain.data}
    return dataclasses.replace(_programs(dataclasses.replace(config, **same), mesh), config=config)


def _flat(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in leaves}


class Tools:
    """Helpers that tests use through the fixture `tools`."""

    def config(self, **changes: Any) -> Config:
        """The tiny run with nested changes; the vocabulary is the bytes'."""
        return make_config(merged(merged(TINY, {"model": {"vocab_size": 384}}), changes))

    def trainer(self, config: Config, sizes: tuple[int, ...] = (1, 1, 1)) -> Trainer:
        """Compiled once for each config and mesh; sizes: data, fsdp, tensor and, if not 1, context."""
        devices, names = jax.devices()[: math.prod(sizes)], ("data", "fsdp", "tensor", "context")
        return shared_trainer(config, make_mesh(MeshConfig(**dict(zip(names, sizes, strict=False))), devices))

    def tokens(self, trainer: Trainer, seed: int = 0) -> jax.Array:
        """A random batch, below 257."""
        draw = np.random.default_rng(seed).integers(0, 257, trainer.batch.shape).astype(np.int32)
        return jax.device_put(draw, trainer.batch.sharding)

    def forget(self) -> None:
        """Drops all compiled programs: one for eight devices maps a thousand pieces of memory, a process has 65,530."""
        _programs.cache_clear()
        jax.clear_caches()
        gc.collect()

    flat = staticmethod(_flat)

    metrics = staticmethod(commands.metrics)
    losses = staticmethod(commands.losses)

    def saved(self, run_dir: pathlib.Path, step: int) -> dict[str, Any]:
        """Everything a checkpoint holds but its config, read without any of our code: arrays by path, and JSON."""
        found: dict[str, Any] = {}
        for item in sorted((run_dir / "checkpoints" / str(step)).iterdir()):
            if item.name == "data":
                found["data"] = json.loads((item / "metadata").read_text())
            elif item.is_dir() and item.name != "meta":
                with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                    tree = reader.metadata(item).item_metadata.tree
                    kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
                    arrays = reader.restore(item, args=ocp.args.PyTreeRestore(restore_args=kinds))
                found |= {f"{item.name}/{k}": v for k, v in _flat(arrays).items()}
        return found

    def assert_same(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        """Equal to the bit."""
        assert a.keys() == b.keys()
        for name, value in a.items():
            same = value.tobytes() == b[name].tobytes() if isinstance(value, np.ndarray) else value == b[name]
            assert same, name


@pytest.fixture(scope="session")
def tools() -> Tools:
    """See `Tools`."""
    return Tools()


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory) -> pathlib.Path:
    """Where compiled programs are kept for the session, by all its worker processes."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "compiled"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(autouse=True)
def _quickly_compiled(compilation_cache, monkeypatch):
    """Programs made in a test are compiled with little optimisation, and taken from the cache where it has them."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=options))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(compilation_cache))
    jax.config.update(names[1], 0.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def preset(tmp_path) -> pathlib.Path:
    """The tiny run as a config file."""
    path = tmp_path / "tiny-run.json"  # JSON is YAML
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def here(preset, monkeypatch, capfd) -> Callable[..., Outcome]:
    """Runs train.py's main in this process on one device: here("--steps=3", ...)."""
    monkeypatch.setattr(loop, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))
    monkeypatch.setattr(loop, "make_trainer", shared_trainer)
    levels = {name: logging.getLogger(name).level for name in ("absl", "orbax", "jax")}

    def run(*arguments: str) -> Outcome:
        return captured(main.main, capfd, preset, *arguments)

    yield run
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def start(preset, compilation_cache) -> Callable[..., subprocess.Popen[str]]:
    """Starts train.py in a process of its own, on one CPU device unless told otherwise."""
    with Processes() as processes:

        def run(
            *arguments: str,
            devices: int = 1,
            file_limit: int | None = None,  # KiB
            environment: Mapping[str, str] = {},
            before: Sequence[str] = (),
        ) -> subprocess.Popen[str]:
            limited = before if file_limit is None else ["bash", "-c", f'ulimit -f {file_limit}; exec "$0" "$@"']
            cache = {"JAX_COMPILATION_CACHE_DIR": str(compilation_cache)}
            return processes.start(
                [preset, *arguments], devices=devices, environment={**cache, **environment}, before=limited
            )

        yield run


@pytest.fixture
def there(start) -> Callable[..., Outcome]:
    """Runs train.py in a process of its own to its end."""

    def run(*arguments: str, **options: Any) -> Outcome:
        return outcome(start(*arguments, **options))

    return run


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """A hanging run must not hang the suite."""
    for item in items:
        if "training" in str(item.path.parent.name):
            item.add_marker(pytest.mark.timeout(600))
