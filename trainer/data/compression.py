"""Decompress data files by suffix: `.gz` and `.zst`, also with several members or frames."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import BinaryIO, Protocol, cast

import zstandard

from prepcli.core.errors import PrepError
from trainer.data.files import stream_blocks

COMPRESSED_READ_NBYTES = 64 << 10
# 16 selects the gzip format, MAX_WBITS its largest window (see `zlib.decompressobj`).
GZIP_FORMAT = 16 + zlib.MAX_WBITS
# Limit of the zstd program without `--long`. A frame may ask for a much larger window.
MAX_ZSTD_WINDOW_NBYTES = 128 << 20
# Compressed bytes that are decompressed at once, so that at most 8 MiB come out. A byte of gzip
# stands for up to 1,032 bytes. A block of zstd has at least 4 bytes and stands for up to 128 KiB.
FEED_NBYTES = {".gz": 4 << 10, ".zst": 256}


class Decompressor(Protocol):
    """Decompressor of one member of a file."""

    @property
    def eof(self) -> bool:
        """Whether the end of the member was reached."""
        ...

    @property
    def unused_data(self) -> bytes:
        """Bytes after the end of the member."""
        ...

    def decompress(self, data: bytes, /) -> bytes:
        """Decompress the next bytes."""
        ...


DECOMPRESSORS: Mapping[str, Callable[[], Decompressor]] = {
    ".gz": lambda: zlib.decompressobj(GZIP_FORMAT),
    ".zst": lambda: _zstd_decompressor(),
}


def _zstd_decompressor() -> Decompressor:
    context = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_NBYTES)
    return cast(Decompressor, context.decompressobj())


def split_compression(name: str) -> tuple[str, str]:
    """Split a file name at the suffix of its compression.

    E.g. `a.csv.gz` -> (`a.csv`, `.gz`) and `a.csv` -> (`a.csv`, an empty text).
    """
    suffix = PurePath(name).suffix
    if suffix not in DECOMPRESSORS:
        return name, ""
    return name.removesuffix(suffix), suffix


def open_decompressed(stream: BinaryIO, name: str, suffix: str) -> BinaryIO:
    """Return a buffered stream of the decompressed bytes of a stream.

    Args:
        stream: Compressed bytes.
        name: Name of the file, for error messages.
        suffix: Suffix of the compression.
    """
    blocks = _decompress_pieces(
        _stream_pieces(stream, FEED_NBYTES[suffix]), name, DECOMPRESSORS[suffix]
    )
    return stream_blocks(blocks)


def _stream_pieces(stream: BinaryIO, nbytes: int) -> Iterator[bytes]:
    """Yield the bytes of a stream, at most `nbytes` at a time."""
    while data := stream.read(COMPRESSED_READ_NBYTES):
        for start in range(0, len(data), nbytes):
            yield data[start : start + nbytes]


def _decompress_pieces(
    pieces: Iterator[bytes], name: str, make_decompressor: Callable[[], Decompressor]
) -> Iterator[bytes]:
    """Yield the decompressed bytes of all members of a file."""
    decompressor = None
    try:
        for piece in pieces:
            data = piece
            while data:
                decompressor = decompressor or make_decompressor()
                yield decompressor.decompress(data)
                data = b""
                # A file may have several members or frames one after the other, e.g. of `cat a.gz
                # b.gz`. The bytes after the end of a member belong to the next member.
                if decompressor.eof:
                    data = decompressor.unused_data
                    decompressor = None
    except (zlib.error, zstandard.ZstdError) as error:
        raise PrepError(
            f"{name} cannot be decompressed", str(error), "get the file again"
        ) from error
    if decompressor is not None:
        raise PrepError(
            f"{name} cannot be decompressed", "its end is missing", "get the file again"
        )
