"""What the depth routing of a trained model does: maps, probes, ablations, and a report to look at.

Command: `python -m mhar_jax.inspect CHECKPOINT --data TEXT --out DIR`.
"""
