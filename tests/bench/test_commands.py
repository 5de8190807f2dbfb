"""Each subcommand once, on the smallest models, and the mistakes users make."""

import dataclasses
import json
import math
import subprocess
import sys

import jax
import pytest

from mhar_jax.bench import __main__ as bench
from mhar_jax.bench import candidates, common, report, routing, shapes, timing, training
from mhar_jax.bench.traffic import PASSES
from mhar_jax.config import schema
from mhar_jax.models.counting import train_flops_per_token
from mhar_jax.training import hardware


def rows_of(path, kind: str) -> list[report.Row]:
    """Of a saved result, which has the schema and says that a CPU's times mean nothing."""
    saved = report.load(path / f"{kind}.json")
    assert saved.notes[0] == report.CPU_NOTE
    assert saved.environment["command"][:4] == ["python", "-m", "mhar_jax.bench", kind]
    assert saved.environment["wall_seconds"][kind] > 0
    assert saved.environment["git"] is None or len(saved.environment["git"]["revision"]) == 40
    assert (path / f"{kind}.md").read_text().count("\n|") == len(saved.rows) + 2
    return saved.rows


def test_routing(tmp_path, capsys):
    """A single site and a whole model."""
    arguments = ["--presets=tiny", "--implementations=xla", "--sources=2", "--layouts=stacked,blocked"]
    assert bench.main(["routing", *arguments, f"--out={tmp_path}"]) == 0
    assert "mean nothing at all" in capsys.readouterr().err
    rows = rows_of(tmp_path, "routing")
    assert [(row.of["what"], row.of["pass"]) for row in rows] == [(w, p) for w in ("site", "model") for p in PASSES]
    for row in rows:
        m = row.metrics
        assert (row.status, len(row.samples_ms), m["interpreted"]) == ("ok", 12, False)
        assert m["quartile_low_ms"] <= m["median_ms"] <= m["quartile_high_ms"]
        assert m["tb_per_s"] == pytest.approx(m["bytes"] / m["median_ms"] / 1e9)
        assert 0 < m["error"] < 1.5e-2
        assert m["peak_bytes"] > 0
        assert m["compile_s"] > 0
    # 16 tokens x 128 numbers x 2 bytes, of two sources and the mix
    assert rows[0].metrics["bytes"] == 3 * 4096
    for name in ("routing_sources.png", "routing_roofline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_outlives_an_interruption(tmp_path, monkeypatch):
    """A result is written after every part of it, and says that it is not complete."""

    def measure(name, shape, layout, chosen, settings):
        if layout == "separate":
            raise KeyboardInterrupt
        return [report.timed({"preset": name, "what": "site", "layout": layout}, [1.0])]

    monkeypatch.setattr("mhar_jax.bench.measure_site.measure_site", measure)
    arguments = ["--shapes=2x16x1", "--layouts=stacked,separate", f"--out={tmp_path}"]
    assert bench.main(["routing", *arguments]) == 130
    saved = report.load(tmp_path / "routing.json")
    assert [row.of["layout"] for row in saved.rows] == ["stacked"]
    assert saved.notes[-1] == "not complete: the command had not ended"
    assert [path.name for path in tmp_path.iterdir()] == ["routing.json"]


def test_all_writes_each_part_as_it_comes(tmp_path, monkeypatch):
    """An interruption within a part of `all` leaves what that part had measured."""

    def measure(name, shape, layout, chosen, settings):
        if shape.sources == 4:
            raise KeyboardInterrupt
        return [report.timed({"preset": name, "what": "site", "layout": layout}, [1.0])]

    monkeypatch.setattr("mhar_jax.bench.measure_site.measure_site", measure)
    monkeypatch.setattr("mhar_jax.bench.measure_model.model_jobs", lambda *of: [])
    assert bench.main(["all", f"--out={tmp_path}"]) == 130
    saved = report.load(tmp_path / "routing.json")
    assert len(saved.rows) == 1
    assert saved.notes[-1] == "not complete: the command had not ended"


@pytest.mark.parametrize("subcommand", ["routing", "training", "decode", "compile --topology=v5e:2x2", "all"])
def test_a_folder_that_cannot_be_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys, subcommand):
    monkeypatch.setattr("mhar_jax.bench.common.Clock.say", lambda self, text: pytest.fail(text))
    path = tmp_path / "file"
    path.touch()
    for out in (path, path / "folder"):
        assert bench.main([*subcommand.split(), f"--out={out}"]) == 2
        assert f"cannot be written to {out}" in capsys.readouterr().err


def test_a_shape_that_does_not_fit_is_left_out(tmp_path, monkeypatch):
    def measure(name, shape, layout, chosen, settings):
        if layout == "separate":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte.")
        return [report.timed({"preset": name, "what": "site", "layout": layout}, [1.0])]

    monkeypatch.setattr("mhar_jax.bench.measure_site.measure_site", measure)
    arguments = ["--shapes=2x16x1", "--layouts=separate,stacked", f"--out={tmp_path}"]
    monkeypatch.setattr("mhar_jax.bench.tables.show", lambda saved: None)
    monkeypatch.setattr("mhar_jax.bench.tables.write_markdown", lambda saved, folder: folder)
    monkeypatch.setattr("mhar_jax.bench.figures.draw", lambda saved, folder: [])
    assert bench.main(["routing", *arguments]) == 0
    saved = report.load(tmp_path / "routing.json")
    assert [row.of["layout"] for row in saved.rows] == ["stacked"]
    assert saved.notes[-1].startswith("left out, memory does not suffice: 2 sources of custom, separate")


