"""Operations on stored arrays: decode the chunks of an Orbax item, undo a layout's scale, put chunks into C order.

A decoded array has the bytes of its chunks, one chunk after another: chunk number i begins at byte i times the chunk's
size. Chunks without stored bytes are zeros. A chunk is decoded from its first byte, only as far as it is read.
Its decoder stays open while the cache has room. A read from before the decoder's position decodes the chunk again, and
then keeps the whole chunk in memory if it fits.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

import numpy as np

from prepcli.algebra.boxes import Range, full_box, split_merged_range, volume
from prepcli.algebra.grids import StoredRange, StoredValue
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.core.formatting import count_text
from prepcli.core.json_values import quote_name
from prepcli.engine.blobs import (
    BlockCache,
    ByteBlock,
    DerivedArrays,
    DerivedReader,
    MemoryBlock,
    Operation,
    RowOperation,
)
from prepcli.engine.casts import Scale
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.permute import needs_permute, scatter
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
from prepcli.planning.arrays import location_copies
from prepcli.planning.libraries import LayoutScale
from prepcli.planning.slabs import Slab
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import SourceTensor
from prepcli.stores.buffers import ByteArray, allocate_buffer
from prepcli.stores.files import io_error
from prepcli.stores.paths import AnyPath, StorePath

# A chunk of at most 1/8 of the cache size is decoded at once and kept.
WHOLE_CHUNK_DIVISOR = 8
# Bytes per request for a value on a server.
REMOTE_BLOCK_NBYTES = 1 << 20
# Bytes per step of a scale. The temporary arrays of a step fit a core's cache.
SCALE_BLOCK_NBYTES = 1 << 17
# Bytes per step of `JoinChunks`. A read takes about twice its size.
JOIN_BLOCK_NBYTES = 1 << 20


class DecodeChunks(Operation):
    """Decodes the chunks of one array of an item. A block is a chunk.

    Attributes:
        item: The item.
        array_number: Number of the array in the item.
        array: The array as stored.
    """

    def __init__(self, item: OrbaxItem, array_number: int) -> None:
        self.item = item
        self.array_number = array_number
        self.array = item.arrays[array_number]
        self.name = f"{quote_name(self.array.name)} of {item.folder}"

    @property
    def nbytes(self) -> int:
        """Size of all chunks, padding included."""
        return math.prod(self.array.grid.chunk_counts) * self.array.chunk_nbytes

    def block_nbytes(self, memory_nbytes: int) -> int:
        """Return the size of a chunk."""
        return self.array.chunk_nbytes

    def open_block(
        self, byte_range: Range, reader: DerivedReader, *, keep_whole: bool
    ) -> ByteBlock:
        """Open a chunk."""
        number = byte_range[0] // self.array.chunk_nbytes
        index = unravel_chunk_index(self.array.grid.chunk_counts, number)
        return self.open_chunk(index, reader.cache, keep_whole=keep_whole)

    def open_chunk(
        self, index: tuple[int, ...], cache: BlockCache, *, keep_whole: bool = False
    ) -> ByteBlock:
        """Open a chunk for reading from its first byte on.

        Args:
            index: Index of the chunk in the grid.
            cache: Limits the memory of all open blocks. Older blocks are closed to make room.
            keep_whole: Decode all of the chunk into memory if the cache has room, so that any part can be read again.

        Raises:
            PrepError: The chunk is broken or unreadable, or its decoder needs more memory than the cache has.
        """
        with self.chunk_errors(index):
            value = self.array.stored_chunk(index)
            nbytes = self.array.chunk_nbytes
            if value is None:
                return MemoryBlock(np.broadcast_to(np.uint8(0), (nbytes,)), nbytes=0)
            stored = _StoredChunk(value, self._chunk_path(value))
            chunk = _Chunk(self, index, stored)
            cache.make_room(stored.memory_nbytes)
            if not self.array.codecs:
                return chunk
            with contextlib.ExitStack() as stack:
                # Closes the file unless the streamed chunk, which closes it itself, is returned.
                stack.callback(stored.close)
                # The header of a zstd frame states the window that its decoder allocates. It is untrusted, and
                # compared with the memory of the cache before there is a decoder.
                header = stored.read_at(0, CHUNK_HEADER_NBYTES)
                chunk.nbytes += decoder_memory_nbytes(self.array.codecs, header, nbytes)
                cache.make_room(chunk.nbytes)
                bytes_reader = StoredBytesReader(stored.read_at, stored.nbytes)
                chunk.decoder = open_decoder(self.array.codecs, bytes_reader)
                is_small = nbytes <= cache.most_nbytes // WHOLE_CHUNK_DIVISOR
                if (keep_whole or is_small) and chunk.nbytes + nbytes <= cache.most_nbytes:
                    cache.make_room(chunk.nbytes + nbytes)
                    data = np.empty(nbytes, np.uint8)
                    chunk.read(0, data)
                    return MemoryBlock(data)
                stack.pop_all()
            return chunk

    def _chunk_path(self, value: StoredValue | None) -> AnyPath:
        """Return the file of a chunk. The item's folder if the chunk is inline in the index or not stored."""
        return self.item.files[value.file] if isinstance(value, StoredRange) else self.item.folder

    @contextlib.contextmanager
    def chunk_errors(self, index: tuple[int, ...]) -> Iterator[None]:
        """Raise PrepError for a chunk that cannot be read or decoded."""
        try:
            yield
        except (ValueError, OSError) as error:
            path = self._chunk_path(self.array.stored_chunk(index))
            if isinstance(error, OSError):
                raise io_error(path, error) from error
            what = f"chunk {chunk_label(index)} of {self.name} cannot be decoded"
            raise DamagedError(what, f"{path.name}: {error}", GET_AGAIN_HINT) from error


