"""How long JAX compiled, and whether the programs came from its cache on disk."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.monitoring

_PARTS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")
_FOUND = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass
class Compilation:
    """What was compiled while it was looked at."""

    seconds: float = 0.0  # lowering, and compiling or reading from disk
    programs: int = 0
    from_cache: int = 0  # of these programs

    def __str__(self) -> str:
        where = ", read from the compilation cache" if self.from_cache and self.from_cache == self.programs else ""
        return f"compiled in {self.seconds:.1f} s{where}"


@contextlib.contextmanager
def watch_compiling() -> Iterator[Compilation]:
    """Everything that this process compiles inside, in any thread."""
    found = Compilation()

    def duration(event: str, duration_secs: float, **_: Any) -> None:
        if event in _PARTS:
            found.seconds += duration_secs
            found.programs += event == _PARTS[1]

    def happened(event: str, **_: Any) -> None:
        found.from_cache += event == _FOUND

    jax.monitoring.register_event_duration_secs_listener(duration)
    jax.monitoring.register_event_listener(happened)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(duration)
        jax.monitoring.unregister_event_listener(happened)
