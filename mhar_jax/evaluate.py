"""python -m mhar_jax.evaluate CHECKPOINT: held-out loss, bits per byte and perplexity, and tasks of the harness."""

import argparse
import contextlib
import pathlib
import sys
from typing import Any

from mhar_jax.command_line import add_checkpoint_arguments, open_from, parser
from mhar_jax.errors import UserError, command
from mhar_jax.platforms import prefer_present_hardware

# Metrics that are right or wrong item by item.
_SHARES = ("acc", "acc_norm", "exact_match", "math_verify", "pass@1", "pass_at_1")


def _parser() -> argparse.ArgumentParser:
    p = parser(
        "evaluate",
        "Score text or run tasks of the lm-evaluation-harness. Without --text and --tasks: the run's held-out text.",
    )
    add_checkpoint_arguments(p)
    p.add_argument("--text", metavar="PATH", help="text file, JSON lines, parquet, glob or directory to score")
    p.add_argument("--format", default="auto", choices=("auto", "text", "jsonl", "parquet"), help="of --text")
    p.add_argument("--text-field", metavar="NAME", default="text", help="field or column that holds a document")
    p.add_argument("--whole-files", action="store_true", help="each text file is one document, not its paragraphs")
    p.add_argument("--window", metavar="INT", type=int, help="most tokens read before a token; None: as trained")
    p.add_argument("--stride", metavar="INT", type=int, help="tokens predicted by a window; None: the window")
    p.add_argument("--prefix-token", metavar="INT", type=int, help="read before a text; None: the end-of-text token")
    p.add_argument("--batch-tokens", metavar="INT", type=int, default=8192, help="tokens of a batch, padding included")
    p.add_argument("--tasks", metavar="NAMES", help="tasks of the harness (extra: eval), with commas between")
    p.add_argument("--task-dir", metavar="DIR", help="task files of your own")
    p.add_argument("--task-data", metavar="DIR", help="DATA-SET/CONFIGURATION/SPLIT.jsonl; None: fetched from the hub")
    p.add_argument("--num-fewshot", metavar="INT", type=int, help="examples before each item; None: the task's")
    p.add_argument("--offline", action="store_true", help="fetch nothing; with --task-dir, know only its tasks")
    p.add_argument("--allow-code", action="store_true", help="run generated programs, as HumanEval and MBPP need")
    p.add_argument("--limit", metavar="INT", type=int, help="documents, or items of each task, at most; None: all")
    p.add_argument("--cache", metavar="FILE", help="keep answers to tasks here: a stopped run goes on")
    p.add_argument("--out", metavar="FILE", help="write everything, single items included, for mhar_jax.compare")
    return p


def _names(tasks: str) -> list[str]:
    return [name.strip() for name in tasks.split(",") if name.strip()]


