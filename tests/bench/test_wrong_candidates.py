"""A candidate that is wrong is shown as wrong and gets no time; one that is right does."""

import jax
import planted  # registers its candidates
import pytest

from mhar_jax.bench import __main__ as bench
from mhar_jax.bench import candidates, check, measure, report
from mhar_jax.bench.measure_model import measure_model
from mhar_jax.bench.measure_site import measure_site
from mhar_jax.bench.shapes import ModelShape, SiteShape
from mhar_jax.models import decoder

SETTINGS = measure.Settings(samples=10, threads=1, copy=1.0)
SITE = SiteShape(3, 32, 4, 24)
decoder_stack = decoder.depth_stack


@pytest.fixture(scope="module")
def site_rows():
    """Of every planted candidate and of xla, one site, forward and forward + backward."""
    names = ("xla", "without_norm", "wrong_query_gradient", "one_token_off", "nowhere", "broken")
    rows = measure_site("planted", SITE, "stacked", [candidates.find(n) for n in names], SETTINGS)
    return {(row.of["implementation"], row.of["pass"]): row for row in rows}


def test_a_right_one_is_timed(site_rows):
    for which in ("forward", "forward_backward"):
        row = site_rows["xla", which]
        assert row.status == "ok"
        assert len(row.samples_ms) == 10
        assert 0 < row.metrics["error"] < 3e-3


def test_a_wrong_value(site_rows):
    for which in ("forward", "forward_backward"):
        row = site_rows["without_norm", which]
        assert (row.status, row.samples_ms) == ("wrong", [])
        assert "out is off by" in row.reason
        assert row.metrics["errors"]["out"] > 1e-2
        assert "median_ms" not in row.metrics


def test_a_wrong_gradient_spoils_only_the_pass_that_has_it(site_rows):
    assert site_rows["wrong_query_gradient", "forward"].status == "ok"
    row = site_rows["wrong_query_gradient", "forward_backward"]
    assert (row.status, row.samples_ms) == ("wrong", [])
    assert row.metrics["errors"]["d_query"] == pytest.approx(0.05, rel=0.01)
    assert row.metrics["errors"]["d_sources"] < 3e-3
    assert "d_query" in row.reason
    assert "d_sources" not in row.reason


def test_not_a_number_in_the_last_token(site_rows):
    row = site_rows["one_token_off", "forward"]
    errors = {"out": float("inf"), "tokens among each other": float("inf")}
    assert (row.status, row.samples_ms, row.metrics["errors"]) == ("wrong", [], errors)


def test_what_cannot_run(site_rows):
    assert site_rows["nowhere", "forward"].status == "unsupported"
    assert site_rows["nowhere", "forward"].reason == "this chip does not exist"
    assert site_rows["broken", "forward"].status == "failed"
    assert "TypeError" in site_rows["broken", "forward"].reason


def test_models():
    """Whole models in both forms: values are right, and a wrong gradient of the sites' op is seen in the whole."""
    wrong = [(candidates.find("wrong_query_gradient"), None)]
    for shape in (ModelShape((1, 2, 3), 32, 4, 24), ModelShape((1, 1, 2), 32, 4, 24, delta=True)):
        values, both = measure_model("planted", shape, wrong, SETTINGS)
        assert (values.status, len(values.samples_ms)) == ("ok", 10)
        assert (both.status, both.samples_ms) == ("wrong", [])
        assert "d_queries" in both.reason
        others = [e for name, e in both.metrics["errors"].items() if "d_queries" not in name]
        assert max(others) < 1.5e-2


