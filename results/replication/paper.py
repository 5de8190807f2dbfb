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
# What lies below what at 100M: the claim, its difference (v1 / v2), the lower and the higher variant.
ORDER = (
    ("one head is below the additive baseline", "−0.039 / −0.061", "attention_residuals", "additive"),
    ("many heads are below the additive baseline", "−0.049 / −0.062", "mhar", "additive"),
    ("hyper-connections are below the additive baseline", "−0.014 / –", "hyper_connections", "additive"),
    ("one head is below hyper-connections", "−0.025 / –", "attention_residuals", "hyper_connections"),
    ("many heads are below one", "−0.010 / −0.001", "mhar", "attention_residuals"),
)
