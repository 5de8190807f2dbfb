"""Depth routing for JAX: one op, its backends, and the stack that uses it. No Flax below this package."""

from mhar_kernels.api import IMPLEMENTATIONS, depth_route
from mhar_kernels.errors import UnsupportedInputError
from mhar_kernels.stack import depth_stack
from mhar_kernels.target import assume_platform

__all__ = ["IMPLEMENTATIONS", "UnsupportedInputError", "assume_platform", "depth_route", "depth_stack"]
