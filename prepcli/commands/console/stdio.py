"""Standard streams that may be closed, full or without a reader, and the output of libraries."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from prepcli.core.observer import LIBRARIES, CommandObserver, Observer


class LossyStream:
    """A text stream that drops text it cannot write: a lost message must not stop a conversion."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text. Drop it, and all later text, if the stream is broken."""
        with contextlib.suppress(OSError):
            return self._stream.write(text)
        redirect_to_null(self._stream)
        return len(text)

    def flush(self) -> None:
        """Flush. Drop the text if that fails."""
        try:
            self._stream.flush()
        except OSError:
            redirect_to_null(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_closed_streams() -> None:
    """Open a replacement for each closed standard stream, so that no output file gets its descriptor.

    Writes to the replacement of stdout fail, because a result would be lost. The replacement of stderr
    drops messages.
    """
    # `open` returns the lowest free descriptor. The loop fills 0, 1 and 2 before any output file.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        # A descriptor for reading makes every write fail with EBADF.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


@contextlib.contextmanager
def library_output_hidden(to_stderr: bool) -> Iterator[TextIO]:
    """Keep text that libraries write to descriptor 1 out of stdout, which carries only the result.

    The network library of jax for CPUs prints there. The text goes to stderr, or is dropped. The `with` block gets a
    stream that writes to stdout, and must not write to `sys.stdout`.
    """
    sys.stdout.flush()
    with os.fdopen(
        os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace"
    ) as stdout:
        # The redirection is on the descriptor: C libraries do not use `sys.stdout`.
        if to_stderr:
            target = os.dup(2)
        else:
            target = os.open(os.devnull, os.O_WRONLY)
        os.dup2(target, 1)
        os.close(target)
        try:
            yield stdout
        finally:
            ctypes.CDLL(None).fflush(None)  # text in the buffers of C libraries
            os.dup2(stdout.fileno(), 1)


def escape_unencodable() -> None:
    """Make the standard streams escape characters missing in their encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def write_and_flush(stream: TextIO, text: str = "") -> OSError | None:
    """Write and flush, and return the error if the text was lost. A closed reader is no error."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        redirect_to_null(stream)
        return _ignore_broken_pipe(error)
    return None


def _ignore_broken_pipe(error: OSError) -> OSError | None:
    # EPIPE: `prep ... | head` has read all lines that it prints. Every other failure loses a part of the result.
    if isinstance(error, BrokenPipeError):
        return None
    return error


def write_exact_and_flush(stream: TextIO, text: str) -> OSError | None:
    """Write the bytes of a script and flush, and return the error if they were lost. A closed reader is no error.

    A name that is not UTF-8 keeps its bytes. `write_and_flush` would escape it, and the script would
    contain the name of another file.
    """
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        return write_and_flush(stream, text)
    try:
        stream.flush()
        buffer.write(text.encode("utf-8", "surrogateescape"))
    except OSError as error:
        redirect_to_null(stream)
        return _ignore_broken_pipe(error)
    return write_and_flush(stream)


def redirect_to_null(stream: TextIO) -> None:
    """Discard the stream's buffer and all text written to it from now on."""
    with contextlib.suppress(OSError, ValueError):  # streams in tests have no descriptor
        # The descriptor is replaced, not the stream: Python flushes the buffer of stdout at exit, and a
        # failure there would print an error and change the exit code to 120.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


def is_reader_gone(stream: TextIO) -> bool:
    """Return whether the stream is a pipe closed by its reader."""
    poll = select.poll()
    try:
        # No requested events: poll reports POLLERR regardless, once the reader has closed the pipe.
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))


def prepare_jax(observer: Observer) -> None:
    """Set the environment variables of JAX, before it is imported.

    Its log messages, such as warnings about missing accelerators, are hidden unless a command has `-vv`. A command
    keeps its compiled programs for later ones.
    """
    is_verbose = isinstance(observer, CommandObserver) and observer.level >= LIBRARIES
    # The C++ part of jax reads this variable when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if is_verbose else "3")
    logging.getLogger("jax").setLevel(logging.INFO if is_verbose else logging.ERROR)
    if isinstance(observer, CommandObserver):
        # It imports the parser of e-mails, in 12 ms.
        from prepcli.core.compilation_cache import use_compilation_cache

        use_compilation_cache(os.environ)
