"""Fingerprints of text: what tells two corpora apart without tokenising them, and what two fingerprints differ in.

Tokenised text has the hash of its documents. Text tokenised on the fly has four parts with dashes between: of the
names, sizes and numbers of documents of its files; of the tokenizer; the end-of-text token; of the files' content.
"""

import hashlib
from pathlib import Path

_WHOLE = 1 << 24  # bytes: files up to this size are hashed whole
_BLOCK = 1 << 16  # bytes of each of the 256 evenly spaced blocks, first and last included, of a larger one
_PARTS = ("names, sizes or numbers of documents", "tokenizers", "end-of-text tokens", "content")


def hash_content(path: Path) -> str:
    """Of a file: whole up to 16 MiB, else 16 MiB of it in evenly spaced blocks; an edit between them goes unseen."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        if size <= _WHOLE:
            file.seek(0)
            digest.update(file.read())
        else:
            blocks = _WHOLE // _BLOCK
            for block in range(blocks):
                file.seek((size - _BLOCK) * block // (blocks - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def what_differs(first: str, second: str) -> str:
    """In two unequal fingerprints, as ": their content"; empty where they do not say."""
    a, b = first.split("-"), second.split("-")
    if min(len(a), len(b)) < 3:
        return ": one text was tokenised on the fly, the other was not" if max(len(a), len(b)) >= 3 else ""
    if found := [name for name, x, y in zip(_PARTS, a, b, strict=False) if x != y]:
        return f": their {' and '.join(found)}"
    return ": only one of them covers the content, as all do that are written now"
