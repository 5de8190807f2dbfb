"""A few made-up items for each of the nine tasks, in the files and columns that the harness's own task files read."""

import json
import pathlib

MATH = {"level": "Level 1", "type": "Algebra"}
# task -> {file of its data set: items}
ITEMS: dict[str, dict[str, list[dict]]] = {
    "gsm8k": {
        "openai/gsm8k/main/train.jsonl": [
            {"question": f"What is {i} and {i}?", "answer": f"{i} + {i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}"}
            for i in range(1, 8)
        ],
        "openai/gsm8k/main/test.jsonl": [
            {"question": "What is 1,000 and 234?", "answer": "Add them: 1234.\n#### 1,234"},
            {"question": "What is 7 minus 9?", "answer": "Subtract.\n#### -2"},
            {"question": "What is 2 and 2?", "answer": "Add.\n#### 4"},
        ],
    },
    "mbpp": {
        "google-research-datasets/mbpp/full/test.jsonl": [
            {
                "task_id": 11 + i,
                "text": f"Write a function to multiply by {i}.",
                "code": f"def times(a):\r\n    return a * {i}",
                "test_list": [f"assert times({n}) == {n * i}" for n in range(3)],
                "test_setup_code": "",
                "challenge_test_list": [],
            }
            for i in (2, 3)
        ]
    },
    "humaneval": {
        "openai/openai_humaneval/test.jsonl": [
            {
                "task_id": f"Local/{i}",
                "prompt": f"def times(a):\n    '''a times {i}'''\n",
                "entry_point": "times",
                "canonical_solution": f"    return a * {i}\n",
                "test": f"def check(candidate):\n    assert candidate(5) == {5 * i}\n",
            }
            for i in (2, 3)
        ]
    },
    "minerva_math_algebra": {
        "EleutherAI/hendrycks_math/algebra/test.jsonl": [
            {"problem": "Halve $1$.", "solution": "It is $\\boxed{\\frac{1}{2}}$.", **MATH},
            {"problem": "Add $x$ and $x$.", "solution": "It is $\\boxed{2x}$.", **MATH},
            {"problem": "Give an interval.", "solution": "It is $\\boxed{[2,5)}$.", **MATH},
        ]
    },
    "wikitext": {
        f"EleutherAI/wikitext_document_level/wikitext-2-raw-v1/{split}.jsonl": [
            {"page": " = A title = \n \n The year 1 @,@ 000 was long , and it 's over . \n"},
            {"page": " = Other = \n \n " + "It goes on and on . " * 40},
        ]
        for split in ("train", "test")
    },
    "lambada_openai": {
        "EleutherAI/lambada_openai/default/test.jsonl": [
            {"text": "the quick brown fox jumps over the lazy dog"},
            {"text": "she said that he said that she said so"},
        ]
    },
    "hellaswag": {
        f"Rowan/hellaswag/{split}.jsonl": [
            {
                "ind": i,
                "activity_label": "Cooking",
                "ctx_a": "A man stirs a pot.",
                "ctx_b": "the man",
                "ctx": "A man stirs a pot. the man",
                "endings": [f"It [substeps] ends {j}." for j in "abcd"],
                "source_id": f"made~up{i}",
                "split": "val",
                "split_type": "indomain",
                "label": str(i),
            }
            for i in range(4)
        ]
        for split in ("train", "validation")
    },
    "mmlu_anatomy": {
        f"cais/mmlu/anatomy/{split}.jsonl": [
            {"question": f"How many {split} is {i}?", "subject": "anatomy", "choices": list("0123"), "answer": i}
            for i in range(4)
        ]
        for split in ("dev", "test")
    },
    "gpqa_main_zeroshot": {
        "Idavidrein/gpqa/gpqa_main/train.jsonl": [
            {
                "Question": f"Which one is {i}?",
                "Correct Answer": f"right {i}",
                **{f"Incorrect Answer {j}": f"wrong {j} of {i}" for j in (1, 2, 3)},
            }
            for i in range(6)
        ]
    },
}
FOLDERS = {
    "minerva_math_algebra": "minerva_math",
    "lambada_openai": "lambada",
    "mmlu_anatomy": "mmlu/default",
    "gpqa_main_zeroshot": "gpqa/zeroshot",
}


def write(root: pathlib.Path) -> pathlib.Path:
    """All of them below `root`, as `--task-data` reads them."""
    for files in ITEMS.values():
        for name, rows in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return root


def task_files(task: str) -> pathlib.Path:
    """The harness's own folder that defines a task."""
    import lm_eval

    return pathlib.Path(lm_eval.__file__).parent / "tasks" / FOLDERS.get(task, task)
