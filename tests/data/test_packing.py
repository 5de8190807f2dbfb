"""Packing against the plain concatenation of documents."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhar_jax.data.corpus import MemoryTokens
from mhar_jax.data.packing import EpochCache, PackedTokens, epoch_order

EOS = 9_999


def make_source(lengths):
    """Documents of distinct tokens, so that a token out of place is seen."""
    return MemoryTokens(np.arange(sum(lengths), dtype=np.uint32), np.array(lengths, np.int64))


def concatenated(source, documents, seed, shuffle, epochs):
    """The stream, the simple way."""
    stream = []
    for epoch in range(epochs):
        for place in epoch_order(len(documents), seed, epoch, shuffle):
            document = int(documents[place])
            stream += [*source.read(document, 0, int(source.lengths[document])).tolist(), EOS]
    return np.array(stream)


def check(lengths, documents, seq_len, shuffle, epochs=3):
    source = make_source(lengths)
    documents = np.array(documents)
    packed = PackedTokens(source, documents, eos_id=EOS, seq_len=seq_len, seed=5, shuffle=shuffle)
    # A few epochs more than compared, since the last window may be longer than a short epoch.
    stream = concatenated(source, documents, 5, shuffle, epochs + seq_len + 2)
    windows = epochs * packed.tokens_per_epoch // seq_len + 1
    for index in range(windows):
        expected = stream[index * seq_len : index * seq_len + seq_len + 1]
        np.testing.assert_array_equal(packed[index], expected)
    np.testing.assert_array_equal(packed.windows(0, windows), np.stack([packed[i] for i in range(windows)]))
    # Nothing lost, nothing twice: the inputs of the windows are the stream.
    inputs = packed.windows(0, windows)[:, :-1].ravel()
    np.testing.assert_array_equal(inputs, stream[: windows * seq_len])
    epoch = np.sort(inputs[: packed.tokens_per_epoch])
    everything = np.concatenate([source.read(d, 0, lengths[d]) for d in documents] + [[EOS] * len(documents)])
    np.testing.assert_array_equal(epoch, np.sort(everything))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seq_len", [1, 4, 7])
@pytest.mark.parametrize(
    "lengths",
    [
        [3, 0, 1, 90, 2, 0, 0, 5],  # empty, one token, longer than many windows
        [0],
        [1],
        [0, 0, 0],
        [40],
    ],
)
def test_windows_are_those_of_the_concatenation(lengths, seq_len, shuffle):
    check(lengths, range(len(lengths)), seq_len, shuffle)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    seq_len=st.integers(1, 20),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_any_lengths_and_any_split(lengths, seq_len, shuffle, data):
    chosen = data.draw(st.sets(st.sampled_from(range(len(lengths))), min_size=1))
    check(lengths, sorted(chosen), seq_len, shuffle)


def test_reading_order_does_not_matter():
    packed = PackedTokens(make_source([4, 2, 9]), np.arange(3), eos_id=EOS, seq_len=5, seed=1)
    forward = [packed[i] for i in range(30)]
    backward = [packed[i] for i in reversed(range(30))][::-1]
    np.testing.assert_array_equal(forward, backward)
    again = pickle.loads(pickle.dumps(packed))
    np.testing.assert_array_equal(again[29], forward[29])


def test_far_windows_need_no_walk():
    packed = PackedTokens(make_source([4, 2, 9]), np.arange(3), eos_id=EOS, seq_len=6, seed=1)
    epoch = 10**12
    assert packed[epoch * packed.tokens_per_epoch // 6].shape == (7,)


def test_epoch_order_is_fixed_for_all_time():
    # Literal: checkpoints of earlier versions must go on with the same documents.
    assert epoch_order(8, 42, 0, True).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert epoch_order(8, 42, 1, True).tolist() != epoch_order(8, 42, 0, True).tolist()
    assert epoch_order(8, 43, 0, True).tolist() != epoch_order(8, 42, 0, True).tolist()
    assert epoch_order(5, 42, 3, False).tolist() == [0, 1, 2, 3, 4]
    assert sorted(epoch_order(1000, 1, 2, True).tolist()) == list(range(1000))


def test_epoch_cache_makes_once_and_forgets_the_oldest():
    made = []
    cache = EpochCache(lambda epoch: made.append(epoch) or epoch, keep=2)
    for epoch in (0, 1, 0, 1, 2, 1, 0):
        assert cache(epoch) == epoch
    assert made == [0, 1, 2, 0]


def test_empty_split_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        PackedTokens(make_source([1]), np.arange(0), eos_id=EOS, seq_len=4)
