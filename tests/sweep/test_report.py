"""Tables, verdicts and pictures from losses that are known, without training."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from mhar_jax.errors import UserError
from mhar_jax.sweep.__main__ import main
from mhar_jax.sweep.grid import Sweep, create, make_cells, open_sweep
from mhar_jax.sweep.report import write_report
from mhar_jax.sweep.results import difference, groups_of, head_curves, read_run, read_validation

STEPS = 40
EVALS = range(0, STEPS + 1, 2)  # 21; of these 11 from step 30 on would be 6: 30, 32, ..., 40


def make_sweep(tmp_path, grid, tail, *, skip=()) -> Sweep:
    """A sweep whose runs end at `tail(values)` for the last quarter of the steps."""
    sweep = create(tmp_path / "sweep", make_cells("tiny", [f"steps={STEPS}"], grid), grid)
    for cell in sweep.cells:
        if cell.name in skip:
            continue
        end = tail(dict(cell.values))
        lines = []
        for step in EVALS:
            loss = end + (0.02 * (30 - step) if step < 30 else 0.001 * (step - 35))
            lines += [json.dumps({"step": step, "loss": 9.0}), json.dumps({"step": step, "val_loss": loss})]
        (sweep.path(cell) / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return sweep


def runs_of(sweep):
    return [run for cell in sweep.cells if (run := read_run(cell, sweep.path(cell))) is not None]


def test_the_tail_mean_is_of_the_last_quarter_and_at_most_eleven(tmp_path):
    sweep = make_sweep(tmp_path, {"seed": ["1"]}, lambda v: 3.0)
    (run,) = runs_of(sweep)
    assert run.tail_count == 6
    assert run.tail == pytest.approx(3.0)
    path = sweep.path(sweep.cells[0]) / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "val_loss": float(s)}) + "\n" for s in range(STEPS + 1)))
    (run,) = runs_of(sweep)
    assert run.tail_count == 11
    assert run.tail == pytest.approx(35)


def test_repeated_and_torn_lines_count_once(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "val_loss": 5.0}\n{"step": 0, "val_loss": 4.0}\n{"step": 2, "loss": 1}\n[]\n{"step": 4, "val'
    )
    assert read_validation(tmp_path) == [(0, 4.0)]
    assert read_validation(tmp_path / "nothing") == []


def test_a_paired_difference_and_its_interval(tmp_path):
    """Seeds differ by much, the variants by little and always: paired, this is resolved; unpaired it would not be."""
    offsets = {1: 0.0, 2: 0.5, 3: -0.4}
    gains = {1: -0.010, 2: -0.012, 3: -0.011}
    sweep = make_sweep(
        tmp_path,
        {"model.variant": ["additive", "mhar"], "seed": ["1", "2", "3"]},
        lambda v: 3 + offsets[v["seed"]] + (gains[v["seed"]] if v["model.variant"] == "mhar" else 0),
    )
    base, mhar = groups_of(runs_of(sweep))
    d = difference(mhar, base)
    half = stats.t.ppf(0.975, 2) * 0.001 / math.sqrt(3)
    assert (d.mean, d.std, d.seeds) == (pytest.approx(-0.011), pytest.approx(0.001), 3)
    assert (d.low, d.high) == (pytest.approx(-0.011 - half), pytest.approx(-0.011 + half))
    assert d.verdict == "resolved: better"
    assert difference(base, mhar).verdict == "resolved: worse"
    assert base.tail.std == pytest.approx(np.std([3, 3.5, 2.6], ddof=1))


def test_one_seed_and_noisy_seeds_resolve_nothing(tmp_path):
    noisy = {1: -0.1, 2: 0.08}
    sweep = make_sweep(
        tmp_path,
        {"model.variant": ["additive", "mhar"], "seed": ["1", "2"]},
        lambda v: 3 + (noisy[v["seed"]] if v["model.variant"] == "mhar" else 0),
        skip=(),
    )
    base, mhar = groups_of(runs_of(sweep))
    assert difference(mhar, base).verdict == "not resolved: the interval holds 0"
    one = groups_of([r for r in runs_of(sweep) if r.seed == 1])
    assert difference(one[1], one[0]).verdict == "not resolved: one seed says nothing about the noise"
    assert math.isnan(difference(one[1], one[0]).low)
    other_seed = groups_of([r for r in runs_of(sweep) if r.seed == 2])
    assert difference(one[1], other_seed[0]).verdict.startswith("not paired")


def u_shape(v, noise=0.0003):
    """A U in log2 H with its lowest point at 4, per KV count, and a little noise by seed that differs by H."""
    h, kv = v["model.routing_heads"], v["model.num_kv_heads"]
    return (
        3
        + 0.02 * (math.log2(h) - 2) ** 2
        + 0.01 * kv
        + noise * np.random.default_rng([v["seed"], h, kv]).standard_normal()
    )


GRID = {"model.routing_heads": ["1", "2", "4", "8", "16"], "model.num_kv_heads": ["2", "4"], "seed": ["1", "2", "3"]}


def test_a_u_is_called_one_only_beyond_the_noise(tmp_path):
    curves = head_curves(groups_of(runs_of(make_sweep(tmp_path, GRID, u_shape))))
    assert [dict(c.rest) for c in curves] == [{"model.num_kv_heads": 2}, {"model.num_kv_heads": 4}]
    for curve in curves:
        assert curve.heads == [1, 2, 4, 8, 16]
        assert curve.heads[curve.best] == 4
        assert "A U: resolved" in curve.verdict
        assert "beyond the noise: H = 1, 2, 8, 16" in curve.verdict
        alone = difference(curve.groups[0], curve.groups[curve.best])
        assert curve.against_best[0].low < alone.low < alone.mean  # wider: four comparisons share the 95 %
    noisy = head_curves(groups_of(runs_of(make_sweep(tmp_path / "b", GRID, lambda v: u_shape(v, 0.2)))))
    assert all("resolved, both ends" not in c.verdict for c in noisy)


def test_the_report_is_whole_and_self_contained(tmp_path):
    sweep = make_sweep(tmp_path, GRID, u_shape)
    files = write_report(sweep)
    names = {f.name for f in files}
    assert {"curves.png", "heads.svg", "heads_and_kv.png", "report.md", "report.json"} <= names
    page = files[0].read_text()
    assert "http" not in page.replace("https://", "http") or 'src="http' not in page
    assert "<script" not in page
    assert "paper v2, 1B, 8 KV" in page
    assert "H=4: 3.132" in page
    numbers = json.loads((sweep.directory / "report" / "report.json").read_text())
    assert len(numbers["groups"]) == 10
    assert numbers["groups"][0]["runs"][0]["val_loss"][0] == pytest.approx(
        u_shape({**numbers["groups"][0]["values"], "seed": 1}) + 0.6
    )
    assert numbers["missing"] == []


def test_a_report_of_half_a_sweep_says_what_is_missing(tmp_path):
    grid = {"model.variant": ["additive", "mhar", "attention_residuals"], "seed": ["1", "2"]}
    skip = ("variant=mhar,seed=2",)
    sweep = make_sweep(tmp_path, grid, lambda v: 3.0 + 0.1 * (v["model.variant"] == "mhar"), skip=skip)
    text = next(f for f in write_report(sweep) if f.name == "report.md").read_text()
    assert "Not done, and left out: variant=mhar,seed=2." in text
    assert "| variant=mhar | +0.1000 | – | 1 | not resolved: one seed says nothing about the noise |" in text
    assert (
        "| additive | 3.0000 ± 0.0000 | variant=additive | 3.336 | 3.290 | 3.175 | 3.031 | 2.997 | 2.894 | – |" in text
    )
    other = next(f for f in write_report(sweep, baseline="variant=mhar") if f.name == "report.md").read_text()
    assert "Paired with variant=mhar" in other
    with pytest.raises(UserError, match="--baseline must be one of variant=additive; variant=mhar"):
        write_report(sweep, baseline="variant=delta")


@pytest.mark.exhaustive
def test_the_same_losses_give_the_same_bytes(tmp_path):
    contents = []
    for name in ("a", "b"):
        sweep = make_sweep(tmp_path / name, GRID, u_shape)
        contents.append({f.name: f.read_bytes() for f in write_report(open_sweep(sweep.directory))})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["walk", "DIR"], "the first argument must be run or report"),
        (["run"], "run needs a directory"),
        (["run", "DIR"], "holds no sweep"),
        (["run", "DIR", "tiny"], "needs at least one --grid"),
        (["run", "DIR", "tiny", "--grid.seed=1", "--jobs=0"], "--jobs must be a positive integer, got '0'"),
        (["run", "DIR", "--grid.seed=1", "--devices=0,0"], "--devices must be different numbers"),
        (["run", "DIR", "--grid.seed=1", "--devices=0", "--jobs=2"], "not both"),
        (["run", "DIR", "--grid.seed"], "--grid.seed needs a value"),
        (["run", "DIR", "--grid.seed=1", "--grid.seed=2"], "--grid.seed is given twice"),
        (["run", "DIR", "--grid.seed=1", "--stepz=3"], "unknown config field stepz"),
        (["report", "DIR"], "holds no sweep"),
        (["report", "DIR", "--steps=3"], "report takes a directory and --baseline only"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, tmp_path, capsys):
    assert main([a.replace("DIR", str(tmp_path / "sweep")) for a in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "sweep" / "cells").exists()


def test_a_report_of_nothing(tmp_path):
    sweep = make_sweep(tmp_path, {"seed": ["1"]}, lambda v: 3.0, skip=("seed=1",))
    with pytest.raises(UserError, match=r"no cell of .* is done"):
        write_report(sweep)
