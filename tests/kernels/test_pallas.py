"""The Pallas TPU kernels under the interpreter: the contract of every implementation, and what is theirs alone."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from mhar_kernels import UnsupportedInputError, assume_platform, depth_route, tune, tuning
from mhar_kernels.contract import RouteCall
from mhar_kernels.pallas_heads import Heads, bfloat16_parts
from mhar_kernels.pallas_plan import MIB, backward_plan, forward_plan
from oracle import error, random_case, route_case_names, solve
from route_contract import DELTA_FORMS, GRADIENT, SIZES, RouteContract, quick

FORWARD, BACKWARD = "depth_route_forward", "depth_route_backward"


# The interpreter makes each kernel a program of its own, which takes 2 to 15 s to compile. By default one case of each
# kind runs: stacked and separate arrays, bfloat16, delta, only a null source, zero logits. Methods that only call
# super() choose the cases; what is asserted is in RouteContract.
GIVEN = ("bf16", "delta", "delta_closed_gate", "delta_null_only", "one_source", "zero_query")


class TestPallas(RouteContract):
    implementation = "pallas_tpu"
    interpret = True
    compiler_options: ClassVar = {"xla_backend_optimization_level": 0}  # of the interpreter, not of the kernel

    @pytest.mark.parametrize("name", quick(route_case_names(), lambda name: name in GIVEN))
    def test_given_case(self, name):
        super().test_given_case(name)

    @pytest.mark.parametrize("name", quick(["four_heads", "delta", "bf16"], lambda name: name == "four_heads"))
    def test_given_case_stacked(self, name):
        super().test_given_case_stacked(name)

    @pytest.mark.parametrize(("n", "lead", "dim", "heads"), quick(SIZES, lambda size: size in (SIZES[1], SIZES[-1])))
    def test_size(self, n, lead, dim, heads):
        super().test_size(n, lead, dim, heads)

    @pytest.mark.parametrize("dtype", quick(["bfloat16", "float16"], lambda dtype: dtype == "float16"))
    def test_half_precision(self, dtype):  # bfloat16: test_head_slices
        super().test_half_precision(dtype)

    @pytest.mark.parametrize(
        ("residual", "gate", "null"), quick(DELTA_FORMS, lambda form: form in ((False, 0.6, True), (True, None, False)))
    )
    def test_delta_form(self, residual, gate, null):
        super().test_delta_form(residual, gate, null)

    @pytest.mark.parametrize("check_vma", quick([True, False], bool))
    def test_shard_map(self, check_vma):
        super().test_shard_map(check_vma)


class _Tiled(TestPallas):
    """The same checks with a tile of one's own."""

    __test__ = False

    def __init__(self, **tile):
        self.tile = tile


