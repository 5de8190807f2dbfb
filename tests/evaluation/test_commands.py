"""`python -m mhar_jax.generate` and `evaluate` on a run directory, a pretrained directory, and on bad input."""

import json
import re
import shutil
from pathlib import Path

import pytest

from mhar_jax import evaluate, generate
from mhar_jax.config.load import load_config
from mhar_jax.evaluation.items import read_results
from tests.evaluation import task_items

HF = Path(__file__).parent.parent / "fixtures" / "hf"
RUN = """
run_dir: {run_dir}
steps: 2
batch_size: 8
seq_len: 32
model: {{variant: mhar, num_layers: 1, d_model: 32, num_heads: 4, num_kv_heads: 2, ffn_dim: 48, context: 64,
        compute_dtype: float32}}
data: {{path: {text}, held_out: 0.3}}
eval: {{batches: 2}}
log: {{tensorboard: false}}
sample: {{tokens: 0}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps on forty short documents."""
    from mhar_jax.training.loop import train

    root = tmp_path_factory.mktemp("run")
    text = root / "text.txt"
    text.write_text("\n\n".join(f"Document {i} says that {i} times {i} is {i * i}." for i in range(40)))
    config = root / "config.yaml"
    config.write_text(RUN.format(run_dir=root / "run", text=text))
    train(load_config(config))
    return root / "run"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A pretrained model of 320 tokens, read with the bytes tokenizer."""
    return [str(HF / "tiny-llama31"), "--tokenizer", "bytes", "--compute-dtype", "float32"]


def lines(capsys, main, *arguments, code=0):
    assert main([str(a) for a in arguments]) == code
    found = capsys.readouterr()
    return found.out, found.err


def test_evaluate_gives_the_loss_of_training(run, capsys, tmp_path):
    """`val_loss` of metrics.jsonl again, from the checkpoint; and the text document by document."""
    out, _ = lines(capsys, evaluate.main, run, "--out", tmp_path / "r.json")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [m for m in metrics if "val_loss" in m][-1]
    results = read_results(tmp_path / "r.json")
    assert results.summary["val_loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert results.summary["val_tokens"] == last["val_tokens"]
    assert f"val_loss          {last['val_loss']:.4f} nats a token, as in training" in out
    assert "sliding window    at most 32 tokens before a token, 32 new tokens a window" in out
    documents = [item for item in results.items if item.task == "text"]
    assert 3 < len(documents) < 40
    nll = sum(item.metrics["nll"] for item in documents)
    assert f"loss              {results.summary['loss']:.6f}" in out
    bits = nll / 0.6931471805599453 / sum(i.metrics["nll"] / i.metrics["nats_per_byte"] for i in documents)
    assert results.summary["bits_per_byte"] == pytest.approx(bits)


def test_evaluate_a_file_with_a_window_of_ones_own(run, capsys, tmp_path):
    text = tmp_path / "x.txt"
    text.write_text("One paragraph.\n\nAnother one, which is longer than sixteen bytes.")
    out, _ = lines(capsys, evaluate.main, run, "--text", text, "--window", 16, "--stride", 4)
    assert "documents         2: " in out
    assert "at most 16 tokens before a token, 4 new tokens a window" in out
    out, _ = lines(capsys, evaluate.main, run, "--text", text, "--whole-files", "--limit", 1)
    assert f"documents         1: {len(text.read_bytes())} tokens" in out


def test_generate_streams_one_prompt(run, capsys):
    out, err = lines(capsys, generate.main, run, "--prompt", "Docu", "--max-tokens", 6, "--temperature", 0)
    assert out.startswith("Docu")
    assert out.endswith("\n")
    again, _ = lines(
        capsys, generate.main, run, "--prompt-tokens", "68,111,99,117", "--max-tokens", 6, "--temperature", 0
    )
    assert again == out
    new, _ = lines(capsys, generate.main, run, "--prompt", "Docu", "--max-tokens", 6, "--temperature", 0, "--only-new")
    assert "Docu" + new == out
    tiny, _ = lines(capsys, generate.main, run, "--prompt", "Docu", "--max-tokens", 6, "--temperature", 1e-40)
    assert tiny == out
    huge, _ = lines(capsys, generate.main, run, "--prompt", "Docu", "--max-tokens", 6, "--temperature", 1e300)
    assert len(huge) > len("Docu")  # any tokens at all: to float32 the temperature is infinite
    assert "6 tokens, --max-tokens" in err


@pytest.mark.exhaustive
def test_generate_several_prompts(pretrained, capsys):
    settings = ["--max-tokens", 5, "--temperature", 1.0, "--top-k", 50, "--top-p", 0.9, "--seed", 4]
    out, err = lines(capsys, generate.main, *pretrained, "--prompt", "one", "--prompt", "another", *settings)
    assert "one" in out
    assert "another" in out
    assert "prompt 2: " in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty; give at least one character of text"),
        (["--prompt", "x" * 600], "the prompt has 600 tokens, and the model's context of 512 leaves room for 511"),
        (["--prompt-tokens", "1,320"], "token 320 of the prompt is outside the model's vocabulary of 320 tokens"),
        (["--prompt-tokens", f"1,{2**70}"], "a token of the prompt is beyond 64 bits"),
        (["--prompt-tokens", "1,-1"], "token -1 of the prompt is outside the model's vocabulary"),
        (["--prompt", "a\udcff"], "the prompt is not text in UTF-8, from its character 1"),
        (["--prompt-tokens", "1,a"], "--prompt-tokens must be numbers with commas between, got '1,a'"),
        (["--prompt", "a", "--variant", "mhar"], "holds a model of variant additive, and mhar was asked for"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["--prompt", "a", "--stop", ""], "a stop string must not be empty"),
        (["--prompt", "a", "--top-p", "2"], "top_p must be above 0 and at most 1, got 2.0"),
        (["--prompt", "a", "--data", "3"], "mesh data=3"),
        (["--prompt", "a", "--data", "0"], "mesh axes must be positive"),
        ([], "give at least one --prompt or --prompt-tokens"),
    ],
)
def test_generate_refuses_in_one_sentence(pretrained, capsys, arguments, message):
    _, err = lines(capsys, generate.main, *pretrained, *arguments, code=2)
    assert message in err
    assert err.count("\n") == 1


def test_checkpoints_that_are_refused(run, capsys, tmp_path):
    prompt = ["--prompt", "a"]
    for arguments, message in (
        ([tmp_path / "nothing", *prompt], "a model is a directory or a .gguf file"),
        ([HF / "tiny-qwen3", *prompt], "has no tokenizer.json; name a tokenizer with --tokenizer"),
        ([HF / "tiny-qwen3", "--tokenizer", "bytes", *prompt], "the tokenizer bytes has 257 tokens, and the model of"),
        ([run, "--variant", "additive", *prompt], "holds a model of variant mhar, and additive was asked for"),
    ):
        _, err = lines(capsys, generate.main, *arguments, code=2)
        assert message in err
        assert err.count("\n") == 1
    other = tmp_path / "other"
    shutil.copytree(run, other)
    written = (other / "config.yaml").read_text().replace("variant: mhar", "variant: delta")
    (other / "config.yaml").write_text(written)
    _, err = lines(capsys, evaluate.main, other, code=2)
    assert "holds a checkpoint of variant mhar, and its config.yaml says delta" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "65"], "the window must be at most the model's context of 64, got 65"),
        (["--window", "8", "--stride", "9"], "the stride must be from 1 to the window of 8 tokens, got 9"),
        (["--window", "0"], "--window must be at least 1, got 0"),
        (["--text", "/nowhere.txt"], "/nowhere.txt"),
        (["--tasks", ","], "--tasks must name at least one task, with commas between, got ','"),
        (["--text", "a.txt", "--tasks", "gsm8k"], "give --text or --tasks, not both"),
        (["--task-data", "x"], "--task-data belongs to --tasks, which was not given"),
        (["--allow-code"], "--allow-code belongs to --tasks, which was not given"),
        (["--tasks", "gsm8k", "--num-fewshot", "-1"], "--num-fewshot must be at least 0, got -1"),
        (["--out", "/nowhere/out.json"], "--out must be a file in a directory that exists, got /nowhere/out.json"),
        (["--tasks", ""], "--tasks must name at least one task, with commas between, got ''"),
    ],
)
def test_evaluate_refuses_in_one_sentence(run, capsys, arguments, message):
    _, err = lines(capsys, evaluate.main, run, *arguments, code=2)
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "evaluate", "compare"])
def test_help_shows_every_argument_with_type_and_default(command, capsys):
    import importlib

    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"mhar_jax.{command}").main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "default" in text
    assert "--" in text


METRICS = {
    "gsm8k": {"exact_match,strict-match", "exact_match,flexible-extract"},
    "mbpp": {"pass_at_1,none"},
    "humaneval": {"pass@1,create_test"},
    "minerva_math_algebra": {"exact_match,none", "math_verify,none"},
    "wikitext": {"word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"},
    "lambada_openai": {"perplexity,none", "acc,none"},
    "hellaswag": {"acc,none", "acc_norm,none"},
    "mmlu_anatomy": {"acc,none"},
    "gpqa_main_zeroshot": {"acc,none", "acc_norm,none"},
}


@pytest.mark.filterwarnings("default")  # of the harness and what it imports
@pytest.mark.parametrize(
    "task", [name if name == "lambada_openai" else pytest.param(name, marks=pytest.mark.exhaustive) for name in METRICS]
)
def test_evaluate_runs_the_harness_task_files(run, capsys, tmp_path, task):
    """From a routed checkpoint to the table: every metric that the task file asks for, and every item on disk."""
    pytest.importorskip("lm_eval", reason="the harness is the extra `eval`")
    if task == "minerva_math_algebra":
        pytest.importorskip("math_verify", reason="it comes with lm-eval[math], which the extra `eval` names")
    data, out = task_items.write(tmp_path / "data"), tmp_path / "out.json"
    places = [f"--task-dir={task_items.task_files(task)}", f"--task-data={data}", f"--out={out}"]
    shown, _ = lines(capsys, evaluate.main, run, f"--tasks={task}", "--offline", "--allow-code", *places)
    results = read_results(out)
    measured = {name for name in results.summary[task] if "," in name and "_stderr" not in name}
    assert measured == METRICS[task]
    for name in measured:
        metric, name_filter = name.split(",")
        assert re.search(rf"^{task} .* {name_filter} +{re.escape(metric)} [↑↓] +\d", shown, re.MULTILINE)
    asked = list(task_items.ITEMS[task].values())[-1]
    assert len(results.items) == len(asked)
