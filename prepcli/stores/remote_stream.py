"""A remote file as a seekable stream of bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from prepcli.stores.byte_ranges import ReadAheadCache, RemoteFile

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class RemoteStream(io.RawIOBase):
    """Stream of a remote file, read by byte ranges at its listed version."""

    def __init__(self, file: RemoteFile, cache: ReadAheadCache) -> None:
        """Start at the first byte.

        Args:
            file: The file.
            cache: Reads its byte ranges.
        """
        self._file = file
        self._cache = cache
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset from the start, the position or the end, and return the offset from the start."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer, unless the file ends before, and return the number of bytes.

        Raises:
            PrepError: The file is gone, changed or forbidden, or the store does not answer.
        """
        into = np.frombuffer(memoryview(buffer), np.uint8)
        count = max(0, min(into.size, self._file.size - self._position))
        if count:
            self._cache.read(self._file, self._position, into[:count])
        self._position += count
        return count
