"""python -m mhar_jax.bench all: routing, training and decode, one after another, into one directory.

On one H200 the default set is planned for less than 8 minutes, compiling included; what there is no time for is left
out, and the result says so. Each result holds the wall seconds of every part and of the whole command.
"""

import argparse
import dataclasses
import gc
import pathlib
import time
import traceback
from collections.abc import Sequence

from mhar_jax.bench import common, decode, report, routing, tables, training
from mhar_jax.command_line import parser
from mhar_jax.errors import UserError

_PARTS = {"routing": routing, "training": training, "decode": decode}
# Share of the minutes after which a part begins nothing new. What has begun is finished, so each leaves some room.
_SHARES = {"routing": 0.42, "training": 0.7, "decode": 0.9}


def make_parser() -> argparse.ArgumentParser:
    """Of the subcommand."""
    p = parser("bench all", "Run routing, training and decode with their defaults into one directory.")
    p.add_argument("--out", metavar="DIR", required=True, help="where JSON, tables and pictures go")
    p.add_argument("--minutes", metavar="FLOAT", type=float, default=8.0, help="begin nothing that would go past this")
    p.add_argument("--parts", default="routing,training,decode", help="which of them")
    p.add_argument("--threads", metavar="INT", type=int, default=8, help="programs compiled at once")
    p.add_argument("--profile", action="store_true", help="routing: time of each kernel, from a trace")
    p.add_argument("--revision", metavar="TEXT", help="revision of the source to record where git cannot tell it")
    return p


def main(arguments: Sequence[str], begun: float) -> int:
    """Runs the subcommand, begun at that reading of `time.monotonic`: 1 if a part or a row failed."""
    options = make_parser().parse_args(list(arguments))
    parts = common.names(options.parts, "parts", list(_PARTS))
    if not options.minutes > 0:
        raise UserError(f"--minutes must be positive, got {options.minutes}")
    common.at_least("threads", options.threads, 1)
    worst, seconds = 0, {}
    for name in parts:
        own = ["--out", options.out, "--threads", str(options.threads)]
        own += ["--revision", options.revision] if options.revision else []
        own += ["--profile"] if name == "routing" and options.profile else []
        part, part_begun = _PARTS[name], time.monotonic()
        clock = common.Clock(begun, begun + 60 * options.minutes * _SHARES[name])
        try:
            found = part.run(part.make_parser().parse_args(own), ["all", *arguments], clock)
            seconds[name] = common.Clock(part_begun).seconds()
            worst = max(worst, common.finish(found, options.out, seconds))
        except UserError:
            raise
        except Exception:  # the parts that follow are still worth having
            traceback.print_exc()
            worst = 1
        gc.collect()
    seconds["all"] = common.Clock(begun).seconds()
    _save_seconds(pathlib.Path(options.out), seconds)
    print(", ".join(f"{name} {value:.0f} s" for name, value in seconds.items()), flush=True)
    return worst


def _save_seconds(folder: pathlib.Path, seconds: dict[str, float]) -> None:
    """What all parts took, which is known only now, into every result."""
    for name in seconds:
        if name in _PARTS:
            saved = report.load(folder / f"{name}.json")
            saved = dataclasses.replace(saved, environment={**saved.environment, "wall_seconds": seconds})
            saved.save(folder / f"{name}.json")
            tables.write_markdown(saved, folder)