def decoded_array(item: OrbaxItem, array_number: int) -> DerivedArrays:
    """Return a blob of the decoded chunks of an array."""
    operation = DecodeChunks(item, array_number)
    return DerivedArrays(operation.name, (operation,))


class _StoredChunk:
    """A chunk as stored: inline in the index, in a byte range of a file, or of one on a server, read in blocks."""

    def __init__(self, value: StoredValue, path: AnyPath) -> None:
        self.memory_nbytes = 0
        # The file on a server, if the value is a part of one
        self._remote: StorePath | None = None
        self._fd = -1
        self._offset = 0
        self._block = memoryview(b"")
        self._block_start = 0
        if isinstance(value, bytes):
            self.nbytes = len(value)
            self._block = memoryview(value)
            return
        self.nbytes = value.nbytes
        self._offset = value.offset
        if isinstance(path, StorePath):
            self._remote = path
            self.memory_nbytes = min(value.nbytes, REMOTE_BLOCK_NBYTES)
        else:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, offset: int, count: int) -> bytes:
        """Return up to `count` bytes. Bytes on a server are returned as far as the block has them."""
        if self._fd >= 0:
            return os.pread(self._fd, min(count, self.nbytes - offset), self._offset + offset)
        start = offset - self._block_start
        if self._remote is not None and not 0 <= start < len(self._block):
            # The old block is freed first: `memory_nbytes` counts one block.
            self._block = memoryview(b"")
            block = np.empty(min(REMOTE_BLOCK_NBYTES, self.nbytes - offset), np.uint8)
            self._remote.read_at(self._offset + offset, block)
            self._block = block.data
            self._block_start = offset
            start = 0
        return bytes(self._block[start : start + count])

    def close(self) -> None:
        """Close the file, and release the memory."""
        self._block = memoryview(b"")
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Chunk:
    """Reader of a chunk. A decoder goes forward only, and its last decoded block stays in memory."""

    def __init__(
        self, operation: DecodeChunks, index: tuple[int, ...], stored: _StoredChunk
    ) -> None:
        self.nbytes = stored.memory_nbytes
        # None for a chunk without codecs.
        self.decoder: ByteReader | None = None
        self._operation = operation
        self._index = index
        self._stored = stored
        self._block = np.empty(0, np.uint8)
        self._block_start = 0

    def read(self, start: int, into: ByteArray) -> bool:
        """Fill `into` from byte `start` on. Return False if the decoder is already past it."""
        if start < self._block_start and self.decoder is not None:
            return False
        with self._operation.chunk_errors(self._index):
            done = 0
            while done < into.size:
                data = self._read_part(start + done, into.size - done)
                into[done : done + data.size] = data
                done += data.size
        return True

    def _read_part(self, start: int, count: int) -> ByteArray:
        """Return up to `count` bytes from `start` on."""
        if self.decoder is None:
            data = self._stored.read_at(start, min(count, READ_BLOCK_NBYTES))
            if not data:
                raise ValueError(f"{count_text(count, 'byte is', 'bytes are')} missing")
            return np.frombuffer(data, np.uint8)
        chunk_nbytes = self._operation.array.chunk_nbytes
        while start >= self._block_start + self._block.size:
            self._block_start += self._block.size
            block = self.decoder.read(min(READ_BLOCK_NBYTES, chunk_nbytes - self._block_start))
            if not block:
                raise ValueError(f"it holds {self._block_start:,} bytes, not {chunk_nbytes:,}")
            self._block = np.frombuffer(block, np.uint8)
            if self._block_start + self._block.size == chunk_nbytes and self.decoder.read(1):
                raise ValueError(f"it holds more than {chunk_nbytes:,} bytes")
        first = start - self._block_start
        return self._block[first : first + count]

    def close(self) -> None:
        """Close the file."""
        self._stored.close()


