"""What a user can get wrong: one sentence, exit code 2, nothing half-made left behind."""

import json
import os
import subprocess

import jax
import pytest

from mhar_jax.config import load_config
from mhar_jax.sharding import make_mesh
from mhar_jax.training import loop, main


@pytest.fixture
def refused(here, tmp_path, monkeypatch):
    """Runs a command that must be refused before it writes anything; returns its sentence."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        before = sorted(p for p in tmp_path.rglob("*"))
        sentence = here("--run_dir=run", *arguments).one_sentence()
        assert sorted(p for p in tmp_path.rglob("*")) == before, "something was left behind"
        return sentence

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model.layers=3"], ["unknown config field model.layers", "num_layers"]),
        (["--model.routing_heads=5"], ["routing_heads must divide d_model", "routing_heads=5", "d_model=32"]),
        (["--model.num_kv_heads=3"], ["num_kv_heads must divide num_heads", "num_kv_heads=3", "num_heads=4"]),
        (["--data.tokenizer=no/tokenizer.json"], ["no/tokenizer.json"]),
        (["--data.path=nowhere.txt"], ["nowhere.txt"]),
        (["--mesh.data=2"], ["mesh data=2", "needs 2 devices, and there are 1"]),
        (["--mesh.tensor=3"], ["tensor=3", "multiple of 3 devices, and there are 1"]),
        (["--batch_size=6", "--optimizer.accumulate=4"], ["accumulate must divide batch_size"]),
        (["--model.routing_implementation=triton"], ["triton"]),
        (["--model.attention_implementation=cudnn"], ["cudnn", "GPU"]),
        (["--model.vocab_size=100"], ["model.vocab_size", "257"]),
        (["--steps"], ["--steps needs a value"]),
        (["another"], ["give one config"]),
        (["--seq_len=65"], ["seq_len=65", "context=64"]),
        (["--init_from=nowhere"], ["init_from", "nowhere"]),
        (["--model.num_layers=1001"], ["model.num_layers", "less than or equal to 1000"]),
        (["--model.hyper_streams=65"], ["model.hyper_streams", "less than or equal to 64"]),
        (["--data.prefetch=1884308"], ["data.prefetch", "less than or equal to 1000"]),
        (["--data.workers=100000"], ["data.workers must be at most"]),
        # 3 x 2^40 parameters, 20 bytes each with moments, averages and gradient; 2^30 tokens of width 32, twice.
        (["--model.ffn_dim=1073741824", "--model.d_model=1024"], ["take 65,970.8 GB at the least on each device"]),
        (["--batch_size=67108864"], ["take 274.9 GB at the least"]),
        (["--batch_size=2147483646", "--model.d_model=8"], ["GB at the least"]),
        (["--data.format=synthetic", "--eval.batches=2000000000"], ["2,000,000,003 batches of", "eval.batches"]),
    ],
)
def test_bad_arguments(refused, arguments, words):
    sentence = refused(*arguments)
    for word in words:
        assert word in sentence


def test_bad_text(refused, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt" in refused("--data.path=empty.txt")
    (tmp_path / "blank.txt").write_text(" \n \n")
    assert "blank.txt" in refused("--data.path=blank.txt")
    (tmp_path / "short.txt").write_text("\n\n".join(f"doc {i}" for i in range(4)))
    assert "seq_len=32" in refused("--data.path=short.txt", "--data.held_out=0.5")
    assert "seq_len=32" in refused("--data.path=short.txt", "--data.held_out=0.5", "--data.tokenize_at_start_mb=0")


def test_batch_that_the_mesh_does_not_divide(refused, monkeypatch):
    monkeypatch.setattr(loop, "make_mesh", make_mesh)  # all eight devices
    assert "multiple of data x fsdp = 8 devices, got 12 / 3 = 4" in refused(
        "--batch_size=12", "--optimizer.accumulate=3"
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory: smaller batches"),
        (jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 256000000000 bytes."), "asked for 256.0 GB"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 device"), "out of memory: smaller batches"),
    ],
)
def test_memory_that_does_not_suffice(refused, monkeypatch, error, words):
    """Found out when the first step's numbers are read, when all files of a run are there."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(loop.Reports, "add", fail)
    assert words in refused("--eval.every=0")


