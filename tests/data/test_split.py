"""The held-out split depends on a document's text and on nothing else."""

import numpy as np

from mhar_jax.data.split import document_hash, held_out, is_held_out


def test_hash_is_fixed_for_all_time():
    # Literals: BLAKE2b is published, so these never change.
    assert document_hash("") == 0xB4B2797457A0A6E4
    assert document_hash("It is a truth universally acknowledged") == document_hash(
        "It is a truth " + "universally acknowledged"
    )
    assert document_hash("日本") != document_hash("日木")


def test_share_is_kept_and_larger_shares_only_add():
    hashes = np.array([document_hash(str(i)) for i in range(20_000)], np.uint64)
    small, large = held_out(hashes, 0.05), held_out(hashes, 0.2)
    # Standard deviation of the share is 0.0015 for 20,000 documents; four of them.
    assert abs(small.mean() - 0.05) < 0.006
    assert not (small & ~large).any()
    assert [is_held_out(str(i), 0.2) for i in range(100)] == large[:100].tolist()


def test_extremes():
    hashes = np.array([0, 2**64 - 1], np.uint64)
    assert held_out(hashes, 0.0).tolist() == [False, False]
    assert held_out(hashes, 1e-18).tolist() == [True, False]
    assert held_out(hashes, 1 - 2**-53).tolist() == [True, False]
