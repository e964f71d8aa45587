"""Codecs of chunks: the bytes that are stored, turned back into elements piece by piece, within stated memory.

What is decoded comes from strangers: a few bytes may claim to be any number. No more is ever made than is asked for,
and what a decoder needs for itself is known, and bounded, before it is made.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol, cast

import google_crc32c

READ_BLOCK_NBYTES = 128 << 10  # of stored bytes, read at a time
CRC32C_NBYTES = 4
COMPRESSORS = ("zstd", "gzip", "zlib")
CRC32C = "crc32c"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_HEADER_NBYTES = 18  # of a zstd frame, at most
_MOST_WINDOW_NBYTES = 1 << 27  # zstd's own limit; only its --ultra goes beyond
_ZLIB_WINDOW_BITS = {"gzip": 31, "zlib": 15}
_OWN_NBYTES = 512 << 10  # what a decoder takes beside its window, pieces included


class ByteReader(Protocol):
    """Bytes from first to last."""

    def read(self, count: int) -> bytes:
        """At most `count` more bytes; none at the end. ValueError says what is broken."""
        ...


class StoredBytesReader:
    """`nbytes` stored bytes, as pieces; `read_at(offset, count)` gives any of them."""

    def __init__(self, read_at: Callable[[int, int], bytes], nbytes: int) -> None:
        self._read_at, self._nbytes, self._at = read_at, nbytes, 0

    def read(self, count: int) -> bytes:
        """The next bytes."""
        found = self._read_at(self._at, min(count, self._nbytes - self._at))
        self._at += len(found)
        return found


def decoder_memory_nbytes(codec_names: Sequence[str], header: bytes, decoded_nbytes: int) -> int:
    """Memory that decoding takes, by the first bytes that are stored of a chunk of `nbytes`.

    ValueError where they are no frame, or one that says it holds another number of bytes.
    """
    return _OWN_NBYTES + (_zstd_window(header, decoded_nbytes) if codec_names and codec_names[0] == "zstd" else 0)


def open_decoder(codec_names: Sequence[str], stored: ByteReader) -> ByteReader:
    """The elements behind `steps`, which are in the order in which they were encoded."""
    for step in reversed(codec_names):
        stored = _STEPS[step](stored)
    return stored


def _zstd_window(head: bytes, nbytes: int) -> int:
    import zstandard  # late: an item that is stored raw does not need it

    if head[:4] != _ZSTD_MAGIC:
        raise ValueError("it is no zstd frame")
    try:
        frame = zstandard.get_frame_parameters(head[:ZSTD_HEADER_NBYTES])
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if frame.content_size not in (nbytes, zstandard.CONTENTSIZE_UNKNOWN):
        raise ValueError(f"its frame says that it holds {frame.content_size:,} bytes, not {nbytes:,}")
    if frame.window_size > _MOST_WINDOW_NBYTES:
        raise ValueError(f"its window of {frame.window_size:,} bytes is beyond {_MOST_WINDOW_NBYTES:,}")
    if frame.dict_id:
        raise ValueError("it needs a dictionary")
    return min(frame.window_size, nbytes)


class _Zstd:
    def __init__(self, stored: ByteReader) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_NBYTES)
        self._reader = decompressor.stream_reader(cast(BinaryIO, stored), read_size=READ_BLOCK_NBYTES)

    def read(self, count: int) -> bytes:
        try:
            return self._reader.read(count)
        except self._error as error:
            raise ValueError(str(error).removeprefix("zstd decompress error: ")) from error


class _Zlib:
    def __init__(self, stored: ByteReader, window_bits: int) -> None:
        self._stored = stored
        self._stream = zlib.decompressobj(window_bits)

    def read(self, count: int) -> bytes:
        found = b""
        while not found and not self._stream.eof:
            data = self._stream.unconsumed_tail or self._stored.read(READ_BLOCK_NBYTES)
            if not data:
                raise ValueError("it is cut short")
            try:
                found = self._stream.decompress(data, count)
            except zlib.error as error:
                raise ValueError(str(error)) from error
        if not found and (self._stream.unused_data or self._stored.read(1)):
            raise ValueError("bytes follow its end")
        return found


class _Checked:
    """Bytes with a CRC-32C behind them."""

    def __init__(self, stored: ByteReader) -> None:
        self._stored, self._held, self._sum = stored, b"", 0

    def read(self, count: int) -> bytes:
        while len(self._held) < count + CRC32C_NBYTES and (more := self._stored.read(count)):
            self._held += more
        keep = max(0, len(self._held) - CRC32C_NBYTES)
        found, self._held = self._held[: min(count, keep)], self._held[min(count, keep) :]
        self._sum = google_crc32c.extend(self._sum, found)
        if not found and count and self._held != struct.pack("<I", self._sum):
            raise ValueError("its checksum does not match")
        return found


_STEPS: dict[str, Callable[[ByteReader], ByteReader]] = {
    "zstd": _Zstd,
    "gzip": lambda stored: _Zlib(stored, _ZLIB_WINDOW_BITS["gzip"]),
    "zlib": lambda stored: _Zlib(stored, _ZLIB_WINDOW_BITS["zlib"]),
    CRC32C: _Checked,
}
