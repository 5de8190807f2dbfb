"""One cell of a sweep, as a process of its own: `python -m mhar_jax.sweep.cell CELL_DIRECTORY`."""

import fcntl
import json
import logging
import os
import pathlib
import sys
from collections.abc import Sequence

from mhar_jax.config.load import load_config
from mhar_jax.errors import command, writing
from mhar_jax.platforms import prefer_present_hardware
from mhar_jax.sweep.results import read_validation

DONE = "done.json"


def is_done(path: pathlib.Path) -> bool:
    """Whether the cell's run is over and its last evaluation written."""
    return (path / DONE).is_file()


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Trains the cell, from where it was; 3 where a signal stopped it before its end."""
    (directory,) = sys.argv[1:] if arguments is None else arguments
    path = pathlib.Path(directory)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    for noisy in ("absl", "orbax", "jax"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    with (path / "lock").open("w") as lock:
        # Held until this process ends, also by one whose sweep was killed: two never train one cell.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_done(path):
            return 0
        config = load_config(path / "cell.yaml", [f"run_dir={path}"])
        prefer_present_hardware()  # before JAX looks for devices
        from mhar_jax.training.loop import train

        train(config)
        validation = read_validation(path)
        if not validation or validation[-1][0] != config.steps:
            print("stopped by a signal; the sweep continues it", file=sys.stderr)
            return 3
        aside = path / f"{DONE}.tmp"
        with writing("the end of the cell", aside):
            aside.write_text(json.dumps({"steps": config.steps}), encoding="utf-8")
            os.replace(aside, path / DONE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
