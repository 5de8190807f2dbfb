"""Ratios of two results: what they say, and when they are refused."""

import copy
import json
import math

import numpy as np
import pytest

from mhar_jax.bench import __main__ as bench
from mhar_jax.bench import compare, report
from mhar_jax.bench.intervals import ratio_of_medians

ENVIRONMENT = {
    "device": "chip one",
    "platform": "gpu",
    "device_count": 1,
    "versions": {"jax": "0"},
    "git": None,
    "date": "2026-11-30T00:00:00+00:00",
    "command": ["python"],
}


def result(scale: float = 1.0, **changes) -> report.Report:
    """Three rows: one as fast as ever, one `scale` times slower, one wrong."""
    draw = np.random.default_rng(round(scale * 100)).normal
    rows = [
        report.timed({"what": "same"}, list(1 + draw(scale=0.02, size=12))),
        report.timed({"what": "scaled"}, list(scale * (3 + draw(scale=0.02, size=12)))),
        report.refused({"what": "bad"}, "wrong", "off by far"),
    ]
    return report.Report("routing", {**ENVIRONMENT, **changes}, rows)


@pytest.fixture
def saved(tmp_path):
    def save(name: str, found: report.Report) -> str:
        found.save(tmp_path / name)
        return str(tmp_path / name)

    return save


def test_ratios_and_their_intervals():
    same, scaled = compare.ratios(result(), result(1.2))
    assert same["verdict"] == "no difference seen"
    assert same["low"] < 1 < same["high"]
    assert same["ratio"] == pytest.approx(1, abs=0.03)
    assert scaled["verdict"] == "B slower"
    assert 1.15 < scaled["low"] < scaled["ratio"] < scaled["high"] < 1.25
    assert compare.ratios(result(1.2), result())[1]["verdict"] == "B faster"


def test_an_interval_covers_what_it_should():
    """Medians of normal samples, true ratio 1.1: a 95 % interval holds it in most of 60 draws, and is not wide."""
    draw = np.random.default_rng(5).normal
    found = [ratio_of_medians(draw(1, 0.03, 15), draw(1.1, 0.03, 15)) for _ in range(60)]
    inside = sum(r.low <= 1.1 <= r.high for r in found)
    assert inside >= 50  # 57 expected; percentile intervals of few samples are a little short
    assert np.median([r.high - r.low for r in found]) < 0.08


def test_pairs_cancel_what_they_share():
    """Both halves of a pair were slowed by the same moment: paired, the ratio is exact."""
    moments = np.linspace(1, 2, 11)
    paired = ratio_of_medians(moments, 1.5 * moments, paired=True)
    assert (paired.low, paired.high) == pytest.approx((1.5, 1.5))
    apart = ratio_of_medians(moments, 1.5 * moments)
    assert apart.low < 1.3
    assert apart.high > 1.7


def test_one_sample_has_no_interval():
    """And nothing is said about which is faster."""
    ratio = ratio_of_medians([2.0], [3.0])
    assert ratio.value == 1.5
    assert math.isnan(ratio.low)
    assert math.isnan(ratio.high)
    once = report.Report("routing", ENVIRONMENT, [report.timed({"what": "same"}, [2.0])])
    (row,) = compare.ratios(once, result())
    assert (row["interval"], row["verdict"]) == ("–", "one sample")


@pytest.mark.parametrize("changes", [{"device": "chip two"}, {"device_count": 2}, {"platform": "tpu"}])
def test_other_hardware_is_refused_unless_told(saved, capsys, changes):
    files = [saved("a.json", result()), saved("b.json", result(1.2, **changes))]
    assert bench.main(["compare", *files]) == 2
    assert "different hardware" in capsys.readouterr().err
    assert bench.main(["compare", *files, "--different-hardware"]) == 0
    printed = capsys.readouterr().out
    assert "B slower" in printed
    assert "A has no time (wrong): bad" in printed


def test_other_kinds_and_nothing_in_common(saved, capsys):
    a = saved("a.json", result())
    training = report.Report("training", ENVIRONMENT, result().rows)
    assert bench.main(["compare", a, saved("b.json", training)]) == 2
    assert "of one kind, got routing and training" in capsys.readouterr().err
    apart = report.Report("routing", ENVIRONMENT, result().rows[2:])
    assert bench.main(["compare", a, saved("c.json", apart)]) == 2
    captured = capsys.readouterr()
    assert "no row with times in common" in captured.err
    assert "only in A: same" in captured.out


def test_files_that_are_no_results(tmp_path, capsys):
    path = tmp_path / "x.json"
    deep = "[" * 100_000
    for text, words in (
        ("{", "cannot be read"),
        (deep, "cannot be read"),
        ("[1]", "schema must be 1"),
        ('{"schema": 9}', "schema must be 1"),
    ):
        path.write_text(text)
        assert bench.main(["compare", str(path), str(path)]) == 2
        assert words in capsys.readouterr().err
    assert bench.main(["compare", str(tmp_path / "absent.json"), str(path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_what_is_not_a_number_is_null(tmp_path):
    """JSON has no word for it, and a result must not be lost over it."""
    rows = [report.refused({"what": "bad"}, "wrong", "off", errors={"out": math.inf, "d_query": [math.nan, 1.0]})]
    report.Report("routing", ENVIRONMENT, rows).save(tmp_path / "r.json")
    assert report.load(tmp_path / "r.json").rows[0].metrics == {"errors": {"out": None, "d_query": [None, 1.0]}}


def test_schema(tmp_path):
    """A saved result has the schema; each of these mistakes is seen."""
    result().save(tmp_path / "r.json")
    good = json.loads((tmp_path / "r.json").read_text())
    assert report.problem_of(good) is None
    assert report.load(tmp_path / "r.json") == result()

    def spoiled(change) -> str | None:
        content = copy.deepcopy(good)
        change(content)
        return report.problem_of(content)

    assert "schema" in spoiled(lambda c: c.update(schema=2))
    assert "kind" in spoiled(lambda c: c.update(kind="other"))
    assert "rows must be a list" in spoiled(lambda c: c.update(rows={}))
    assert "lacks device" in spoiled(lambda c: c["environment"].pop("device"))
    assert "copy_tb_per_s" in spoiled(lambda c: c.pop("copy_tb_per_s"))
    assert "a row must have" in spoiled(lambda c: c["rows"][0].pop("status"))
    assert "status" in spoiled(lambda c: c["rows"][0].update(status="fine"))
    assert "no samples" in spoiled(lambda c: c["rows"][2].update(samples_ms=[1.0]))
    assert "positive" in spoiled(lambda c: c["rows"][0].update(samples_ms=[0.0]))
    assert "positive" in spoiled(lambda c: c["rows"][0].update(samples_ms=[math.inf]))
    for damage in ({"of": None}, {"of": ["site"]}, {"samples_ms": None}, {"samples_ms": 1.0}, {"metrics": None}):
        assert "of a row must be" in spoiled(lambda c, damage=damage: c["rows"][0].update(damage))
    for name, value in {"device_count": None, "versions": "0.11", "git": "e4fe7b1", "date": 20261130}.items():
        problem = spoiled(lambda c, name=name, value=value: c["environment"].update({name: value}))
        assert problem == f"{name} of its environment is {value!r}"
    for git in ({}, {"revision": None, "modified": True}, {"revision": "e4fe7b1"}):
        assert "lacks revision" in spoiled(lambda c, git=git: c["environment"].update(git=git))
    assert "lack jax" in spoiled(lambda c: c["environment"].update(versions={}))
