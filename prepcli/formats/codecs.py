"""Codecs of stored chunks: zstd, gzip, zlib and CRC-32C, with names, settings, decoder and encoder of each.

A codec is one subclass of `ChunkCodec`, or of `WrittenCodec` if prep writes it, listed in `CODECS`. Input is untrusted:
a few stored bytes may decode to any number of bytes. A decoder never returns more bytes than requested, and its own
memory is computed and bounded before it is created.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, ClassVar, Protocol, cast

from prepcli.core.errors import Option, text, usage_error
from prepcli.planning.item_storage import Compression

READ_BLOCK_NBYTES = 128 << 10  # stored bytes per read
CRC32C_NBYTES = 4
# Stored bytes that are enough to compute the memory of any decoder: the maximum size of a zstd frame header.
CHUNK_HEADER_NBYTES = 18
# Memory of a decoder without its window, with the blocks that are read.
_DECODER_NBYTES = 512 << 10
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# Default limit of zstd. Only its --ultra levels exceed it.
_MAX_WINDOW_NBYTES = 1 << 27


class ByteReader(Protocol):
    """Sequential reader of bytes."""

    def read(self, count: int) -> bytes:
        """Return at most `count` more bytes, none at the end. Raise ValueError if the stream is invalid."""
        ...


class Encoder(Protocol):
    """Encoder of one chunk. The encoded bytes do not depend on the sizes of the pieces."""

    def compress(self, data: Any, /) -> bytes:
        """Encode a piece, and return the bytes that are complete."""
        ...

    def flush(self) -> bytes:
        """End the chunk, and return its remaining bytes."""
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


class ChunkCodec(ABC):
    """A codec of chunks. An instance decodes one chunk.

    Attributes:
        name: Name in messages, in manifests and in the option `--compress`.
        zarr2_id: Value of `id` in a `.zarray`, or None if zarr 2 has no such codec.
        zarr3_name: Value of `name` in a `zarr.json`, or None if zarr 3 has no such codec.
        is_checksum: Whether the codec only appends a checksum.
    """

    name: ClassVar[str]
    zarr2_id: ClassVar[str | None] = None
    zarr3_name: ClassVar[str | None] = None
    is_checksum: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, stored: ByteReader) -> None: ...

    @abstractmethod
    def read(self, count: int) -> bytes:
        """Return at most `count` more decoded bytes, none at the end. Raise ValueError for invalid input."""

    @classmethod
    def window_nbytes(cls, header: bytes, decoded_nbytes: int) -> int:
        """Return the memory of the decoder's window. Raise ValueError if the chunk's header is invalid."""
        return 0


class WrittenCodec(ChunkCodec):
    """A codec that prep writes as well.

    Attributes:
        levels: Levels that prep writes.
        default_level: Level of a request without one.
    """

    levels: ClassVar[range]
    default_level: ClassVar[int]

    @classmethod
    @abstractmethod
    def settings(cls, level: int, zarr_version: int) -> dict[str, object]:
        """Return the settings in the metadata document of an array."""

    @classmethod
    @abstractmethod
    def open_encoder(cls, level: int, nbytes: int) -> Encoder:
        """Return an encoder of a chunk of `nbytes` bytes."""

    @classmethod
    @abstractmethod
    def encoder_nbytes(cls, level: int, chunk_nbytes: int) -> int:
        """Return the memory of an encoder of chunks of at most `chunk_nbytes` bytes."""

    @classmethod
    @abstractmethod
    def max_encoded_nbytes(cls, nbytes: int, num_chunks: int) -> int:
        """Return the maximum size of `nbytes` encoded bytes that belong to `num_chunks` chunks."""


class Zstd(WrittenCodec):
    """Frames of Zstandard."""

    # `zstandard` is imported late, as `google_crc32c` below: most items have no compressed chunks.
    name = "zstd"
    zarr2_id = "zstd"
    zarr3_name = "zstd"
    # Higher levels need much memory.
    levels = range(1, 20)
    default_level = 1  # the level that Orbax uses

    def __init__(self, stored: ByteReader) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_NBYTES)
        self._reader = decompressor.stream_reader(
            cast(BinaryIO, stored), read_size=READ_BLOCK_NBYTES
        )

    def read(self, count: int) -> bytes:
        """Decode at most `count` bytes of the frame."""
        try:
            return self._reader.read(count)
        except self._error as error:
            raise ValueError(str(error).removeprefix("zstd decompress error: ")) from error

    @classmethod
    def window_nbytes(cls, header: bytes, decoded_nbytes: int) -> int:
        """Return the window that the header of the frame states. It is checked before there is a decoder."""
        import zstandard

        if header[:4] != _ZSTD_MAGIC:
            raise ValueError("it is not a zstd frame")
        try:
            frame = zstandard.get_frame_parameters(header[:CHUNK_HEADER_NBYTES])
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

    @classmethod
    def settings(cls, level: int, zarr_version: int) -> dict[str, object]:
        """Return the settings in TensorStore's order of keys."""
        if zarr_version == 2:
            return {"level": level}
        return {"checksum": False, "level": level}

    @classmethod
    def open_encoder(cls, level: int, nbytes: int) -> Encoder:
        """Return a new compressor. It has one context, so that each open chunk needs its own."""
        import zstandard

        return zstandard.ZstdCompressor(level=level).compressobj(size=nbytes)

    @classmethod
    def encoder_nbytes(cls, level: int, chunk_nbytes: int) -> int:
        """Return the memory of a context and its window, e.g. 1.1 MB for level 1 and 94 MB for level 19."""
        import zstandard

        parameters = zstandard.ZstdCompressionParameters.from_level(level)
        # A stream also keeps a window of earlier input: 86.8 MiB were
        # measured for level 19, and 14.4 MiB for level 9.
        return parameters.estimated_compression_context_size() + (1 << parameters.window_log)

    @classmethod
    def max_encoded_nbytes(cls, nbytes: int, num_chunks: int) -> int:
        """Return the maximum size, also of bytes that cannot be compressed."""
        # zstd adds 3 bytes to a block of at least 1 KiB, at most 18 to a chunk, and keeps up to a block of 128 KiB of
        # the piece before. 1 MiB has room for that block.
        return nbytes + nbytes // 256 + 64 * num_chunks + (1 << 20)


