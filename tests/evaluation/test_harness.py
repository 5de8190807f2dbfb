"""The lm-evaluation-harness over a tiny model and local tasks: exactly what a direct loop computes."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from inference_helpers import placed, tiny_model
from mhar_jax.data.tokenizers import ByteTokenizer
from mhar_jax.errors import UserError
from model_helpers import jit

pytest.importorskip("lm_eval", reason="the harness is the extra `eval`")
pytestmark = pytest.mark.filterwarnings("default")  # of the harness and what it imports
BYTES = ByteTokenizer()
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "far", "away"]


def task(name, data, **fields):
    lines = [f"task: {name}", "dataset_path: json", "dataset_kwargs:", "  data_files:", f"    test: {data}"]
    lines += ["test_split: test", *(f"{key}: {value}" for key, value in fields.items())]
    return "\n".join([*lines, "metadata:", "  version: 1.0", ""])


def metrics(*names, **aggregations):
    rows = [{"metric": n, "aggregation": aggregations.get(n, "mean"), "higher_is_better": True} for n in names]
    return json.dumps(rows)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Items and task files of each kind of request."""
    root = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(3)
    say = lambda n: " ".join(rng.choice(WORDS, n))
    last = [{"context": say(1 + i % 6), "target": " " + say(1)} for i in range(12)]
    choice = [{"q": say(4), "choices": [say(1 + j) for j in range(4)], "label": int(i % 4)} for i in range(12)]
    pages = [{"page": say(40)}, {"page": "short"}, {"page": say(25) + "\n" + say(3)}]
    prompts = [{"q": say(2 + i % 3), "a": "x"} for i in range(5)]
    for name, rows in (("last", last), ("choice", choice), ("pages", pages), ("prompts", prompts)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = lambda name: root / f"{name}.jsonl"
    files = {
        "tiny_last": task(
            "tiny_last",
            data("last"),
            output_type="loglikelihood",
            doc_to_text='"{{context}}"',
            doc_to_target='"{{target}}"',
            metric_list=metrics("acc", "perplexity", perplexity="perplexity"),
        ),
        "tiny_choice": task(
            "tiny_choice",
            data("choice"),
            output_type="multiple_choice",
            doc_to_text='"{{q}}"',
            doc_to_target='"{{label}}"',
            doc_to_choice='"choices"',
            metric_list=metrics("acc", "acc_norm"),
        ),
        "tiny_pages": task(
            "tiny_pages",
            data("pages"),
            output_type="loglikelihood_rolling",
            doc_to_text='""',
            doc_to_target='"{{page}}"',
            metric_list=metrics(
                "word_perplexity",
                "byte_perplexity",
                "bits_per_byte",
                word_perplexity="weighted_perplexity",
                byte_perplexity="weighted_perplexity",
                bits_per_byte="bits_per_byte",
            ),
        ),
        "tiny_prompts": task(
            "tiny_prompts",
            data("prompts"),
            output_type="generate_until",
            doc_to_text='"{{q}}"',
            doc_to_target='"{{a}}"',
            generation_kwargs=json.dumps({"until": ["e", "\n\n"], "max_gen_toks": 9}),
            metric_list=metrics("exact_match"),
        ),
    }
    for name, text in files.items():
        (root / f"{name}.yaml").write_text(text)
    return root


@pytest.fixture(scope="module")
def found(tasks):
    """The harness' results, and the model that gave them."""
    from mhar_jax.evaluation.harness import HarnessModel, run_tasks

    model = HarnessModel(placed(tiny_model()), BYTES, batch_tokens=256)
    names = ["tiny_last", "tiny_choice", "tiny_pages", "tiny_prompts"]
    return run_tasks(model, names, task_directory=str(tasks), offline=True), model


@pytest.fixture(scope="module")
def logits():
    """Of one row by a whole forward pass."""
    graph, state = nnx.split(tiny_model())
    run = jit(lambda state, tokens: nnx.merge(graph, state)(tokens))

    def of(row):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(row)] = row
        return np.asarray(run(state, jnp.asarray(padded)))[0, : len(row)]

    return of


def rows_of(tasks, name):
    return [json.loads(line) for line in (tasks / f"{name}.jsonl").read_text().splitlines()]


def direct(logits, context, continuation):
    """Sum of log-probabilities, and whether greedy decoding gives the continuation."""
    ids = [*context.encode(), *continuation.encode()][-65:]
    count = len(continuation.encode())
    log_p = np.asarray(jax.nn.log_softmax(logits(ids[:-1])), np.float64)[-count:]
    return log_p[np.arange(count), ids[-count:]].sum(), bool((log_p.argmax(-1) == ids[-count:]).all())


def test_log_likelihoods(tasks, found, logits):
    results, _ = found
    expected = [direct(logits, r["context"], r["target"]) for r in rows_of(tasks, "last")]
    got = results["results"]["tiny_last"]
    assert got["acc,none"] == np.mean([greedy for _, greedy in expected])
    assert got["perplexity,none"] == pytest.approx(math.exp(-np.mean([p for p, _ in expected])), rel=1e-5)
    for sample, (p, greedy) in zip(results["samples"]["tiny_last"], expected, strict=True):
        (answer,) = sample["filtered_resps"]
        assert answer[0] == pytest.approx(p, rel=1e-5)  # float32 on both sides
        assert answer[1] == greedy


