"""Errors of the libraries that encode text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.models.errors import PrepError

PANIC_MODULE = "pyo3_runtime"  # of the exception that a panic of Rust becomes
MAX_CHARS = 300


@contextmanager
def library_errors(what: str, hint: str) -> Iterator[None]:
    """Turn every error of a library in the block into a PrepError.

    A panic of Rust is a BaseException, so `except Exception` does not catch it. Here a panic means that the library
    does not check some fault of the tokenizer's file.

    Args:
        what: The failed operation, for the message.
        hint: How to correct it.

    Raises:
        PrepError: The block raised an error.
    """
    try:
        yield
    except PrepError:
        raise
    except Exception as error:  # the libraries have no exception type of their own
        first_line = str(error).partition("\n")[0]
        raise PrepError(what, first_line[:MAX_CHARS], hint) from error
    except BaseException as error:
        if type(error).__module__ != PANIC_MODULE:
            raise
        raise PrepError(what, f"its library stopped with: {error!s:.{MAX_CHARS}}", hint) from error
