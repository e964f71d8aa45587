"""Decode the parts of an OCDBT node or manifest: frame with checksum, columns of varints, prefix-compressed keys.

Input is untrusted: a few bytes may claim any number of entries. Decoders never allocate more than the bytes that are
present can encode, and raise ValueError for invalid input.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from prepcli.core.counts import count_text
from prepcli.formats.codecs import StoredBytesReader, open_decoder

# CRC-32C, at the end of the frame
_CHECKSUM_NBYTES = 4
# 4 of the magic and 8 of the length
_HEADER_NBYTES = 12
_READ_BLOCK_NBYTES = 1 << 20
_VARINT_BATCH = 1 << 16  # varints decoded at a time
_MAX_DIGITS = 10  # bytes of a 64-bit varint
UINT64_MAX = (1 << 64) - 1


def decode_frame(data: bytes, magic: int, max_nbytes: int) -> BodyReader:
    """Check a frame and return a reader of its body.

    Args:
        data: Bytes of the frame.
        magic: Expected magic number.
        max_nbytes: Limit of the decompressed body.

    Raises:
        ValueError: The frame is invalid, its checksum differs, or the body exceeds the limit.
    """
    if len(data) < _HEADER_NBYTES + _CHECKSUM_NBYTES or data[:4] != struct.pack(">I", magic):
        raise ValueError(f"it does not start with {magic:08x}")
    # magic [4, big endian], length of the frame [8], body, CRC-32C of all before [4]. The body
    # starts with two varints: version and compression (0 none, 1 zstd).
    (length,) = struct.unpack_from("<Q", data, 4)
    if length != len(data):
        raise ValueError(f"its length field is {count_text(length, 'byte')}, it has {len(data):,}")
    (checksum,) = struct.unpack_from("<I", data, len(data) - _CHECKSUM_NBYTES)
    if google_crc32c.value(data[:-_CHECKSUM_NBYTES]) != checksum:
        raise ValueError("its checksum does not match")
    body = BodyReader(memoryview(data)[_HEADER_NBYTES:-_CHECKSUM_NBYTES])
    version = body.read_varint()
    compression = body.read_varint()
    if version or compression > 1:
        raise ValueError(
            f"its version is {version}, its compression {compression}; supported: version 0, compression 0 and 1"
        )
    if compression:
        return BodyReader(memoryview(_decompress(body, max_nbytes)))
    return body


def _decompress(body: BodyReader, max_nbytes: int) -> bytearray:
    # In blocks, because a few bytes of zstd may decompress to gigabytes: the limit is checked after
    # each block, not after all of them.
    reader = open_decoder(
        ("zstd",), StoredBytesReader(lambda _, count: body.take(count), body.remaining_nbytes)
    )
    decompressed = bytearray()
    while block := reader.read(_READ_BLOCK_NBYTES):
        decompressed += block
        if len(decompressed) > max_nbytes:
            raise ValueError(f"it decompresses to more than {max_nbytes:,} bytes")
    return decompressed


class BodyReader:
    """Sequential reader of a decoded frame's body."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._offset = 0

    @property
    def remaining_nbytes(self) -> int:
        """Return the number of unread bytes."""
        return len(self._data) - self._offset

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if count > self.remaining_nbytes:
            raise ValueError("it is cut short")
        self._offset += count
        return bytes(self._data[self._offset - count : self._offset])

    def expect_end(self) -> None:
        """Raise ValueError unless all bytes were read."""
        if self.remaining_nbytes:
            raise ValueError(
                f"{count_text(self.remaining_nbytes, 'byte follows', 'bytes follow')} its end"
            )

    def read_varint(self, max_value: int = UINT64_MAX) -> int:
        """Return the next varint."""
        return int(self.read_varints(1, max_value)[0])

    def read_varints(self, count: int, max_value: int = UINT64_MAX) -> NDArray[np.uint64]:
        """Return the next `count` varints, each at most `max_value`."""
        if count > self.remaining_nbytes:
            raise ValueError("it is cut short")
        values = np.zeros(count, np.uint64)
        for start in range(0, count, _VARINT_BATCH):
            self._decode_varints(values[start : start + _VARINT_BATCH])
        if count and values.max() > max_value:
            raise ValueError(f"it has the number {values.max():,}, the limit is {max_value:,}")
        return values

    def _decode_varints(self, out: NDArray[np.uint64]) -> None:
        data = np.frombuffer(
            self._data, np.uint8, min(_MAX_DIGITS * len(out), self.remaining_nbytes), self._offset
        )
        ends = np.flatnonzero(data < 128)[: len(out)]  # the top bit is set if another digit follows
        if len(ends) < len(out):
            raise ValueError("it is cut short, or has a number of more than 64 bits")
        starts = np.append(0, ends[:-1] + 1)
        digits = ends - starts + 1
        # The tenth digit has place for one bit only: 9 * 7 = 63.
        if (digits + (data[ends] > 1)).max() > _MAX_DIGITS:
            raise ValueError("it has a number of more than 64 bits")
        # One turn per digit for all numbers at once: offsets below 32 GiB have at most 5 digits.
        for digit in range(digits.max()):
            has_digit = digits > digit
            out[has_digit] |= (data[starts[has_digit] + digit] & 127).astype(
                np.uint64
            ) << np.uint64(7 * digit)
        self._offset += int(ends[-1]) + 1


def iter_ints(column: NDArray[np.uint64]) -> Iterator[int]:
    """Yield the numbers of a column as Python ints, converted in batches."""
    for start in range(0, len(column), _VARINT_BATCH):
        yield from column[start : start + _VARINT_BATCH].tolist()


def decode_keys(
    prefix_lengths: NDArray[np.uint64],
    suffix_lengths: NDArray[np.uint64],
    suffixes: bytes,
    max_key_nbytes: int,
) -> Iterator[bytes]:
    """Yield prefix-compressed keys.

    Args:
        prefix_lengths: Length of the prefix that each key but the first shares with the previous key.
        suffix_lengths: Length of the rest of each key.
        suffixes: All suffixes, joined.
        max_key_nbytes: Limit of a key's length.

    Raises:
        ValueError: A key is too long, or its prefix is longer than the previous key.
    """
    key = b""
    offset = 0
    for prefix_length, suffix_length in zip(
        itertools.chain([0], iter_ints(prefix_lengths)), iter_ints(suffix_lengths)
    ):
        if prefix_length > len(key) or prefix_length + suffix_length > max_key_nbytes:
            key_length = prefix_length + suffix_length
            raise ValueError(
                f"it has a name of {key_length:,} bytes, {prefix_length:,} of them from one of {len(key):,}"
            )
        key = key[:prefix_length] + suffixes[offset : offset + suffix_length]
        offset += suffix_length
        yield key