@pytest.mark.parametrize(
    ("tokens", "rows", "chunk", "sweeps"),
    [
        (24, 8, 3, 2),  # three tiles over two cores; chunks of 1, 3 and 3 sources
        pytest.param(24, 8, 3, 1, marks=pytest.mark.exhaustive),
        pytest.param(29, 8, 7, 1, marks=pytest.mark.exhaustive),  # a ragged last tile; one chunk
        pytest.param(29, 8, 7, 2, marks=pytest.mark.exhaustive),
        pytest.param(5, 8, 2, 1, marks=pytest.mark.exhaustive),  # less than a tile
        pytest.param(5, 8, 2, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_tiles(tokens, rows, chunk, sweeps):
    case = random_case(7, (tokens,), 40, 2, null_source=True, residual=True, gate=0.7, seed=tokens)
    _Tiled(rows=rows, chunk=chunk, sweeps=sweeps).check(case, as_sequence=chunk != 3)


@pytest.mark.parametrize(
    ("dim", "heads", "sweeps"),
    [
        pytest.param(128, 2, 2, marks=pytest.mark.exhaustive),  # two heads in a lane tile
        (130, 2, 1),  # K = 65: a tile that two heads share, and an odd half
        (480, 3, 2),  # K = 160
        pytest.param(257, 1, 1, marks=pytest.mark.exhaustive),
        (300, 300, 2),  # more heads than lanes
        *(
            pytest.param(*rest, marks=pytest.mark.exhaustive)
            for rest in ((128, 2, 1), (130, 2, 2), (480, 3, 1), (257, 1, 2), (300, 300, 1))
        ),
    ],
)
def test_head_slices(dim, heads, sweeps):
    case = random_case(3, (9,), dim, heads, dtype="bfloat16", null_source=True, gate=0.7, seed=dim)
    _Tiled(rows=16, chunk=2, sweeps=sweeps).check(case, as_sequence=True)


@pytest.mark.parametrize("sweeps", quick([1, 2], lambda sweeps: sweeps == 2))
def test_weights_of_both_backward_forms(sweeps):
    """The cotangent of the weights, with heads wide enough for the vector unit and logits that need pairs."""
    case = random_case(3, (5,), 128, 2, null_source=True, query_scale=30.0)
    d_weights = np.random.default_rng(1).standard_normal(case.weights.shape).astype(np.float32)
    _, _, grads = _Tiled(sweeps=sweeps).run(case, d_weights=d_weights)
    want = solve(case.inputs, case.cotangent, 2, case.eps, d_weights)[2]
    for name, grad in grads.items():
        assert error(grad, want[name]) < GRADIENT["float32"], name


@pytest.mark.parametrize(("dim", "heads"), quick([(24, 3), (256, 2)], lambda shape: shape == (24, 3)))
def test_two_sweeps_under_a_query_of_thousands(dim, heads):
    """One source takes all, so logits have no gradient. Weights that do not add up to one would give them one."""
    case = random_case(4, (16,), dim, heads, dtype="bfloat16", query_scale=5000.0)
    _, _, grads = _Tiled(sweeps=2).run(case, return_weights=False)
    assert error(grads["sources"], case.grads["sources"]) < GRADIENT["bfloat16"]


@pytest.mark.parametrize(
    ("stacked", "sweeps"), quick([(True, 1), (False, 2), (True, 2), (False, 1)], lambda p: p == (False, 2))
)
def test_copies_do_not_race(stacked, sweeps):
    """Under the interpreter that models DMA, with memory that starts as NaN: no race, and the right numbers."""
    case = random_case(5, (37,), 24, 3, null_source=True, residual=True, gate=0.5)
    names, values = list(case.inputs), [jnp.asarray(v) for v in case.inputs.values()]
    if not stacked:
        values[0] = tuple(values[0])

    def call(*values):
        kw = dict(zip(names, values, strict=True))
        sources, query = kw.pop("sources"), kw.pop("query")
        tile = {"rows": 8, "chunk": 2, "sweeps": sweeps}
        return depth_route(sources, query, num_heads=3, implementation="pallas_tpu", tile=tile, **kw)

    @jax.jit
    def both(values, cotangent):
        out, vjp = jax.vjp(call, *values)
        return out, vjp(cotangent)

    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
    with pltpu.force_tpu_interpret_mode(params), assume_platform("tpu"):
        out, grads = jax.block_until_ready(both(values, jnp.asarray(case.cotangent)))
    assert interpret_pallas_call.races is not None  # JAX has no public way to ask
    assert not interpret_pallas_call.races.races_found
    assert error(out, case.out) < 2e-6
    for name, grad in zip(names, grads, strict=True):
        got = jnp.stack(grad) if isinstance(grad, tuple) else grad
        assert error(got, case.grads[name]) < GRADIENT["float32"], name


@pytest.mark.parametrize(
    ("dim", "heads", "sweeps"), quick([(128, 2, 1), (96, 3, 2), (128, 2, 2)], lambda p: p == (128, 2, 1))
)
def test_bfloat16_is_as_accurate_as_xla(dim, heads, sweeps):
    """Against float64 on the same rounded inputs. Heads of both layouts; one sweep and two."""
    case = random_case(6, (32,), dim, heads, dtype="bfloat16", null_source=True, residual=True, gate=0.7)
    tiled = _Tiled(sweeps=sweeps)
    tiled.compiler_options = None  # as XLA's own sums are compiled
    ours = tiled.run(case, as_sequence=True)
    xla = RouteContract()
    xla.implementation = "xla"
    theirs = xla.run(case, as_sequence=True)
    assert error(ours[0], case.out) <= 1.01 * error(theirs[0], case.out)
    mix = (case.out - np.asarray(case.inputs["residual"], np.float64)) / 0.7
    terms = np.linalg.norm(np.asarray(case.cotangent, np.float64) * mix)
    for name, grad in ours[2].items():
        # Where both are at float32's rounding, either may be the smaller. d_gate is one sum of mixed signs, smaller
        # than its terms together, whose roundings, eight of each, add up as a random walk.
        slack = 2.0**-21 * terms / abs(float(case.grads["gate"])) if name == "gate" else 1e-6
        assert error(grad, case.grads[name]) <= 1.01 * error(theirs[2][name], case.grads[name]) + slack, name


@pytest.mark.exhaustive
def test_gradients_per_example():
    """vmap of a gradient in an unmapped query: one gradient an example, not their sum."""
    case = random_case(3, (4, 5), 24, 3)
    query = jnp.asarray(case.inputs["query"])
    loss = lambda q, s: jnp.sum(TestPallas().route(s, q, num_heads=3) ** 2)
    sources = jnp.asarray(case.inputs["sources"])
    each = TestPallas().jit(jax.vmap(jax.grad(loss), (None, 1)))(query, sources)
    one = TestPallas().jit(jax.grad(loss))
    for i in range(4):
        assert error(each[i], one(query, sources[:, i])) < 2e-6


@pytest.mark.exhaustive
def test_vmap_over_one_source_of_several():
    case = random_case(3, (5,), 24, 3)
    a, b, c = jnp.asarray(case.inputs["sources"])
    many = jnp.stack([b, 2 * b])
    f = lambda b: TestPallas().route((a, b, c), jnp.asarray(case.inputs["query"]), num_heads=3)
    out, one = TestPallas().jit(jax.vmap(f))(many), TestPallas().jit(f)
    for i in range(2):
        assert error(out[i], one(many[i])) < 1e-6


def _kernels(jaxpr) -> list[str]:
    """Names of the Pallas calls in a jaxpr, in order."""
    names = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            names.append(eqn.params["name"])
            continue
        for value in jax.tree.leaves(
            tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names += _kernels(inner)
    return names


@pytest.mark.parametrize("remat", [False, True])
def test_the_kernels_are_in_the_program(remat):
    """One forward and one backward kernel; with remat the forward one again, and nothing else."""
    route = lambda s, q: jnp.sum(
        depth_route(s, q, num_heads=4, implementation="pallas_tpu", interpret=True).astype(jnp.float32) ** 2
    )
    if remat:
        route = jax.checkpoint(route)
    sources = [jax.ShapeDtypeStruct((16, 512), jnp.bfloat16)] * 3
    jaxpr = jax.make_jaxpr(jax.grad(route, (0, 1)))(sources, jax.ShapeDtypeStruct((512,), jnp.float32))
    assert _kernels(jaxpr.jaxpr) == [FORWARD] * (1 + remat) + [BACKWARD]


CALL = RouteCall(
    num_sources=9,
    tokens=8192,
    dim=4096,
    num_heads=8,
    dtype="bfloat16",
    stacked=False,
    has_null=True,
    has_residual=True,
    has_gate=True,
    return_weights=False,
    eps=1e-6,
    interpret=False,
    tile=None,
    platform="tpu",
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [1, 9, 73, 129])
@pytest.mark.parametrize(("dim", "heads"), [(512, 4), (1280, 8), (4096, 8), (7186, 2), (16384, 8)])
def test_vmem_fits_the_smallest_chip(n, dim, heads, dtype):
    """v4 has 16 MiB; the heuristic leaves the compiler some, and forward and backward agree on the mix."""
    call = dataclasses.replace(CALL, num_sources=n, dim=dim, num_heads=heads, dtype=dtype, differentiated=True)
    for plan in (forward_plan(call), backward_plan(call)):
        assert plan.vmem_bytes <= 14 * MIB
        assert plan.vmem_limit <= 18 * MIB
        assert plan.rows % plan.group == 0
        assert plan.first + (plan.chunks - 1) * plan.chunk == n
    assert backward_plan(call).resident == backward_plan(dataclasses.replace(call, differentiated=False)).resident


def test_what_a_chip_has_no_room_for_is_refused_before_launch(monkeypatch):
    """Wide rows of many heads, whose smallest tile is beyond the 16 MiB of a v4."""
    from mhar_kernels import pallas_plan, pallas_tpu

    call = dataclasses.replace(CALL, num_sources=2, dim=16384, num_heads=16384, differentiated=True)
    assert pallas_tpu.unsupported(call) is None  # ahead of time, for some chip
    monkeypatch.setattr(pallas_plan, "_device_kind", lambda call: "TPU v4")
    monkeypatch.setattr(pallas_plan.pltpu, "get_tpu_info", lambda: SimpleNamespace(vmem_capacity_bytes=16 * MIB))
    reason = pallas_tpu.unsupported(call)
    assert reason is not None
    assert "MiB of VMEM, more than 15.5" in reason
    assert "implementation='xla'" in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"platform": "cpu"}, ("cpu", "interpret=True", "xla")),
        ({"dtype": "float64"}, ("float64", "xla")),
        ({"dim": 32768}, ("16384", "32768")),
        ({"tile": (("rows", 12),)}, ("rows", "16", "12")),
        ({"tile": (("rows", 65536),)}, ("VMEM", "tile")),
        ({"tile": (("sweeps", 3),)}, ("sweeps", "3")),
    ],
)
def test_refusals_say_what_would_work(change, words):
    from mhar_kernels import pallas_tpu

    reason = pallas_tpu.unsupported(dataclasses.replace(CALL, **change))
    assert reason is not None
    for word in words:
        assert word in reason
    assert pallas_tpu.unsupported(CALL) is None


