"""Runs side by side: the table, what counts as paired, seeds, scales, items."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from mhar_jax.compare import main
from mhar_jax.config.load import to_yaml
from mhar_jax.config.schema import Config, DataConfig, EvalConfig, ModelConfig, OptimizerConfig
from mhar_jax.evaluation.items import Item, Results, Weighted, items_of_harness, read_results, write_results
from mhar_jax.evaluation.runs import compare_runs, read_run, reasons_against_pairing, what_is_compared

STEPS = 1300
LOSSES = np.linspace(4.0, 3.0, 14)  # evaluations at 0, 100, ..., 1300


def config(variant="additive", *, seed=42, peak_lr=1e-3, layers=2, **changes):
    model = ModelConfig(variant=variant, vocab_size=256, num_layers=layers, d_model=64, num_heads=4, num_kv_heads=2)
    fields = {"seed": seed, "steps": STEPS, "batch_size": 4, "seq_len": 32, "model": model}
    return Config(**(fields | {"optimizer": OptimizerConfig(peak_lr=peak_lr), "eval": EvalConfig(every=100)} | changes))


def write_run(path, config, losses=LOSSES, *, fingerprint="text-1", tokens=4096, every=100):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(config))
    lines = [{"step": 10, "loss": 5.0}]
    lines += [{"step": i * every, "val_loss": float(x), "val_tokens": tokens} for i, x in enumerate(losses)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if fingerprint is not None:
        (path / "data.json").write_text(json.dumps({"source": "a text", "fingerprint": fingerprint}))
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for seed, shift in ((1, -0.069), (2, -0.071), (3, -0.073)):
        noise = np.random.default_rng(seed).normal(0, 0.01, 14)  # a harder batch is harder for both
        write_run(root / f"additive-{seed}", config(seed=seed), LOSSES + noise)
        write_run(root / f"mhar-{seed}", config("mhar", seed=seed, peak_lr=5e-4), LOSSES + noise + shift)
    return root


def test_table_of_paired_runs_over_seeds(runs, capsys):
    paths = [str(runs / f"{name}-{seed}") for name in ("additive", "mhar") for seed in (1, 2, 3)]
    assert main([*paths, "--require-paired"]) == 0
    out = capsys.readouterr().out
    tail = np.mean((LOSSES + np.random.default_rng(1).normal(0, 0.01, 14))[-11:])
    assert f"{tail:.4f}" in out
    assert "D - A   paired: -0.0690 ± 0.0000 from one evaluation to another" in out
    assert "compared: model.variant additive | mhar; optimizer.peak_lr 0.001 | 0.0005" in out
    assert "-0.0710 ± 0.0020 over 3 seeds (mean ± standard deviation)" in out
    assert "NOT PAIRED" not in out


def test_one_seed_is_said_to_be_one(runs, capsys):
    assert main([str(runs / "additive-1"), str(runs / "mhar-1")]) == 0
    assert "one seed: how far another seed would move this is not known" in capsys.readouterr().out


def test_seeds_of_one_method_are_no_pair(runs, capsys):
    paths = [str(runs / f"additive-{seed}") for seed in (1, 2)]
    assert main(paths) == 0
    assert "NOT PAIRED: the runs are of one method with different seeds" in capsys.readouterr().out
    assert main([*paths, "--require-paired"]) == 2
    assert "error: not paired: the runs are of one method" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seed": 7}, "seed is 42 and 7"),
        ({"batch_size": 8}, "batch_size is 4 and 8"),
        ({"seq_len": 16}, "seq_len is 32 and 16"),
        ({"steps": 1200}, "steps is 1300 and 1200"),
        ({"optimizer": OptimizerConfig(warmup_steps=10)}, "optimizer.warmup_steps is 1000 and 10"),
        ({"optimizer": OptimizerConfig(schedule="wsd")}, "optimizer.schedule is 'cosine' and 'wsd'"),
        ({"data": DataConfig(shuffle=False)}, "data.shuffle is True and False"),
        ({"eval": EvalConfig(every=100, batches=4)}, "eval.batches is 16 and 4"),
        ({"fingerprint": "text-2"}, r"they saw different text \(fingerprints text-1 and text-2\)"),
        ({"tokens": 2048}, "their evaluations read different numbers of tokens"),
        ({"every": 99}, "they were evaluated at different steps"),
        ({"losses": LOSSES[:-1]}, "ends at step 1200 of 1300"),
        ({"fingerprint": None}, "has no readable data.json, so nothing says which text it saw"),
    ],
)
def test_runs_that_are_not_paired(tmp_path, capsys, change, reason):
    changes = dict(change)
    how = {k: changes.pop(k) for k in ("fingerprint", "tokens", "every", "losses") if k in changes}
    a, b = write_run(tmp_path / "a", config()), write_run(tmp_path / "b", config("mhar", **changes), **how)
    found = reasons_against_pairing(read_run(a), read_run(b))
    assert any(re.search(reason, r) for r in found), found
    assert main([a, b]) == 0
    out = capsys.readouterr().out
    assert "NOT PAIRED" in out
    assert "over 1 seeds" not in out
    assert main([a, b, "--require-paired"]) == 2
    assert "not paired" in capsys.readouterr().err


def test_what_changes_no_batch_does_not_matter(tmp_path):
    a = config()
    b = dataclasses.replace(
        a, run_dir="elsewhere", data=DataConfig(workers=2, prefetch=9), log=dataclasses.replace(a.log, every=3)
    )
    b = dataclasses.replace(b, model=dataclasses.replace(b.model, routing_heads=2, remat="layer"))
    first, second = read_run(write_run(tmp_path / "a", a)), read_run(write_run(tmp_path / "b", b))
    assert reasons_against_pairing(first, second) == []
    assert what_is_compared(first, second) == "model.remat none | layer; model.routing_heads None | 2"
    assert len(compare_runs([first, second])) == 1


def test_gain_over_scales(tmp_path, capsys):
    paths = []
    for layers, base in ((1, 3.6), (2, 3.3), (4, 3.1)):
        for variant, shift in (("additive", 0.0), ("mhar", -0.05)):
            run = config(variant, layers=layers)
            paths.append(write_run(tmp_path / f"{variant}-{layers}", run, np.full(14, base + shift)))
    assert main([*paths, "--gain", "--sigma", "0.001"]) == 0
    out = capsys.readouterr().out
    assert "mhar over additive: compute-equivalent gain" in out
    assert "a ladder of fixed steps" in out
    assert "three numbers fitted to three points" in out


def results(metrics, *, task="quiz", variant="additive", window=64):
    items = [Item(task, i, f"question {i}", m) for i, m in enumerate(metrics)]
    return Results("somewhere", variant, {"window": window, "stride": 64}, {}, items)


def test_items_with_the_papers_counts(tmp_path, capsys):
    """GSM8K by PAPER.md: 1,319 questions, 123 that only MHAR got right and 81 that only the control did."""
    control = [1.0] * 81 + [0.0] * 123 + [1.0] * 539 + [0.0] * 576
    mhar = [0.0] * 81 + [1.0] * 123 + [1.0] * 539 + [0.0] * 576
    for name, values in (("a", control), ("b", mhar)):
        write_results(results([{"acc": v, "nll": 2 + i % 7 - 0.1 * v} for i, v in enumerate(values)]), tmp_path / name)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "quiz acc: 0.4701 to 0.5019, 123 against 81 discordant items, exact McNemar p = 0.004" in out
    assert "quiz nll" in out
    assert "paired bootstraps over 1319 items" in out
    assert "2 tests" not in out  # the bootstrap has no p-value


def test_few_items_are_said_to_be_few(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        write_results(results([{"acc": float(v)} for v in rng.integers(0, 2, 200)]), tmp_path / name)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "not significant. 200 items" in out
    assert "to see 3 points takes 4," in out


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (results([{"acc": 1.0}] * 3), "1 items are in one of them only"),
        (results([{"acc": 1.0}] * 4, window=32), "window is 64 and 32"),
        (results([{"acc": 1.0}] * 4, task="other"), "8 items are in one of them only"),
        (results([]), "there are no items"),
    ],
)
def test_items_that_are_not_paired(tmp_path, capsys, other, reason):
    write_results(results([{"acc": 1.0}] * 4), tmp_path / "a")
    write_results(other, tmp_path / "b")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert f"NOT PAIRED: {reason}" in capsys.readouterr().out


def test_bad_input_is_one_sentence(tmp_path, runs, capsys):
    run, file = str(runs / "additive-1"), tmp_path / "x.json"
    file.write_text("{}")
    empty = write_run(tmp_path / "empty", config(), [])
    broken = tmp_path / "broken"
    write_run(broken, config())
    (broken / "metrics.jsonl").write_text('{"step": 1, "val_loss": 3}\n{"step": 2, "val_l')
    for arguments, message in (
        ([run], "give at least two runs"),
        ([run, run], "given twice"),
        ([run, str(tmp_path)], "is no run directory: it has no config.yaml"),
        ([run, str(file)], "either run directories or files of results"),
        ([str(file), str(runs / "mhar-1" / "config.yaml")], "holds no results of an evaluation"),
        ([run, empty], "has no evaluation in its metrics.jsonl"),
        ([run, str(broken)], "cannot be read at line 2"),
        ([run, str(runs / "additive-2"), "--gain"], "--gain needs runs of two variants"),
    ):
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_results_round_trip(tmp_path):
    before = results([{"acc": 1.0, "f1": 0.25}])
    write_results(before, tmp_path / "r.json")
    assert read_results(tmp_path / "r.json") == before


def test_filters_of_one_question_are_metrics_of_one_item(tmp_path, capsys):
    """GSM8K in the harness: every question twice, once a filter. Each filter has its own test over all questions."""

    def samples(strict, flexible):
        rows = [
            {"doc_id": i, "doc": {"q": i}, "filter": name, "metrics": ["exact_match"], "exact_match": value}
            for name, values in (("strict-match", strict), ("flexible-extract", flexible))
            for i, value in enumerate(values)
        ]
        return {"gsm8k": rows}

    for name, strict in (("a", [0] * 8 + [1] * 2), ("b", [1] * 10)):
        items = items_of_harness(samples(strict, [1] * 10))
        assert len(items) == 10
        assert items[0].metrics == {"exact_match,strict-match": strict[0], "exact_match,flexible-extract": 1}
        write_results(Results(name, "mhar", {}, {}, items), tmp_path / name)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "gsm8k exact_match,strict-match: 0.2000 to 1.0000, 8 against 0 discordant items" in out
    assert "gsm8k exact_match,flexible-extract: 1.0000 to 1.0000, 0 against 0 discordant items" in out


def test_perplexities_are_compared_by_their_log_likelihoods(tmp_path, capsys):
    """Metrics that the harness keeps as (log-likelihood, words) or (log-likelihood, bytes)."""
    for name, nats in (("a", 4.0), ("b", 3.75)):
        rows = [
            {
                "doc_id": i,
                "doc": i,
                "metrics": ["word_perplexity", "f1"],
                "word_perplexity": (-nats * n, n),
                "f1": (1, 0),
            }
            for i, n in enumerate((10, 20, 30, 40))
        ]
        items = items_of_harness({"wikitext": rows})
        assert items[1].metrics == {"word_perplexity": Weighted(-nats * 20, 20)}
        write_results(Results(name, "mhar", {}, {}, items), tmp_path / name)
        assert read_results(tmp_path / name).items == items
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "wikitext word_perplexity (nats a word): 4.0000 to 3.7500, difference -0.2500" in out
    write_results(results([{}] * 4), tmp_path / "c")
    write_results(results([{}] * 4, variant="mhar"), tmp_path / "d")
    assert main([str(tmp_path / "c"), str(tmp_path / "d")]) == 0
    assert "no metric that both have is kept item by item" in capsys.readouterr().out


def test_items_that_are_not_numbers_are_not_averaged(tmp_path, capsys):
    write_results(results([{"nll": 1.0}] * 3), tmp_path / "a")
    write_results(results([{"nll": 1.0}, {"nll": float("nan")}, {"nll": 2.0}]), tmp_path / "b")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "quiz nll: 1 values are not finite, for instance item 1 of somewhere, so there is no test" in out


def test_text_of_equal_size_is_told_apart(tmp_path):
    """By the content's part of the fingerprint; an older data.json is read, and said to lack it."""
    write = lambda name, fingerprint: read_run(write_run(tmp_path / name, config(), fingerprint=fingerprint))
    new, other, old = write("a", "x-bytes-256-c"), write("b", "x-bytes-256-d"), write("c", "x-bytes-256")
    (reason,) = reasons_against_pairing(new, other)
    assert reason.endswith(": their content)")
    (reason,) = reasons_against_pairing(new, old)
    assert "only one of them covers the content" in reason
    assert reasons_against_pairing(old, dataclasses.replace(old, path="d")) == []


