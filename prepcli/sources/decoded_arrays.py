"""Arrays of a checkpoint as the bytes of their chunks one after another, decoded as they are read.

Chunk number i of an array is the bytes from i times a chunk's size on; what is not stored is zeros. A chunk is decoded
from its first byte on, only as far as it is read. What was begun is kept while there is room for it: a chunk that is
read from before where it stands is decoded anew, and from then on held whole if it fits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prepcli.engine.chunk_cache import ChunkCache, ChunkReader
from prepcli.engine.files import ByteArray, io_error
from prepcli.errors import PrepError
from prepcli.formats.codecs import (
    READ_BLOCK_NBYTES,
    ZSTD_HEADER_NBYTES,
    ByteReader,
    StoredBytesReader,
    decoder_memory_nbytes,
    open_decoder,
)
from prepcli.formats.orbax import ArrayMeta, chunk_key, unravel_chunk_index
from prepcli.formats.orbax_read import OrbaxItem
from prepcli.formats.orbax_store import StoredRange, StoredValue
from prepcli.formats.untrusted import quote_name

WHOLE_CHUNK_DIVISOR = 8  # a chunk of at most this part of the memory is held whole at once


@dataclass(frozen=True, slots=True)
class DecodedArray:
    """Array number `number` of an item, as a blob."""

    item: OrbaxItem
    array_number: int

    @property
    def meta(self) -> ArrayMeta:
        return self.item.arrays[self.array_number]

    @property
    def name(self) -> str:
        return f"{quote_name(self.meta.name)} of {self.item.folder}"

    def stored_value(self, index: tuple[int, ...]) -> StoredValue | None:
        """What is stored of a chunk; None for zeros."""
        return self.item.chunks[self.array_number].get(index)

    def chunk_path(self, index: tuple[int, ...]) -> Path:
        """The file that a chunk is in."""
        value = self.stored_value(index)
        return self.item.files[value.file] if isinstance(value, StoredRange) else self.item.folder

    def open(self) -> DecodedArrayReader:
        """Read it within a little memory."""
        return self.open_with_cache(ChunkCache())

    def open_with_cache(self, cache: ChunkCache) -> DecodedArrayReader:
        """Read it within memory that others use too."""
        return DecodedArrayReader(self, cache)


class DecodedArrayReader:
    """A decoded array while one thread reads it."""

    def __init__(self, blob: DecodedArray, cache: ChunkCache) -> None:
        self._blob, self._cache = blob, cache
        self._chunk_nbytes = blob.meta.chunk_nbytes

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` from byte `offset` on. PrepError names the chunk that is broken."""
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
        held = self._cache.get(key)
        if held is not None and held.read(start, into):
            return
        again = held is not None
        self._cache.drop(key)
        self._cache.put(key, open_chunk(self._blob, self._index(number), self._cache, again)).read(start, into)

    def _index(self, number: int) -> tuple[int, ...]:
        return unravel_chunk_index(self._blob.meta.grid, number)

    def close(self) -> None:
        """Let go of what is held, here and by others that use the same memory."""
        self._cache.close()


