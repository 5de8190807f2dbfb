"""Command line: `python -m mhar_jax.bench routing | training | decode | compile | compare | all`."""

import importlib
import sys
import time
from collections.abc import Sequence

from mhar_jax.errors import UserError, command

USAGE = """\
usage: python -m mhar_jax.bench SUBCOMMAND [options]        (SUBCOMMAND --help shows them)

routing   depth_route and a whole model's routing: time, bandwidth, share of a copy's, memory, error
training  train steps of several variants and implementations, as ratios to the first
decode    prefill and decode of several variants, as ratios to the first
compile   a train step compiled for a TPU pod slice that is not there: memory, collectives, a roofline estimate
all       routing, training and decode, one after another, into one directory
compare   A.json B.json: ratios of two results, with intervals
"""

# subcommand -> module; imported when asked for, so that --help needs no device
_MODULES = {
    "routing": "routing",
    "training": "training",
    "decode": "decode",
    "compile": "ahead",
    "all": "everything",
    "compare": "compare",
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand: 0, 1 where a row is wrong or failed, 2 for wrong input."""
    begun = time.monotonic()  # before anything large is imported
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, *rest = given
    if name not in _MODULES:
        raise UserError(f"the first argument must be of {', '.join(_MODULES)}, got {name!r}")
    return importlib.import_module(f"mhar_jax.bench.{_MODULES[name]}").main(rest, begun)


if __name__ == "__main__":
    sys.exit(main())
