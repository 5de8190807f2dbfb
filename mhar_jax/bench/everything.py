"""python -m mhar_jax.bench all: routing, training and decode, one after another, into one directory.

On one H200 the default set is planned for 8 minutes, compiling included; what there is no time for is left out, and the
result says so.
"""

import argparse
import gc
import time
import traceback
from collections.abc import Sequence

from mhar_jax.bench import common, decode, routing, training
from mhar_jax.command_line import parser
from mhar_jax.errors import UserError

_PARTS = {"routing": routing, "training": training, "decode": decode}
# Share of the minutes after which a part begins nothing new. What has begun is finished, so each leaves some room.
_SHARES = {"routing": 0.4, "training": 0.66, "decode": 0.88}


def make_parser() -> argparse.ArgumentParser:
    """Of the subcommand."""
    p = parser("bench all", "Run routing, training and decode with their defaults into one directory.")
    p.add_argument("--out", metavar="DIR", required=True, help="where JSON, tables and pictures go")
    p.add_argument("--minutes", metavar="FLOAT", type=float, default=8.0, help="begin nothing that would go past this")
    p.add_argument("--parts", default="routing,training,decode", help="which of them")
    p.add_argument("--threads", metavar="INT", type=int, default=4, help="routing: programs compiled at once")
    p.add_argument("--profile", action="store_true", help="routing: time of each kernel, from a trace")
    p.add_argument("--revision", metavar="TEXT", help="revision of the source to record where git cannot tell it")
    return p


def main(arguments: Sequence[str]) -> int:
    """Runs the subcommand: 1 if a part or a row failed."""
    options = make_parser().parse_args(list(arguments))
    parts = common.names(options.parts, "parts", list(_PARTS))
    if options.minutes <= 0:
        raise UserError(f"--minutes must be positive, got {options.minutes}")
    common.at_least("threads", options.threads, 1)
    begun, worst = time.monotonic(), 0
    for name in parts:
        own: list[str] = ["--revision", options.revision] if options.revision else []
        if name == "routing":  # alone: XLA tries out matrix products on the device while it compiles the other parts
            own += ["--threads", str(options.threads), *(["--profile"] if options.profile else [])]
        part = _PARTS[name]
        clock = common.Clock(begun + 60 * options.minutes * _SHARES[name])
        try:
            report = part.run(part.make_parser().parse_args(own), ["all", *arguments], clock)
            worst = max(worst, common.finish(report, options.out))
        except UserError:
            raise
        except Exception:  # the parts that follow are still worth having
            traceback.print_exc()
            worst = 1
        gc.collect()
        print(f"{name}: {(time.monotonic() - begun) / 60:.1f} minutes so far", flush=True)
    return worst