def test_refused_before_anything_runs():
    sources = jnp.ones((2, 4, 32))
    with pytest.raises(UnsupportedInputError, match="interpret=True"):
        depth_route(sources, jnp.ones(32), num_heads=2, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="rows, chunk, sweeps"):
        TestPallas().route(sources, jnp.ones(32), num_heads=2, tile={"lanes": 3})


def test_bfloat16_parts_hold_float32():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * np.float32(1e-3)
    parts = jax.jit(bfloat16_parts)(jnp.asarray(x))
    np.testing.assert_array_equal(sum(np.asarray(p, np.float64) for p in parts), x.astype(np.float64))


def test_every_feature_has_one_head():
    for dim, heads in ((130, 2), (480, 3), (1280, 8), (64, 1)):
        layout = Heads(dim, heads)
        seen = [(t * 128 + lane, h) for t in range(layout.tiles) for h, a, b in layout.spans(t) for lane in range(a, b)]
        assert seen == [(d, d // (dim // heads)) for d in range(dim)]


@pytest.mark.exhaustive  # test_shard_map, with another tile
def test_two_devices_share_one_query():
    """Plain sharding of the tokens, kernel inside shard_map: the query's gradient is summed exactly once."""
    case = random_case(3, (8,), 24, 3)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    route = functools.partial(TestPallas().route, num_heads=3, tile={"sweeps": 1})
    sharded = jax.shard_map(
        route, mesh=mesh, in_specs=(spec(None, "data"), spec()), out_specs=spec("data"), check_vma=True
    )
    query = jnp.asarray(case.inputs["query"] * case.inputs["norm_scale"])
    loss = lambda f: lambda s, q: jnp.sum(f(s, q) * case.cotangent)
    sources = jnp.asarray(case.inputs["sources"])
    got = TestPallas().jit(jax.grad(loss(sharded), (0, 1)))(sources, query)
    want = TestPallas().jit(jax.grad(loss(route), (0, 1)))(sources, query)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.exhaustive
def test_tune_writes_a_table_that_calls_then_use(tmp_path, monkeypatch):
    """The whole program on a tiny shape; the times mean nothing here, the flow does."""
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    monkeypatch.setattr(tune, "SAMPLES", 1)
    monkeypatch.setattr(tune, "_ROTATED_BYTES", 1)
    monkeypatch.setattr(tune, "candidates", lambda heuristic: [heuristic | {"chunk": 2}])
    tuning.table.cache_clear()
    try:
        shape = ["--widths", "8x2", "--sources", "2", "--tokens", "8"]
        tune.main(["--backend", "pallas_tpu", "--interpret", *shape])
        entries = tuning.table("pallas_tpu")[jax.devices()[0].device_kind]
        assert sorted(map(len, entries.values())) == [2, 3]  # forward: rows and chunk; backward: sweeps too
        assert all(entry["chunk"] in (1, 2) for entry in entries.values())
    finally:
        tuning.table.cache_clear()


def test_candidate_tiles():
    found = list(tune.candidates({"rows": 16, "chunk": 4, "sweeps": 1}))
    assert {"rows": 16, "chunk": 4, "sweeps": 1} in found
    assert {(t["rows"], t["chunk"]) for t in found} == {(r, c) for r in (8, 16, 32) for c in (1, 2, 4, 8)}