class Gzip(ChunkCodec):
    """Streams of gzip."""

    name = "gzip"
    zarr2_id = "gzip"
    zarr3_name = "gzip"
    window_bits: ClassVar[int] = 31

    def __init__(self, stored: ByteReader) -> None:
        self._stored = stored
        self._stream = zlib.decompressobj(self.window_bits)

    def read(self, count: int) -> bytes:
        """Decode at most `count` bytes. The stream must end with the stored bytes."""
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


class Zlib(Gzip):
    """Streams of zlib: gzip with another header."""

    name = "zlib"
    zarr2_id = "zlib"
    zarr3_name = None
    window_bits = 15


class Crc32c(ChunkCodec):
    """Bytes that a CRC-32C checksum follows. The decoder checks it at the end."""

    name = "crc32c"
    zarr3_name = "crc32c"
    is_checksum = True

    def __init__(self, stored: ByteReader) -> None:
        import google_crc32c

        self._stored = stored
        self._pending = b""
        self._extend = google_crc32c.extend
        self._crc = 0

    def read(self, count: int) -> bytes:
        """Return at most `count` bytes. The last call compares the checksum."""
        while len(self._pending) < count + CRC32C_NBYTES and (more := self._stored.read(count)):
            self._pending += more
        data_nbytes = min(count, max(0, len(self._pending) - CRC32C_NBYTES))
        data = self._pending[:data_nbytes]
        self._pending = self._pending[data_nbytes:]
        self._crc = self._extend(self._crc, data)
        if not data and count and self._pending != struct.pack("<I", self._crc):
            raise ValueError("its checksum does not match")
        return data


def codecs_by(key: str, codecs: Iterable[type[ChunkCodec]]) -> dict[str, type[ChunkCodec]]:
    """Return codecs by one of their names. Raise ValueError if two have the same one."""
    by_key: dict[str, type[ChunkCodec]] = {}
    for codec in codecs:
        value = getattr(codec, key)
        if value is not None and by_key.setdefault(value, codec) is not codec:
            raise ValueError(
                f"{by_key[value].__name__} and {codec.__name__} have the {key} {value}"
            )
    return by_key


CODECS = codecs_by("name", (Zstd, Gzip, Zlib, Crc32c))
ZARR2_CODECS = codecs_by("zarr2_id", CODECS.values())
ZARR3_CODECS = codecs_by("zarr3_name", CODECS.values())
COMPRESSORS = tuple(codec.name for codec in CODECS.values() if not codec.is_checksum)
# Codecs that prep writes.
WRITTEN_CODECS = {name: codec for name, codec in CODECS.items() if issubclass(codec, WrittenCodec)}


def codec_of(compression: Compression) -> type[WrittenCodec]:
    """Return the codec of chunks to write."""
    # `parse_compression` accepts no other codec.
    return WRITTEN_CODECS[compression.codec_name]


def open_decoder(codec_names: Sequence[str], stored: ByteReader) -> ByteReader:
    """Return a reader of the decoded bytes. `codec_names` are in encoding order."""
    for codec_name in reversed(codec_names):
        stored = CODECS[codec_name](stored)
    return stored


def decoder_memory_nbytes(codec_names: Sequence[str], header: bytes, decoded_nbytes: int) -> int:
    """Return the bytes of memory that decoding a chunk needs.

    `header` has the first `CHUNK_HEADER_NBYTES` stored bytes. Raise ValueError if they do not begin a chunk of
    `decoded_nbytes` bytes.
    """
    if not codec_names:
        return _DECODER_NBYTES
    return _DECODER_NBYTES + CODECS[codec_names[0]].window_nbytes(header, decoded_nbytes)


def parse_compression(value: str | None) -> Compression | None:
    """Return the compression of a request such as `zstd` or `zstd:3`. Raise UsageError for any other text."""
    if value is None:
        return None
    name, colon, level_text = value.partition(":")
    codec = WRITTEN_CODECS.get(name)
    level = 0
    if level_text.isdecimal() and len(level_text) < 3:
        level = int(level_text)
    elif codec is not None and not colon:
        level = codec.default_level
    if codec is None or level not in codec.levels:
        choices = [
            f"{codec.name}, and {codec.name}:{codec.levels[0]} to {codec.name}:{codec.levels[-1]}"
            for codec in WRITTEN_CODECS.values()
        ]
        raise usage_error(
            text("{} is invalid", Option("compress", value)),
            f"valid values are {'; '.join(choices)}",
            text("{}", Option("compress", next(iter(WRITTEN_CODECS)))),
        )
    return Compression(name, level)
