"""The held-out split: a function of a document's text and of nothing else."""

import hashlib

import numpy as np


def document_hash(text: str) -> int:
    """64-bit hash of a document: the first 8 bytes of BLAKE2b of its UTF-8, little-endian."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Which documents are held out, bool like `hashes`: those whose uint64 hash is in the lowest `share` of all hashes.

    The same text is on the same side in every order, file layout and run, so copies of a document stay together, and a
    larger share only adds documents.
    """
    return np.asarray(hashes, np.uint64) < np.uint64(int(share * 2**64))


def is_held_out(text: str, share: float) -> bool:
    """`held_out` for one document."""
    return bool(held_out(np.array(document_hash(text), np.uint64), share))
