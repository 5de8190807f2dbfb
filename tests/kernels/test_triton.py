"""The Triton kernels under Triton's interpreter: the shared contract, and what only they have."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhar_kernels import UnsupportedInputError, depth_route, triton_gpu, triton_launch, tune, tuning
from mhar_kernels.contract import RouteCall
from oracle import error, random_case, solve
from route_contract import GRADIENT, VALUE, RouteContract

CALL = RouteCall(
    num_sources=9,
    tokens=24,
    dim=64,
    num_heads=4,
    dtype="bfloat16",
    stacked=True,
    has_null=False,
    has_residual=False,
    has_gate=False,
    return_weights=False,
    eps=1e-6,
    interpret=True,
    tile=None,
    platform="cpu",
)


class TestTriton(RouteContract):
    implementation = "triton"
    interpret = True

    @pytest.mark.parametrize(
        "tile",
        [
            pytest.param({"sources": 1, "width": 1}, marks=pytest.mark.exhaustive),
            pytest.param({"sources": 8, "width": 16, "ahead": 2}, marks=pytest.mark.exhaustive),
            {"sources": 2, "width": 32, "warps": 2, "stages": 1, "programs": 1},  # wider than a head: masked
        ],
    )
    def test_tiles_change_nothing_but_rounding(self, tile):
        case = random_case(5, (24,), 40, 2, null_source=True)
        _, _, grads = self.run(case, as_sequence=True)
        values = {k: jnp.asarray(v) for k, v in case.inputs.items()}
        sources, query = values.pop("sources"), values.pop("query")
        f = lambda s, q: self.route(s, q, num_heads=2, tile=tile, **values)
        out, vjp = jax.vjp(f, tuple(sources), query)
        d_sources, d_query = vjp(jnp.asarray(case.cotangent))
        assert error(out, case.out) < VALUE["float32"]
        assert error(jnp.stack(d_sources), grads["sources"]) < GRADIENT["float32"]
        assert error(d_query, grads["query"]) < GRADIENT["float32"]

    def test_padding_under_very_negative_logits(self):
        """Rows and heads of padding would weigh exp(0 - lse), which overflows where every real logit is below -1000."""
        case = random_case(3, (2,), 24, 3, query_scale=0.0)
        inputs = case.inputs | {"query": np.full(24, -400, np.float32), "norm_scale": np.ones(24, np.float32)}
        inputs["sources"] = np.abs(inputs["sources"]) + 1
        out, weights, grads = solve(inputs, case.cotangent, 3, case.eps)
        self.check(dataclasses.replace(case, inputs=inputs, out=out, weights=weights, grads=grads))

    @pytest.mark.parametrize("n", [9, 40])
    def test_separate_arrays_equal_one_array_to_the_bit(self, n):
        case = random_case(n, (3,), 24, 3, dtype="bfloat16")
        np.testing.assert_equal(
            jax.tree.map(np.asarray, self.run(case, as_sequence=True)), jax.tree.map(np.asarray, self.run(case))
        )

    @pytest.mark.exhaustive
    def test_more_arrays_than_a_kernel_takes_are_stacked(self):
        n = triton_launch.POINTER_COUNTS[-1] + 1
        self.check(random_case(n, (1,), 8, 1), as_sequence=True)

    @pytest.mark.parametrize(
        ("dtype", "query_scale"),
        [
            ("bfloat16", 5.0),
            pytest.param("bfloat16", 1.0, marks=pytest.mark.exhaustive),
            pytest.param("float16", 3.0, marks=pytest.mark.exhaustive),
        ],
    )
    def test_half_precision_errors_are_no_larger_than_those_of_xla(self, dtype, query_scale):
        """Apart from noise of float32 size. Without the kept rest of the mix, the query's gradient is off by 1e-3."""
        case = random_case(9, (16,), 128, 4, dtype=dtype, query_scale=query_scale)
        rounded = np.asarray(jnp.asarray(case.cotangent, dtype).astype(jnp.float32), np.float64)
        want = solve(case.inputs, rounded, case.num_heads, case.eps)[2]
        out, _, ours = self.run(case)
        xla, _, theirs = type("Xla", (RouteContract,), {"implementation": "xla"})().run(case)
        assert error(out, case.out) <= 1.01 * error(xla, case.out)
        for name, grad in ours.items():
            assert error(grad, want[name]) < 1.01 * error(theirs[name], want[name]) + 1e-6, name


def test_few_kernels_serve_every_number_of_sources():
    counts = {triton_launch.pointer_count(n) for n in range(1, 130)}
    assert len(counts) <= 14
    assert all(triton_launch.pointer_count(n) >= n for n in range(1, 130))
    assert triton_launch.pointer_count(10_000) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"dim": 16_385, "num_heads": 1}, "16384"),
        ({"interpret": False}, "needs a GPU"),
        ({"interpret": False, "platform": "tpu"}, "tpu"),
    ],
)
def test_says_why_it_cannot_run(change, reason):
    assert reason in triton_gpu.unsupported(dataclasses.replace(CALL, **change))
    assert triton_gpu.unsupported(CALL) is None


