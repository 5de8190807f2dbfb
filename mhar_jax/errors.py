"""The one error a user is meant to read: a single sentence, and exit code 2 at the command line."""

import functools
import sys
from collections.abc import Callable


class UserError(ValueError):
    """Something the user gave cannot be used. The message says what it was, what was got and what would be right."""


def command(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wraps a command's main: a `UserError` becomes one line on standard error and exit code 2."""

    @functools.wraps(main)
    def wrapped(*args, **kwargs) -> int:
        try:
            return main(*args, **kwargs) or 0
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return wrapped
