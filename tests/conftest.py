"""One strict process: CPU only, eight simulated devices, warnings are errors (pyproject.toml)."""

import os

# Before JAX looks for devices: libtpu is here for its compiler, not for a chip. Tests that need a chip say how to ask.
os.environ["JAX_PLATFORMS"] = os.environ.get("MHAR_TEST_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax

jax.config.update("jax_num_cpu_devices", 8)


def pytest_terminal_summary(terminalreporter):
    """What tests measured and recorded as the property "measured", for whoever reads the log."""
    reports = terminalreporter.stats.get("passed", [])
    lines = [value for report in reports for name, value in report.user_properties if name == "measured"]
    if lines:
        terminalreporter.section("measured")
        terminalreporter.write_line("\n".join(sorted(lines)))
