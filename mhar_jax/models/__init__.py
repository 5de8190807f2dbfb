"""The decoder and everything it is made of."""

from mhar_jax.models.decoder import Decoder, build_model

__all__ = ["Decoder", "build_model"]