def test_training(tmp_path):
    arguments = ["--steps=1", "--windows=3", "--set=model.num_layers=1", f"--out={tmp_path}"]
    assert bench.main(["training", "--implementations=xla", *arguments]) == 0
    rows = rows_of(tmp_path, "training")
    names = [(row.of["variant"], row.of["implementation"]) for row in rows]
    assert names == [("additive", None), ("mhar", "xla")]
    assert rows[0].metrics["ratio"] == 1
    for row in rows:
        m = row.metrics
        assert m["ratio"] == pytest.approx(rows[0].metrics["median_ms"] / m["median_ms"])
        assert m["ratio_interval"][0] <= m["ratio"] <= m["ratio_interval"][1]
        assert m["tokens_per_s"] == pytest.approx(8 * 32 / m["median_ms"] * 1e3)
        assert m["mfu"] is None  # nobody knows what this processor could do
        assert len(row.samples_ms) == 3
    assert "errors" not in rows[0].metrics
    assert rows[1].metrics["errors"].keys() == {"loss", "d_query", "d_norm_scale"}
    assert 0 < rows[1].metrics["error"] < 1e-3  # this model is float32
    assert rows[1].metrics["first_loss"] == pytest.approx(math.log(256), rel=0.05)  # untrained, of 256 tokens
    assert (tmp_path / "training_ratios.png").read_bytes().startswith(b"\x89PNG")


def test_utilisation_of_a_known_chip(monkeypatch):
    """A step of 10 ms on each of the 8 devices, of a chip of 1 TFLOP/s."""
    monkeypatch.setitem(hardware._PEAK, "cpu", 1e12)
    model = schema.ModelConfig(variant="additive", vocab_size=64, num_layers=1, d_model=16, num_heads=2, num_kv_heads=2)
    config = schema.Config(model=model, batch_size=8, seq_len=4)
    row = training._row({}, config, [10.0, 10.0], [5.0, 5.0], timing.Compiled(None, 1.0, 7), {"first_loss": 4.0})
    flops = train_flops_per_token(model, 4) * 4  # of one device: its sequence
    assert row.metrics["tflops"] == pytest.approx(flops / 0.01 / 1e12)
    assert row.metrics["mfu"] == pytest.approx(flops / 0.01 / 1e12)
    assert row.metrics["tokens_per_s"] == pytest.approx(32 / 0.01)
    assert (row.metrics["ratio"], row.metrics["peak_bytes"]) == (0.5, 7)


def test_a_wrong_first_loss():
    """Not finite, or not what another implementation of the variant got."""
    losses = {("mhar", "xla"): 10.0, ("mhar", "triton"): 10.01, ("delta", "xla"): 5.0, ("mhar", "reference"): 10.1}
    found = {pair[1]: training._problem(pair, losses) for pair in losses if pair[0] == "mhar"}
    assert "10.10000 by reference" in found["triton"]
    assert training._problem(("delta", "xla"), losses) is None
    assert training._problem(("mhar", "xla"), {("mhar", "xla"): float("nan")}) is not None


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
def test_decode(tmp_path, capsys):
    """Times and their ratio; and, from a trace, the groups of kernels that the time goes to."""
    arguments = ["--batches=2", "--steps=2", "--repeats=3", "--set=model.num_layers=1", f"--out={tmp_path}"]
    profiled = f"--profile={tmp_path / 'traces'}"
    assert bench.main(["decode", "--prefill=1x4", "--prompt=3", *arguments, profiled]) == 0
    rows = rows_of(tmp_path, "decode")
    named = [(row.of["kind"], row.of["batch"], row.of["variant"]) for row in rows]
    assert named == [(k, b, v) for k, b in (("prefill", 1), ("decode", 2)) for v in ("additive", "mhar")]
    for baseline, row in (rows[:2], rows[2:]):
        assert len(row.samples_ms) == 3
        assert row.metrics["ratio"] == pytest.approx(row.metrics["median_ms"] / baseline.metrics["median_ms"])
        own, base = (r.metrics["profile"]["groups_ms"] for r in (row, baseline))
        assert own["routing"] > 3 * base["routing"]
        for of in (row, baseline):
            found = of.metrics["profile"]
            assert sum(found["groups_ms"].values()) == pytest.approx(found["span_ms"])
            assert min(found["groups_ms"][name] for name in ("matmuls", "attention", "other")) > 0
            assert any(name.startswith("matmuls: ") for name in of.metrics["kernels_ms"])
    table = (tmp_path / "decode_profile.md").read_text()
    assert "| decode batch 2 | mhar | " in table
    assert table.count("| more than additive | ") == 2
    assert table.splitlines()[-1] in capsys.readouterr().out


