"""An import's memory does not grow with the model."""

import pytest

from mhar_jax.conversion import memory


@pytest.mark.slow
def test_memory_does_not_grow_with_layers(tmp_path):
    """Widths of the 8B model with a smaller vocabulary: two more layers are 0.87 GB of bfloat16, and cost nothing."""
    peaks = []
    for layers in (1, 3):
        largest = memory.write_checkpoint(tmp_path / f"hf-{layers}", layers, vocab_size=32768)
        found = memory.measure(tmp_path / f"hf-{layers}", tmp_path / f"run-{layers}")
        assert found["peak"] < 1.5 * largest + 2 * 2**30
        peaks.append(found["peak"])
    assert abs(peaks[1] - peaks[0]) < 1.5e8
