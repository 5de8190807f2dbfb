"""Trains a depth-routed language model: `python train.py [PRESET or FILE] [--field=value ...]`."""

import sys

from mhar_jax.training.main import main

if __name__ == "__main__":
    sys.exit(main())
