"""The paired mid-training of SmolLM2, on a model and a text so small that it takes seconds."""

import importlib.util
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.conversion.gguf_model import write_model

pytest.importorskip("gguf", reason="the GGUF reader is part of the extra `hf`")

SHAPE = {"num_layers": 2, "context": 64, "d_model": 24, "num_heads": 3, "num_kv_heads": 3, "head_dim": 8, "ffn_dim": 32}


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
