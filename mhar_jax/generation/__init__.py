"""Continuing text: prefill and decode with a key/value cache, sampling, stop strings, streaming."""

from mhar_jax.generation.engine import TokenGenerator
from mhar_jax.generation.sampling import Sampling
from mhar_jax.generation.text import Completion, complete

__all__ = ["Completion", "Sampling", "TokenGenerator", "complete"]
