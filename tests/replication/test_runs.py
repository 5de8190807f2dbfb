"""Runs of the plan at toy size: the same batches for every variant, killed and continued, one JSON at the end."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mhar_jax.data import load_tokenizer, make_train_iterator
from mhar_jax.data.prepare import prepare
from mhar_jax.data.shards import ShardTokens, load_index
from mhar_jax.data.tokenizers import ByteTokenizer
from mhar_jax.errors import UserError
from results.replication import corpus, measure, run
from results.replication.plan import plan, planned
from results.replication.results import compared, read_results

TOY = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 8,
    "model.ffn_dim": 64,
    "model.context": 64,
    "model.compute_dtype": "float32",
    "seq_len": 64,
    "batch_size": 8,  # of eight simulated devices
    "steps": 12,
    "eval.every": 1,
    "eval.batches": 1,
    "optimizer.warmup_steps": 2,
    "log.every": 4,
    "data.path": "null",
    "data.held_out_path": "null",
    "data.tokenizer": "bytes",
    "data.eos_token": "null",
}
OVERRIDES = [f"{name}={value}" for name, value in TOY.items()]
ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> pathlib.Path:
    """Results of two variants at one seed."""
    directory = tmp_path_factory.mktemp("runs")
    for name in ("d512-hyper_connections-s0", "d512-attention_residuals-s0"):
        arguments = [name, str(directory / name), str(directory / f"{name}.json"), "--commit=abc", *OVERRIDES]
        assert measure.main(arguments) == 0
    return directory


def batches(name: str, count: int = 5) -> list[np.ndarray]:
    config = planned(name).config(OVERRIDES)
    iterator = make_train_iterator(config, load_tokenizer(config.data.tokenizer))
    found = [next(iterator)["tokens"] for _ in range(count)]
    iterator.close()
    return found


def test_variants_at_one_seed_see_the_same_batches_and_seeds_do_not():
    additive, mhar = batches("d512-additive-s0"), batches("d768-mhar-s0")
    np.testing.assert_array_equal(additive, mhar)
    assert not np.array_equal(additive, batches("d512-additive-s1"))
    digest = lambda name: measure.batches_digest(planned(name).config(OVERRIDES))
    assert digest("d512-additive-s0") == digest("d512-hyper_connections-s0")
    assert digest("d512-additive-s0")["train"] != digest("d512-additive-s1")["train"]


@pytest.mark.exhaustive
def test_results_are_paired_and_hold_what_the_weights_showed(out):
    results = read_results(out)
    hyper, single = results["d512-hyper_connections-s0"], results["d512-attention_residuals-s0"]
    (comparison,) = compared([hyper], [single])
    assert [d.reasons for d in comparison.differences] == [[]]
    assert len(single.run.evaluations) == 13
    assert single.values["config"]["run_dir"] == "runs/replication/d512-attention_residuals-s0"  # no path of a machine
    moved = hyper.values["weights"]["hyper_connections"]
    assert 0 < moved["mean_change"]["carry"] < moved["largest_change"]["carry"] < 1
    probe = single.values["weights"]["probe"]["width_disagreement"]["contiguous"]
    assert probe["trained"] > 0
    assert probe["null"] > 0
    weight = np.array(single.values["weights"]["routing"]["weight"], np.float64)[:, :, 0]
    np.testing.assert_allclose(np.nansum(weight, axis=1), 1, atol=1e-3)  # rounded to four digits
    assert sum(f.stat().st_size for f in out.glob("*.json")) < 100_000


def test_names_are_unique_and_every_config_is_valid():
    names = [each.name for each in plan()]
    assert len(names) == len(set(names))
    for each in plan():
        config = each.config()
        tokens = config.steps * config.batch_size * config.seq_len
        assert tokens >= (100_000_000 if each.stage != "pilot" else 25_000_000)
        assert config.steps % config.eval.every == 0
        assert config.steps // config.eval.every == 40  # the last eleven are the last quarter, as the paper's
    assert planned("d512-additive-lr-x0.5-s0").config().optimizer.peak_lr == pytest.approx(5e-4)


@pytest.fixture
def shards(tmp_path) -> pathlib.Path:
    data = tmp_path / "data"
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {i} of a text. " * (i % 7 + 1) for i in range(90)), encoding="utf-8")
    for split, count in corpus.SPLITS.items():
        prepare(path=str(text), out=str(data / split), tokenizer=ByteTokenizer(), shards=count)
    for name in corpus.OTHERS:
        (data / name).write_text("{}", encoding="utf-8")
    return data


def test_parts_give_the_same_documents(shards, tmp_path):
    corpus.pack(shards, tmp_path / "parts")
    corpus.unpack(tmp_path / "parts", tmp_path / "again", workers=2)
    for split in corpus.SPLITS:
        before, after = (ShardTokens(d / split, load_index(d / split)) for d in (shards, tmp_path / "again"))
        np.testing.assert_array_equal(before.lengths, after.lengths)
        for i in range(len(before.lengths)):
            np.testing.assert_array_equal(before.document(i), after.document(i))


def test_a_damaged_part_is_refused(shards, tmp_path):
    corpus.pack(shards, tmp_path / "parts")
    parts = sorted((tmp_path / "parts").glob("train.tokens*"))
    parts[3].write_bytes(parts[4].read_bytes())  # sound by itself, and not the right one
    with pytest.raises(UserError, match="not the one that was packed"):
        corpus.unpack(tmp_path / "parts", tmp_path / "again", workers=1)


def test_documents_are_runs_of_paragraphs():
    paragraphs = ["a" * 3000, "b" * 3000, "c" * 3000, "d"]
    assert [len(d) for d in corpus.documents(paragraphs)] == [9004, 1]


@pytest.fixture
def options(tmp_path) -> run.Options:
    return run.Options(
        out=tmp_path / "out",
        work=tmp_path / "work",
        seconds=None,
        devices=(None,),
        fitting=False,
        keep_weights=False,
        commit=None,
        overrides=tuple(OVERRIDES),
    )


def test_a_finished_run_is_skipped_and_one_of_another_config_refused(out, options):
    name = "d512-hyper_connections-s0"
    options.out.mkdir()
    file = options.out / f"{name}.json"
    file.write_bytes((out / f"{name}.json").read_bytes())
    said: list[str] = []
    assert run.run_all([planned(name)], options, say=said.append) == 0
    assert said == ["1 runs, 1 of them done", "1 of 1 runs done"]
    values = json.loads(file.read_text(encoding="utf-8"))
    values["config"]["optimizer"]["peak_lr"] *= 2
    file.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError, match="is of another config than the plan's d512-hyper_connections-s0"):
        run.run_all([planned(name)], options)


def test_nothing_is_begun_that_cannot_end(options):
    late = dataclasses.replace(options, seconds=100.0, fitting=True)
    said: list[str] = []
    run.run_all([planned("d768-mhar-s0")], late, say=said.append)
    assert said == ["1 runs, 0 of them done", "0 of 1 runs done; next: d768-mhar-s0"]


def test_what_is_left_of_a_run_is_expected_to_take_less(options):
    this = planned("d512-mhar-s0")
    whole = run.expected(this, options)
    assert whole > this.overhead
    directory = options.work / this.name
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"step": 9, "loss": 1.0}\n', encoding="utf-8")
    left = run.expected(this, options) - this.overhead
    assert left == pytest.approx((whole - this.overhead) / 4)  # 9 of 12 steps are done


def test_a_run_is_expected_to_be_as_fast_as_the_last_like_it(options, monkeypatch):
    monkeypatch.setattr(run, "RUNS", options.out)
    plain = dataclasses.replace(options, overrides=())
    this = planned("d768-mhar-s1")
    guess = run.expected(this, plain)
    assert guess == this.seconds()
    options.out.mkdir()
    for name, speed in (
        ("d768-mhar-a", 1.0),
        ("d768-mhar-s0", 1e6),
        ("d768-mhar_headwise-s0", 2.0),
        ("d512-mhar-s0", 3.0),
    ):
        values = {"tokens_per_s": {"median": speed}}
        (options.out / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    # 6,400 steps, and 41 evaluations of 20 batches at three times the speed, of 16,384 tokens
    assert run.expected(this, plain) == pytest.approx(this.overhead + (6400 + 41 * 20 / 3) * 16384 / 1e6)
    assert planned("d512-additive-s0").seconds(tokens_per_s=742e3) == pytest.approx(177, abs=1)


@pytest.mark.slow
def test_killed_and_stopped_runs_end_like_one_that_ran_through(tmp_path):
    def command(name: str) -> list[str]:
        given = ["d512-mhar-s0", str(tmp_path / name), str(tmp_path / f"{name}.json")]
        return [sys.executable, "-m", "results.replication.measure", *given, "steps=400", "eval.every=100", *rest]

    rest = [o for o in OVERRIDES if not o.startswith(("steps", "eval.every"))] + ["checkpoint.every=50"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}

    def start(name: str) -> subprocess.Popen:
        return subprocess.Popen(command(name), env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)

    assert start("whole").wait() == 0
    for signalled, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 3)):
        process = start("broken")
        saved = lambda: len(list((tmp_path / "broken" / "checkpoints").glob("[0-9]*")))
        before = saved()
        while saved() <= before and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signalled)
        assert process.wait() == code
    assert start("broken").wait() == 0
    whole, broken = (json.loads((tmp_path / f"{n}.json").read_text())["evaluations"] for n in ("whole", "broken"))
    assert whole == broken