@command
def main(arguments: list[str] | None = None) -> None:
    """Runs the command; wrong input is one line on standard error and exit code 2."""
    options = _parser().parse_args(arguments)
    for name in ("window", "stride", "batch_tokens", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if options.tasks is not None and options.text is not None:
        raise UserError("give --text or --tasks, not both")
    for name in ("task_dir", "task_data", "num_fewshot", "allow_code", "cache"):
        if getattr(options, name) not in (None, False) and options.tasks is None:
            raise UserError(f"--{name.replace('_', '-')} belongs to --tasks, which was not given")
    if options.out is not None:  # before hours of evaluation
        out = pathlib.Path(options.out)
        if out.is_dir() or not out.absolute().parent.is_dir():
            raise UserError(f"--out must be a file in a directory that exists, got {options.out}")
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise UserError(f"--num-fewshot must be at least 0, got {options.num_fewshot}")
    if options.tasks is not None and not _names(options.tasks):
        raise UserError(f"--tasks must name at least one task, with commas between, got {options.tasks!r}")
    prefer_present_hardware()
    from mhar_jax.evaluation.items import Results, write_results
    from mhar_jax.models import count_parameters

    checkpoint = open_from(options)
    model = checkpoint.config.model
    window = options.window or min(checkpoint.config.seq_len, model.context)
    settings = {
        "window": window,
        "stride": options.stride or window,
        "prefix_token": checkpoint.tokenizer.eos_id if options.prefix_token is None else options.prefix_token,
        "tokenizer": checkpoint.tokenizer.fingerprint,
        "num_fewshot": options.num_fewshot,
        "compute_dtype": model.compute_dtype,
    }
    print(f"{options.checkpoint}: {model.variant}, {count_parameters(model):,} parameters, {model.compute_dtype}")
    run = _tasks if options.tasks else _text
    summary, items = run(options, checkpoint, settings)
    if options.out:
        write_results(Results(options.checkpoint, model.variant, settings, summary, items), options.out)
        print(f"wrote {options.out}")


def _text(options: argparse.Namespace, checkpoint: Any, settings: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    from mhar_jax.evaluation.held_out import held_out_documents, read_documents, training_loss
    from mhar_jax.evaluation.items import Item, content_hash
    from mhar_jax.evaluation.scoring import Scorer
    from mhar_jax.evaluation.statistics import bootstrap_ratio
    from mhar_jax.evaluation.text import score_documents

    placed = checkpoint.placed()
    summary: dict[str, Any] = {}
    if options.text is not None:
        documents = read_documents(
            options.text, options.format, options.text_field, limit=options.limit, whole_files=options.whole_files
        )
    else:
        documents = held_out_documents(checkpoint.config, checkpoint.tokenizer, options.limit)
        loss, tokens = training_loss(placed, checkpoint.config, checkpoint.tokenizer)
        summary |= {"val_loss": loss, "val_tokens": tokens}
        print(f"val_loss          {loss:.4f} nats a token, as in training: {tokens:,} tokens in packed windows")
    with _bar("scoring", "window") as progress:
        report = score_documents(
            Scorer(placed, batch_tokens=options.batch_tokens),
            checkpoint.tokenizer,
            documents,
            window=settings["window"],
            stride=settings["stride"],
            prefix=settings["prefix_token"],
            progress=progress,
        )
    print(
        f"documents         {len(documents):,}: {report.total('tokens'):,.0f} tokens, {report.total('num_bytes'):,.0f} "
        f"bytes; each on its own after one token {settings['prefix_token']}, which is not scored"
    )
    print(
        f"sliding window    at most {settings['window']} tokens before a token, {settings['stride']} new tokens a "
        "window; every token is predicted once"
    )
    print(f"loss              {report.loss:.6f} nats a token")
    print(f"bits per byte     {report.bits_per_byte:.6f}")
    print(f"perplexity        {report.perplexity:.4f} a token, {report.word_perplexity:.4f} a word")
    counted = [d for d in report.documents if d.tokens]
    if len(counted) > 1:
        interval = bootstrap_ratio([d.nll for d in counted], [d.tokens for d in counted])
        print(f"95 % of bootstraps over documents: loss {interval.low:.4f} to {interval.high:.4f}")
        summary |= {"loss_low": interval.low, "loss_high": interval.high}
    names = ("loss", "perplexity", "bits_per_byte", "byte_perplexity", "word_perplexity")
    summary |= {name: getattr(report, name) for name in names}
    items = [
        Item("text", i, content_hash(text), {"nll": d.nll, "nats_per_byte": d.nll / max(d.num_bytes, 1)})
        for i, (text, d) in enumerate(zip(documents, report.documents, strict=True))
    ]
    return summary, items


def _tasks(options: argparse.Namespace, checkpoint: Any, settings: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    try:
        from mhar_jax.evaluation.harness import HarnessModel, run_tasks
    except ImportError as error:
        raise UserError(f"--tasks needs the lm-evaluation-harness: extra `eval` ({error.name} is missing)") from None
    from mhar_jax.evaluation.items import items_of_harness
    from mhar_jax.evaluation.statistics import size_note
    from mhar_jax.evaluation.tables import harness_table

    model = HarnessModel(
        checkpoint.placed(),
        checkpoint.tokenizer,
        window=settings["window"],
        stride=settings["stride"],
        batch_tokens=options.batch_tokens,
        prefix=settings["prefix_token"],
    )
    results = run_tasks(
        model,
        _names(options.tasks),
        task_directory=options.task_dir,
        data_directory=options.task_data,
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        offline=options.offline,
        allow_code=options.allow_code,
        cache=options.cache,
    )
    print(harness_table(results))
    items = items_of_harness(results["samples"])
    for task in results["samples"]:
        of_task = [item.metrics for item in items if item.task == task]
        for name in dict.fromkeys(name for metrics in of_task for name in metrics):
            values = [float(value) for m in of_task if isinstance(value := m.get(name), int | float)]
            if values and name.split(",")[0] in _SHARES and all(0 <= value <= 1 for value in values):
                print(f"{task} {name}, {size_note(sum(values) / len(values), len(values))}")
    return dict(results["results"]), items


@contextlib.contextmanager
def _bar(what: str, unit: str):
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, disable=not sys.stderr.isatty()) as bar:
        yield bar.update


if __name__ == "__main__":
    sys.exit(main())
