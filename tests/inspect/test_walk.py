"""The walk gives what the model gives, edits what it is told, and compiles each piece once."""

import inspect_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inspect_helpers import TOKENS, known, sequence_losses

from mhar_jax.errors import UserError
from mhar_jax.inspect.walk import Walk
from model_helpers import ROUTED, build, relative, tiny


def run(walk, **options):
    """The final norm's input and the weights of every site, for the first batch."""
    found = {}
    x = walk.run(
        *walk.start(jnp.asarray(TOKENS[0][:, :-1])),
        visit=lambda site, given, weights: found.__setitem__(site, np.asarray(weights)),
        **options,
    )
    return x, [found[i] for i in sorted(found)]


@pytest.mark.parametrize("variant", ROUTED)
def test_losses_and_weights_equal_the_definition(variant):
    k = known(variant)
    x, weights = run(k.walk)
    losses = k.walk.losses(x, jnp.asarray(TOKENS[0][:, 1:]), jnp.ones((3, 11), bool))
    # float32 rounding through 6 sublayers; the models' own tests see 1e-6
    assert relative(losses, sequence_losses(k.logits[:3], TOKENS[0][:, 1:])) < 5e-6
    assert len(weights) == len(k.weights) == len(k.walk.shapes)
    for shape, mine, oracle in zip(k.walk.shapes, weights, k.weights, strict=True):
        assert mine.shape == (k.walk.max_sources, 3, 11, shape.softmaxes)
        assert relative(mine[: len(shape.sources)], oracle[:, :3]) < 1e-5
        assert not mine[len(shape.sources) :].any()


def test_the_programs_of_a_site_are_as_large_at_any_depth():
    """XLA for GPUs takes minutes over programs that fuse dozens of arrays into what reads them."""
    sizes = []
    for layers in (1, 3):
        walk, given = Walk(build(tiny("delta", num_layers=layers))), []
        walk.run(
            *walk.start(jnp.asarray(TOKENS[0][:, :-1])), visit=lambda site, input_, w, given=given: given.append(input_)
        )
        assert {i.sources.shape for i in given} == {(2 * layers, 3, 11, 32)}
        sizes.append(len(jax.tree.leaves(given[0])))
    assert sizes[0] == sizes[1] == 6


def test_a_mask_leaves_tokens_out():
    k = known("mhar")
    x, _ = run(k.walk)
    mask = np.ones((3, 11), bool)
    mask[1, 4:] = False
    targets = TOKENS[0][:, 1:]
    kept = sequence_losses(k.logits[1:2, :4], targets[1:2, :4])
    assert k.walk.losses(x, jnp.asarray(targets), jnp.asarray(mask))[1] == pytest.approx(kept[0], rel=1e-5)


@pytest.mark.parametrize("variant", ["mhar", "delta_block", "mhar_headwise"])
def test_edits_change_the_weights_of_their_site_as_told(variant):
    walk = known(variant).walk
    site = next(i for i, s in enumerate(walk.shapes) if len(s.sources) > 2 and i % 2 == 0)
    x, intact = run(walk)
    count, heads = len(walk.shapes[site].sources), walk.shapes[site].softmaxes
    keep = walk.no_edit(site).keep.copy()
    keep[1, 0] = False  # one source of one softmax
    edited_x, edited = run(walk, edits={site: walk.no_edit(site)._replace(keep=keep)})
    expected = intact[site].copy()
    expected[1, ..., 0] = 0
    expected[..., 0] /= expected[..., 0].sum(0)
    np.testing.assert_allclose(edited[site], expected, atol=2e-6)
    for before in range(site):
        np.testing.assert_array_equal(edited[before], intact[before])
    assert relative(edited_x, x) > 1e-3
    uniform = np.arange(heads) == heads - 1
    weights = run(walk, edits={site: walk.no_edit(site)._replace(uniform=uniform, keep=keep)})[1][site]
    np.testing.assert_allclose(weights[:count, ..., -1], 1 / count, rtol=1e-6)
    np.testing.assert_allclose(weights[..., 0], expected[..., 0], atol=2e-6)


def test_a_run_from_a_kept_state_equals_the_whole_run():
    walk = known("delta_block").walk
    state, context = walk.start(jnp.asarray(TOKENS[0][:, :-1]))
    states = []
    whole = walk.run(state, context, states=states)
    assert len(states) == 7  # before each of 6 sublayers, and the last
    for first in (0, 3, 6):
        np.testing.assert_array_equal(walk.run(states[first], context, first=first), whole)


def test_every_piece_is_compiled_once_whatever_the_site_and_the_edit():
    walk = Walk(build(tiny("mhar", num_layers=5)))
    state, context = walk.start(jnp.asarray(TOKENS[0][:, :-1]))
    for site in range(11):
        edit = walk.no_edit(site)._replace(scale=np.zeros(2, np.float32))
        walk.run(state, context, edits={site: edit})
    assert [f._cache_size() for f in (walk._read, *walk._sublayers)] == [1, 1, 1]


@pytest.mark.parametrize("variant", ["additive", "hyper_connections"])
def test_a_variant_without_routing_is_refused(variant):
    with pytest.raises(UserError, match=f"model.variant={variant} has no depth routing"):
        Walk(build(tiny(variant)))


def test_the_helpers_oracle_sees_every_site():
    for variant in ("mhar_headwise", "block_mhar", "delta_block"):
        k = helpers.known(variant)
        assert [len(s) for s in k.sources] == [len(s.sources) for s in k.walk.shapes]
