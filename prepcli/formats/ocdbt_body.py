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

from prepcli.formats.codecs import Stretch, decoded

_CHECKSUM_NBYTES, _HEAD_NBYTES = 4, 12
_PIECE_NBYTES = 1 << 20
_PIECE = 1 << 16  # numbers decoded at a time
_MOST_DIGITS = 10  # of 7 bits, in a number of 64
MOST_NUMBER = (1 << 64) - 1


def unframed(data: bytes, magic: int, most_nbytes: int) -> Body:
    """What a frame holds, which may be `most_nbytes` once it is decompressed."""
    if len(data) < _HEAD_NBYTES + _CHECKSUM_NBYTES or data[:4] != struct.pack(">I", magic):
        raise ValueError(f"it does not begin with {magic:08x}")
    (length,) = struct.unpack_from("<Q", data, 4)
    if length != len(data):
        raise ValueError(f"it says that it has {length:,} bytes, and has {len(data):,}")
    (checksum,) = struct.unpack_from("<I", data, len(data) - _CHECKSUM_NBYTES)
    if google_crc32c.value(data[:-_CHECKSUM_NBYTES]) != checksum:
        raise ValueError("its checksum does not match")
    body = Body(memoryview(data)[_HEAD_NBYTES:-_CHECKSUM_NBYTES])
    version, compression = body.number(), body.number()
    if version or compression > 1:
        raise ValueError(f"its version is {version}, its compression {compression}; prep knows 0, and 0 or 1")
    return Body(memoryview(_decompressed(body, most_nbytes))) if compression else body


def _decompressed(body: Body, most_nbytes: int) -> bytearray:
    pieces = decoded(("zstd",), Stretch(lambda _, count: body.take(count), body.left))
    held = bytearray()
    while piece := pieces.read(_PIECE_NBYTES):
        held += piece
        if len(held) > most_nbytes:
            raise ValueError(f"it stands for more than {most_nbytes:,} bytes")
    return held


class Body:
    """Bytes that are taken from first to last."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        """Bytes that nobody took yet."""
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.left:
            raise ValueError("it is cut short")
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    def end(self) -> None:
        """ValueError unless all was taken."""
        if self.left:
            raise ValueError(f"{self.left:,} bytes follow its end")

    def number(self, most: int = MOST_NUMBER) -> int:
        """The next number."""
        return int(self.numbers(1, most)[0])

    def numbers(self, count: int, most: int = MOST_NUMBER) -> NDArray[np.uint64]:
        """The next `count` numbers, each in base 128, lowest digit first."""
        if count > self.left:
            raise ValueError("it is cut short")
        found = np.zeros(count, np.uint64)
        for first in range(0, count, _PIECE):
            self._decode(found[first : first + _PIECE])
        if count and found.max() > most:
            raise ValueError(f"it has the number {found.max():,} where {most:,} is the most")
        return found

    def _decode(self, found: NDArray[np.uint64]) -> None:
        data = np.frombuffer(self._data, np.uint8, min(_MOST_DIGITS * len(found), self.left), self._at)
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


def plain(column: NDArray[np.uint64]) -> Iterator[int]:
    """The numbers of a column as Python has them, few at a time."""
    for first in range(0, len(column), _PIECE):
        yield from column[first : first + _PIECE].tolist()


def names(shared: NDArray[np.uint64], rests: NDArray[np.uint64], text: bytes, most_nbytes: int) -> Iterator[bytes]:
    """Names one by one: the bytes that each shares with the one before, and of `text` as many as `rests` says."""
    name, at = b"", 0
    for same, more in zip(itertools.chain([0], plain(shared)), plain(rests)):
        if same > len(name) or same + more > most_nbytes:
            raise ValueError(f"it has a name of {same + more:,} bytes, {same:,} of them from one of {len(name):,}")
        name = name[:same] + text[at : at + more]
        at += more
        yield name
