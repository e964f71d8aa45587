"""Arrays of an Orbax item as blobs: the decoded bytes of their chunks, one chunk after another.

Chunk number i begins at byte i times the chunk's size. Chunks without stored bytes are zeros. A chunk is decoded from
its first byte, only as far as it is read. Its decoder stays open while the cache has room. A read from before the
decoder's position decodes the chunk again, and then keeps the whole chunk in memory if it fits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prepcli.algebra.chunks import StoredRange, StoredValue
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.formatting import count_text
from prepcli.core.json_values import quote_name
from prepcli.engine.chunk_cache import ChunkCache, ChunkReader
from prepcli.formats.codecs import (
    CHUNK_HEADER_NBYTES,
    READ_BLOCK_NBYTES,
    ByteReader,
    StoredBytesReader,
    decoder_memory_nbytes,
    open_decoder,
)
from prepcli.formats.orbax import OrbaxItem
from prepcli.formats.orbax_chunks import chunk_label, unravel_chunk_index
from prepcli.planning.arrays import Array
from prepcli.stores.buffers import ByteArray
from prepcli.stores.paths import AnyPath, StorePath
from prepcli.stores.reading import io_error

# A chunk of at most 1/8 of the cache size is decoded at once and kept.
WHOLE_CHUNK_DIVISOR = 8
# Bytes per request for a value on a server.
REMOTE_BLOCK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DecodedArray:
    """A blob of the decoded chunks of one array.

    Attributes:
        item: The item.
        array_number: Number of the array in the item.
    """

    item: OrbaxItem
    array_number: int

    @property
    def meta(self) -> Array:
        """The array as stored."""
        return self.item.arrays[self.array_number]

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{quote_name(self.meta.name)} of {self.item.folder}"

    def stored_value(self, index: tuple[int, ...]) -> StoredValue | None:
        """Return the stored value of a chunk. None for a chunk of zeros without stored bytes."""
        return self.meta.stored_chunk(index)

    def chunk_path(self, index: tuple[int, ...]) -> AnyPath:
        """Return the file of a chunk. The item's folder if the chunk is inline in the index or not stored."""
        value = self.stored_value(index)
        if isinstance(value, StoredRange):
            return self.item.files[value.file]
        return self.item.folder

    def open(self) -> DecodedArrayReader:
        """Open the array for reading, with a small separate cache."""
        return self.open_with_cache(ChunkCache())

    def open_with_cache(self, cache: ChunkCache) -> DecodedArrayReader:
        """Open the array for reading, with a cache shared with other readers."""
        return DecodedArrayReader(self, cache)


