"""One run on 8, 4, 2, 1 and again 8 devices: exactly the batches of a run on one, and its losses."""

import contextlib

import jax
import numpy as np
import pytest

from mhar_jax.config.schema import MeshConfig
from mhar_jax.sharding import make_mesh
from mhar_jax.training import loop

MESHES = {
    8: MeshConfig(data=2, fsdp=2, tensor=2),
    4: MeshConfig(data=1, fsdp=2, context=2),
    2: MeshConfig(tensor=2),
    1: None,
}


@pytest.fixture
def part(here, monkeypatch):
    """Runs on some devices until after a step: part(run_dir, devices, stop). Returns the batches that it trained on."""
    read: list[bytes] = []
    to_devices = loop._to_devices

    def recorded(batch, trainer):
        array = to_devices(batch, trainer)
        read.append(np.asarray(array).tobytes())
        return array

    monkeypatch.setattr(loop, "_to_devices", recorded)

    def run(run_dir, devices: int, stop: int, *arguments: str) -> list[bytes]:
        mesh = MESHES[devices] or MeshConfig()
        monkeypatch.setattr(loop, "make_mesh", lambda _: make_mesh(mesh, jax.devices()[:devices]))
        monkeypatch.setattr(loop, "_terminated", lambda: contextlib.nullcontext(lambda step: step == stop))
        read.clear()
        outcome = here(f"--run_dir={run_dir}", "--eval.every=0", "--steps=10", "--batch_size=16", *arguments)
        assert outcome.code == 0, outcome.err
        return read[1:]  # the first is the held-out one

    return run


def check(part, tools, tmp_path, chain, *arguments):
    """The parts of a run, one after the other, against a run that was never moved."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    expected, batches = part(whole, 1, 0, *arguments), []
    for devices, stop in chain:
        batches += part(moved, devices, stop, *arguments)
    assert batches == expected
    assert len(set(batches)) == 10
    a, b = tools.losses(moved), tools.losses(whole)
    assert [x[:2] for x in a] == [x[:2] for x in b]
    # float32 sums in another order, over ten steps
    np.testing.assert_allclose([x[2] for x in a], [x[2] for x in b], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [256, 0], ids=["packed", "streams"])
def test_eight_four_two_one_and_eight_devices(part, tools, tmp_path, megabytes):
    chain = ((8, 2), (4, 4), (2, 6), (1, 8), (8, 10))
    check(part, tools, tmp_path, chain, f"--data.tokenize_at_start_mb={megabytes}")


@pytest.mark.exhaustive
def test_four_devices_and_one(part, tools, tmp_path):
    check(part, tools, tmp_path, ((4, 5), (1, 10)))
