"""Chunks that are being read, kept within a number of bytes that all of a checkpoint's arrays share."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from prepcli.console.formatting import format_bytes
from prepcli.engine.files import ByteArray

DEFAULT_CACHE_NBYTES = 16 << 20  # where nobody says how much memory there is
MAX_CHUNKS = 64  # chunks, each of which may have a file open


class ChunkReader(Protocol):
    """A chunk that is being read, and the memory that it takes."""

    nbytes: int

    def read(self, start: int, into: ByteArray) -> bool:
        """Fill `into` from byte `start` on; False where that is not ahead any more. ValueError for a broken chunk."""
        ...

    def close(self) -> None: ...


class ChunkCache:
    """Chunks that are being read, the latest last; together they take at most `most_nbytes`."""

    def __init__(self, max_nbytes: int = DEFAULT_CACHE_NBYTES) -> None:
        self.most_nbytes = max_nbytes
        self._held: OrderedDict[tuple[int, int], ChunkReader] = OrderedDict()

    def get(self, key: tuple[int, int]) -> ChunkReader | None:
        """What is held of a chunk."""
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def make_room(self, nbytes: int) -> None:
        """Let go of the oldest until so much is free. ValueError where there will never be so much."""
        if nbytes > self.most_nbytes:
            why = (
                f"decoding it takes {format_bytes(nbytes)}, of `--memory` {format_bytes(self.most_nbytes)} are for that"
            )
            raise ValueError(why)
        held = self._held
        while held and (sum(h.nbytes for h in held.values()) + nbytes > self.most_nbytes or len(held) >= MAX_CHUNKS):
            held.popitem(last=False)[1].close()

    def put(self, key: tuple[int, int], reader: ChunkReader) -> ChunkReader:
        """Take in what is held of a chunk."""
        self._held[key] = reader
        return reader

    def drop(self, key: tuple[int, int]) -> None:
        """Let go of a chunk."""
        if old := self._held.pop(key, None):
            old.close()

    def close(self) -> None:
        """Let go of all."""
        while self._held:
            self._held.popitem()[1].close()