def test_lazy_past_a_few_sources():
    """Right at a site of few sources and in a short stack; the whole model is what is timed, and what is checked.

    What is off in values is off by tens of percent; a gradient that is missing at late sites, by all of it there.
    """
    few = ModelShape(tuple(range(1, planted.FEW + 1)), 32, 4, 24)
    many = ModelShape(tuple(range(1, 6)), 32, 4, 24)
    find = candidates.find
    runs = [(find("lazy_route"), None), (find("stack_last_two"), 4), (find("stack_deaf_route"), 4)]
    for row in measure_model("planted", few, runs, SETTINGS):
        assert row.status == "ok", row.reason
    for row in measure_model("planted", many, runs, SETTINGS):
        if (row.of["implementation"], row.of["pass"]) == ("stack_deaf_route", "forward"):
            assert row.status == "ok", row.reason
            continue
        assert (row.status, row.samples_ms) == ("wrong", [])
        if row.of["implementation"] == "stack_deaf_route":
            assert row.metrics["errors"]["d_queries at one site"] == pytest.approx(1)
            assert row.metrics["errors"]["out"] < 1e-2
        else:
            assert row.metrics["errors"]["out"] > 0.1


def test_one_token_of_many():
    """Neither the first nor the last, and no more than a 24th of the result: it is held against one that it repeats."""
    right = planted.right
    for token in range(24):
        spoil = lambda *given, token=token, **rest: right(*given, **rest).at[token].multiply(1.1)
        candidate = candidates.Candidate("one_token", spoil)
        if token in check.Repeats.of(24).first:
            continue
        row, _ = measure_site("planted", SITE, "stacked", [candidate], SETTINGS)
        assert row.status == "wrong"
        assert row.metrics["errors"]["out"] < 4e-3
        assert row.metrics["errors"]["tokens among each other"] == pytest.approx(0.1, rel=0.1)
        break


def ignoring(function):
    """A stack whose queries are lost on the way in (`zeros_like`) or on the way back (`stop_gradient`)."""
    return lambda sublayers, params, x, queries, *rest, implementation, **more: decoder_stack(
        sublayers,
        params,
        x,
        function(queries) if implementation == "xla" else queries,
        *rest,
        implementation=implementation,
        **more,
    )


@pytest.mark.parametrize(
    ("lost", "loss_is_off"),
    [(jax.numpy.zeros_like, True), (jax.lax.stop_gradient, False)],
    ids=["ignored", "no gradient"],
)
def test_training_with_a_backend_that_ignores_queries(lost, loss_is_off, monkeypatch, tmp_path, capsys):
    """Queries start at zero, so that its first loss is right, and nothing is there to compare it with."""
    monkeypatch.setattr(decoder, "depth_stack", ignoring(lost))
    options = ["--implementations=xla", "--variants=mhar", "--steps=1", "--windows=1", "--set=model.num_layers=1"]
    assert bench.main(["training", *options, f"--out={tmp_path}"]) == 1
    assert "WRONG" in capsys.readouterr().out
    (row,) = report.load(tmp_path / "training.json").rows
    assert (row.status, row.samples_ms, row.metrics.get("median_ms")) == ("wrong", [], None)
    assert "d_query is off by" in row.reason
    errors = row.metrics["errors"]
    assert errors["d_query"] == pytest.approx(1, abs=1e-6)
    assert (errors["loss"] > 1e-4, errors["loss"] < 1e-6) == (loss_is_off, not loss_is_off)


def test_on_the_command_line(tmp_path, capsys):
    """Beside a right one, which is interpreted here and timed once."""
    arguments = ["--implementations=without_norm,triton", "--module=planted", "--shapes=2x32x4", "--tokens=8"]
    assert bench.main(["routing", *arguments, f"--out={tmp_path}"]) == 1
    assert "WRONG" in capsys.readouterr().out
    saved = report.load(tmp_path / "routing.json")
    assert [row.status for row in saved.rows] == ["wrong", "wrong", "ok", "ok"]
    assert [len(row.samples_ms) for row in saved.rows] == [0, 0, 1, 1]
    assert saved.rows[2].metrics["interpreted"]
    assert "WRONG" in (tmp_path / "routing.md").read_text()
