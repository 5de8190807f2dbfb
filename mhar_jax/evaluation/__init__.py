"""Scoring text, running the lm-evaluation-harness, and the statistics of comparisons."""
