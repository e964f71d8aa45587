"""Bytes in memory, and readers of byte sequences."""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]


def allocate_buffer(nbytes: int) -> ByteArray:
    """Allocate a page-aligned buffer, in huge pages if the system supports them. Untouched pages take no memory."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages raises an OSError.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class ClosedAfterBlock(ABC):
    """Open files, closed after the block of a `with` statement."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class BlobReader(Protocol):
    """An open blob. It is used by one thread at a time."""

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes from `offset` on. Raises PrepError if they cannot be read."""
        ...

    def close(self) -> None:
        """Release the reader's resources."""
        ...


class Blob(Protocol):
    """A byte sequence with reads at any offset."""

    @property
    def name(self) -> str:
        """Name in messages."""
        ...

    def open(self) -> BlobReader:
        """Return a reader of the bytes."""
        ...
