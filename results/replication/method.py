"""How the runs were made: the section of the page that says so."""

import collections
import json
import pathlib
from typing import TYPE_CHECKING

from results.replication.plan import plan

if TYPE_CHECKING:
    from results.replication.results import Result

SOURCES = pathlib.Path(__file__).parent / "sources.json"


def method(results: "dict[str, Result]") -> str:
    """Data, recipe, commands, hardware, versions, dates."""
    return "## Method\n\n" + "\n\n".join(
        text for text in (_data(results), _recipe(), _machine(results), _commands()) if text
    )


def _data(results: "dict[str, Result]") -> str:
    facts = json.loads(SOURCES.read_text(encoding="utf-8"))
    characters, held_out = facts["characters"], facts["held_out"]
    train = {name: n for name, n in characters.items() if name not in held_out}
    largest = sorted(train.items(), key=lambda item: -item[1])[:6]
    text = (
        f"**Data.** {sum(train.values()) / 1e6:.0f} million characters of English from {len(train)} sources, "
        "most of it "
        "manuals, dictionaries and package descriptions, with religious commentary, fiction and an encyclopaedia; the "
        f"largest are {', '.join(f'{name} ({n / 1e6:.0f}M)' for name, n in largest)}. Held out are whole sources: "
        f"{', '.join(f'{name} ({characters[name] / 1e6:.1f}M)' for name in held_out)}. Tokeniser: SmolLM2's, 49,152 "
        "entries, so that the head does not drown the rest. A document is a run of consecutive paragraphs of "
        "one source "
        "of about 8,000 characters. Everything a run trains on is shuffled by document in every epoch, by seed."
    )
    full = [r for r in results.values() if r.planned.stage != "pilot"]
    if full:
        data, config = full[0].values["data"], full[0].run.config
        tokens = config.steps * config.batch_size * config.seq_len
        evaluated = full[0].run.evaluations[-1].tokens or 0
        text += (
            f" An epoch is {data['tokens_per_epoch']:,} tokens; a run trains on {tokens:,}, that is "
            f"{tokens / data['tokens_per_epoch']:.2f} epochs. Each evaluation reads the same {evaluated:,} of the "
            f"{data['held_out_tokens']:,} held-out tokens, documents of all five sources in the order of their hashes."
        )
        prints = sorted({r.values["data"]["fingerprint"] for r in full})
        text += f" Fingerprint of the training text: {', '.join(prints)}."
    return text


def _recipe() -> str:
    config = plan()[-1].config()
    o = config.optimizer
    return (
        "**Recipe.** The paper's Qwen3 shape at 12 layers, 4 KV heads, head dim 64 (8 query heads and FFN "
        "1,536 at d 512; "
        "12 and 2,304 at d 768), RMSNorm eps 1e-6, RoPE θ 1e4, tied embeddings, init N(0, 0.02²), queries at "
        "zero. AdamW "
        f"β {o.beta1:g} / {o.beta2:g}, ε {o.eps:g}, weight decay {o.weight_decay:g} on all parameters, clip "
        f"{o.clip_norm:g}, bfloat16, cosine to {o.final_lr_ratio:g} of a peak of {o.peak_lr:g}, "
        f"{o.warmup_steps} steps of "
        f"warm-up. {config.steps:,} steps of {config.batch_size} x {config.seq_len:,} tokens. What differs from the "
        "paper, and why, is in `configs/replicate_d512.yaml`. At one seed all variants see the same batches; "
        "parameters "
        "outside the routing start from the same values."
    )


def _machine(results: "dict[str, Result]") -> str:
    if not results:
        return ""
    counted: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for r in results.values():
        v = r.values
        counted["hardware"][f"{v['hardware']['device']}"] += 1
        counted["versions"][", ".join(f"{name} {version}" for name, version in v["versions"].items())] += 1
        counted["dates"][v["date"]] += 1
        counted["commits"][str(v["commit"])] += 1
    said = lambda name: "; ".join(f"{value} ({n} runs)" for value, n in sorted(counted[name].items()))
    hours = sum(r.values["wall_s"] + r.values.get("weights_s", 0) for r in results.values()) / 3600
    return (
        f"**Machine.** One GPU a run: {said('hardware')}. Versions: {said('versions')}. Dates: {said('dates')}. "
        f"Commits: {said('commits')}. All runs together: {hours:.1f} GPU hours, starts and compilation included."
    )


def _commands() -> str:
    return """**Commands.** From the root of the repository; `corpus build` says what it takes.

```
python -m results.replication.corpus build TEXT LOG GGUF runs/replication/data
python -m results.replication.run --list                       # the plan and what is left of it
python -m results.replication.run --devices=0,1 --seconds=540  # what is left, within a time
python -m results.replication.report                           # this page
python -m results.replication.report --run-dirs=runs/replicated
python -m mhar_jax.compare runs/replicated/d512-additive-s0 runs/replicated/d512-mhar-s0
```

Each run's own command is in its JSON."""
