"""Programs that a model wrote: run under limits, counted by pass@k, and through the harness's own task offline."""

import itertools
import json
import pathlib
import shutil

import pytest

from inference_helpers import placed, tiny_model
from mhar_jax.data.tokenizers import ByteTokenizer
from mhar_jax.errors import UserError
from mhar_jax.evaluation.code import CodeEval, pass_at_k, passes


@pytest.mark.parametrize(("samples", "correct", "k"), [(5, 2, 1), (5, 2, 3), (5, 2, 4), (6, 0, 2), (4, 4, 1)])
def test_pass_at_k_counts_the_draws(samples, correct, k):
    """Every choice of k of the samples, counted."""
    draws = list(itertools.combinations([1] * correct + [0] * (samples - correct), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(max, draws)) / len(draws))


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("def add(a, b):\n    return a + b\nassert add(2, 3) == 5", True),
        ("def add(a, b):\n    return a * b\nassert add(2, 3) == 5", False),
        ("import sys\nsys.exit(0)\nassert False", False),
        ("import os\nos._exit(0)", False),
        ("def f(:", False),
        ("while True: pass", False),
        ("import time\ntime.sleep(60)", False),
        ("x = bytearray(8 << 30)", False),
        ("input()", False),
        ("if __name__ == '__main__':\n    raise ValueError", True),
    ],
)
def test_programs(program, right):
    assert passes(program, 1.0 if not right else 10.0) == right


def test_compute_leaves_out_what_it_has_too_few_programs_for():
    right, wrong = "x = 1", "x = 2"
    means, found = CodeEval(True).compute(
        references=["assert x == 1", "assert x == 2"], predictions=[[right, wrong], [right, right]], k=[1, 2, 3]
    )
    assert found == {0: [True, False], 1: [False, False]}
    assert means == {"pass@1": pytest.approx(0.25), "pass@2": pytest.approx(0.5)}
    with pytest.raises(UserError, match="code_eval runs programs that the model wrote; give --allow-code"):
        CodeEval(False).compute(references=["assert x == 1"], predictions=[[right]])


@pytest.mark.filterwarnings("default")  # of the harness and what it imports
def test_humaneval_of_the_harness_from_local_lines(tmp_path, monkeypatch):
    """The harness's own HumanEval task over two local problems: nothing is fetched, and a right program counts."""
    lm_eval = pytest.importorskip("lm_eval", reason="the harness is the extra `eval`")
    from mhar_jax.evaluation.harness import HarnessModel, run_tasks
    from mhar_jax.evaluation.items import items_of_harness

    theirs = pathlib.Path(lm_eval.__file__).parent / "tasks" / "humaneval"
    problems = [
        {"task_id": f"local/{name}", "prompt": f"def {name}(a):\n", "entry_point": name, "test": test}
        for name, test in (
            ("same", "def check(f):\n    assert f(3) == 3"),
            ("twice", "def check(f):\n    assert f(3) == 6"),
        )
    ]
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(p) + "\n" for p in problems))
    shutil.copy(theirs / "utils.py", tmp_path)
    text = (theirs / "humaneval.yaml").read_text()
    local = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}"
    (tmp_path / "humaneval.yaml").write_text(text.replace("dataset_path: openai/openai_humaneval", local))
    model = HarnessModel(placed(tiny_model()), ByteTokenizer(), batch_tokens=256)
    monkeypatch.setattr(model, "generate_until", lambda requests, **_: ["    return a\n"] * len(requests))
    run = lambda allow: run_tasks(model, ["humaneval"], task_directory=str(tmp_path), offline=True, allow_code=allow)
    with pytest.raises(UserError, match="give --allow-code"):
        run(False)
    results = run(True)
    assert results["results"]["humaneval"]["pass@1,create_test"] == 0.5
    items = items_of_harness(results["samples"])
    assert [item.metrics for item in items] == [{"pass@1,create_test": 1.0}, {"pass@1,create_test": 0.0}]
