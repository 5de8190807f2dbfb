"""Parameter counts and FLOPs against shapes, the paper's claims and a count by hand."""

import pytest

from mhar_jax.config import ModelConfig
from mhar_jax.errors import UserError
from mhar_jax.models import count_parameters, train_flops_per_token
from mhar_jax.models.counting import depth_parameters, expected_parameters
from model_helpers import VARIANTS, tiny

ONE_B = dict(
    vocab_size=151_936,
    num_layers=36,
    d_model=1280,
    num_heads=16,
    num_kv_heads=8,
    head_dim=80,
    ffn_dim=5120,
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": False, "qk_norm": False, "null_source": False, "gate": False}]
)
def test_formula_equals_the_shapes(variant, changes):
    config = tiny(variant, **changes)
    assert count_parameters(config) == expected_parameters(config)


def test_one_billion():
    """The 1B shape: MHAR adds nothing to one head, and 0.02 % to the additive model."""
    additive, one_head, mhar = (
        count_parameters(ModelConfig(variant=v, **ONE_B)) for v in ("additive", "attention_residuals", "mhar")
    )
    assert mhar == one_head
    assert mhar - additive == 73 * 2 * 1280
    assert 0.9e9 < additive < 1.2e9
    assert (mhar - additive) / additive < 0.0002


def test_depth_parameters_by_hand():
    """3 layers, D 32, 2 KV heads, 4 streams."""
    by_hand = {
        "additive": 0,
        "hyper_connections": 6 * (16 + 4 + 4),
        "attention_residuals": 7 * 64,
        "mhar": 7 * 64,
        "mhar_headwise": 3 * 2 * 32 + 4 * 32 + 7 * 32,
        "block_mhar": 7 * 64,
        "delta": 6 * (64 + 32 + 1),
        "delta_block": 6 * (64 + 32 + 1),
    }
    assert {v: depth_parameters(tiny(v)) for v in VARIANTS} == by_hand


def test_flops_by_hand():
    config = tiny("additive")
    matrices = 3 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48) + 64 * 32
    attention = 3 * 32 * 100  # layers · width of the heads · length
    assert train_flops_per_token(config, 100) == 6 * matrices + 6 * attention
    pairs = sum(range(1, 8))
    assert train_flops_per_token(tiny("mhar"), 100) == 6 * matrices + 6 * attention + 12 * 32 * pairs
    headwise = 1 * 2 + 2 + 3 * 2 + 4 + 5 * 2 + 6 + 7
    assert train_flops_per_token(tiny("mhar_headwise"), 100) == 6 * matrices + 6 * attention + 12 * 32 * headwise


def test_flops_of_depth_routing_at_one_billion():
    """The paper says about +0.5 to 1.2 % FLOPs over the ordinary Transformer."""
    additive, mhar = (train_flops_per_token(ModelConfig(variant=v, **ONE_B), 1024) for v in ("additive", "mhar"))
    assert 0.003 < mhar / additive - 1 < 0.012


def test_vocabulary_must_be_known():
    with pytest.raises(UserError, match="vocab_size"):
        train_flops_per_token(tiny("mhar", vocab_size=None), 8)
