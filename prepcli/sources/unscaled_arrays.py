"""Arrays of an Orbax item of another trainer, without the trainer's scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prepcli.engine.casts import unscale_values
from prepcli.engine.chunk_cache import ChunkCache
from prepcli.engine.fills import numpy_dtype
from prepcli.planning.layout_scales import LayoutScale
from prepcli.sources.decoded_arrays import DecodedArray, DecodedArrayReader
from prepcli.stores.buffers import ByteArray

# Bytes per step. The temporary arrays of a step fit a core's cache.
BLOCK_NBYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class UnscaledArray:
    """The bytes of one decoded array, with the scale of the layout undone."""

    array: DecodedArray
    scale: LayoutScale

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.array.name

    def open(self) -> UnscaledReader:
        """Open the array for reading, with a small separate cache."""
        return self.open_with_cache(ChunkCache())

    def open_with_cache(self, cache: ChunkCache) -> UnscaledReader:
        """Open the array for reading, with a cache shared with other readers."""
        return UnscaledReader(self, cache)


class UnscaledReader:
    """Reader of an unscaled array, for one thread."""

    def __init__(self, blob: UnscaledArray, cache: ChunkCache) -> None:
        self._reader = DecodedArrayReader(blob.array, cache)
        self._scale = blob.scale
        self._dtype = numpy_dtype(blob.array.meta.dtype)

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes from `offset` on.

        Raises:
            PrepError: A chunk is broken or unreadable.
        """
        for start in range(0, into.size, BLOCK_NBYTES):
            block = into[start : start + BLOCK_NBYTES]
            self._read_block(offset + start, block)

    def _read_block(self, offset: int, into: ByteArray) -> None:
        # A read may begin or end inside of a value. Bytes 3 to 9 of float32 values are read as bytes 0 to 12.
        size = self._dtype.itemsize
        before = offset % size
        after = -(offset + into.size) % size
        data = np.empty(before + into.size + after, np.uint8)
        self._reader.read_at(offset - before, data)
        values = unscale_values(data.view(self._dtype), self._scale)
        into[:] = values.view(np.uint8)[before : before + into.size]

    def close(self) -> None:
        """Close the array."""
        self._reader.close()
