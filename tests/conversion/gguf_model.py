"""A small random model as a GGUF file, with fields to spoil."""

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

TOKENS = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
FIELDS: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 24,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 3,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1e5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [3] + [1] * 257,
    "tokenizer.ggml.eos_token_id": 0,
}
_LAYER = {
    "attn_norm": (24,),
    "attn_q": (24, 24),
    "attn_k": (24, 24),
    "attn_v": (24, 24),
    "attn_output": (24, 24),
    "ffn_norm": (24,),
    "ffn_gate": (32, 24),
    "ffn_up": (32, 24),
    "ffn_down": (24, 32),
}


def write_model(
    path: Path, changes: dict[str, Any] | None = None, more: dict[str, tuple[int, ...]] | None = None
) -> Path:
    """A model whose tokens are bytes, and its tokenizer.

    `changes` of FIELDS, where None leaves a field out; `more`: names without ".weight" and shapes of further tensors.
    """
    import gguf

    writer, draw = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    kinds: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in (FIELDS | (changes or {})).items():
        if value is not None:
            kinds.get(type(value), writer.add_array)(name, value)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (258, 24), "output_norm": (24,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in _LAYER.items()}
    shapes |= more or {}
    for name, shape in shapes.items():
        value = np.ones(shape) if len(shape) == 1 else 0.1 * draw.normal(size=shape)
        writer.add_tensor(f"{name}.weight", value.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