def test_held_out_text_of_its_own_is_told_apart(tmp_path):
    held = config(data=DataConfig(held_out_path="held.txt"))
    run = read_run(write_run(tmp_path / "a", held))
    a, b = (dataclasses.replace(run, held_out_fingerprint=f) for f in ("one", "other"))
    assert reasons_against_pairing(run, run) == reasons_against_pairing(a, a) == []
    assert "they were evaluated on different text (fingerprints one and other)" in reasons_against_pairing(a, b)
    (reason,) = reasons_against_pairing(a, run)
    assert "does not say on which held-out text it was evaluated" in reason


def test_losses_that_are_not_finite_are_not_averaged(tmp_path, capsys):
    a = write_run(tmp_path / "a", config())
    b = write_run(tmp_path / "b", config("mhar"), [*LOSSES[:-2], float("nan"), float("nan")])
    assert main([a, b]) == 2
    assert capsys.readouterr().err == f"error: {b} cannot be averaged: its held-out loss at step 1200 is nan\n"


def test_of_repeated_lines_of_a_step_the_last_counts(tmp_path):
    run = read_run(write_run(tmp_path / "a", config()))
    path = write_run(tmp_path / "b", config(), [9.0] * 14)
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines(keepends=True)
        file.writelines(reversed(lines))
    assert read_run(path).evaluations == run.evaluations


