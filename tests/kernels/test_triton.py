"""The Triton kernels under Triton's interpreter: the shared contract, and what only they have."""

from route_contract import RouteContract


class TestTriton(RouteContract):
    implementation = "triton"
    interpret = True
