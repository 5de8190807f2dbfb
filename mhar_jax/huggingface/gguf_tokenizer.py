"""The tokenizer inside a GGUF file: byte-level BPE, as GPT-2's and its descendants."""

import hashlib
import json
from pathlib import Path
from typing import Any

from mhar_jax.data.tokenizers import HuggingFaceTokenizer
from mhar_jax.errors import UserError, one_line
from mhar_jax.huggingface.gguf import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types of special and of added tokens
_DIGITS_ALONE = ("smollm",)  # tokenizer.ggml.pre: these split every digit off
_PLAIN = ("gpt-2", "gpt2", "default")


def gguf_tokenizer(path: str | Path) -> HuggingFaceTokenizer:
    """The tokenizer of a GGUF file; its end-of-text token is the one the file names.

    Raises:
      UserError: not byte-level BPE, or a splitting rule that is not known here.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    file = GGUFFile(path)
    kind, split = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in (*_DIGITS_ALONE, *_PLAIN):
        known = ", ".join((*_DIGITS_ALONE, *_PLAIN))
        raise UserError(f"{path}: the tokenizer must be gpt2 with splitting {known}, got {kind} with {split}")
    tokens = file.listed("tokenizer.ggml.tokens", str)
    merges: list[Any] = [tuple(merge.split(" ")) for merge in file.listed("tokenizer.ggml.merges", str)]
    types = file.listed("tokenizer.ggml.token_type", int)
    eos_id = file.token_id("tokenizer.ggml.eos_token_id", len(tokens))
    if len(types) != len(tokens):
        raise UserError(
            f"{path}: tokenizer.ggml.token_type must have one entry a token, {len(tokens)}, got {len(types)}"
        )
    if eos_id is None:
        raise UserError(f"{path}: the field tokenizer.ggml.eos_token_id is missing")
    try:
        implementation = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise UserError(f"{path}: the tokenizer cannot be made: {one_line(error)}") from None
    byte_level: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split in _DIGITS_ALONE:
        byte_level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    implementation.pre_tokenizer = byte_level
    implementation.decoder = decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    for token, kind in added:
        implementation.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    content = json.dumps([tokens, merges, types, split], ensure_ascii=False).encode()
    return HuggingFaceTokenizer(
        spec=str(path),
        vocab_size=len(tokens),
        eos_token=tokens[eos_id],
        eos_id=eos_id,
        fingerprint=hashlib.blake2b(content, digest_size=16).hexdigest(),
        implementation=implementation,
        path=Path(path),
    )
