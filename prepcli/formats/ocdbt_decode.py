"""What an OCDBT node or manifest is made of: a frame with a checksum, columns of numbers, names that share beginnings.

It comes from strangers: a few bytes may claim to be any number of entries. Nothing here makes more than the bytes that
are there can stand for, and a ValueError says what is wrong with them.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from prepcli.formats.codecs import StoredBytesReader, open_decoder

_CHECKSUM_NBYTES, _HEAD_NBYTES = 4, 12
_PIECE_NBYTES = 1 << 20
_PIECE = 1 << 16  # numbers decoded at a time
_MOST_DIGITS = 10  # of 7 bits, in a number of 64
UINT64_MAX = (1 << 64) - 1


def decode_frame(data: bytes, magic: int, max_nbytes: int) -> BodyReader:
    """What a frame holds, which may be `most_nbytes` once it is decompressed."""
    if len(data) < _HEAD_NBYTES + _CHECKSUM_NBYTES or data[:4] != struct.pack(">I", magic):
        raise ValueError(f"it does not begin with {magic:08x}")
    (length,) = struct.unpack_from("<Q", data, 4)
    if length != len(data):
        raise ValueError(f"it says that it has {length:,} bytes, and has {len(data):,}")
    (checksum,) = struct.unpack_from("<I", data, len(data) - _CHECKSUM_NBYTES)
    if google_crc32c.value(data[:-_CHECKSUM_NBYTES]) != checksum:
        raise ValueError("its checksum does not match")
    body = BodyReader(memoryview(data)[_HEAD_NBYTES:-_CHECKSUM_NBYTES])
    version, compression = body.read_varint(), body.read_varint()
    if version or compression > 1:
        raise ValueError(f"its version is {version}, its compression {compression}; prep knows 0, and 0 or 1")
    return BodyReader(memoryview(_decompressed(body, max_nbytes))) if compression else body


def _decompressed(body: BodyReader, most_nbytes: int) -> bytearray:
    pieces = open_decoder(("zstd",), StoredBytesReader(lambda _, count: body.take(count), body.remaining_nbytes))
    held = bytearray()
    while piece := pieces.read(_PIECE_NBYTES):
        held += piece
        if len(held) > most_nbytes:
            raise ValueError(f"it stands for more than {most_nbytes:,} bytes")
    return held


class BodyReader:
    """Bytes that are taken from first to last."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    @property
    def remaining_nbytes(self) -> int:
        """Bytes that nobody took yet."""
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.remaining_nbytes:
            raise ValueError("it is cut short")
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    def expect_end(self) -> None:
        """ValueError unless all was taken."""
        if self.remaining_nbytes:
            raise ValueError(f"{self.remaining_nbytes:,} bytes follow its end")

    def read_varint(self, max_value: int = UINT64_MAX) -> int:
        """The next number."""
        return int(self.read_varints(1, max_value)[0])

    def read_varints(self, count: int, max_value: int = UINT64_MAX) -> NDArray[np.uint64]:
        """The next `count` numbers, each in base 128, lowest digit first."""
        if count > self.remaining_nbytes:
            raise ValueError("it is cut short")
        found = np.zeros(count, np.uint64)
        for first in range(0, count, _PIECE):
            self._decode(found[first : first + _PIECE])
        if count and found.max() > max_value:
            raise ValueError(f"it has the number {found.max():,} where {max_value:,} is the most")
        return found

    def _decode(self, found: NDArray[np.uint64]) -> None:
        data = np.frombuffer(self._data, np.uint8, min(_MOST_DIGITS * len(found), self.remaining_nbytes), self._at)
        ends = np.flatnonzero(data < 128)[: len(found)]  # the top bit says that another digit follows
        if len(ends) < len(found):
            raise ValueError("it is cut short, or has a number of more than 64 bits")
        starts = np.append(0, ends[:-1] + 1)
        digits = ends - starts + 1
        if (digits + (data[ends] > 1)).max() > _MOST_DIGITS:
            raise ValueError("it has a number of more than 64 bits")
        for n in range(digits.max()):
            there = digits > n
            found[there] |= (data[starts[there] + n] & 127).astype(np.uint64) << np.uint64(7 * n)
        self._at += int(ends[-1]) + 1


def iter_ints(column: NDArray[np.uint64]) -> Iterator[int]:
    """The numbers of a column as Python has them, few at a time."""
    for first in range(0, len(column), _PIECE):
        yield from column[first : first + _PIECE].tolist()


def decode_keys(
    prefix_lengths: NDArray[np.uint64], suffix_lengths: NDArray[np.uint64], suffixes: bytes, max_key_nbytes: int
) -> Iterator[bytes]:
    """Names one by one: the bytes that each shares with the one before, and of `text` as many as `rests` says."""
    name, at = b"", 0
    for same, more in zip(itertools.chain([0], iter_ints(prefix_lengths)), iter_ints(suffix_lengths)):
        if same > len(name) or same + more > max_key_nbytes:
            raise ValueError(f"it has a name of {same + more:,} bytes, {same:,} of them from one of {len(name):,}")
        name = name[:same] + suffixes[at : at + more]
        at += more
        yield name
