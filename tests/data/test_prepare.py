"""Prepared shards: the same tokens as on the fly, whole or not at all, damage is seen."""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest

from mhar_jax.data import describe_data, load_tokenizer, make_eval_batches, make_train_iterator
from mhar_jax.data import prepare as prepare_module
from mhar_jax.data.__main__ import main
from mhar_jax.data.prepare import prepare
from mhar_jax.data.shards import ShardTokens, load_index
from mhar_jax.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path):
    return load_tokenizer(str(tokenizer_path))


@pytest.fixture(scope="module")
def prepared(corpus_path, tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("prepared") / "tokens"
    prepare(path=str(corpus_path), out=str(directory), tokenizer=tokenizer, shards=3)
    return directory


@pytest.fixture
def copy(prepared, tmp_path):
    """A copy to be damaged."""
    for file in prepared.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def error_of(function, *arguments, **keywords):
    with pytest.raises(UserError) as info:
        function(*arguments, **keywords)
    assert "\n" not in str(info.value)
    return str(info.value)


def test_documents_are_those_of_the_text(prepared, tokenizer, texts):
    index = load_index(prepared)
    assert sorted(file.name for file in prepared.iterdir()) == [
        "hashes.npy",
        "index.json",
        "lengths.npy",
        "tokenizer.json",
        "tokens-00000-of-00003.array_record",
        "tokens-00001-of-00003.array_record",
        "tokens-00002-of-00003.array_record",
    ]
    assert (index.documents, index.dtype, len(index.shards)) == (len(texts), "uint16", 3)
    tokens = ShardTokens(prepared, index)
    for document, text in enumerate(texts):
        np.testing.assert_array_equal(tokens.document(document), tokenizer.encode(text))
    again = pickle.loads(pickle.dumps(tokens))  # as for a worker process
    np.testing.assert_array_equal(again.document(7), tokens.document(7))
    assert index.tokens == sum(len(tokenizer.encode(text)) for text in texts) == tokens.lengths.sum()
    assert oct(prepared.stat().st_mode & 0o777) == "0o755"


def test_training_is_the_same_as_on_the_fly(prepared, tokenizer, make_config):
    text, shards = make_config(seq_len=32), make_config(seq_len=32, path=str(prepared))
    one, other = make_train_iterator(text, tokenizer), make_train_iterator(shards, tokenizer)
    for _ in range(60):
        np.testing.assert_array_equal(next(one)["tokens"], next(other)["tokens"])
    # So alike that a state of the one goes on in the other.
    assert one.get_state() == other.get_state()
    one.close()
    other.close()


def test_evaluation_and_description_are_the_same(prepared, tokenizer, make_config):
    text, shards = make_config(), make_config(path=str(prepared))
    for one, other in zip(make_eval_batches(text, tokenizer), make_eval_batches(shards, tokenizer), strict=True):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])
    assert describe_data(text, tokenizer) == {**describe_data(shards, tokenizer), "source": text.data.path}


def test_worker_processes_write_the_same_files(prepared, corpus_path, tokenizer, tmp_path):
    prepare(path=str(corpus_path), out=str(tmp_path / "a"), tokenizer=tokenizer, shards=3, workers=2)
    for file in prepared.iterdir():
        assert (tmp_path / "a" / file.name).read_bytes() == file.read_bytes(), file.name
    assert os.listdir(tmp_path) == ["a"]


def test_large_vocabularies_take_four_bytes(tmp_path):
    from dataclasses import replace

    from mhar_jax.data.tokenizers import ByteTokenizer

    (tmp_path / "a.txt").write_text("one\n\ntwo")
    index = prepare(path=str(tmp_path / "a.txt"), out=str(tmp_path / "out"), tokenizer=ByteTokenizer(vocab_size=65537))
    assert index.dtype == "uint32"
    assert ShardTokens(tmp_path / "out", index).document(1).tolist() == list(b"two")
    assert replace(index, dtype="uint16") != index


