"""The page of the replication: rebuilt from the committed JSON, and from made-up results that say what it must say."""

import json
import pathlib

import numpy as np
import pytest

from mhar_jax import compare
from mhar_jax.config.load import to_dict
from mhar_jax.errors import UserError
from results.replication import report
from results.replication.chart import Line, svg
from results.replication.plan import comparable, plan, planned
from results.replication.results import RUNS, compared, read_results, write_run_directories

BATCHES = {"first_batches": 32, "train": "a", "held_out": "b"}


def made_up(name: str, level: float, *, jitter: float = 0.0, batches=BATCHES, fingerprint: str = "text") -> dict:
    """A result whose loss falls to `level`, with noise from one evaluation to another."""
    run = planned(name)
    config = run.config(["model.vocab_size=49152"])
    noise = np.random.default_rng(sum(name.encode()) if jitter else 0)
    steps = range(0, config.steps + 1, config.eval.every)
    evaluations = [
        {
            "step": s,
            "val_loss": level + 8 * 0.001 ** (s / config.steps) + jitter * noise.standard_normal(),
            "val_tokens": 9,
        }
        for s in steps
    ]
    data = {"fingerprint": fingerprint, "source": "text", "tokens_per_epoch": 48_000_000, "held_out_tokens": 2_000_000}
    return {
        "format": 1,
        "name": name,
        "stage": run.stage,
        "date": "2026-11-30",
        "commit": "0000000",
        "hardware": {"device": "a device", "devices": 1, "platform": "cpu"},
        "versions": {"python": "3.12"},
        "config": {**to_dict(config), "run_dir": f"runs/replication/{name}"},
        "data": data,
        "batches": {**batches, "seed": run.seed},
        "evaluations": evaluations,
        "train": [{"step": 1, "loss": 11.0, "grad_norm": 1.0, "lr": 1e-6}],
        "tokens_per_s": {"median": 500_000.0, "lowest": 1.0, "highest": 2.0},
        "memory_peak_bytes": 10**10,
        "wall_s": 200.0,
        "diverged": None,
        "weights": {},
    }


@pytest.fixture
def results(tmp_path):
    """A function from results as JSON values to results as the report reads them."""

    def read(*values: dict):
        for value in values:
            (tmp_path / f"{value['name']}.json").write_text(json.dumps(value), encoding="utf-8")
        return read_results(tmp_path)

    return read


LEVELS = {"additive": 3.0, "hyper_connections": 2.99, "attention_residuals": 2.97, "mhar": 2.9}


def main_runs(**how) -> list[dict]:
    return [made_up(r.name, LEVELS[r.variant] + 0.02 * r.seed, **how) for r in plan() if r.stage == "main"]


def test_the_page_is_what_the_committed_json_says():
    assert report.stale(report.build(read_results(RUNS)), report.PAGE.parent) == []


def test_a_changed_number_is_noticed(results, tmp_path):
    found = results(*main_runs())
    docs = tmp_path / "docs"
    docs.mkdir()
    report.write(report.build(found), docs)
    assert report.stale(report.build(found), docs) == []
    values = found["d512-mhar-s0"].values
    values["evaluations"][-1]["val_loss"] += 0.01
    changed = results(values)
    assert "replication.md" in report.stale(report.build(changed), docs)


def test_every_committed_result_is_of_the_plan():
    for name, result in read_results(RUNS).items():
        assert comparable(result.run.config) == comparable(planned(name).config()), name


def test_without_runs_it_says_so(results):
    page = report.build(results())["replication.md"]
    assert "None yet" in page
    assert all(f"`{run.name}`" in page for run in plan())


def test_differences_beyond_the_noise_are_found(results):
    page = report.build(results(*main_runs(jitter=0.001)))["replication.md"]
    assert "Width 512, `mhar` against `additive`: lower at every seed, -0.10" in page
    assert "`attention_residuals` against `additive`: lower at every seed, -0.0" in page
    assert "widens" not in page.split("The gap between many heads and one, from width")[1].split(":")[0]


def test_differences_within_the_noise_are_not(results):
    page = report.build(results(*main_runs(jitter=0.2)))["replication.md"]
    assert "lower at every seed" not in page
    assert "cannot be told" in page


def test_one_seed_is_never_told_apart(results):
    page = report.build(results(*(r for r in main_runs() if r["name"].endswith("s0"))))["replication.md"]
    assert "lower at the one seed run: not told apart" in page
    assert "at every seed," not in page


def test_many_heads_are_also_set_against_one_at_half_the_rate(results):
    runs = [made_up("d512-attention_residuals-s0", 3.0), made_up("d512-mhar-s0", 2.9)]
    half = made_up("d512-attention_residuals-lr-x0.5-s0", 2.88)
    page = report.build(results(*runs, half))["replication.md"]
    assert "many heads against one at half its peak rate, which the paper finds it may need: higher" in page
    assert "| 512, one head at half the rate | +0.0200 (one seed" in page


def test_many_heads_above_one_are_no_gap_that_widens(results):
    gaps = {512: 0.2, 768: 0.1}  # a difference that falls with width, but on the wrong side
    runs = [
        made_up(f"d{w}-{variant}-s{seed}", 3.0 + (gap if variant == "mhar" else 0.0), jitter=0.001)
        for w, gap in gaps.items()
        for variant in ("attention_residuals", "mhar")
        for seed in (0, 1)
    ]
    page = report.build(results(*runs))["replication.md"]
    assert "from width 512 to 768: does not hold: many heads are above one at width 512 and 768." in page


