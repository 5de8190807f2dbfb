"""Grids of runs: every cell a run directory, resumable one by one, and a report that knows its noise.

Command: `python -m mhar_jax.sweep run DIR ...` and `python -m mhar_jax.sweep report DIR`.
"""
