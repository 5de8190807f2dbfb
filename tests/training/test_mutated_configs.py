"""A slice of the configs with random mistakes: `python tests/training/mutate.py --count 1000` is the whole."""

import random
import time

import jax

from mhar_jax.sharding import make_mesh
from mhar_jax.training import loop
from tests.training import mutate


def test_each_config_runs_or_is_refused_in_a_sentence(tmp_path, monkeypatch):
    devices = jax.devices()[:1]  # as the command has
    monkeypatch.setattr(loop, "make_mesh", lambda mesh: make_mesh(mesh, devices))
    found = mutate.check(60, seed=0, directory=tmp_path, train_every=1000, large_every=1000)
    assert not found.failures, found.failures
    assert found.ends["refused"] > 20
    assert found.ends["passed"] > 0


def test_a_traceback_is_a_failure(tmp_path, monkeypatch):
    """A fault planted: the refusal of bad meshes raises another error."""

    def broken(*_):
        raise TypeError("a bug")

    monkeypatch.setattr(loop, "make_mesh", broken)
    monkeypatch.setattr(mutate, "mutated", lambda draws: mutate.TINY | {"seed": draws.randrange(9)})
    found = mutate.check(1, seed=0, directory=tmp_path)
    assert found.ends["traceback"] == 1
    assert "a bug" in found.failures[0]


def test_a_hang_is_a_failure(tmp_path, monkeypatch):
    """A fault planted: the mesh takes a minute."""
    monkeypatch.setattr(loop, "make_mesh", lambda mesh: time.sleep(60))
    monkeypatch.setattr(mutate, "mutated", lambda draws: mutate.TINY | {"seed": draws.randrange(9)})
    monkeypatch.setattr(mutate, "SECONDS", 1)
    found = mutate.check(1, seed=0, directory=tmp_path)
    assert "TooSlow: it took more than 1 s" in found.failures[0]


def test_large_numbers_are_known():
    assert not mutate.is_large(mutate.TINY)
    assert mutate.is_large(mutate.TINY | {"steps": 2**20})
    assert mutate.is_large(mutate.TINY | {"data": {"prefetch": 101}})
    assert any(mutate.is_large(mutate.grown(random.Random(seed))) for seed in range(3))


def test_mutations_are_those_of_the_seed():
    a, b = (mutate.mutated(random.Random(4)) for _ in range(2))
    assert repr(a) == repr(b) != repr(mutate.TINY)
