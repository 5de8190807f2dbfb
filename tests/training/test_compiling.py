"""What is said of compiling."""

import jax
import jax.numpy as jnp

from mhar_jax.training.compiling import Compilation, watch_compiling


def fresh():
    """A new function each time, whose program is the same."""

    def tangent(x):
        return jnp.tan(x) * 17.25

    return jax.jit(tangent)


def test_a_program_is_compiled_once_and_then_read_from_disk(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))  # the fixture of this folder puts it back
    x, first = jnp.ones(3), fresh()
    with watch_compiling() as compiled:
        first(x)
    with watch_compiling() as again:
        first(x)
    with watch_compiling() as read:
        fresh()(x)
    assert (compiled.programs, compiled.from_cache) == (1, 0)
    assert compiled.seconds > 0
    assert again == Compilation()
    assert (read.programs, read.from_cache) == (1, 1)
    assert str(Compilation(12.34, 1, 0)) == "compiled in 12.3 s"
    assert str(Compilation(0.5, 1, 1)) == "compiled in 0.5 s, read from the compilation cache"


def test_it_stops_looking():
    with watch_compiling() as found:
        pass
    fresh()(jnp.ones(5))
    assert found == Compilation()
