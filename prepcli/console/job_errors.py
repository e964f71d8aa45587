"""The process of a job in which an error was raised, for the error's message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def label_errors(process: int | None) -> Iterator[None]:
    """Record the process of a job in errors that leave the block. See `process_of`.

    Args:
        process: Index of this process, or None outside of a job of several processes.
    """
    try:
        yield
    except BaseException as error:
        # An attribute, and no wrapping exception: handlers further out still see the type of the error.
        vars(error)["process"] = process
        raise


def process_of(error: BaseException) -> int | None:
    """Return the index of the process in which an error was raised, or None outside of a job of several processes."""
    return getattr(error, "process", None)