def test_multiple_choice(tasks, found, logits):
    results, _ = found
    acc, acc_norm = [], []
    for row in rows_of(tasks, "choice"):
        p = np.array([direct(logits, row["q"], " " + c)[0] for c in row["choices"]])
        acc.append(p.argmax() == row["label"])
        acc_norm.append((p / [len(c) for c in row["choices"]]).argmax() == row["label"])
    got = results["results"]["tiny_choice"]
    assert got["acc,none"] == np.mean(acc)
    assert got["acc_norm,none"] == np.mean(acc_norm)
    assert 0 < np.mean(acc) < 1  # so that agreement says something


def test_rolling_agrees_with_evaluate(tasks, found):
    """The same windows, the same program: to 1e-6, as the harness' own windows say it must."""
    from mhar_jax.evaluation.scoring import Scorer
    from mhar_jax.evaluation.text import score_documents

    results, _ = found
    texts = [row["page"] for row in rows_of(tasks, "pages")]
    report = score_documents(Scorer(placed(tiny_model())), BYTES, texts, window=64, stride=64)
    assert max(len(t.encode()) for t in texts) > 64  # more than one window
    got = results["results"]["tiny_pages"]
    assert got["bits_per_byte,none"] == pytest.approx(report.bits_per_byte, rel=1e-6)
    assert got["byte_perplexity,none"] == pytest.approx(report.byte_perplexity, rel=1e-6)
    assert got["word_perplexity,none"] == pytest.approx(report.word_perplexity, rel=1e-6)


def test_generation(tasks, found, logits):
    """Greedy until a stop string, the end of text or nine tokens."""
    results, _ = found
    answers = []
    for row in rows_of(tasks, "prompts"):
        ids, text = list(row["q"].encode()), b""
        while len(text) < 9 and b"e" not in text:
            token = int(logits(ids)[-1].argmax())
            if token == BYTES.eos_id:
                break
            ids.append(token)
            text += bytes([token])
        answers.append(text.split(b"e")[0].decode(errors="replace"))
    assert [s["filtered_resps"][0] for s in results["samples"]["tiny_prompts"]] == answers
    assert any(answers)


def test_no_compilation_per_length(found):
    _, model = found
    traces = model.scorer.placed.traces
    assert traces["score"] <= 5  # 16, 24, 32, 48, 64
    assert traces["prefill"] <= 2
    assert traces["decode"] <= 2


def test_requests_that_are_special(logits):
    from lm_eval.api.instance import Instance

    from mhar_jax.evaluation.harness import HarnessModel

    model = HarnessModel(placed(tiny_model()), BYTES, batch_tokens=256)
    ask = lambda kind, *args: [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(args)]
    long = "a truth" * 30
    pairs = [("", "no context"), (long, " ends"), ("trailing ", "space"), ("é", "ü"), ("same", "")]
    got = model.loglikelihood(ask("loglikelihood", *pairs), disable_tqdm=True)
    assert got[0] == (pytest.approx(prefixed(logits, "no context"), rel=1e-5), False)
    assert got[1][0] == pytest.approx(direct(logits, long, " ends")[0], rel=1e-5)
    assert got[2][0] == pytest.approx(direct(logits, "trailing", " space")[0], rel=1e-5)
    assert got[3][0] == pytest.approx(direct(logits, "é", "ü")[0], rel=1e-5)
    assert got[4] == (0.0, True)
    with pytest.raises(UserError, match="a continuation of 65 tokens does not fit the model's context of 64"):
        model.loglikelihood(ask("loglikelihood", ("a", "b" * 65)), disable_tqdm=True)
    assert model.loglikelihood_rolling(ask("loglikelihood_rolling", ("",)), disable_tqdm=True) == [0.0]
    options = {"until": "\n", "max_gen_toks": 3, "do_sample": False}
    texts = model.generate_until(ask("generate_until", ("", options), (long, options)), disable_tqdm=True)
    assert len(texts) == 2


def test_long_answers_leave_half_of_the_context_to_the_prompt(monkeypatch, caplog):
    """HumanEval asks for 1,024 tokens whatever the context; a prompt of one token would be no question."""
    from lm_eval.api.instance import Instance

    from mhar_jax.evaluation import harness
    from mhar_jax.generation.text import Completion

    model = harness.HarnessModel(placed(tiny_model()), BYTES, batch_tokens=256)
    read = []

    def complete(generator, tokenizer, prompts, **options):
        read.extend(prompts)
        return [Completion("", [], "length") for _ in prompts]

    monkeypatch.setattr(harness, "complete", complete)

    def lengths(most):
        read.clear()
        options = {"until": ["\n"], "max_gen_toks": most}
        asked = [Instance("generate_until", {}, ("x" * n + "end", options), 0) for n in (200, 1)]
        model.generate_until(asked, disable_tqdm=True)
        assert all(bytes(prompt.tolist()).endswith(b"end") for prompt in read)
        return [len(prompt) for prompt in read]

    assert lengths(1024) == [32, 4]
    assert "2 of 2 prompts leave less than max_gen_toks=1024 of the context of 64" in caplog.text
    assert lengths(40) == [32, 4]
    caplog.clear()
    assert lengths(10) == [54, 4]
    assert not caplog.text
    beams = {"until": ["\n"], "max_gen_toks": 3, "do_sample": False, "num_beams": 4}
    model.generate_until([Instance("generate_until", {}, ("x", beams), 0)], disable_tqdm=True)
    assert "generation settings without effect here: num_beams" in caplog.text


