"""Train steps compiled for pod slices by the real TPU compiler."""

import os

import jax
import pytest

from mhar_jax import topology
from mhar_jax.collectives import Array, Collective, Shapes
from mhar_jax.config.load import load_config
from mhar_jax.training.main import main as train

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
    with pytest.raises(topology.DoesNotFit, match="does not fit a chip of v5e:2x2"):
        topology.compile_step(config, "v5e:2x2")


def found(*collectives: Collective) -> topology.Footprint:
    """One sequence of 64 tokens of width 64 a chip."""
    sizes = {"chips": 4, "state": 1, "batch": 1, "temporary": 1}
    return topology.Footprint(
        **sizes, seconds=1.0, flops=1.0, counted_flops=1.0, counted_bytes=1.0, shapes=Shapes(1, 64, 64),
        collectives=collectives,
    )  # fmt: skip


MOVED = Collective("all-gather", (Array("bf16", (4, 64, 64), of_model=True),), "jit(step)/mix")


@pytest.mark.parametrize(
    ("outcome", "code", "sentence"),
    [
        (found(), 0, ""),
        (
            found(MOVED, MOVED),
            1,
            "error: the compiled step moves the depth history: all-gather of bf16[4, 64, 64] moves more than one "
            "source (jit(step)/mix), and 2 more such findings",
        ),
        (topology.DoesNotFit("the step does not fit a chip"), 1, "error: the step does not fit a chip"),
        (topology.UserError("no such topology"), 2, "error: no such topology"),
    ],
)
def test_what_it_found_is_its_exit_code(monkeypatch, capsys, outcome, code, sentence):
    """The same of the command, and of `train.py --dry-run`."""

    def compile_step(config, name):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(topology, "compile_step", compile_step)
    monkeypatch.setattr(topology, "topology_devices", lambda name: jax.devices()[:4])
    fields = ["tiny", *SMALL, "--model.vocab_size=256", "--mesh.data=4"]
    assert topology.main([*fields, "v5e:2x2"]) == code
    alone = capsys.readouterr()
    assert alone.err.strip() == sentence
    assert train([*fields, "--dry-run", "--topology=v5e:2x2"]) == code
    dry = capsys.readouterr()
    assert dry.err.strip() == sentence
    assert dry.out.endswith(alone.out)


def test_arguments(capsys):
    assert topology.main(["midtrain_8b"]) == 2
    assert "give a config and a topology" in capsys.readouterr().err
    assert topology.main(["tiny", "v5e:2x2"]) == 2
    assert "model.vocab_size must be set" in capsys.readouterr().err
    assert topology.main(["--help"]) == 0
