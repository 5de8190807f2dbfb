"""Figures of the paper (Luo, Cai, Hu, arXiv 2607.27230) that the page sets beside its own."""

# Tail-mean validation loss at 100M: version 1 (FineWeb-Edu) and version 2 (another corpus).
LOSSES_100M = {
    "additive": "3.336 / 3.031",
    "hyper_connections": "3.322 / –",
    "attention_residuals": "3.297 / 2.970",
    "mhar": "3.287 / 2.969",
}
# Version 1, 100M, learning rate 5e-4: paired difference to the baseline over three seeds.
PAIRED_100M = {
    "additive": "–",
    "hyper_connections": "−.031 ± .003",
    "attention_residuals": "−.043 ± .003",
    "mhar": "−.045 ± .007",
}
# MHAR minus one head, from the table of losses.
HEADS_GAP = (
    ("100M (d 512, 12 layers): v1 / v2", "−0.010 / −0.001"),
    ("350M (d 1024, 24 layers): v1 / v2", "−0.135 / −0.028"),
    ("1B (d 1280, 36 layers): v1 / v2", "−0.204 / −0.005"),
)
# Learned excess of width disagreement (4 slices) and mean cosine between sources.
PROBE = (
    ("100M (d 512, 12 layers)", "0.235", "0.060"),
    ("d 768, 12 layers", "0.281", "0.063"),
    ("350M", "0.512", "0.114"),
    ("1B", "0.606", "0.087"),
)
