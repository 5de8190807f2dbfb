"""Tokenizers: the built-in bytes, and any Hugging Face tokenizer.json."""

import abc
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mhar_jax.errors import UserError

# End-of-text tokens of GPT-2 and Qwen, chat Qwen and SmolLM, Llama 2, Llama 3 and Gemma, in the order of the search.
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "</s>", "<|end_of_text|>", "<eos>")


@dataclass(frozen=True)
class Tokenizer(abc.ABC):
    """Text to token ids and back.

    Text is only text: a special token written out in a document is encoded like any other characters, so that an
    end-of-text id always is the end of a document.
    """

    spec: str  # what it was loaded from: "bytes" or a path
    vocab_size: int  # highest id + 1
    eos_token: str  # text of the end-of-text token
    eos_id: int
    fingerprint: str  # hash of the content; equal for equal tokenizers wherever their files are

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One int32 array of ids for each text, no special tokens added."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids. Special tokens and ids outside the vocabulary give nothing, broken UTF-8 U+FFFD."""

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of the text, no special tokens added."""
        return self.encode_batch([text])[0]


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and id 256 for the end of a text."""

    spec: str = "bytes"
    vocab_size: int = 257
    eos_token: str = "<|endoftext|>"
    eos_id: int = 256
    fingerprint: str = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, run by the `tokenizers` package."""

    implementation: Any = field(repr=False, compare=False)
    path: Path = field(repr=False, compare=False)  # of the tokenizer.json itself

    def __post_init__(self) -> None:
        _take_text_as_text(self.implementation)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _take_text_as_text(self.implementation)  # not kept by its pickle

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self.implementation.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, np.int32) for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self.implementation.decode([i for i in map(int, ids) if 0 <= i < self.vocab_size])


def _take_text_as_text(implementation: Any) -> None:
    # Settings of a file meant for short inputs would cut or fill up documents.
    implementation.no_truncation()
    implementation.no_padding()
    implementation.encode_special_tokens = True


def load_tokenizer(spec: str, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` and `data.eos_token` name.

    Args:
      spec: "bytes", or the path of a tokenizer.json or of the directory that holds it.
      eos_token: text of the end-of-text token; None looks for END_TOKENS, the first that exists wins.

    Raises:
      UserError: no such file, not a tokenizer, or no such end-of-text token.
    """
    if spec == "bytes":
        if eos_token not in (None, ByteTokenizer.eos_token):
            raise UserError(
                f"data.eos_token: the bytes tokenizer has only {ByteTokenizer.eos_token}, got {eos_token!r}; "
                "leave it out"
            )
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"data.tokenizer: there is no file {path}; give 'bytes', or the path of a Hugging Face tokenizer.json or "
            "of its directory"
        )
    return _load_tokenizer_json(spec, path, eos_token)


def _load_tokenizer_json(spec: str, path: Path, eos_token: str | None) -> Tokenizer:
    import tokenizers

    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or "model" not in content:
            raise ValueError("it has no field 'model'")
        implementation = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise UserError(f"data.tokenizer: {path} is not a Hugging Face tokenizer.json ({error})") from error

    vocabulary = implementation.get_vocab(with_added_tokens=True)
    names = END_TOKENS if eos_token is None else (eos_token,)
    found = next((name for name in names if name in vocabulary), None)
    if found is None:
        looked_for = ", ".join(names)
        raise UserError(
            f"data.eos_token: {path} has no end-of-text token {looked_for}; name one of its tokens with data.eos_token"
        )
    # Hash of the parsed content: the layout of the file does not matter.
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode("utf-8", errors="surrogatepass")
    return HuggingFaceTokenizer(
        spec=spec,
        vocab_size=max(vocabulary.values()) + 1,
        eos_token=found,
        eos_id=vocabulary[found],
        fingerprint=hashlib.blake2b(canonical, digest_size=16).hexdigest(),
        implementation=implementation,
        path=path,
    )
