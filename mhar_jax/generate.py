"""python -m mhar_jax.generate CHECKPOINT --prompt TEXT: continues text, as it comes."""

import argparse
import sys

from mhar_jax.command_line import add_checkpoint_arguments, open_from, parser
from mhar_jax.errors import UserError, command, one_line, writing
from mhar_jax.platforms import prefer_present_hardware


def _parser() -> argparse.ArgumentParser:
    p = parser("generate", "Continue text with a model. One prompt streams; several are continued in one batch.")
    add_checkpoint_arguments(p)
    p.add_argument("--prompt", metavar="TEXT", action="append", help="text to continue; repeat for a batch")
    p.add_argument("--prompt-tokens", metavar="IDS", action="append", help="token ids to continue, as 1,2,3")
    p.add_argument("--max-tokens", metavar="INT", type=int, default=200, help="tokens a prompt is continued by at most")
    p.add_argument("--temperature", metavar="FLOAT", type=float, default=0.8, help="0: always the likeliest token")
    p.add_argument("--top-k", metavar="INT", type=int, help="draw among the k likeliest tokens; None: all")
    p.add_argument("--top-p", metavar="FLOAT", type=float, help="draw within this probability; None: all")
    p.add_argument("--stop", metavar="TEXT", action="append", default=[], help="string that ends the text; repeatable")
    p.add_argument("--seed", metavar="INT", type=int, default=0, help="of the draws")
    p.add_argument("--only-new", action="store_true", help="print the continuation without the prompt")
    return p


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"--prompt-tokens must be numbers with commas between, got {one_line(text, 60)!r}") from None


@command
def main(arguments: list[str] | None = None) -> None:
    """Runs the command; wrong input is one line on standard error and exit code 2."""
    options = _parser().parse_args(arguments)
    prompts = [*(options.prompt or ()), *map(_token_ids, options.prompt_tokens or ())]
    if not prompts:
        raise UserError("give at least one --prompt or --prompt-tokens")
    prefer_present_hardware()
    from mhar_jax.generation import Sampling, TokenGenerator, complete
    from mhar_jax.inference import check_tokens

    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed)
    checkpoint = open_from(options)
    tokenizer = checkpoint.tokenizer
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_tokens(prompt, checkpoint.config.model)  # before they are decoded
    shown = ["" if options.only_new else p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
    alone = len(prompts) == 1
    begun = False

    def show(index: int, text: str) -> None:
        nonlocal begun
        if alone:
            _print(text if begun else shown[0] + text)
            begun = True

    generator = TokenGenerator(checkpoint.placed(), vocabulary=tokenizer.vocab_size)
    completions = complete(
        generator,
        tokenizer,
        prompts,
        max_tokens=options.max_tokens,
        sampling=sampling,
        stop=options.stop,
        on_text=show,
    )
    if alone:
        _print("\n" if begun else shown[0] + "\n")
    else:
        for start, completion in zip(shown, completions, strict=True):
            _print(f"{start}{completion.text}\n")
    reasons = {"end": "end of text", "stop": "stop string", "length": "--max-tokens", "context": "the context is full"}
    for i, completion in enumerate(completions):
        name = "" if alone else f"prompt {i + 1}: "
        print(f"{name}{len(completion.tokens)} tokens, {reasons[completion.reason]}", file=sys.stderr)


def _print(text: str) -> None:
    with writing("text", "standard output"):
        print(text, end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