def open_chunk(blob: DecodedArray, index: tuple[int, ...], cache: ChunkCache, keep_whole: bool = False) -> ChunkReader:
    """A chunk, ready to be read from its first byte on; `whole`: from anywhere, if there is room for all of it.

    ValueError where it is broken; OSError where the system does not let it be read.
    """
    value, nbytes, steps = blob.stored_value(index), blob.meta.chunk_nbytes, blob.item.codec_names[blob.array_number]
    if value is None:
        return _Zeros()
    cache.make_room(0)
    stored = _Bytes(value) if isinstance(value, bytes) else _File(blob.item.files[value.file], value)
    if not steps:
        return _Plain(stored)
    with contextlib.ExitStack() as stack:
        stack.callback(stored.close)
        needed = decoder_memory_nbytes(steps, stored.read_at(0, ZSTD_HEADER_NBYTES), nbytes)
        cache.make_room(needed)
        ahead = _Ahead(
            open_decoder(steps, StoredBytesReader(stored.read_at, stored.nbytes)), stored.close, needed, nbytes
        )
        if (keep_whole or nbytes <= cache.most_nbytes // WHOLE_CHUNK_DIVISOR) and needed + nbytes <= cache.most_nbytes:
            cache.make_room(needed + nbytes)
            return _whole(ahead, nbytes)
        stack.pop_all()
    return ahead


def chunk_error(blob: DecodedArray, index: tuple[int, ...], error: ValueError | OSError) -> PrepError:
    """The error of a chunk as one that names it."""
    if isinstance(error, OSError):
        return io_error(blob.chunk_path(index), error)
    what = f"chunk {chunk_key(index)} of {blob.name} cannot be decoded"
    return PrepError(what, f"{blob.chunk_path(index).name}: {error}", "copy the checkpoint again")


class _Bytes:
    """A value that is in memory."""

    def __init__(self, value: bytes) -> None:
        self._value, self.nbytes = value, len(value)

    def read_at(self, offset: int, count: int) -> bytes:
        return self._value[offset : offset + count]

    def close(self) -> None:
        pass


class _File:
    """A value in a file."""

    def __init__(self, path: Path, value: StoredRange) -> None:
        self._value, self.nbytes = value, value.nbytes
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, offset: int, count: int) -> bytes:
        return os.pread(self._fd, min(count, self.nbytes - offset), self._value.offset + offset)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Zeros:
    """A chunk that is not stored."""

    nbytes = 0

    def read(self, start: int, into: ByteArray) -> bool:
        into[:] = 0
        return True

    def close(self) -> None:
        pass


class _Plain:
    """A chunk that is stored as it is."""

    nbytes = 0

    def __init__(self, stored: _Bytes | _File) -> None:
        self._stored = stored

    def read(self, start: int, into: ByteArray) -> bool:
        done = 0
        while done < into.size:
            found = self._stored.read_at(start + done, min(into.size - done, READ_BLOCK_NBYTES))
            if not found:
                raise ValueError(f"{into.size - done:,} bytes are missing")
            into[done : done + len(found)] = np.frombuffer(found, np.uint8)
            done += len(found)
        return True

    def close(self) -> None:
        self._stored.close()


class _Whole:
    """A chunk in memory."""

    def __init__(self, data: ByteArray) -> None:
        self._data, self.nbytes = data, data.nbytes

    def read(self, start: int, into: ByteArray) -> bool:
        into[:] = self._data[start : start + into.size]
        return True

    def close(self) -> None:
        self._data = self._data[:0]


class _Ahead:
    """A chunk that is decoded as it is read, of which the last piece is there."""

    def __init__(self, pieces: ByteReader, close: Callable[[], None], nbytes: int, whole_nbytes: int) -> None:
        self._pieces, self._close, self.nbytes, self._whole_nbytes = pieces, close, nbytes, whole_nbytes
        self._piece, self._start = np.empty(0, np.uint8), 0

    def read(self, start: int, into: ByteArray) -> bool:
        if start < self._start:
            return False
        done = 0
        while done < into.size:
            low = start + done - self._start
            if low >= self._piece.size:
                self._next()
                continue
            count = min(into.size - done, self._piece.size - low)
            into[done : done + count] = self._piece[low : low + count]
            done += count
        return True

    def _next(self) -> None:
        self._start += self._piece.size
        found = self._pieces.read(min(READ_BLOCK_NBYTES, self._whole_nbytes - self._start))
        if not found:
            raise ValueError(f"it holds {self._start:,} bytes, not {self._whole_nbytes:,}")
        self._piece = np.frombuffer(found, np.uint8)
        if self._start + self._piece.size == self._whole_nbytes and self._pieces.read(1):
            raise ValueError(f"it holds more than {self._whole_nbytes:,} bytes")

    def close(self) -> None:
        self._close()


def _whole(ahead: _Ahead, nbytes: int) -> _Whole:
    data = np.empty(nbytes, np.uint8)
    ahead.read(0, data)
    return _Whole(data)