def test_refuses_a_platform_it_cannot_run_on():
    with pytest.raises(UnsupportedInputError, match="interpret=True"):
        depth_route(jnp.ones((2, 3, 8)), jnp.ones(8), num_heads=2, implementation="triton")


@pytest.mark.parametrize(
    ("tile", "message"),
    [({"rows": 8}, "may only name"), ({"sources": 3}, "power of two"), ({"warps": 64}, "32"), ({"ahead": 3}, "1 or 2")],
)
def test_refuses_tiles_it_does_not_have(tile, message):
    with pytest.raises(ValueError, match=message):
        depth_route(jnp.ones((2, 3, 8)), jnp.ones(8), num_heads=2, implementation="triton", interpret=True, tile=tile)


@pytest.mark.parametrize(
    ("dim", "heads"), [(512, 4), (1024, 8), (1280, 8), (1280, 16), (4096, 8), (4096, 1), (1000, 8), (16_384, 8), (7, 7)]
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_heuristic_tile_holds_a_row(dim, heads, direction):
    call = dataclasses.replace(CALL, dim=dim, num_heads=heads)
    tile = triton_gpu.tile(call, direction)
    tiles = -(-call.head_dim // tile.width)
    assert tiles * tile.width <= 1.2 * call.head_dim or call.head_dim < 16  # padding wastes little
    lanes = 32 * tile.warps
    assert tiles * tile.width * heads / lanes <= 48  # features a lane
    single = triton_gpu.tile(dataclasses.replace(call, dtype="float32"), direction)
    assert single.sources * dim * 4 * (single.stages - 1) <= 99 * 1024  # shared memory of the smallest chips


def test_a_tuned_entry_beats_the_heuristic_and_an_explicit_size_beats_both(tmp_path, monkeypatch):
    key = tuning.bucketed("forward", dim=64, num_heads=4, sources=9, tokens=24, dtype="bfloat16")
    assert key["sources"] == 9
    assert key["tokens"] == 64
    general = tuning.spell({**key, "sources": "any", "tokens": "any"})
    tiles = {tuning.spell(key): {"sources": 8, "stages": 2, "other": 1}, general: {"warps": 4}}
    (tmp_path / "triton.json").write_text(json.dumps({"tiles": {"A chip": tiles}}))
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    tuning.table.cache_clear()
    heuristic = {"sources": 1, "stages": 1, "warps": 1}
    try:
        assert tuning.choose("triton", "A chip", key, heuristic, {"stages": 3}) == {
            "sources": 8,
            "stages": 3,
            "warps": 1,
        }
        assert tuning.choose("triton", "A chip", {**key, "sources": 25}, heuristic, None) == {**heuristic, "warps": 4}
        assert tuning.choose("triton", "Another", key, heuristic, None) == heuristic
        assert tuning.choose("triton", None, key, heuristic, None) == heuristic
    finally:
        tuning.table.cache_clear()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"tiles": []}',
        '{"tiles": {"A": {"key": {"warps": 0}}}}',
        '{"tiles": {"A": {"key": {"warps": "4"}}}}',
    ],
)
def test_a_damaged_table_is_refused_by_name(text, tmp_path, monkeypatch):
    (tmp_path / "triton.json").write_text(text)
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    tuning.table.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"triton\.json must hold tiles of positive integers; remove it, and"):
            tuning.choose("triton", "A chip", {"dim": 64}, {"warps": 1}, None)
    finally:
        tuning.table.cache_clear()


def test_tune_writes_a_table_that_calls_then_use(tmp_path, monkeypatch):
    """The whole program on a tiny shape; the times mean nothing here, the flow does."""
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    monkeypatch.setattr(tune, "SAMPLES", 1)
    monkeypatch.setattr(tune, "_ROTATED_BYTES", 1)
    monkeypatch.setattr(tune, "candidates", lambda heuristic: [heuristic | {"sources": 4}])
    tuning.table.cache_clear()
    try:
        tune.main(["--interpret", "--widths", "8x2", "--sources", "2", "--tokens", "1"])
        device = jax.devices()[0].device_kind
        key = tuning.bucketed("backward", dim=8, num_heads=2, sources=50, tokens=4096, dtype="bfloat16")
        chosen = tuning.choose("triton", device, key, triton_gpu.heuristic(CALL, "backward")._asdict(), None)
        assert chosen["sources"] in (1, 2, 4)
        assert len(tuning.table("triton")[device]) == 2
    finally:
        tuning.table.cache_clear()


def test_least_loss_looks_at_every_shape():
    a, b = (("sources", 1),), (("sources", 2),)
    assert tune.least_loss({(9, 8): {a: 1.0, b: 1.1}, (25, 8): {a: 3.0, b: 2.0}}) == {"sources": 2}


def test_the_shipped_table_names_sizes_that_exist():
    for entries in tuning.table("triton").values():
        for key, tile in entries.items():
            assert set(tile) == set(triton_gpu.Tile._fields), key
