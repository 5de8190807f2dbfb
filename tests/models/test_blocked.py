"""Routing by passes: the same model as site by site."""

import jax
import numpy as np
import pytest
from flax import nnx

from mhar_jax.models import blocked, decoder
from mhar_jax.models.blocked import passes
from mhar_jax.models.sites import num_sites, num_sublayers, starts_block
from model_helpers import TOKENS, build, jit, mean_loss, pure, relative, scramble, tiny

BY_PASS = ("block_mhar", "delta_block", "delta", "mhar_headwise")


def readable(config, site: int) -> int:
    """How many sources a site has, without a null source."""
    if config.variant in ("delta", "mhar_headwise"):
        return site + 1
    last = site == num_sublayers(config)
    blocks = sum(starts_block(config, i) for i in range(1, num_sublayers(config)) if i <= site) + last
    return 1 + blocks + (config.variant == "block_mhar" and not last and not starts_block(config, site))


@pytest.mark.parametrize("remat", ["none", "layer"])
@pytest.mark.parametrize("variant", BY_PASS)
@pytest.mark.parametrize(("layers", "blocks"), [(1, 1), (3, 2), (8, 2), (10, 4), (13, 13)])
def test_every_source_reaches_every_site_once(variant, layers, blocks, remat):
    config = tiny(variant, num_layers=layers, num_blocks=blocks, remat=remat)
    made = passes(config)
    for site in range(num_sites(config)):
        covered = [n for at, one in sorted(made.items()) if at <= site and site in one.sites for n in one.sources]
        assert covered == list(range(len(covered)))
        assert readable(config, site) - len(covered) in (0, 1)
    for at, one in made.items():  # nothing is read before it exists
        assert one.sites.start == at
        assert one.sources.stop <= readable(config, at)
    spans = blocked.PassReader(config, []).spans()
    assert [i for span in spans for i in span] == list(range(num_sublayers(config)))
    if len(spans) > 1:  # made again with its span, a pass serves no site of another
        last = range(num_sublayers(config), num_sites(config))
        for one in made.values():
            assert any(set(one.sites) <= set(span) for span in [*spans, last])


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=() if v == "delta_block" else pytest.mark.exhaustive) for v in BY_PASS]
)
def test_equals_site_by_site(variant, monkeypatch):
    config = tiny(variant)
    graph, state = nnx.split(scramble(build(config)))
    results, reads = [], []
    monkeypatch.setattr(blocked.PassReader, "check", lambda reader: reads.extend(reader.seen))
    for by_pass in (True, False):
        if not by_pass:
            monkeypatch.setattr(decoder, "can_block", lambda config, dtype: False)
        step = jax.value_and_grad(lambda state: mean_loss(graph, state, TOKENS), has_aux=True)
        (loss, _), grads = jit(step)(state)
        assert reads == list(range(num_sites(config)))  # of the first of the two
        results.append((loss, grads))
    (loss, grads), (expected, by_site) = results
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    # Both in float32, summed in another order: a few roundings of the gradients' size.
    for a, b in zip(jax.tree.leaves(pure(grads)), jax.tree.leaves(pure(by_site)), strict=True):
        assert relative(a, b) <= 1e-5 or np.abs(b).max() < 1e-7


@pytest.mark.parametrize("variant", BY_PASS)
def test_layer_remat_keeps_no_parts(variant, capsys):
    """Of a run's float32 mixes, sources times sites of them, the backward pass makes its own."""
    layers = 4 if variant in ("block_mhar", "delta_block") else 5
    config = tiny(variant, num_layers=layers, num_blocks=2, remat="layer", compute_dtype="bfloat16")
    graph, state = nnx.split(build(config))
    jax.ad_checkpoint.print_saved_residuals(lambda state: mean_loss(graph, state, TOKENS)[0], state)
    row = "[2,12,32]"  # B, T, D
    kept = [line for line in capsys.readouterr().out.splitlines() if row in line]
    assert any("state_between_layers" in line for line in kept), kept
    wide = [line for line in kept if line.startswith("f32") and "rms_norm" not in line]  # the final norm's own
    # A block's sum between its two layers; what the final site reads.
    others = {"block_mhar": 2, "mhar_headwise": 2}.get(variant, 0)
    assert len(wide) == others, wide