def test_a_package_that_is_not_installed(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "mhar-jax[wandb]" in refused("--log.wandb_project=x")


def test_presets_are_listed(capfd):
    assert main.main(["no-such-preset"]) == 2
    assert "tiny" in capfd.readouterr().err


@pytest.mark.parametrize(
    "run_dir",
    ["file", "file/below", "/proc/nothing/run", "a\0b", "x" * 300],
    ids=["file", "below", "proc", "nul", "long"],
)
def test_run_directories_that_cannot_be(here, tmp_path, monkeypatch, run_dir):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    sentence = here(f"--run_dir={run_dir}").one_sentence()
    assert "run_dir" in sentence
    assert "choose another run_dir" in sentence
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_run_directory(here, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", place], capture_output=True).returncode == 0
    if not mounted:
        place.chmod(0o555)
        if os.access(place, os.W_OK):
            pytest.skip("neither mounts nor permissions can make a directory read-only for this user")
    try:
        assert "cannot be written" in here(f"--run_dir={place}").one_sentence()
        assert "cannot be written" in here(f"--run_dir={place / 'run'}").one_sentence()
    finally:
        if mounted:
            subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.yaml", "kind: something else\n"), ("metrics.jsonl", "not ours\n"), ("metrics.jsonl", '{"loss": 1}\n')],
)
def test_a_file_of_somebody_else_is_not_overwritten(here, tmp_path, name, content):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / name).write_text(content)
    assert f"holds a {name} that no run wrote" in here(f"--run_dir={run_dir}").one_sentence()
    assert [p.name for p in run_dir.iterdir()] == [name]
    assert (run_dir / name).read_text() == content


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints", "tensorboard", "routing.png"])
def test_something_in_the_way(here, tmp_path, name):
    run_dir = tmp_path / "run"
    if name in ("checkpoints", "tensorboard"):
        run_dir.mkdir()
        (run_dir / name).write_text("a file")
    else:
        (run_dir / name).mkdir(parents=True)
    sentence = here(f"--run_dir={run_dir}", "--log.tensorboard=true").one_sentence()
    assert str(run_dir / name) in sentence


def test_other_files_may_lie_beside(here, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "log.txt").write_text("from tee")
    assert here(f"--run_dir={run_dir}").code == 0
    assert here(f"--run_dir={run_dir}", "--checkpoint.resume=false").one_sentence().count("checkpoint.resume") == 1
    assert (run_dir / "log.txt").read_text() == "from tee"
    changed = here(f"--run_dir={run_dir}", "--optimizer.peak_lr=0.5", "--seed=7").one_sentence()
    assert "optimizer.peak_lr was 0.001 and is 0.5; seed was 42 and is 7" in changed


def test_another_text_is_refused(here, tmp_path):
    run_dir = tmp_path / "run"
    held = "--data.held_out=0.2"
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"document {i} with some words" for i in range(60)))
    assert here(f"--run_dir={run_dir}", f"--data.path={text}", held).code == 0
    moved = tmp_path / "moved.txt"
    text.rename(moved)
    assert here(f"--run_dir={run_dir}", f"--data.path={moved}", held).code == 0, "the same text in another place"
    moved.write_text("\n\n".join(f"another {i} with some words" for i in range(60)))
    assert "other data" in here(f"--run_dir={run_dir}", f"--data.path={moved}", held).one_sentence()


def test_interrupt_is_one_line(monkeypatch, capfd):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "load_config", interrupted)
    assert main.main([]) == 130
    assert capfd.readouterr().err == "error: interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(*_):
        raise NotImplementedError("a bug")

    monkeypatch.setattr(main, "load_config", broken)
    with pytest.raises(NotImplementedError, match="a bug"):
        main.main([])


def test_help_needs_no_accelerator(capfd):
    assert main.main(["--help"]) == 0
    assert "--model.variant" in capfd.readouterr().out


def test_the_resolved_config_makes_the_run_again(here, tmp_path, tools):
    run_dir = tmp_path / "run"
    assert here(f"--run_dir={run_dir}", "--model.rope_scaling.factor=4").code == 0
    config = load_config(run_dir / "config.yaml")
    assert config.model.rope_scaling is not None
    assert config.model.vocab_size == 384, "resolved"
    assert config.run_dir == str(run_dir)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert main.main([str(run_dir / "config.yaml")]) == 0
    assert (run_dir / "metrics.jsonl").read_text().splitlines() == lines
    assert json.loads(lines[0])["step"] == 0