def test_a_request_that_is_there_several_times_is_drawn_anew_each_time():
    """HumanEval's pass@64 asks 64 times the same; batches begin no seeds again, and their size does not matter."""
    from lm_eval.api.instance import Instance

    from mhar_jax.evaluation.harness import HarnessModel

    options = {"until": ["\n"], "max_gen_toks": 6, "do_sample": True, "temperature": 2.0}
    said = []
    for batch_tokens in (64, 256):
        model = HarnessModel(placed(tiny_model()), BYTES, batch_tokens=batch_tokens)
        asked = [Instance("generate_until", {}, ("x", options), 0) for _ in range(16)]
        said.append(model.generate_until(asked, disable_tqdm=True))
    assert said[0] == said[1]
    assert len(set(said[0])) > 12


def prefixed(logits, text):
    ids = [BYTES.eos_id, *text.encode()]
    log_p = np.asarray(jax.nn.log_softmax(logits(ids[:-1])), np.float64)
    return log_p[np.arange(len(ids) - 1), ids[1:]].sum()


def test_unknown_tasks_and_directories(tasks):
    from mhar_jax.evaluation.harness import run_tasks

    with pytest.raises(UserError, match="there is no task 'nonsense'; the 4 known ones begin with tiny_choice"):
        run_tasks(None, ["nonsense"], task_directory=str(tasks), offline=True)
    with pytest.raises(UserError, match="task directory /nowhere does not exist"):
        run_tasks(None, ["tiny_last"], task_directory="/nowhere", offline=True)


@pytest.mark.parametrize(
    "error", ["ModuleNotFoundError", "AssertionError"]
)  # what minerva_math raises without sympy, and with another version of antlr4
def test_packages_that_a_task_lacks_are_one_sentence(tmp_path, error):
    from mhar_jax.evaluation.harness import HarnessModel, run_tasks

    model = HarnessModel(placed(tiny_model()), BYTES, batch_tokens=256)

    (tmp_path / "x.jsonl").write_text('{"q": "a"}\n')
    text = task("needy", tmp_path / "x.jsonl", output_type="generate_until", doc_to_text="!function utils.text")
    (tmp_path / "needy.yaml").write_text(text)
    (tmp_path / "utils.py").write_text(f'raise {error}("`sympy` and others are required")\n')
    with pytest.raises(UserError, match=r"needy needs .*extra `eval`: `sympy` and others are required"):
        run_tasks(model, ["needy"], task_directory=str(tmp_path), offline=True)


def test_a_stopped_run_goes_on(tasks, tmp_path):
    """Answers are kept as they come; asked again, the model computes only the rest."""
    from mhar_jax.evaluation.harness import HarnessModel, run_tasks

    model = HarnessModel(placed(tiny_model()), BYTES, batch_tokens=64)
    asked = []
    score = model.scorer.batches

    def stopping(sequences):
        asked.append(len(sequences))
        for number, batch in enumerate(score(sequences)):
            if len(asked) == 1 and number == 2:
                raise KeyboardInterrupt
            yield batch

    model.scorer.batches = stopping
    run = lambda: run_tasks(
        model, ["tiny_last"], task_directory=str(tasks), offline=True, cache=str(tmp_path / "answers")
    )
    with pytest.raises(KeyboardInterrupt):
        run()
    results = run()["results"]["tiny_last"]
    assert asked[0] == 12
    assert 0 < asked[1] < 12
    model.scorer.batches = score
    assert results == run_tasks(model, ["tiny_last"], task_directory=str(tasks), offline=True)["results"]["tiny_last"]


def test_another_model_does_not_get_kept_answers(tasks, tmp_path):
    """One name of a cache, two models that differ in one number: each gives its own figures."""
    from mhar_jax.evaluation.harness import HarnessModel, run_tasks

    def perplexity(params, cache):
        model = HarnessModel(placed(tiny_model()), BYTES, batch_tokens=256)
        model.scorer.placed.params = params
        results = run_tasks(model, ["tiny_last"], task_directory=str(tasks), offline=True, cache=cache)
        return results["results"]["tiny_last"]["perplexity,none"]

    params = placed(tiny_model()).params
    other = {**params, "final_norm": params["final_norm"].at[0].mul(-1.0)}
    cache = str(tmp_path / "answers")
    found = [perplexity(p, cache) for p in (params, other, params)]
    assert found[0] == found[2] != found[1]
    assert len(list(tmp_path.iterdir())) == 2
