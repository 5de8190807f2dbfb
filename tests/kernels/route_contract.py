"""What every implementation of `depth_route` must do. A backend's test file subclasses `RouteContract`.

Tolerances are on ‖a − b‖ / ‖b‖ against float64:
- float32 values 2e-6 and gradients 1e-5: a few dozen roundings of 6e-8 in sums over depth and width. The case `peaked`
  has logits of 600, where rounding the logit itself to float32 already costs 1.4e-5 of the query's gradient: float32
  storage therefore needs scores of more than float32 (see mhar_kernels/twofloat.py and `RouteArrays.query_low`).
- bfloat16 and float16: one rounding of the output (2e-3 and 2.5e-4 of the norm) and of each source gradient.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mhar_kernels import depth_route
from oracle import error, load_case, random_case, route_case_names, solve

VALUE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 6e-4}
GRADIENT = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1e-3}


SIZES = [
    (1, (), 32, 2),  # one token without an axis, one source
    (3, (1, 1, 3), 21, 7),  # odd width, K = 3
    (4, (24,), 64, 4),  # three tiles of eight rows
    (5, (1, 9), 123, 3),  # ragged rows, ragged width
    (3, (5,), 40, 40),  # H = D
    (2, (7,), 160, 1),
    (40, (3,), 16, 2),
    (129, (2,), 8, 1),
]
DELTA_FORMS = list(itertools.product((False, True), (None, 0.6), (False, True)))  # residual, gate, null source


def quick(values, default):
    """Parameters of which only those that `default` accepts run by default; the others are marked exhaustive."""
    return [
        v if default(v) else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.exhaustive)
        for v in values
    ]


_programs: dict[tuple[Any, ...], Callable[..., Any]] = {}


class RouteContract:
    """Subclass with `implementation`, and `interpret` where the backend needs it."""

    implementation: str
    interpret = False
    compiler_options: ClassVar[dict[str, Any] | None] = None
    tile: ClassVar[dict[str, int] | None] = None

    def route(self, sources, query, **kw):
        return depth_route(
            sources, query, implementation=self.implementation, interpret=self.interpret, **{"tile": self.tile, **kw}
        )

    def jit(self, function):
        """Compiled as the backend's tests want it."""
        return jax.jit(function, compiler_options=self.compiler_options)

    def run(self, case, *, as_sequence=False, return_weights=True, d_weights=None, jit=True):
        """out, weights and gradients of one case; cases of one signature share a program."""
        names = tuple(case.inputs)
        values = [jnp.asarray(v) for v in case.inputs.values()]
        if as_sequence:
            values[0] = tuple(values[0])

        def call(*values):
            kw = dict(zip(names, values, strict=True))
            return self.route(
                kw.pop("sources"),
                kw.pop("query"),
                num_heads=case.num_heads,
                eps=case.eps,
                return_weights=return_weights,
                **kw,
            )

        def both(values, cotangent, d_weights):
            result, vjp = jax.vjp(call, *values)
            out, weights = result if return_weights else (result, None)
            tangent = cotangent.astype(out.dtype)
            return out, weights, vjp((tangent, d_weights) if return_weights else tangent)

        if jit:
            options = [tuple(sorted((x or {}).items())) for x in (self.tile, self.compiler_options)]
            key = (type(self), self.implementation, *options, names, case.num_heads, case.eps, return_weights)
            both = _programs.setdefault(key, self.jit(both))
        if d_weights is None:
            d_weights = np.zeros(case.weights.shape, np.float32)
        out, weights, grads = both(values, jnp.asarray(case.cotangent), jnp.asarray(d_weights, jnp.float32))
        grads = list(grads)
        if as_sequence and grads[0]:
            grads[0] = jnp.stack(grads[0])
        elif as_sequence:
            grads[0] = jnp.zeros_like(case.inputs["sources"])
        return out, weights, dict(zip(names, grads, strict=True))

    def check(self, case, **kw):
        out, weights, grads = self.run(case, **kw)
        assert out.dtype == case.dtype
        assert error(out, case.out) < VALUE[case.dtype]
        if weights is not None:
            assert weights.dtype == jnp.float32
            assert error(weights, case.weights) < VALUE["float32"]
        for name, grad in grads.items():
            assert grad.dtype == case.inputs[name].dtype
            assert error(grad, case.grads[name]) < GRADIENT[case.dtype], name

    # The given cases.

    @pytest.mark.parametrize("name", route_case_names())
    def test_given_case(self, name):
        case = load_case(name)
        self.check(case, as_sequence="residual" in case.inputs or case.inputs["sources"].shape[0] > 0)

    @pytest.mark.parametrize("name", ["four_heads", "delta", "bf16"])
    def test_given_case_stacked(self, name):
        self.check(load_case(name), return_weights=False)

    # Literal values (float64, independent of any code).

    @pytest.mark.parametrize(
        ("sources", "query", "heads", "eps", "expected"),
        [
            ([[1, 0, 0, 0], [0, 1, 0, 0]], [2, 0, 0, 0], 1, 1e-6, [0.9820136487, 0.0179863513, 0, 0]),
            ([[1, 1, 0, 0], [0, 0, 1, 1]], [1, 1, 1, 1], 2, 0.0, [0.9441927808] * 4),
            ([[1, 1, 0, 0], [0, 0, 1, 1]], [1, 1, 1, 1], 1, 0.0, [0.5] * 4),
            ([[2, 0, 0, 1], [0, 1, 2, 0]], [1, 0, 1, 0], 2, 0.0, [1.7135735259, 0.1432132370] * 2),
            ([[2, 0, 0, 1], [0, 1, 2, 0]], [1, 0, 1, 0], 1, 0.0, [1, 0.5, 1, 0.5]),
            ([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], [0, 0, 0, 0], 2, 1e-6, [5, 6, 7, 8]),
        ],
    )
    def test_literal_mix(self, sources, query, heads, eps, expected):
        out = self.route(jnp.float32(sources), jnp.float32(query), num_heads=heads, eps=eps)
        np.testing.assert_allclose(out, expected, atol=2e-6)

    @pytest.mark.parametrize(
        ("sources", "query", "expected"),
        [
            ([[1, 0, 0, 0], [0, 1, 0, 0]], [2, 0, 0, 0], [[0.98201365, 0.5], [0.01798635, 0.5]]),
            ([[3, 0, 0, 1], [1, 0, 0, 3]], [1, 0, 0, 1], [[0.7798703, 0.2201297], [0.2201297, 0.7798703]]),
        ],
    )
    def test_literal_weights(self, sources, query, expected):
        _, weights = self.route(jnp.float32(sources), jnp.float32(query), num_heads=2, return_weights=True)
        np.testing.assert_allclose(weights, expected, atol=1e-6)

    def test_huge_query_picks_one_source_with_finite_gradients(self):
        sources, query = jnp.eye(4, dtype=jnp.float32)[:, None], jnp.float32([5000, 0, 0, 0])
        loss = lambda s, q: jnp.sum(self.route(s, q, num_heads=1) ** 2)
        np.testing.assert_array_equal(self.route(sources, query, num_heads=1)[0], [1, 0, 0, 0])
        chex.assert_tree_all_finite(jax.grad(loss, (0, 1))(sources, query))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_query_beyond_all_digits_leaves_gradients_finite(self, dtype):
        # Logits of 1e20: the last digit of one, computed again, is more than any exponential takes.
        case = random_case(4, (11,), 24, 3, dtype=dtype, query_scale=1e20, seed=2)
        out, _, grads = self.run(case, return_weights=False)
        assert error(out, case.out) < VALUE[dtype]
        chex.assert_tree_all_finite(grads)

    def test_very_negative_logits_beat_no_mask_constant(self):
        # Every logit is about -2e10: a finite "minus infinity" in padding would win the softmax.
        sources = jnp.float32([[[1, 0, 0, 0]], [[1, 0, 0, 0]], [[1, 0, 0, 0]]])
        out = self.route(sources, jnp.float32([-1e10, 0, 0, 0]), num_heads=1)
        np.testing.assert_allclose(out[0], [1, 0, 0, 0], atol=1e-6)

    # Sizes.

    @pytest.mark.parametrize(("n", "lead", "dim", "heads"), SIZES)
    def test_size(self, n, lead, dim, heads):
        self.check(random_case(n, lead, dim, heads, seed=n), as_sequence=n < 40)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, dtype):
        self.check(
            random_case(6, (2, 5), 96, 4, dtype=dtype, residual=True, gate=0.7, null_source=True), as_sequence=True
        )

    @pytest.mark.parametrize(("residual", "gate", "null"), DELTA_FORMS)
    def test_delta_form(self, residual, gate, null):
        case = random_case(3, (4,), 24, 3, residual=residual, gate=gate, null_source=null, seed=7)
        self.check(case, return_weights=False)

    # Gradients.

    @pytest.mark.parametrize("form", [{}, {"dtype": "bfloat16", "residual": True, "gate": 0.7}])
    def test_one_source_has_exactly_zero_query_gradient(self, form):
        case = random_case(1, (3, 2), 48, 3, **form)
        _, _, grads = self.run(case)
        np.testing.assert_array_equal(grads["query"], 0)
        np.testing.assert_array_equal(grads["norm_scale"], 0)

    def test_gradient_of_the_weights(self):
        case = random_case(4, (3,), 24, 3, null_source=True, residual=True, gate=0.5)
        d_weights = np.random.default_rng(1).standard_normal(case.weights.shape).astype(np.float32)
        _, _, grads = self.run(case, d_weights=d_weights)
        want = solve(case.inputs, case.cotangent, 3, case.eps, d_weights)[2]
        for name, grad in grads.items():
            assert error(grad, want[name]) < GRADIENT["float32"], name

    def test_repeats_to_the_bit(self):
        case = random_case(5, (2, 5), 96, 4, dtype="bfloat16", null_source=True, residual=True, gate=0.3)
        chex.assert_trees_all_equal(self.run(case), self.run(case))

    # Transformations: the same numbers, whatever wraps the call.

    def test_without_jit(self):
        self.check(random_case(3, (2,), 24, 3), jit=False)

    def test_checkpoint(self):
        case = random_case(4, (3,), 24, 3)
        f = lambda s, q: jnp.sum(self.route(s, q, num_heads=3) * case.cotangent)
        args = jnp.asarray(case.inputs["sources"]), jnp.asarray(case.inputs["query"] * case.inputs["norm_scale"])
        grads = self.jit(jax.grad(jax.checkpoint(f), (0, 1)))(*args)
        for grad, plain in zip(grads, self.jit(jax.grad(f, (0, 1)))(*args), strict=True):
            assert error(grad, plain) < 1e-6  # fused differently, so not to the bit
        assert error(grads[0], case.grads["sources"]) < GRADIENT["float32"]

    def test_nested_vmap(self):
        """Over sources with one query, over queries with one set of sources, and over both together."""
        rng = np.random.default_rng(3)
        s = rng.standard_normal((3, 2, 4, 5, 24)).astype(np.float32)  # [a, b, N, T, D]
        q = rng.standard_normal((3, 24)).astype(np.float32)  # [a, D]
        cotangent = rng.standard_normal((3, 2, 5, 24)).astype(np.float32)
        one = lambda s, q: self.route(s, q, num_heads=3)
        mapped = jax.vmap(jax.vmap(one, (0, None)), (0, 0))

        @self.jit
        def both(s, q, cotangent):
            out, vjp = jax.vjp(mapped, s, q)
            return out, vjp(cotangent)

        out, (d_s, d_q) = both(jnp.asarray(s), jnp.asarray(q), jnp.asarray(cotangent))
        want_q = np.zeros_like(q, np.float64)
        for a in range(3):
            for b in range(2):
                want, _, grads = solve({"sources": s[a, b], "query": q[a]}, cotangent[a, b], 3, 1e-6)
                assert error(out[a, b], want) < VALUE["float32"]
                assert error(d_s[a, b], grads["sources"]) < GRADIENT["float32"]
                want_q[a] += grads["query"]
        assert error(d_q, want_q) < GRADIENT["float32"]
        many = self.jit(jax.vmap(one, (None, 0)))(jnp.asarray(s[0, 0]), jnp.asarray(q))
        for a in range(3):
            assert error(many[a], solve({"sources": s[0, 0], "query": q[a]}, cotangent[a, 0], 3, 1e-6)[0]) < 2e-6

    def test_scan(self):
        case = random_case(3, (4,), 24, 3)
        queries = np.random.default_rng(5).standard_normal((3, 24)).astype(np.float32)

        def loss(s, queries):
            step = lambda total, q: (total + jnp.sum(self.route(s, q, num_heads=3) * case.cotangent), None)
            return jax.lax.scan(step, 0.0, queries)[0]

        d_s, d_q = self.jit(jax.grad(loss, (0, 1)))(jnp.asarray(case.inputs["sources"]), jnp.asarray(queries))
        solved = [solve({"sources": case.inputs["sources"], "query": q}, case.cotangent, 3, 1e-6)[2] for q in queries]
        assert error(d_s, sum(g["sources"] for g in solved)) < GRADIENT["float32"]
        assert error(d_q, np.stack([g["query"] for g in solved])) < GRADIENT["float32"]

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_shard_map(self, check_vma):
        """Tokens over eight devices: every gradient equals the unsharded one, replicated parameters' too."""
        case = random_case(3, (8, 2), 24, 3, null_source=True, residual=True, gate=0.5)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        names, values = list(case.inputs), [jnp.asarray(v) for v in case.inputs.values()]
        specs = tuple({"sources": P(None, "data"), "residual": P("data")}.get(n, P()) for n in names)

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
        def sharded(*values):
            kw = dict(zip(names, values, strict=True))
            return self.route(kw.pop("sources"), kw.pop("query"), num_heads=3, **kw)

        loss = lambda *v: jnp.sum(sharded(*v) * case.cotangent)
        grads = self.jit(jax.grad(loss, tuple(range(len(names)))))(*values)
        for name, grad in zip(names, grads, strict=True):
            assert error(grad, case.grads[name]) < GRADIENT["float32"], name