class DecodedArrayReader:
    """Reader of a decoded array, for one thread."""

    def __init__(self, blob: DecodedArray, cache: ChunkCache) -> None:
        self._blob = blob
        self._cache = cache
        self._chunk_nbytes = blob.meta.chunk_nbytes

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes from `offset` on.

        Raises:
            PrepError: A chunk is broken or unreadable.
        """
        done = 0
        while done < into.size:
            number, start = divmod(offset + done, self._chunk_nbytes)
            count = min(into.size - done, self._chunk_nbytes - start)
            try:
                self._read(number, start, into[done : done + count])
            except (ValueError, OSError) as error:
                raise chunk_error(self._blob, self._index(number), error) from error
            done += count

    def _read(self, number: int, start: int, into: ByteArray) -> None:
        key = (id(self), number)
        cached = self._cache.get(key)
        if cached is not None and cached.read(start, into):
            return
        # A cached reader is already past `start` and cannot go back, so this chunk is not read in
        # the order of its bytes. Decode it once more, and keep all of it for later reads.
        is_reread = cached is not None
        self._cache.drop(key)
        reader = open_chunk(self._blob, self._index(number), self._cache, keep_whole=is_reread)
        self._cache.put(key, reader).read(start, into)

    def _index(self, number: int) -> tuple[int, ...]:
        return unravel_chunk_index(self._blob.meta.grid.chunk_counts, number)

    def close(self) -> None:
        """Close all readers in the cache, including the readers of other arrays."""
        self._cache.close()


def open_chunk(
    blob: DecodedArray, index: tuple[int, ...], cache: ChunkCache, keep_whole: bool = False
) -> ChunkReader:
    """Open a chunk for reading from its first byte on.

    Args:
        blob: The array.
        index: Index of the chunk in the grid.
        cache: Limits the memory of all open readers. Older readers are closed to make room.
        keep_whole: Decode all of the chunk into memory if the cache has room, so that any part can be read again.

    Raises:
        ValueError: The chunk is broken, or its decoder needs more memory than the cache has.
        OSError: The chunk's file cannot be read.
    """
    value = blob.stored_value(index)
    nbytes = blob.meta.chunk_nbytes
    codec_names = blob.meta.codecs
    if value is None:
        return _ZeroChunk()
    stored = _open_value(blob, value)
    cache.make_room(stored.memory_nbytes)
    if not codec_names:
        return _UncompressedChunk(stored)
    with contextlib.ExitStack() as stack:
        # Closes the file unless the streamed reader, which closes it itself, is returned.
        stack.callback(stored.close)
        # The header of a zstd frame states the window that its decoder allocates. It is untrusted, and
        # compared with the memory of the cache before there is a decoder.
        decoder_nbytes = decoder_memory_nbytes(
            codec_names, stored.read_at(0, CHUNK_HEADER_NBYTES), nbytes
        )
        reader_nbytes = decoder_nbytes + stored.memory_nbytes
        cache.make_room(reader_nbytes)
        decoder = open_decoder(codec_names, StoredBytesReader(stored.read_at, stored.nbytes))
        streamed = _StreamedChunk(decoder, stored.close, reader_nbytes, nbytes)
        is_small = nbytes <= cache.most_nbytes // WHOLE_CHUNK_DIVISOR
        if (keep_whole or is_small) and reader_nbytes + nbytes <= cache.most_nbytes:
            cache.make_room(reader_nbytes + nbytes)
            return _load_whole_chunk(streamed, nbytes)
        stack.pop_all()
    return streamed


def chunk_error(
    blob: DecodedArray, index: tuple[int, ...], error: ValueError | OSError
) -> PrepError:
    """Return the error for an unreadable chunk."""
    if isinstance(error, OSError):
        return io_error(blob.chunk_path(index), error)
    what = f"chunk {chunk_label(index)} of {blob.name} cannot be decoded"
    return DamagedError(what, f"{blob.chunk_path(index).name}: {error}", GET_AGAIN_HINT)


def _open_value(blob: DecodedArray, value: StoredValue) -> _InlineValue | _FileValue | _RemoteValue:
    """Open a stored value for reading."""
    if isinstance(value, bytes):
        return _InlineValue(value)
    path = blob.item.files[value.file]
    if isinstance(path, StorePath):
        return _RemoteValue(path, value)
    return _FileValue(path, value)


class _InlineValue:
    """A stored value in the index, so in memory."""

    memory_nbytes = 0

    def __init__(self, value: bytes) -> None:
        self._value = value
        self.nbytes = len(value)

    def read_at(self, offset: int, count: int) -> bytes:
        return self._value[offset : offset + count]

    def close(self) -> None:
        pass


class _FileValue:
    """A stored value in a byte range of a file."""

    memory_nbytes = 0

    def __init__(self, path: Path, value: StoredRange) -> None:
        self._value = value
        self.nbytes = value.nbytes
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, offset: int, count: int) -> bytes:
        return os.pread(self._fd, min(count, self.nbytes - offset), self._value.offset + offset)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _RemoteValue:
    """A stored value in a byte range of a file on a server, read in blocks."""

    def __init__(self, file: StorePath, value: StoredRange) -> None:
        self._file = file
        self._value = value
        self.nbytes = value.nbytes
        self.memory_nbytes = min(value.nbytes, REMOTE_BLOCK_NBYTES)
        self._block = np.empty(0, np.uint8)
        self._block_start = 0

    def read_at(self, offset: int, count: int) -> bytes:
        """Return up to `count` bytes, as far as the block has them."""
        start = offset - self._block_start
        if not 0 <= start < self._block.size:
            self._read_block(offset)
            start = 0
        return self._block[start : start + count].tobytes()

    def _read_block(self, offset: int) -> None:
        # The old block is freed first: `memory_nbytes` counts one block.
        self._block = np.empty(0, np.uint8)
        block = np.empty(min(REMOTE_BLOCK_NBYTES, self.nbytes - offset), np.uint8)
        self._file.read_at(self._value.offset + offset, block)
        self._block = block
        self._block_start = offset

    def close(self) -> None:
        self._block = self._block[:0]


class _ZeroChunk:
    """Reader of a chunk without stored value: zeros."""

    nbytes = 0

    def read(self, start: int, into: ByteArray) -> bool:
        into[:] = 0
        return True

    def close(self) -> None:
        pass


class _UncompressedChunk:
    """Reader of an uncompressed chunk."""

    def __init__(self, stored: _InlineValue | _FileValue | _RemoteValue) -> None:
        self._stored = stored
        self.nbytes = stored.memory_nbytes

    def read(self, start: int, into: ByteArray) -> bool:
        done = 0
        while done < into.size:
            block = self._stored.read_at(start + done, min(into.size - done, READ_BLOCK_NBYTES))
            if not block:
                raise ValueError(f"{count_text(into.size - done, 'byte is', 'bytes are')} missing")
            into[done : done + len(block)] = np.frombuffer(block, np.uint8)
            done += len(block)
        return True

    def close(self) -> None:
        self._stored.close()


class _ChunkInMemory:
    """Reader of a decoded chunk in memory."""

    def __init__(self, data: ByteArray) -> None:
        self._data = data
        self.nbytes = data.nbytes

    def read(self, start: int, into: ByteArray) -> bool:
        into[:] = self._data[start : start + into.size]
        return True

    def close(self) -> None:
        self._data = self._data[:0]


class _StreamedChunk:
    """Reader that decodes a chunk block by block and keeps the last decoded block in memory."""

    def __init__(
        self, decoder: ByteReader, close: Callable[[], None], nbytes: int, chunk_nbytes: int
    ) -> None:
        self._decoder = decoder
        self._close = close
        self.nbytes = nbytes
        self._chunk_nbytes = chunk_nbytes
        self._block = np.empty(0, np.uint8)
        self._block_start = 0

    def read(self, start: int, into: ByteArray) -> bool:
        """Fill `into` from byte `start` on. Return False if the decoder is already past it."""
        if start < self._block_start:
            return False
        done = 0
        while done < into.size:
            block_offset = start + done - self._block_start
            if block_offset >= self._block.size:
                self._decode_block()
                continue
            count = min(into.size - done, self._block.size - block_offset)
            into[done : done + count] = self._block[block_offset : block_offset + count]
            done += count
        return True

    def _decode_block(self) -> None:
        self._block_start += self._block.size
        block = self._decoder.read(min(READ_BLOCK_NBYTES, self._chunk_nbytes - self._block_start))
        if not block:
            raise ValueError(f"it holds {self._block_start:,} bytes, not {self._chunk_nbytes:,}")
        self._block = np.frombuffer(block, np.uint8)
        if self._block_start + self._block.size == self._chunk_nbytes and self._decoder.read(1):
            raise ValueError(f"it holds more than {self._chunk_nbytes:,} bytes")

    def close(self) -> None:
        self._close()


def _load_whole_chunk(streamed: _StreamedChunk, nbytes: int) -> _ChunkInMemory:
    data = np.empty(nbytes, np.uint8)
    streamed.read(0, data)
    return _ChunkInMemory(data)