def ladder(root, losses, **of_mhar):
    """Runs of both variants at three scales."""
    paths = []
    for layers, base in zip((1, 2, 4), losses, strict=True):
        for variant, changes in (("additive", {}), ("mhar", of_mhar)):
            run = config(variant, layers=layers, **changes)
            paths.append(write_run(root / f"{variant}-{layers}", run, np.full(14, base)))
    return paths


def test_gain_of_methods_that_differ_is_refused(tmp_path, capsys):
    paths = ladder(tmp_path, (3.6, 3.3, 3.1))
    other = config("mhar", layers=2, seed=1)
    other = dataclasses.replace(other, model=dataclasses.replace(other.model, routing_heads=2))
    assert main([*paths, write_run(tmp_path / "other", other), "--gain"]) == 2
    assert "(mhar) differ in model.routing_heads, None and 2; give runs of one method" in capsys.readouterr().err
    rate = write_run(tmp_path / "rate", config("mhar", layers=2, peak_lr=5e-4))
    assert main([*paths, rate, "--gain"]) == 2
    assert "differ in optimizer.peak_lr, 0.001 and 0.0005" in capsys.readouterr().err


def test_gain_warns_of_runs_that_are_not_paired(tmp_path, capsys):
    assert main([*ladder(tmp_path, (3.6, 3.3, 3.1), seed=7), "--gain", "--sigma", "0"]) == 0
    section = capsys.readouterr().out.partition("compute-equivalent gain")[2]
    assert section.count("are NOT PAIRED: seed is 42 and 7") == 3


