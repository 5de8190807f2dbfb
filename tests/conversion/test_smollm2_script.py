"""The paired mid-training of SmolLM2, on a model and a text so small that it takes seconds."""

import importlib.util
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

gguf = pytest.importorskip("gguf", reason="the GGUF reader is part of the extra `hf`")

FIELDS = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 24,
    "feed_forward_length": 32,
    "attention.head_count": 3,
    "attention.head_count_kv": 3,
}
SHAPE = {"num_layers": 2, "context": 64, "d_model": 24, "num_heads": 3, "num_kv_heads": 3, "head_dim": 8, "ffn_dim": 32}
LAYER = {
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


def write_model(path: Path) -> None:
    """A random model whose tokens are bytes, and its tokenizer."""
    characters = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer, draw = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    for name, value in FIELDS.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(characters)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3] + [1] * 257)
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (258, 24), "output_norm": (24,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()}
    for name, shape in shapes.items():
        value = np.ones(shape) if len(shape) == 1 else 0.1 * draw.normal(size=shape)
        writer.add_tensor(f"{name}.weight", value.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_bundle_and_pairs(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("smollm2_pairs", Path(__file__).parent / "smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    write_model(tmp_path / "model.gguf")
    paragraphs = {name: [f"{name} says {i} to {i * i}." for i in range(60)] for name in ("austen", "brown", "moby")}
    (tmp_path / "prose.txt").write_text("".join(f"{p}\n\n" for text in paragraphs.values() for p in text))
    (tmp_path / "prose.log").write_text("".join(f"{name}\t0.01 MB\t60 paragraphs\n" for name in paragraphs) + "total\n")
    monkeypatch.setattr(script, "PIECE", 10_000)
    script.bundle(tmp_path / "model.gguf", tmp_path / "prose.txt", tmp_path / "prose.log", tmp_path / "parts")
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) > 1
    (tmp_path / "whole.tar").write_bytes(b"".join(p.read_bytes() for p in parts))
    with tarfile.open(tmp_path / "whole.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    sources = json.loads(lzma.decompress((tmp_path / "smollm2" / "sources.json.xz").read_bytes()))
    assert sources == {name: "\n\n".join(text) for name, text in paragraphs.items()}

    overrides = ["--batch_size=8", "--seq_len=16", "--model.vocab_size=258", "--model.compute_dtype=float32"]
    overrides += [f"--model.{name}={value}" for name, value in SHAPE.items()]
    overrides += ["--mesh.data=8", "--optimizer.warmup_steps=2", "--optimizer.peak_lr=0.01", "--steps=4"]
    script.pairs(tmp_path / "out.json", tmp_path / "smollm2", 30.0, overrides)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["steps"] == 4
    plain, *routed = (found["runs"][name] for name in script.VARIANTS)
    assert [e["step"] for e in plain["held_out"]] == [0, 1, 2, 3, 4]
    assert all(len(run["train_loss"]) == 4 for run in (plain, *routed))
    for run in routed:
        np.testing.assert_allclose(run["train_loss"][0], plain["train_loss"][0], atol=1e-5)
        np.testing.assert_allclose(run["held_out"][0]["loss"], plain["held_out"][0]["loss"], atol=1e-5)
        assert np.all(np.array(run["gates"]) != 0)
    assert np.mean(plain["held_out_last_parameters"]) < np.mean(plain["held_out"][0]["loss"])
    assert "minus plain" in capsys.readouterr().out
