"""Train steps compiled for TPU slices: what is counted, and the estimate."""

import os

import pytest

from mhar_jax.bench import __main__ as bench
from mhar_jax.bench import ahead, chips, report
from mhar_jax.collectives import Array, Collective
from mhar_jax.errors import UserError


@pytest.fixture(autouse=True)
def _environment():
    """What libtpu is told here stays in the test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def test_a_step_for_four_chips(tmp_path, capsys):
    """The one-layer model of 128: its batch is 4 chips x 1 sequence of 128 + 1 tokens, its bound the largest part."""
    assert bench.main(["compile", "--presets=tiny", "--topology=v5e:2x2", f"--out={tmp_path}"]) == 0
    assert "No chip has run this" in capsys.readouterr().out
    saved = report.load(tmp_path / "compile.json")
    (row,) = saved.rows
    m = row.metrics
    assert (row.of["topology"], row.of["batch_size"], m["chips"]) == ("v5e:2x2", 4, 4)
    assert row.samples_ms == []
    assert m["batch_bytes"] == 4 * 129
    assert 0 < m["state_bytes"] < m["total_bytes"] < m["chip_bytes"] == 16 * 2**30
    assert m["total_bytes"] == m["state_bytes"] + m["batch_bytes"] + m["temporary_bytes"]
    parts = m["estimate_parts_ms"]
    assert m["estimate_ms"] == max(parts.values()) == parts[m["bound_by"]]
    assert parts["compute"] == pytest.approx(m["model_flops"] / 197e12 * 1e3)
    assert parts["memory"] == pytest.approx(m["bytes"] / 0.819e12 * 1e3)
    assert m["collective_count"] == sum(kind["count"] for kind in m["collectives"].values()) > 0
    assert bench.main(["compare", *[str(tmp_path / "compile.json")] * 2]) == 2
    assert "no times to compare" in capsys.readouterr().err


def test_a_step_that_does_not_fit(monkeypatch, capsys):
    """A row that says so, and exit code 1."""
    import mhar_jax.topology

    def too_large(config, topology):
        raise UserError(f"the step does not fit a chip of {topology}: 17.1G of 15.7G")

    monkeypatch.setattr(mhar_jax.topology, "compile_step", too_large)
    assert bench.main(["compile", "--topology=v5e:2x2"]) == 1
    printed = capsys.readouterr().out
    assert "17.1G of 15.7G" in printed
    assert "NO" in printed


def test_a_slice_is_written_before_the_next(tmp_path, monkeypatch):
    """Each takes minutes: an interruption within the second leaves the first."""

    def interrupted_at_the_second(preset, topology, chip, overrides):
        if topology == "v5p:2x2x1":
            raise KeyboardInterrupt
        return report.refused({"preset": preset, "topology": topology}, "failed", "does not fit")

    monkeypatch.setattr(ahead, "_compile", interrupted_at_the_second)
    assert bench.main(["compile", "--topology=v5e:2x2,v5p:2x2x1", f"--out={tmp_path}"]) == 130
    assert [row.of["topology"] for row in report.load(tmp_path / "compile.json").rows] == ["v5e:2x2"]


def test_bytes_on_the_network():
    """Four chips, arrays of 1,000 bytes: gathered 750 sent, summed 1,500, scattered 3,000 (of 4,000), shifted 1,000."""
    one = (Array("s8", (1000,)),)
    kinds = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute")
    sent = [ahead.network_bytes([Collective(kind, one, "")], 4) for kind in kinds]
    assert sent == [750, 1500, 3000, 1000]


def test_the_batch_follows_the_slice():
    """The paper's micro-batch a chip, or one sequence; over the chips that do not split heads."""
    assert ahead._config("mhar_1b", "v5e:16x16", []).batch_size == 512
    assert ahead._config("midtrain_8b", "v5p:8x8x8", []).batch_size == 512
    split = ["mesh.data=1", "mesh.fsdp=-1", "mesh.tensor=4"]
    assert ahead._config("mhar_1b", "v5e:16x16", split).batch_size == 128
    assert ahead._config("mhar_1b", "v5e:16x16", ["batch_size=256"]).batch_size == 256


def test_roofline():
    of = chips.roofline(chips.chip_of("v5p:8x8x8"), flops=459e12, hbm_bytes=2.765e12 * 2, network_bytes=0.6e12 / 2)
    assert tuple(of) == pytest.approx((1, 2, 0.5))
    assert (of.seconds, of.bound_by) == (pytest.approx(2), "memory")
    with pytest.raises(UserError, match="topologies of v4, v5e, v5p, v6e"):
        chips.chip_of("v9:2x2")
