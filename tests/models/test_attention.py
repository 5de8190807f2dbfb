"""Attention: the dispatch says what it does, and the XLA path is softmax attention."""

import jax.numpy as jnp
import numpy as np
import pytest

from mhar_jax.models.attention import attention
from mhar_kernels import UnsupportedInputError, assume_platform


def qkv(length=6, dtype=jnp.float32, head_dim=8):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, length, heads, head_dim)), dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("segments", [None, [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]]])
def test_equals_softmax_attention(segments):
    q, k, v = qkv()
    ids = None if segments is None else jnp.asarray(segments)
    out = np.asarray(attention(q, k, v, segment_ids=ids))
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    for b in range(2):
        for h in range(4):
            for t in range(6):
                seen = [s for s in range(t + 1) if segments is None or segments[b][s] == segments[b][t]]
                scores = np.exp(k[b, seen, h // 2] @ q[b, t, h] / np.sqrt(8))
                expected = scores / scores.sum() @ v[b, seen, h // 2]
                np.testing.assert_allclose(out[b, t, h], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "platform", "changes", "reason"),
    [
        ("cudnn", "cpu", {}, "needs a GPU"),
        ("cudnn", "gpu", {"dtype": jnp.float32}, "bfloat16 or float16"),
        ("cudnn", "gpu", {"dtype": jnp.bfloat16, "head_dim": 12}, "multiple of 8"),
        ("tpu_flash", "cpu", {"length": 128}, "needs a TPU"),
        ("tpu_flash", "tpu", {"length": 100}, "multiples of 128"),
    ],
)
def test_a_named_implementation_runs_or_raises(name, platform, changes, reason):
    with assume_platform(platform), pytest.raises(UnsupportedInputError, match=reason):
        attention(*qkv(**changes), implementation=name)


def test_unknown_name():
    with pytest.raises(ValueError, match="must be None or one of xla, cudnn, tpu_flash"):
        attention(*qkv(), implementation="flash")


def test_best_falls_back_to_xla():
    """On a GPU, float32 has no cuDNN attention."""
    q, k, v = qkv()
    with assume_platform("gpu"):
        np.testing.assert_array_equal(attention(q, k, v), attention(q, k, v, implementation="xla"))
