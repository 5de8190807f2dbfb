"""Benchmarks of depth routing on the device at hand: `python -m mhar_jax.bench`; `docs/benchmarks.md` explains it."""
