"""The two implementations that run anywhere."""

from route_contract import RouteContract


class TestReference(RouteContract):
    implementation = "reference"


class TestXla(RouteContract):
    implementation = "xla"
