"""The bytes that must move, against counts by hand."""

import pytest

from mhar_jax.bench import traffic
from mhar_jax.bench.shapes import PRESETS, ModelShape, SiteShape, parse_site, preset
from mhar_jax.errors import UserError
from mhar_kernels import stages_triton
from mhar_kernels.traffic import best_block_size

# (preset, sources): megabytes forward, and forward + backward, in thousands of bytes. A row is tokens x D x 2 bytes.
# Forward: N + 1 rows, in delta form N + 2. Backward: 2 N + 1 more.
SITES = {
    ("tiny", 2): (3 * 4_096, 8 * 4_096),  # 16 x 128 x 2 = 4,096 bytes
    ("tiny", 4): (5 * 4_096, 14 * 4_096),
    ("100m", 9): (10 * 8_388_608, 29 * 8_388_608),  # 8,192 x 512 x 2
    ("100m", 25): (26 * 8_388_608, 77 * 8_388_608),
    ("350m", 9): (10 * 16_777_216, 29 * 16_777_216),  # 8,192 x 1,024 x 2
    ("350m", 49): (50 * 16_777_216, 149 * 16_777_216),
    ("1b", 9): (10 * 20_971_520, 29 * 20_971_520),  # 8,192 x 1,280 x 2
    ("1b", 25): (26 * 20_971_520, 77 * 20_971_520),
    ("1b", 49): (50 * 20_971_520, 149 * 20_971_520),
    ("1b", 73): (74 * 20_971_520, 221 * 20_971_520),
    ("8b-delta", 9): (11 * 67_108_864, 30 * 67_108_864),  # 8,192 x 4,096 x 2; 9 + residual + out, then 9 + dO + 9
}

# preset: rows of all sites, site by site. Forward, 1 + 2 + ... + N read, N written; backward, twice the former and N.
# 25: 325 + 25; 650 + 25. 49: 1,225 + 49; 2,450 + 49. 73: 2,701 + 73; 5,402 + 73. tiny, 3 sites: 6 + 3; 12 + 3.
# 8b-delta: 8 sites read 1, 8 read 2, ... 8 read 8: 288 reads; forward 64 residuals in and 64 streams out; backward 576
# and 64 cotangents.
SITE_BY_SITE = {
    "tiny": (9, 24),
    "100m": (350, 350 + 675),
    "350m": (1_274, 1_274 + 2_499),
    "1b": (2_774, 2_774 + 5_475),
    "8b-delta": (416, 416 + 640),
}


def test_every_site_of_every_preset():
    for name, p in PRESETS.items():
        for shape in p.sites("bfloat16"):
            found = tuple(traffic.site_bytes(shape, which) for which in traffic.PASSES)
            assert found == SITES.pop((name, shape.sources))
    assert not SITES


def test_every_model_site_by_site():
    assert SITE_BY_SITE.keys() == PRESETS.keys()
    for name, rows in SITE_BY_SITE.items():
        assert tuple(traffic.model_rows(PRESETS[name].model, which, None) for which in traffic.PASSES) == rows


def test_a_blocked_model():
    """Four sites in blocks of two, by hand. What each kernel reads and writes, in rows:

    merge, sites 0 to 3: source in, history out, mix and its rest out; 0 or 1 source of the block; in the second block
    the partial mix: 4 + 5 + 5 + 6. mix, second block: 2 sources in, 2 partials out. Forward 24.
    finish, sites 3 to 0: cotangent, source, mix and its rest in, cotangent and gradient out; 0 or 1 cotangent of
    the block; in the first block what was pulled: 6 + 7 + 7 + 8. pull, first block: 2 cotangents and 2 sources
    in, 2 partial gradients out. query: 4 in. Backward 38.
    """
    shape = ModelShape((1, 2, 3, 4), 8, 2, 10)
    assert traffic.model_rows(shape, "forward", 2) == 24
    assert traffic.model_rows(shape, "forward_backward", 2) == 62
    assert traffic.model_bytes(shape, "forward", 2) == 24 * 10 * 8 * 2


# preset: sites a block, rows forward, rows backward. merge: 4 a site, the rows inside blocks, 1 a site behind the
# first block. mix, a block behind the first: where it starts, and its size. finish: 6 a site, inside, 1 a site
# before the last block. pull, a block before the last: what follows it, and twice its size. query: 1 a site.
# 25 sites in 7, 7, 7, 4: inside 3 x 21 + 6 = 69. mix 14 + 21 + 25; merge 100 + 69 + 18. pull 32 + 25 + 18; finish
# 150 + 69 + 21. 49 in 6 x 8, 1: inside 168. mix 16 + 24 + ... + 48, 49; merge 196 + 168 + 41. pull 41 + 33 + ...
# + 1 = 126, 96; finish 294 + 168 + 48. 73 in 9 x 8, 1: inside 252. mix 16 + ... + 72, 73; merge 292 + 252 + 65.
# pull 65 + 57 + ... + 1 = 297, 144; finish 438 + 252 + 72. tiny, one block: merge 12 + 3; finish 18 + 3.
BLOCKED = {
    "tiny": (3, 15, 21 + 3),
    "100m": (7, 60 + 187, 75 + 240 + 25),
    "350m": (8, 209 + 405, 222 + 510 + 49),
    "1b": (8, 425 + 609, 441 + 762 + 73),
}


def test_every_blocked_model():
    assert BLOCKED.keys() == {name for name, p in PRESETS.items() if not p.model.delta}
    for name, (block, forward, backward) in BLOCKED.items():
        model = PRESETS[name].model
        found = tuple(traffic.model_bytes(model, which, block) for which in traffic.PASSES)
        assert found == (forward * model.row_bytes, (forward + backward) * model.row_bytes)


def test_blocks_move_less():
    for name in ("100m", "350m", "1b"):
        model = PRESETS[name].model
        block = best_block_size(model.sites, stages_triton.COSTS)
        for which in traffic.PASSES:
            assert traffic.model_rows(model, which, block) < traffic.model_rows(model, which, None)


def test_models_are_those_of_the_paper():
    sizes = {n: (p.model.sites, p.model.dim, p.model.heads, p.model.tokens) for n, p in PRESETS.items()}
    assert sizes["100m"] == (25, 512, 4, 8 * 2048)
    assert sizes["350m"] == (49, 1024, 8, 4 * 1024)
    assert sizes["1b"] == (73, 1280, 8, 2 * 1024)
    assert sizes["8b-delta"] == (64, 4096, 8, 2 * 4096)


def test_flops():
    """2 sources of 3 tokens of 4 numbers: 24 numbers read, 6 operations each forward, 16 in all."""
    assert traffic.routing_flops((2,), 4, 3, "forward") == 6 * 24
    assert traffic.routing_flops((1, 1), 4, 3, "forward_backward") == 16 * 24


def test_float32_is_twice_as_much():
    assert SiteShape(2, 8, 2, 4, dtype="float32").row_bytes == 2 * SiteShape(2, 8, 2, 4).row_bytes == 128


@pytest.mark.parametrize("text", ["9x512", "9x512x5", "ax512x4", "0x512x4"])
def test_bad_shapes(text):
    with pytest.raises(UserError, match="--shapes must"):
        parse_site(text, 16, "bfloat16", False)


def test_unknown_preset():
    with pytest.raises(UserError, match="of tiny, 100m"):
        preset("7b")
