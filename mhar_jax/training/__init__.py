"""Training: the step, the loop around it, checkpoints and metrics."""
