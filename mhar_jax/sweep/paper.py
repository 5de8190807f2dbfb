"""The paper's figures (arXiv 2607.27230) that a sweep can be laid beside. Held-out loss, nats a token.

Version 2 retrained the main table on another corpus, so the two versions are kept apart. All are at 20,000 steps; a
sweep of another size, text or length is no reproduction, and its numbers stand beside these for their signs only.
"""

SCALES = ("100M", "350M", "1B")

# Tail-means by variant and scale: attention_residuals is the paper's "one head".
LOSS_V1 = {
    "additive": (3.336, 3.290, 3.175),
    "hyper_connections": (3.322, 3.260, 3.172),
    "attention_residuals": (3.297, 3.345, 3.315),
    "mhar": (3.287, 3.210, 3.111),
}
LOSS_V2 = {
    "additive": (3.031, 2.997, 2.894),
    "attention_residuals": (2.970, 2.876, 2.759),
    "mhar": (2.969, 2.848, 2.754),
}

# Version 1, learning rate 5e-4: difference from the baseline over paired seeds, mean and standard deviation.
PAIRED_V1 = {
    "hyper_connections": ((-0.031, 0.003), (-0.028, 0.009), (-0.016, 0.015)),
    "attention_residuals": ((-0.043, 0.003), (-0.005, 0.015), (0.093, 0.049)),
    "mhar": ((-0.045, 0.007), (-0.090, 0.004), (-0.071, 0.002)),
}

# Version 2, 1B on web text, 8 KV heads: by number of routing heads.
HEADS_V2 = {1: 3.270, 4: 3.132, 8: 3.129, 16: 3.173}