@pytest.mark.parametrize(("many", "verdict"), [(2.9, "agrees: -0.070"), (2.99, "does not agree: +0.020")])
def test_a_claim_is_weighed(results, many, verdict):
    runs = [made_up(r.name, (LEVELS | {"mhar": many})[r.variant], jitter=0.001) for r in plan() if r.stage == "main"]
    page = report.build(results(*runs))["replication.md"]
    assert f"| many heads are below one | −0.010 / −0.001 | {verdict} | {verdict} |" in page


def test_a_claim_that_noise_hides_is_not_weighed(results):
    page = report.build(results(*main_runs(jitter=0.2)))["replication.md"]
    (line,) = (line for line in page.splitlines() if line.startswith("| many heads are below one |"))
    assert line.count("cannot be told") == 2


@pytest.mark.parametrize(
    ("wider", "verdict"), [(0.3, "agrees"), (0.05, "does not agree"), (0.2, "cannot be told: the seeds overlap")]
)
def test_a_query_that_disagrees_more_in_a_wider_model(results, wider, verdict):
    excess = {512: (0.19, 0.21), 768: (wider, wider + 0.005)}
    runs = []
    for width, values in excess.items():
        for seed, value in enumerate(values):
            s = {"trained": value, "null": 0.0, "null_sd": 0.001, "excess": value, "excess_sd": 0.001}
            probe = {"width_disagreement": {"contiguous": s}, "source_collinearity": {"mean": 0.05}}
            runs.append(made_up(f"d{width}-attention_residuals-s{seed}", 3.0) | {"weights": {"probe": probe}})
    page = report.build(results(*runs))["replication.md"]
    assert f"| one query disagrees more in a wider model | 0.235 / 0.281 | {verdict} | |" in page
    assert "beyond chance | 0.235 / 0.281 | agrees: 0.190 / 0.210 | agrees: " in page


def test_a_run_that_diverged_stands_in_the_finding(results):
    broken = made_up("d512-attention_residuals-s0", 3.0) | {"diverged": "the loss is nan at step 900"}
    page = report.build(results(broken, made_up("d512-mhar-s0", 2.9)))["replication.md"]
    finding = page.split("## Finding")[1].split("## Losses")[0]
    assert "`d512-attention_residuals-s0` diverged and is in no comparison: the loss is nan at step 900" in finding


def test_a_healthy_baseline_and_one_that_is_not(results):
    runs = [made_up("d512-additive-s0", 3.0), made_up("d512-additive-lr-x0.5-s0", 3.1)]
    good = report.build(results(*runs, made_up("d512-additive-lr-x2-s0", 3.05)))["replication.md"]
    assert "not beaten by half or twice" in good
    bad = report.build(results(*runs, made_up("d512-additive-lr-x2-s0", 2.95)))["replication.md"]
    assert "beaten by twice of it" in bad


def test_the_u_in_heads(results):
    levels = {"d512-attention_residuals-s0": 3.0, "d512-mhar-h2-s0": 2.95, "d512-mhar-s0": 2.9, "d512-mhar-h8-s0": 2.92}
    built = report.build(results(*(made_up(name, level) for name, level in levels.items())))
    assert "Lowest at H = 4, inside the range" in built["replication.md"]
    assert "| the loss is U-shaped in H | flat at 4 to 8 | not run | |" in built["replication.md"]  # not at H = 16 yet
    assert "replication_heads.svg" in built


def test_a_pair_of_other_batches_is_refused(results):
    other = {**BATCHES, "train": "other tokens"}
    found = results(made_up("d512-additive-s0", 3.0), made_up("d512-mhar-s0", 2.9, batches=other))
    with pytest.raises(UserError, match="the tokens of their batches differ"):
        compared([found["d512-additive-s0"]], [found["d512-mhar-s0"]])
    with pytest.raises(UserError, match="not paired"):
        report.build(found)


def test_compare_refuses_a_pair_that_saw_other_text(results, tmp_path, capsys):
    found = results(made_up("d512-additive-s0", 3.0), made_up("d512-mhar-s0", 2.9, fingerprint="another text"))
    write_run_directories(found.values(), tmp_path / "runs")
    runs = [str(tmp_path / "runs" / name) for name in found]
    assert compare.main([*runs, "--require-paired"]) == 2
    assert "they saw different text" in capsys.readouterr().err


def test_compare_accepts_a_pair_and_agrees_with_the_page(results, tmp_path, capsys):
    found = results(made_up("d512-additive-s0", 3.0), made_up("d512-mhar-s0", 2.9))
    write_run_directories(found.values(), tmp_path / "runs")
    assert compare.main([*(str(tmp_path / "runs" / name) for name in found), "--require-paired"]) == 0
    assert "paired: -0.1000" in capsys.readouterr().out


def test_a_file_of_no_run_is_refused(tmp_path: pathlib.Path):
    (tmp_path / "d512-unknown-s0.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="of no run of the plan"):
        read_results(tmp_path)


def test_a_chart_puts_points_where_they_belong():
    drawn = svg("t", [Line("a", [0.0, 10.0], [1.0, 3.0], 1)], x="x", y="y", limits=(1.0, 3.0), width=300, height=200)
    # The area goes from 58 to 110 across and from 156 up to 34.
    assert 'points="58.0,156.0 110.0,34.0"' in drawn
