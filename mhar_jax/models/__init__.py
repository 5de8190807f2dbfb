"""The decoder and everything it is made of."""

from mhar_jax.models.counting import count_parameters, train_flops_per_token
from mhar_jax.models.decoder import Decoder, build_model
from mhar_jax.models.sites import site_labels, source_labels
from mhar_jax.models.summary import RoutingSummary, loss_and_summary, routing_summary

__all__ = [
    "Decoder",
    "RoutingSummary",
    "build_model",
    "count_parameters",
    "loss_and_summary",
    "routing_summary",
    "site_labels",
    "source_labels",
    "train_flops_per_token",
]
