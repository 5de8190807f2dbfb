"""Train steps compiled for pod slices by the real TPU compiler."""

import os

import pytest

from mhar_jax import topology
from mhar_jax.config.load import load_config

SMALL = ["--model.num_layers=1", "--model.d_model=128", "--model.num_heads=2", "--model.num_kv_heads=1"]


@pytest.fixture(autouse=True)
def _environment():
    """What libtpu is told here stays in the test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.mark.slow
def test_state_is_split_over_the_chips():
    """A step of the mid-training recipe, small: each of 4 chips holds a quarter of the matrices, in four arrays."""
    fields = [*SMALL, "--batch_size=4", "--seq_len=256", "--model.context=256", "--model.num_blocks=1"]
    fields += ["--mesh.data=1", "--mesh.fsdp=4"]
    config = load_config("midtrain_8b", [*fields, "--model.vocab_size=1024", "--model.ffn_dim=256"])
    found = topology.compile_step(config, "v5e:2x2")
    assert found.chips == 4
    matrices = 2 * 1024 * 128 + 2 * 128 * 256 + 2 * 128 * 128 + 3 * 128 * 256
    # Parameters, two moments and averages in float32. Norms and routing are whole on each chip.
    assert 16 * matrices / 4 < found.state < 1.2 * 16 * matrices / 4
    assert found.batch == 257 * 4
    assert 0 < found.temporary < found.total < 16e9


@pytest.mark.slow
def test_what_does_not_fit_is_refused():
    """1.2 billion parameters and their optimizer are 20 GB; a chip has 16."""
    fields = [*SMALL, "--mesh.fsdp=1", "--mesh.data=4", "--batch_size=4", "--seq_len=128", "--model.context=128"]
    config = load_config("midtrain_8b", [*fields, "--model.vocab_size=4800000", "--model.ffn_dim=256"])
    with pytest.raises(topology.UserError, match="does not fit a chip of v5e:2x2"):
        topology.compile_step(config, "v5e:2x2")


def test_arguments(capsys):
    assert topology.main(["midtrain_8b"]) == 2
    assert "give a config and a topology" in capsys.readouterr().err
    assert topology.main(["tiny", "v5e:2x2"]) == 2
    assert "model.vocab_size must be set" in capsys.readouterr().err
    assert topology.main(["--help"]) == 0
