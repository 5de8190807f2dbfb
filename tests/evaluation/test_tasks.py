"""The harness's own task files of the nine tasks, unchanged, over made-up items in local JSON lines."""

import re
import shutil

import pytest

from inference_helpers import placed, tiny_model
from mhar_jax.data.tokenizers import ByteTokenizer
from mhar_jax.errors import UserError
from mhar_jax.evaluation.items import items_of_harness
from tests.evaluation import task_items

pytest.importorskip("lm_eval", reason="the harness is the extra `eval`")
pytestmark = pytest.mark.filterwarnings("default")  # of the harness and what it imports

MINERVA = "Let us see.\nFinal Answer: The final answer is ${}$. I hope it is correct."
# What a model says to each item, and what the harness must make of it.
GENERATED = {
    "gsm8k": (
        [" Add them.\n#### 1,234", " The answer is -2.", " 2 + 2 = 5\n#### 5"],
        {"exact_match,strict-match": 1 / 3, "exact_match,flexible-extract": 2 / 3},
    ),
    # 0.5 is a half to sympy, x + x is 2 x, and an interval that it cannot read counts where it is the same text.
    "minerva_math_algebra": (
        [MINERVA.format("0.5"), MINERVA.format("x + x"), MINERVA.format("(2,5)")],
        {"exact_match,none": 2 / 3, "math_verify,none": 2 / 3},
    ),
    "mbpp": (["def times(a):\n    return a * 2\n"] * 2, {"pass_at_1,none": 1 / 2}),
    "humaneval": (["    return 2 * a\n"] * 2, {"pass@1,create_test": 1 / 2}),
}
CHOSEN = {
    "hellaswag": {"acc,none": 1.0, "acc_norm,none": 1.0},
    "mmlu_anatomy": {"acc,none": 1.0},
    "gpqa_main_zeroshot": {"acc,none": 1.0, "acc_norm,none": 1.0},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return task_items.write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def model():
    from mhar_jax.evaluation.harness import HarnessModel

    return HarnessModel(placed(tiny_model()), ByteTokenizer(), batch_tokens=256)


def run(model, task, data, **options):
    from mhar_jax.evaluation.harness import run_tasks

    folder = str(task_items.task_files(task))
    return run_tasks(model, [task], task_directory=folder, data_directory=str(data), offline=True, **options)


def figures(results, task):
    """Everything that was measured, without its standard errors."""
    found = results["results"][task]
    return {name: value for name, value in found.items() if "," in name and "_stderr" not in name}


@pytest.mark.parametrize("task", GENERATED)
def test_right_answers_count(model, data, monkeypatch, task):
    """Answers that are known stand for the model's: what the task's filters and scorers make of them."""
    if task == "minerva_math_algebra":
        pytest.importorskip("math_verify", reason="it comes with lm-eval[math], which the extra `eval` names")
    said, expected = GENERATED[task]
    monkeypatch.setattr(model, "generate_until", lambda requests, **_: said)
    results = run(model, task, data, allow_code=True)
    assert figures(results, task) == pytest.approx(expected)
    items = items_of_harness(results["samples"])
    for name, share in expected.items():
        values = [item.metrics[name.removesuffix(",none")] for item in items]
        assert sum(values) / len(said) == pytest.approx(share)


def likes_what_is_right(requests, **_):
    """Answers as one who reads the prompt: the prompts of the made-up items give the answer away."""

    def right(prompt, choice):
        if found := re.search(r"\((.)\) right", prompt):  # GPQA: whichever letter the shuffle gave it
            return choice.strip() == f"({found[1]})"
        if found := re.search(r"How many test is (\d)", prompt):
            return choice.strip() == "ABCD"[int(found[1])]
        return False

    return [(0.0 if right(*request.args) else -1.0 - len(request.args[1]), True) for request in requests]


@pytest.mark.parametrize("task", ["mmlu_anatomy", "gpqa_main_zeroshot"])
def test_right_choices_count(model, data, monkeypatch, task):
    """GPQA shuffles its choices each time it reads the items: those that are scored must be those that were asked."""
    monkeypatch.setattr(model, "loglikelihood", likes_what_is_right)
    assert figures(run(model, task, data), task) == CHOSEN[task]


def test_hellaswag_is_asked_as_published(model, data, monkeypatch):
    asked = []

    def loglikelihood(requests, **_):
        asked.extend(request.args for request in requests)
        return [(float(request.idx == request.doc["gold"]), False) for request in requests]

    monkeypatch.setattr(model, "loglikelihood", loglikelihood)
    assert figures(run(model, "hellaswag", data), "hellaswag") == CHOSEN["hellaswag"]
    assert asked[:2] == [("Cooking: A man stirs a pot. The man", f" It ends {letter}.") for letter in "ab"]


def test_code_runs_only_with_consent(model, data, monkeypatch):
    monkeypatch.setattr(model, "generate_until", lambda requests, **_: pytest.fail("asked without consent"))
    for task in ("humaneval", "mbpp"):
        with pytest.raises(UserError, match="give --allow-code"):
            run(model, task, data)


@pytest.mark.parametrize(
    ("task", "file", "text", "message"),
    [
        ("gsm8k", "openai/gsm8k/main/test.jsonl", "", "test.jsonl is empty; it should hold a JSON object a line"),
        ("gsm8k", "openai/gsm8k/main/test.jsonl", '{"question": ', "test.jsonl cannot be read as JSON lines"),
        ("gsm8k", "openai/gsm8k/main/test.jsonl", '{"question": "a"}', "cannot run gsm8k .*'answer' is undefined"),
        ("gsm8k", "openai/gsm8k/main/train.jsonl", None, "the task reads .*train.jsonl, and there is no such file"),
        ("wikitext", "EleutherAI", None, "there is no data set in .*wikitext-2-raw-v1; it should hold a file SPLIT"),
        ("hellaswag", "Rowan/hellaswag/validation.jsonl", '{"ctx_a": "a"}', "cannot run hellaswag .*KeyError: 'ctx_b'"),
    ],
)
def test_data_that_cannot_be_used_is_one_sentence(model, data, tmp_path, monkeypatch, task, file, text, message):
    place = tmp_path / "data"
    shutil.copytree(data, place)
    if text is not None:
        (place / file).write_text(text)
    elif (place / file).is_dir():
        shutil.rmtree(place / file)
    else:
        (place / file).unlink()
    with pytest.raises(UserError, match=message) as raised:
        run(model, task, place)
    assert "\n" not in str(raised.value)


def test_settings_that_a_task_cannot_have(model, data):
    with pytest.raises(UserError, match=r"cannot run gsm8k .*Sample larger than population"):
        run(model, "gsm8k", data, num_fewshot=50)
    with pytest.raises(UserError, match="the directory /nowhere of the tasks' data does not exist"):
        run(model, "gsm8k", "/nowhere")


def test_our_own_faults_are_not_blamed_on_the_items(model, data, monkeypatch):
    monkeypatch.setattr(model.scorer, "batches", lambda sequences: {}["ours"])
    with pytest.raises(KeyError, match="ours"):
        run(model, "lambada_openai", data)


def test_offline_asks_nobody(model, monkeypatch):
    """Also where the hub's packages were imported before; and afterwards they may again."""
    import socket

    import datasets
    from huggingface_hub import constants

    from mhar_jax.evaluation.harness import run_tasks

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    asked = []

    def look_up(*where, **_):
        asked.append(where)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    folder = str(task_items.task_files("gsm8k"))
    with pytest.raises(UserError, match=r"the data of gsm8k cannot be read.*; --task-data reads JSON lines"):
        run_tasks(model, ["gsm8k"], task_directory=folder, offline=True)
    assert not asked
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.undo()
    assert before == (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)
