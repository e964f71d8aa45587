"""A cache of partly read chunks, with one memory limit for all arrays of a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from prepcli.core.formatting import format_bytes
from prepcli.stores.buffers import ByteArray

DEFAULT_CACHE_NBYTES = 16 << 20
# Each chunk may keep a file open.
MAX_CHUNKS = 64


class ChunkReader(Protocol):
    """A reader of one chunk. `nbytes` is its memory use."""

    nbytes: int

    def read(self, start: int, into: ByteArray) -> bool:
        """Fill `into` with the chunk's bytes from `start` on.

        Returns:
            False if the reader, which may only read forward, has passed `start` already.

        Raises:
            ValueError: The chunk is damaged.
        """
        ...

    def close(self) -> None:
        """Release the reader's resources."""
        ...


class ChunkCache:
    """Chunk readers with at most `max_nbytes` of memory together. The least recently used are closed first."""

    def __init__(self, max_nbytes: int = DEFAULT_CACHE_NBYTES) -> None:
        self.most_nbytes = max_nbytes
        self._held: OrderedDict[tuple[int, int], ChunkReader] = OrderedDict()

    def get(self, key: tuple[int, int]) -> ChunkReader | None:
        """Return the reader of a chunk, or None if it is not cached."""
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def make_room(self, nbytes: int) -> None:
        """Close the least recently used readers until `nbytes` are free.

        Raises:
            ValueError: The limit is below `nbytes`.
        """
        if nbytes > self.most_nbytes:
            needed = format_bytes(nbytes)
            limit = format_bytes(self.most_nbytes)
            raise ValueError(f"decoding it takes {needed}, the memory limit leaves {limit} for it")
        # Sums are cheap: the cache has at most MAX_CHUNKS readers.
        readers = self._held
        while readers and (
            sum(reader.nbytes for reader in readers.values()) + nbytes > self.most_nbytes
            or len(readers) >= MAX_CHUNKS
        ):
            readers.popitem(last=False)[1].close()

    def put(self, key: tuple[int, int], reader: ChunkReader) -> ChunkReader:
        """Add the reader of a chunk, and return it."""
        self._held[key] = reader
        return reader

    def drop(self, key: tuple[int, int]) -> None:
        """Close the reader of a chunk if it is cached."""
        if reader := self._held.pop(key, None):
            reader.close()

    def close(self) -> None:
        """Close all readers."""
        while self._held:
            self._held.popitem()[1].close()
