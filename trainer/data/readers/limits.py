"""The limit on the bytes of a document, line, row and cell (`data.max_document_bytes`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from trainer.models.errors import PrepError

SIZE_KEY = "data.max_document_bytes"
SKIP_NBYTES = 1 << 20  # bytes of a line that is too long, which are read at once


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file.

    Attributes:
        content: Its bytes with the line feed. Empty if the line is too long.
        nbytes: Size of the whole line.
    """

    content: bytes
    nbytes: int

    @property
    def is_too_long(self) -> bool:
        """Whether the line is longer than the limit."""
        return self.nbytes > len(self.content)


def read_lines(stream: BinaryIO, max_nbytes: int) -> Iterator[Line]:
    """Yield the lines of a stream in bounded memory.

    Args:
        stream: The stream.
        max_nbytes: Maximum bytes of a line, without its line feed.
    """
    while content := stream.readline(max_nbytes + 1):
        nbytes = len(content)
        if nbytes <= max_nbytes or content.endswith(b"\n"):
            yield Line(content, nbytes)
            continue
        while not content.endswith(b"\n") and (rest := stream.readline(SKIP_NBYTES)):
            nbytes += len(rest)
            content = rest
        yield Line(b"", nbytes)


def too_large_error(what: str, nbytes: int, max_nbytes: int) -> PrepError:
    """Return the error for a line or row above the limit.

    Args:
        what: The place, and its fault.
        nbytes: Its size, or a lower bound of it.
        max_nbytes: The limit.
    """
    why = f"it has {nbytes:,} bytes or more"
    hint = f"`--set {SIZE_KEY}=N` allows more, `data.bad_lines = N` skips up to N of them"
    return PrepError(what, f"{why}, `{SIZE_KEY}` is {max_nbytes:,}", hint)