def test_all_leaves_out_what_there_is_no_time_for(tmp_path):
    """A deadline that has passed: every part is there, empty, and says what it left out."""
    assert bench.main(["all", f"--out={tmp_path}", "--minutes=0.00001"]) == 0
    for kind in ("routing", "training", "decode"):
        saved = report.load(tmp_path / f"{kind}.json")
        assert saved.rows == []
        assert any("for want of time" in note for note in saved.notes)
        assert saved.environment["command"][3] == "all"
        seconds = saved.environment["wall_seconds"]
        assert list(seconds) == ["routing", "training", "decode", "all"]
        assert 0 <= max(seconds[part] for part in ("routing", "training", "decode")) <= seconds["all"] < 120
        assert f"all {seconds['all']:g}" in (tmp_path / f"{kind}.md").read_text()


def test_slow_compiles_are_left_out_on_gpus():
    """XLA is not asked for a whole model of many sites there, nor for blocks, and the notes say so."""
    model, xla = shapes.PRESETS["1b"].model, [candidates.find("xla")]
    runs, notes = routing.model_runs("1b", model, xla, "blocked", [None], "gpu", False, True)
    assert runs == []
    assert "xla blocked of 1b (--slow-compiles)" in notes[0]
    runs, notes = routing.model_runs("1b", model, xla, "blocked", [None], "gpu", True, True)
    assert [block for _, block in runs] == [8]
    assert notes == []
    small = dataclasses.replace(model, reads=model.reads[: routing.SLOW_SITES])
    for shape, count in ((model, 0), (small, 1)):
        assert len(routing.model_runs("x", shape, xla, "site_by_site", [None], "gpu", False, True)[0]) == count


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["flying"], "must be of routing, training, decode, compile, all, compare"),
        (["routing", "--implementations=cuda"], "--implementations must be of xla, triton"),
        (["routing", "--presets=7b"], "a preset must be of tiny"),
        (["routing", "--samples=3"], "--samples must be at least 10"),
        (["routing", "--layouts=sideways"], "--layouts must be of"),
        (["routing", "--sources=0"], "--sources must be positive integers"),
        (["routing", "--shapes=2x32x4", "--presets=tiny"], "without --presets and --sources"),
        (["routing", "--delta"], "--delta belongs to --shapes"),
        (["routing", "--module=no_such_module"], "cannot be imported"),
        (["training", "--variants=foo"], "--variants must be of"),
        (["training", "--steps=0"], "--steps must be at least 1"),
        (["training", "--implementations=cuda"], "--implementations must be of best, reference"),
        (["training", "--presets=mhar_100m", "--set=batch_size=3"], "multiple of the 8 devices"),
        (["decode", f"--profile={__file__}"], "--profile must be a directory, got the file"),
        (["decode", f"--profile={__file__}/trace"], "the trace cannot be written to"),
        (["decode", "--prefill=8"], "--prefill must be like 8x1024"),
        (["decode", f"--prefill={2**31}x16"], "--prefill must be like 8x1024"),
        (["decode", f"--prompt={2**31 - 1}"], "so long a context"),
        (["routing", "--shapes=2x16x1", f"--tokens={2**70}"], "--tokens must be at most 2147483647"),
        (["routing", f"--shapes=2x{2**40}x1"], "of 31 bits, with heads that divide D"),
        (["routing", f"--sources={2**31}"], "--sources must be positive integers separated by commas, of 31 bits"),
        (["decode", "--batches=none"], "--batches must be positive integers"),
        (["all", "--out=x", "--parts=some"], "--parts must be of routing"),
        (["all", "--out=x", "--minutes=0"], "--minutes must be positive"),
        (["all", "--out=x", "--minutes=nan"], "--minutes must be positive"),
        (["compile", "--topology=v5e:0x2"], "--topology must be like v5e:16x16"),
        (["compile", "--topology=v5e:-2x-2"], "--topology must be like v5e:16x16"),
        (["compile"], "--topology"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words, capsys):
    assert bench.main(arguments) == 2
    error = capsys.readouterr().err.removeprefix(report.CPU_NOTE + "\n")
    assert words in error
    assert error.count("\n") == 1


def test_help_needs_no_device(capsys):
    assert bench.main([]) == 0
    assert "routing   depth_route" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        bench.main(["routing", "--help"])
    assert "default: 12" in capsys.readouterr().out


def test_grain_is_not_needed():
    """The data pipeline is no part of a benchmark; machines with a chip may lack it."""
    modules = "routing, measure_model, measure_site, training, decode, tables, figures, everything"
    code = f"""
import sys
sys.modules["grain"] = None  # an import of it raises
from mhar_jax.bench import {modules}
import mhar_jax.inference, mhar_jax.models.counting, mhar_jax.training.step
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_and_clock():
    assert common.names("a, b", "x") == ["a", "b"]
    assert not common.Clock(0.0).over()
    assert common.Clock(0.0, 0.0).over()
    assert json.loads(json.dumps(report.environment(["routing"], "abc")))["git"]["revision"] == "abc"
