"""The error of a backend that cannot run what was asked of it."""


class UnsupportedInputError(NotImplementedError):
    """The named implementation does not support this input or platform. The message says why and what would work."""