def test_gain_over_a_baseline_that_does_not_fall(tmp_path, capsys):
    assert main([*ladder(tmp_path, (3.1, 3.3, 3.6)), "--gain"]) == 2
    error = capsys.readouterr().err
    assert "the baseline's loss does not fall with compute: 3.1000 at" in error
    assert error.count("\n") == 1


def test_results_that_no_evaluation_wrote(tmp_path, capsys):
    """Items twice, metrics that are no numbers, one item, no words: each is a sentence, none a test."""
    good = results([{"acc": 1.0}, {"acc": 0.0}])
    write_results(good, tmp_path / "good")

    def against(other):
        write_results(other, tmp_path / "other")
        code = main([str(tmp_path / "good"), str(tmp_path / "other")])
        found = capsys.readouterr()
        return code, found.out + found.err

    twice = dataclasses.replace(good, items=[*good.items, good.items[0]])
    code, said = against(twice)
    assert (code, "NOT PAIRED: 1 items of somewhere are there twice" in said) == (0, True)
    for metric in (None, "1", [1.0, 2.0, 3.0]):
        code, said = against(results([{"acc": 1.0}, {"acc": metric}]))
        assert code == 2
        assert f"the metric acc of an item must be a number or a pair of them, got {metric!r}" in said
        assert said.count("\n") == 1
    odd = [{"settings": value} for value in (None, [1], "x")]
    odd += [{"items": [dataclasses.replace(good.items[0], **d)]} for d in ({"task": None}, {"number": math.inf})]
    for damage in odd:
        code, said = against(dataclasses.replace(good, **damage))
        assert (code, "holds no results of an evaluation" in said, said.count("\n")) == (2, True, 1)
    for one, why in ((1.5, "there is one item"), (Weighted(-3.0, 2.0), "there is one item")):
        write_results(results([{"word_perplexity": one}]), tmp_path / "good")
        assert why in against(results([{"word_perplexity": one}]))[1]
    none = [{"word_perplexity": Weighted(-3.0, 0.0)}] * 3
    write_results(results(none), tmp_path / "good")
    assert "some items have no words or bytes, so there is no test" in against(results(none))[1]


def test_the_same_twice_by_other_names(tmp_path, runs, capsys):
    (tmp_path / "link").symlink_to(runs / "additive-1")
    write_results(results([{"acc": 1.0}]), tmp_path / "a.json")
    for pair in (
        (runs / "additive-1", tmp_path / "link"),
        (tmp_path / "a.json", tmp_path / "." / ".." / tmp_path.name / "a.json"),
    ):
        assert main([str(path) for path in pair]) == 2
        assert capsys.readouterr().err == "error: a run or file is given twice\n"


def test_other_prompts_are_other_questions():
    """The same document after other examples: the harness's hash of the prompt tells."""
    sample = {"doc_id": 0, "doc": {"q": "a"}, "metrics": ["acc"], "acc": 1.0}
    hashes = [items_of_harness({"t": [sample | {"prompt_hash": h}]})[0].content for h in ("x", "x", "y")]
    assert hashes[0] == hashes[1] != hashes[2]
