"""A slice of the crash test: `python tests/training/crash.py --kills 50` is the whole."""

import pathlib

import pytest

from tests.training import crash


@pytest.mark.exhaustive
def test_kills_inside_saves_and_elsewhere_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(crash, "KINDS", ("save", "step"))
    lives = crash.crash(tmp_path, kills=2, steps=12, seed=3, say=lambda line: None)
    assert lives.kills.total() == 2
    assert not lives.differences


def test_the_comparison_sees_one_bit(tmp_path):
    """A fault planted: the two runs differ in one number of the log, or in one of the parameters."""
    import orbax.checkpoint as ocp

    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0000001)):
        step = tmp_path / name / "checkpoints" / "3"
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            import numpy as np

            for item in ("params", "ema", "rest"):
                writer.save(step / item, args=ocp.args.StandardSave({"x": np.full(3, value, np.float32)}))
        (step / "data").mkdir()
        (step / "data" / "metadata").write_text("{}")
        pathlib.Path(tmp_path / name / "metrics.jsonl").write_text(f'{{"step": 1, "loss": {value}}}\n')
    assert crash._differences(tmp_path / "a", tmp_path / "b", 3) == []
    assert len(crash._differences(tmp_path / "a", tmp_path / "c", 3)) == 4
