"""The one error a user is meant to read: a single sentence, and exit code 2 at the command line."""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any


class UserError(ValueError):
    """Something the user gave cannot be used. The message says what it was, what was got and what would be right."""


def command(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wraps a command's main: what the user can put right becomes one line on standard error and exit code 2.

    That is a `UserError`, and an implementation that was named but cannot run here (`UnsupportedInputError`). An
    interrupt from the keyboard ends with 130, as shells expect. Memory that does not suffice is a line, too.
    """

    @functools.wraps(main)
    def wrapped(*args, **kwargs) -> int:
        try:
            return main(*args, **kwargs) or 0
        except UserError as error:
            return _say(error, 2)
        except KeyboardInterrupt:
            return _say("interrupted", 130)
        except NotImplementedError as error:
            from mhar_kernels import UnsupportedInputError

            if not isinstance(error, UnsupportedInputError):
                raise
            return _say(error, 2)
        except (MemoryError, RuntimeError) as error:
            if (sentence := out_of_memory(error)) is None:
                raise
            return _say(sentence, 2)

    return wrapped


def _say(what: Any, code: int) -> int:
    print(f"error: {one_line(what, 1000)}", file=sys.stderr)
    return code


def out_of_memory(error: BaseException) -> str | None:
    """What to say of an error that means that memory did not suffice; None of any other.

    XLA has no class for it: its `RuntimeError`s begin with a code, and not always with the one made for this.
    """
    asked = re.search(r"(?i:out of memory)[^.]*?(\d+) bytes", str(error))
    if not isinstance(error, MemoryError) and not asked and "RESOURCE_EXHAUSTED" not in str(error):
        return None
    size = f", which was asked for {int(asked[1]) / 1e9:,.1f} GB at once" if asked else ""
    return (
        f"out of memory{size}: smaller batches or a smaller model are needed, or more devices to share it (mesh.fsdp)"
    )


@contextlib.contextmanager
def writing(what: str, path: Any) -> Iterator[None]:
    """Turns a failed write inside (disk full, no permission, a file in the way) into a `UserError` that names both."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written to {path}: {error.strerror or one_line(error)}") from None


def one_line(error: Any, limit: int = 200) -> str:
    """The first words of an error, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + "…"