class UndoScale(Operation):
    """Undoes the scale of a layout in the values of a blob. Values keep their places, padding of chunks included."""

    def __init__(self, dtype: str, nbytes: int, scale: LayoutScale) -> None:
        self._dtype = numpy_dtype(dtype)
        self._nbytes = nbytes
        self._scale = scale

    @property
    def nbytes(self) -> int:
        """Size of the blob."""
        return self._nbytes

    def block_nbytes(self, memory_nbytes: int) -> int:
        """Return the size of a block of whole values."""
        return SCALE_BLOCK_NBYTES

    def open_block(
        self, byte_range: Range, reader: DerivedReader, *, keep_whole: bool
    ) -> ByteBlock:
        """Compute a block in memory."""
        data = np.empty(byte_range[1] - byte_range[0], np.uint8)
        reader.files.read_at(0, byte_range[0], data)
        with np.errstate(all="ignore"):
            values = Scale(self._scale).undo(data.view(self._dtype))
        return MemoryBlock(values.view(np.uint8))


def unscaled_array(item: OrbaxItem, array_number: int, scale: LayoutScale) -> DerivedArrays:
    """Return a blob of the decoded chunks of an array, with the scale of the layout undone."""
    decoded = decoded_array(item, array_number)
    operation = UndoScale(item.arrays[array_number].dtype, decoded.offsets[-1], scale)
    return DerivedArrays(decoded.name, (operation,), (decoded,))


class JoinChunks(RowOperation):
    """Reads the rows of a tensor in C order, however it is stored."""

    def __init__(self, tensor: SourceTensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self._placement = tensor.placement

    def block_rows(self, memory_nbytes: int) -> int:
        """Return the number of rows to read at a time."""
        return max(1, JOIN_BLOCK_NBYTES // (self.columns * itemsize(self.dtype)))

    def read_rows(self, rows: Range, reader: DerivedReader) -> np.ndarray:
        """Return the bytes of rows."""
        row_nbytes = self.columns * itemsize(self.dtype)
        data = np.empty((rows[1] - rows[0]) * row_nbytes, np.uint8)
        done = 0
        for outer in split_merged_range(rows, self.shape[:-1]):
            box = (*outer, *full_box(self.shape[-1:]))
            part = data[done : done + volume(box) * itemsize(self.dtype)]
            copies = tuple(location_copies(self._placement, box))
            runs = reader.files.read_runs(copies, allocate_buffer(part.size))
            start = rows[0] * row_nbytes + done
            if needs_permute(copies):
                scatter(Slab(0, start, part.size, copies, ()), runs, out=part)
            else:
                part[...] = runs
            done += part.size
        return data
