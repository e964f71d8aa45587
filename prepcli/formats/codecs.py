"""Streaming decoders of stored chunks: zstd, gzip, zlib and CRC-32C, within a known amount of memory.

Input is untrusted: a few stored bytes may decode to any number of bytes. A decoder never returns more bytes than
requested, and its own memory is computed and bounded before it is created.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol, cast

import google_crc32c

READ_BLOCK_NBYTES = 128 << 10  # stored bytes per read
CRC32C_NBYTES = 4
COMPRESSORS = ("zstd", "gzip", "zlib")
CRC32C = "crc32c"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_HEADER_NBYTES = 18  # maximum size of a zstd frame header
# Default limit of zstd. Only its --ultra levels exceed it.
_MAX_WINDOW_NBYTES = 1 << 27
_ZLIB_WINDOW_BITS = {"gzip": 31, "zlib": 15}
# Memory of a decoder without its window, with the blocks that are read.
_DECODER_NBYTES = 512 << 10


class ByteReader(Protocol):
    """Sequential reader of bytes."""

    def read(self, count: int) -> bytes:
        """Return at most `count` more bytes, none at the end. Raise ValueError if the stream is invalid."""
        ...


class StoredBytesReader:
    """Sequential reader of `nbytes` stored bytes, which `read_at(offset, count)` returns."""

    def __init__(self, read_at: Callable[[int, int], bytes], nbytes: int) -> None:
        self._read_at = read_at
        self._nbytes = nbytes
        self._offset = 0

    def read(self, count: int) -> bytes:
        """Return at most `count` more bytes."""
        data = self._read_at(self._offset, min(count, self._nbytes - self._offset))
        self._offset += len(data)
        return data


def decoder_memory_nbytes(codec_names: Sequence[str], header: bytes, decoded_nbytes: int) -> int:
    """Return the bytes of memory that decoding a chunk needs.

    Args:
        codec_names: Codecs of the chunk in encoding order.
        header: First stored bytes of the chunk, at least `ZSTD_HEADER_NBYTES` if the chunk has as many.
        decoded_nbytes: Size of the decoded chunk.

    Raises:
        ValueError: The header is not a zstd frame, or the frame has another content size.
    """
    return _DECODER_NBYTES + (
        _zstd_window_nbytes(header, decoded_nbytes)
        if codec_names and codec_names[0] == "zstd"
        else 0
    )


def open_decoder(codec_names: Sequence[str], stored: ByteReader) -> ByteReader:
    """Return a reader of the decoded bytes. `codec_names` are in encoding order."""
    for codec_name in reversed(codec_names):
        stored = _DECODERS[codec_name](stored)
    return stored


def _zstd_window_nbytes(header: bytes, decoded_nbytes: int) -> int:
    """Check the header of a zstd frame, and return the memory needed for its window."""
    # Imported late: items without compression do not need it.
    import zstandard

    if header[:4] != _ZSTD_MAGIC:
        raise ValueError("it is not a zstd frame")
    try:
        frame = zstandard.get_frame_parameters(header[:ZSTD_HEADER_NBYTES])
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if frame.content_size not in (decoded_nbytes, zstandard.CONTENTSIZE_UNKNOWN):
        raise ValueError(
            f"its frame has a content size of {frame.content_size:,} bytes, not {decoded_nbytes:,}"
        )
    if frame.window_size > _MAX_WINDOW_NBYTES:
        raise ValueError(
            f"its window has {frame.window_size:,} bytes, the limit is {_MAX_WINDOW_NBYTES:,}"
        )
    if frame.dict_id:
        raise ValueError("it needs a dictionary, which is not supported")
    return min(frame.window_size, decoded_nbytes)


class _ZstdReader:
    """Decoder of a zstd frame."""

    def __init__(self, stored: ByteReader) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_NBYTES)
        self._reader = decompressor.stream_reader(
            cast(BinaryIO, stored), read_size=READ_BLOCK_NBYTES
        )

    def read(self, count: int) -> bytes:
        try:
            return self._reader.read(count)
        except self._error as error:
            raise ValueError(str(error).removeprefix("zstd decompress error: ")) from error


class _ZlibReader:
    """Decoder of a gzip or zlib stream."""

    def __init__(self, stored: ByteReader, window_bits: int) -> None:
        self._stored = stored
        self._stream = zlib.decompressobj(window_bits)

    def read(self, count: int) -> bytes:
        decoded = b""
        while not decoded and not self._stream.eof:
            encoded = self._stream.unconsumed_tail or self._stored.read(READ_BLOCK_NBYTES)
            if not encoded:
                raise ValueError("it is cut short")
            try:
                decoded = self._stream.decompress(encoded, count)
            except zlib.error as error:
                raise ValueError(str(error)) from error
        if not decoded and (self._stream.unused_data or self._stored.read(1)):
            raise ValueError("bytes follow its end")
        return decoded


class _Crc32cReader:
    """Reader of bytes that a CRC-32C checksum follows. It checks the checksum at the end."""

    def __init__(self, stored: ByteReader) -> None:
        self._stored = stored
        self._pending = b""
        self._crc = 0

    def read(self, count: int) -> bytes:
        while len(self._pending) < count + CRC32C_NBYTES and (more := self._stored.read(count)):
            self._pending += more
        data_nbytes = min(count, max(0, len(self._pending) - CRC32C_NBYTES))
        data = self._pending[:data_nbytes]
        self._pending = self._pending[data_nbytes:]
        self._crc = google_crc32c.extend(self._crc, data)
        if not data and count and self._pending != struct.pack("<I", self._crc):
            raise ValueError("its checksum does not match")
        return data


_DECODERS: dict[str, Callable[[ByteReader], ByteReader]] = {
    "zstd": _ZstdReader,
    "gzip": lambda stored: _ZlibReader(stored, _ZLIB_WINDOW_BITS["gzip"]),
    "zlib": lambda stored: _ZlibReader(stored, _ZLIB_WINDOW_BITS["zlib"]),
    CRC32C: _Crc32cReader,
}
