"""Parts of an OCDBT node or manifest: frame with checksum, columns of varints, prefix-compressed keys.

Each part is encoded and decoded here. Input is untrusted: a few bytes may claim any number of entries. Decoders never
allocate more than the bytes that are present can encode, and raise ValueError for invalid input.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from prepcli.core.formatting import count_text
from prepcli.formats.codecs import StoredBytesReader, Zstd

# CRC-32C, at the end of the frame
_CHECKSUM_NBYTES = 4
# 4 of the magic and 8 of the length
_HEADER_NBYTES = 12
_READ_BLOCK_NBYTES = 1 << 20
_VARINT_BATCH = 1 << 16  # varints decoded at a time
_MAX_DIGITS = 10  # bytes of a 64-bit varint
UINT64_MAX = (1 << 64) - 1


def encode_frame(magic: int, body: bytes) -> bytes:
    """Encode magic, total length, format version 0, compression 0 (none), body and CRC-32C of all of these."""
    # 18 = 4 magic + 8 length + 1 version + 1 compression + 4 checksum. The magic is big endian,
    # all other numbers are little endian.
    framed = struct.pack(">I", magic) + struct.pack("<Q", len(body) + 18) + b"\0\0" + body
    return framed + struct.pack("<I", google_crc32c.value(framed))


def decode_frame(data: bytes, magic: int, max_nbytes: int) -> BodyReader:
    """Check a frame and return a reader of its body, which has at most `max_nbytes` after decompression."""
    if len(data) < _HEADER_NBYTES + _CHECKSUM_NBYTES or data[:4] != struct.pack(">I", magic):
        raise ValueError(f"it does not start with {magic:08x}")
    (length,) = struct.unpack_from("<Q", data, 4)
    if length != len(data):
        raise ValueError(f"its length field is {count_text(length, 'byte')}, it has {len(data):,}")
    (checksum,) = struct.unpack_from("<I", data, len(data) - _CHECKSUM_NBYTES)
    if google_crc32c.value(data[:-_CHECKSUM_NBYTES]) != checksum:
        raise ValueError("its checksum does not match")
    body = BodyReader(memoryview(data)[_HEADER_NBYTES:-_CHECKSUM_NBYTES])
    version = body.read_varint()
    compression = body.read_varint()  # 0 none, 1 zstd
    if version or compression > 1:
        raise ValueError(
            f"its version is {version}, its compression {compression}; supported: version 0, compression 0 and 1"
        )
    if not compression:
        return body
    # In blocks, because a few bytes of zstd may decompress to gigabytes: the limit is checked after
    # each block, not after all of them.
    reader = Zstd(StoredBytesReader(lambda _, count: body.take(count), body.remaining_nbytes))
    decompressed = bytearray()
    while block := reader.read(_READ_BLOCK_NBYTES):
        decompressed += block
        if len(decompressed) > max_nbytes:
            raise ValueError(f"it decompresses to more than {max_nbytes:,} bytes")
    return BodyReader(memoryview(decompressed))


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
        for first in range(0, count, _VARINT_BATCH):
            out = values[first : first + _VARINT_BATCH]
            nbytes = min(_MAX_DIGITS * len(out), self.remaining_nbytes)
            data = np.frombuffer(self._data, np.uint8, nbytes, self._offset)
            # The top bit is set if another digit follows.
            ends = np.flatnonzero(data < 128)[: len(out)]
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
                bits = (data[starts[has_digit] + digit] & 127).astype(np.uint64)
                out[has_digit] |= bits << np.uint64(7 * digit)
            self._offset += int(ends[-1]) + 1
        if count and values.max() > max_value:
            raise ValueError(f"it has the number {values.max():,}, the limit is {max_value:,}")
        return values


def iter_ints(column: NDArray[np.uint64]) -> Iterator[int]:
    """Yield the numbers of a column as Python ints, converted in batches."""
    for start in range(0, len(column), _VARINT_BATCH):
        yield from column[start : start + _VARINT_BATCH].tolist()


def encode_varints(values: Sequence[int]) -> bytes:
    """Encode numbers as varints: base 128, lowest digit first, top bit set if another byte follows."""
    if not values:
        return b""
    # E.g. 300 = 0b10_0101100 -> digits [0x2c, 2] -> bytes ac 02. One row of `digits` per number,
    # as wide as the longest one; `used` drops the leading zeros of the shorter ones.
    width = max(1, -(-max(values).bit_length() // 7))
    digits = np.array(values, np.uint64)[:, None] >> np.arange(0, 7 * width, 7, dtype=np.uint64)
    used = digits != 0
    used[:, 0] = True
    more = np.where(digits > 127, 128, 0)
    return ((digits & np.uint64(127)).astype(np.uint8) | more.astype(np.uint8))[used].tobytes()


def encode_keys(keys: Sequence[bytes], column: bytes = b"") -> bytes:
    """Encode sorted keys as columns: prefix lengths, suffix lengths, `column` with one number per key, suffixes."""
    if not keys:
        return column
    # Each key shares a prefix with the previous one, e.g. [b"a.w/.zarray", b"a.w/0.0", b"a.w/0.1"]:
    # prefix lengths [4, 6] (the first key has none), suffix lengths [11, 3, 1], suffixes
    # b"a.w/.zarray", b"0.0", b"1".
    prefix_lengths: list[int] = []
    suffixes = [keys[0]]
    for previous, key in itertools.pairwise(keys):
        # The XOR of two keys has zeros where they agree: b"ab1", b"ab2" give 0x000003, 2 bits long, so
        # 1 byte differs and 2 are common.
        nbytes = min(len(previous), len(key))
        differing = int.from_bytes(previous[:nbytes], "big") ^ int.from_bytes(key[:nbytes], "big")
        prefix_length = nbytes - (differing.bit_length() + 7) // 8
        prefix_lengths.append(prefix_length)
        suffixes.append(key[prefix_length:])
    suffix_lengths = list(map(len, suffixes))
    return b"".join(
        [encode_varints(prefix_lengths), encode_varints(suffix_lengths), column, *suffixes]
    )


def decode_keys(
    body: BodyReader, count: int, max_nbytes: int, *, has_column: bool
) -> tuple[Iterator[bytes], NDArray[np.uint64]]:
    """Decode `count` keys, and the numbers in front of the suffixes if there are any: the inverse of `encode_keys`.

    The keys are decoded one by one. Iteration raises ValueError for a key that is too long.
    """
    prefix_lengths = body.read_varints(max(0, count - 1))
    suffix_lengths = body.read_varints(count, max_nbytes)
    column = body.read_varints(count if has_column else 0)
    suffixes = body.take(int(suffix_lengths.sum()))

    def iter_keys() -> Iterator[bytes]:
        key = b""
        offset = 0
        lengths = zip(itertools.chain([0], iter_ints(prefix_lengths)), iter_ints(suffix_lengths))
        for prefix_length, suffix_length in lengths:
            key_length = prefix_length + suffix_length
            if prefix_length > len(key) or key_length > max_nbytes:
                raise ValueError(
                    f"it has a name of {key_length:,} bytes, {prefix_length:,} of them from one of {len(key):,}"
                )
            key = key[:prefix_length] + suffixes[offset : offset + suffix_length]
            offset += suffix_length
            yield key

    return iter_keys(), column