def test_nothing_is_overwritten(corpus_path, tokenizer, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    prepare(path=str(corpus_path), out=str(out), tokenizer=tokenizer)  # an empty directory is fine
    before = (out / "index.json").read_bytes()
    message = error_of(prepare, path=str(corpus_path), out=str(out), tokenizer=load_tokenizer("bytes"))
    assert "exists and is not empty" in message
    assert (out / "index.json").read_bytes() == before
    (tmp_path / "file").write_text("x")
    assert "not empty" in error_of(prepare, path=str(corpus_path), out=str(tmp_path / "file"), tokenizer=tokenizer)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_document_leaves_nothing(tmp_path, workers):
    good = json.dumps({"text": "fine"}) + "\n"
    (tmp_path / "a.jsonl").write_text(good * 9 + "{bad}\n")
    out = tmp_path / "made" / "out"
    keywords = {"path": str(tmp_path / "a.jsonl"), "out": str(out), "tokenizer": load_tokenizer("bytes")}
    assert "a.jsonl, line 10: the line is not JSON" in error_of(prepare, **keywords, shards=2, workers=workers)
    assert os.listdir(tmp_path / "made") == []


def test_an_interrupt_leaves_nothing(corpus_path, tokenizer, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "_write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(path=str(corpus_path), out=str(tmp_path / "out"), tokenizer=tokenizer)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing(corpus_path, tokenizer, tmp_path):
    """The limit on the size of a file stands for the end of the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        message = error_of(prepare, path=str(corpus_path), out=str(tmp_path / "out"), tokenizer=tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert message.startswith("--out: cannot write tokens-00000-of-00001.array_record (")
    assert os.listdir(tmp_path) == []


def test_an_unwritable_place(corpus_path, tokenizer, tmp_path):
    (tmp_path / "file").write_text("x")
    message = error_of(prepare, path=str(corpus_path), out=str(tmp_path / "file" / "out"), tokenizer=tokenizer)
    assert message.startswith("--out: cannot write beside")


def test_another_tokenizer_is_refused(prepared, tokenizer, make_config):
    message = error_of(make_train_iterator, make_config(path=str(prepared)), load_tokenizer("bytes"))
    assert f"was prepared with the tokenizer {tokenizer.spec} and data.tokenizer is bytes" in message
    assert f"set data.tokenizer={prepared}/tokenizer.json" in message
    message = error_of(
        make_train_iterator, make_config(path=str(prepared)), load_tokenizer(str(prepared), "<|im_end|>")
    )
    assert "was prepared for the end-of-text <|endoftext|> and the run's is <|im_end|>; set data.eos_token=" in message
    own = load_tokenizer(str(prepared))
    make_train_iterator(make_config(path=str(prepared)), own).close()


def test_damaged_shards_are_named(copy, tokenizer, make_config):
    config = make_config(path=str(copy))
    shard = copy / "tokens-00001-of-00003.array_record"
    content = shard.read_bytes()

    def read_all():
        iterator = make_train_iterator(config, tokenizer)
        try:
            for _ in range(100):
                next(iterator)
        finally:
            iterator.close()

    shard.write_bytes(content[: len(content) // 2])
    assert f"the shard {shard} is damaged: it has {len(content) // 2} bytes" in error_of(read_all)
    shard.unlink()
    assert f"the shard {shard} is missing" in error_of(read_all)
    shard.write_bytes(content[:1000] + bytes(3000) + content[4000:])
    assert f"the shard {shard} is damaged (" in error_of(read_all)
    # A whole shard of other documents.
    index = json.loads((copy / "index.json").read_text())
    other = (copy / "tokens-00000-of-00003.array_record").read_bytes()
    shard.write_bytes(other)
    index["shards"][1]["bytes"] = len(other)
    (copy / "index.json").write_text(json.dumps(index))
    assert f"the shard {shard} is damaged: document" in error_of(read_all)


def test_damaged_index_is_named(copy, tokenizer, make_config):
    path = copy / "index.json"
    content = json.loads(path.read_text())

    def open_it():
        make_train_iterator(make_config(path=str(copy)), tokenizer).close()

    path.write_text("{")
    assert f"{path} is not the index of prepared shards" in error_of(open_it)
    path.write_text("[]")
    assert "format version None is not 1" in error_of(open_it)
    path.write_text(json.dumps({**content, "format_version": 2}))
    assert "format version 2 is not 1" in error_of(open_it)
    path.write_text(json.dumps({**content, "documents": "many"}))
    assert f"{path} is not the index of prepared shards (documents: " in error_of(open_it)
    path.write_text(json.dumps(content))
    lengths = (copy / "lengths.npy").read_bytes()
    (copy / "lengths.npy").write_bytes(lengths[:-8])
    assert f"{copy / 'lengths.npy'} cannot be read" in error_of(open_it)
    np.save(copy / "lengths.npy", np.zeros(3, "<u4"))
    assert "holds uint32 [3] and must hold <u4 [120]" in error_of(open_it)
    (copy / "lengths.npy").unlink()
    assert f"{copy / 'lengths.npy'} cannot be read" in error_of(open_it)


def test_format_tokens_needs_a_prepared_directory(corpus_path, make_config):
    message = error_of(make_train_iterator, make_config(format="tokens"), load_tokenizer("bytes"))
    assert f"{corpus_path} is no directory of prepared shards" in message


def test_commands(corpus_path, tokenizer_path, tmp_path, capsys, texts):
    out = str(tmp_path / "out")
    arguments = [
        "--path",
        str(corpus_path),
        "--tokenizer",
        str(tokenizer_path),
        "--eos-token",
        "<|im_end|>",
        "--out",
        out,
    ]
    assert main(["prepare", *arguments, "--shards", "2", "--workers", "1"]) == 0
    assert "120 documents" in capsys.readouterr().out
    assert main(["inspect", out, "--documents", "2", "--verify"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "documents    120",
        "<|im_end|> (1)",
        "shards       2",
        "every document can be read",
        texts[0],
        texts[1],
    ):
        assert part in printed
    assert texts[2] not in printed
    assert main(["prepare", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: --out:")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is no directory of prepared shards" in capsys.readouterr().err
    with pytest.raises(SystemExit) as info:
        main(["prepare", *arguments, "--shards", "0"])
    assert info.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    text = capsys.readouterr().out
    for part in ("--text-field NAME", "--shards INT", "--workers INT", "(default: text)", "(default: None)"):
        assert part in text


def test_bytes_can_be_inspected(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    out = str(tmp_path / "out")
    assert main(["prepare", "--path", str(tmp_path / "a.txt"), "--out", out]) == 0
    assert main(["inspect", out]) == 0
    assert "[1] 3 tokens\ntwo" in capsys.readouterr().out


def test_module_runs_as_a_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mhar_jax.data", "prepare", "--path", "none", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: data.path: there is no file or directory none\n"
