"""The command that times train steps, on a model small enough to say nothing about speed."""

import json

import pytest

from mhar_jax.training import bench

SIZES = ("num_layers=1", "d_model=16", "num_heads=2", "num_kv_heads=2", "vocab_size=32")
SMALL = ["--shapes=tiny", "--steps=1", "--windows=2", "--set=seq_len=8", "--set=batch_size=8"]
SMALL += [f"--set=model.{size}" for size in SIZES]


def test_rows_are_ratios_to_the_first_variant(tmp_path, capsys):
    assert not bench.main([*SMALL, f"--out={tmp_path / 'rows.jsonl'}"])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["additive", "mhar"]
    assert rows[0]["ratio"] == 1
    for row in rows:
        assert row["ratio"] == pytest.approx(rows[0]["ms"] / row["ms"])
        assert row["tokens_per_s"] == pytest.approx(8 * 8 / row["ms"] * 1e3)
        assert len(row["samples_ms"]) == 2
    assert capsys.readouterr().out.count("TFLOP/s") == 2


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--variants=foo", "--variants must be of"),
        ("--steps=0", "must be at least 1"),
        ("--set=batch_size=3", "multiple of the 8 devices"),
    ],
)
def test_bad_input_is_one_sentence(argument, words, capsys):
    assert bench.main([argument]) == 2
    assert words in capsys.readouterr().err
