"""Record in which process of a job an error was raised, for the error's message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def label_errors(process: int | None) -> Iterator[None]:
    """Record the index of this process in each error raised inside the `with` block. `process_of` returns the index.

    Args:
        process: Index of this process, or None outside of a job of several processes.
    """
    try:
        yield
    except BaseException as error:
        # The index is an attribute of the error. A wrapping exception would hide its type from outer handlers.
        vars(error)["process"] = process
        raise


def process_of(error: BaseException) -> int | None:
    """Return the index of the process in which an error was raised, or None outside of a job of several processes."""
    return getattr(error, "process", None)
