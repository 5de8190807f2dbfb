"""The oracle itself: against the given answers, and against finite differences."""

import numpy as np
import pytest

from oracle import error, load_case, random_case, route_case_names, solve


@pytest.mark.parametrize("name", route_case_names())
def test_solve_equals_the_given_answer(name):
    case = load_case(name)
    out, weights, grads = solve(case.inputs, case.cotangent, case.num_heads, case.eps)
    assert error(out, case.out) < 1e-12
    assert error(weights, case.weights) < 1e-12
    for key, want in case.grads.items():
        assert error(grads[key], want) < 1e-9, key


def test_solve_equals_finite_differences_with_a_cotangent_on_the_weights():
    case = random_case(3, (2,), 12, 3, residual=True, gate=0.4, null_source=True)
    d_weights = np.random.default_rng(0).standard_normal(case.weights.shape)
    _, _, grads = solve(case.inputs, case.cotangent, 3, case.eps, d_weights)

    def value(inputs):
        out, weights, _ = solve(inputs, case.cotangent, 3, case.eps)
        return np.sum(out * case.cotangent) + np.sum(weights * d_weights)

    rng = np.random.default_rng(1)
    for name, x in case.inputs.items():
        direction = rng.standard_normal(np.shape(x))
        x = np.asarray(x, np.float64)
        up, down = ({**case.inputs, name: x + h * direction} for h in (1e-5, -1e-5))
        slope = (value(up) - value(down)) / 2e-5
        assert abs(slope - np.sum(grads[name] * direction)) < 1e-6 * max(1, abs(slope)), name
