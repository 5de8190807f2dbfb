"""Programs that a model wrote: run under limits, and counted by pass@k (through the harness: test_tasks.py)."""

import itertools

import pytest

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
