"""Zip archives of `torch.save`, written without torch: the bytes around the tensors. Streams write the tensors later.

An archive is an uncompressed zip with the pickle of the object first and one record per storage.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.formats.torch_pickle_write import (
    PROTO,
    PickledValue,
    StoredTensor,
    pickle_tensor,
    pickle_value,
)

# Payloads start at a multiple of this offset in their archive, as PyTorch aligns them.
ALIGNMENT = 64
# A field of 32 bits with this value means that an extra field has the number in 64 bits.
ZIP64_MARK = 0xFFFFFFFF
# The same for a field of 16 bits.
ZIP64_COUNT_MARK = 0xFFFF
LOCAL_HEADER = "<4sHHHHHIIIHH"
CENTRAL_HEADER = "<4sHHHHHHIIIHHHHHII"


@dataclass(frozen=True, slots=True)
class TensorArchive:
    """The archive of one tensor.

    Attributes:
        prefix: Bytes before the payload.
        suffix: Bytes after it.
        nbytes: Size of the archive.
    """

    prefix: bytes
    suffix: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class ObjectArchive:
    """The archive of an object with several tensors.

    Attributes:
        constant_ranges: Offset and bytes of everything outside of the streamed tensors.
        offsets: Offset of each tensor, by the key of its storage.
        nbytes: Size of the archive.
    """

    constant_ranges: tuple[tuple[int, bytes], ...]
    offsets: Mapping[str, int]
    nbytes: int


def encode_archive(dtype: str, shape: Sequence[int]) -> TensorArchive:
    """Return the archive of a tensor in C order, without the payload."""
    tensor = StoredTensor("0", dtype, tuple(shape))
    archive = _encode(pickle_tensor(tensor), [tensor])
    payload = archive.offsets["0"]
    (_, prefix), (_, suffix) = archive.constant_ranges
    assert len(prefix) == payload
    return TensorArchive(prefix, suffix, archive.nbytes)


def encode_object(root: PickledValue) -> ObjectArchive:
    """Return the archive of an object with tensors at any depth, without their payloads."""
    return _encode(pickle_value(root), list(_tensors_in(root)))


def _tensors_in(value: PickledValue) -> Iterator[StoredTensor]:
    """Yield the tensors of a value in their order."""
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _encode(pickled: bytes, tensors: Sequence[StoredTensor]) -> ObjectArchive:
    """Return the archive of a pickled object with these storages."""
    records = {
        "archive/data.pkl": PROTO + pickled + b".",
        "archive/byteorder": b"little",
        "archive/version": b"3\n",
    }
    writer = _ArchiveWriter()
    for name, data in records.items():
        writer.add_record(name, data)
    for tensor in tensors:
        writer.add_tensor(tensor)
    return writer.finish()


class _ArchiveWriter:
    """Collects the records of an archive in their order."""

    def __init__(self) -> None:
        self._constants: list[tuple[int, bytes]] = []
        # Bytes from `_start` to the next payload.
        self._start = 0
        self._pending = bytearray()
        self._directory: list[bytes] = []
        self._offsets: dict[str, int] = {}

    @property
    def _position(self) -> int:
        return self._start + len(self._pending)

    def add_record(self, name: str, data: bytes, *, alignment: int = 1) -> int:
        """Append a record and return the offset of its data."""
        checksum = zlib.crc32(data)
        self._add_header(name, len(data), checksum, alignment)
        offset = self._position
        self._pending += data
        return offset

    def add_tensor(self, tensor: StoredTensor) -> None:
        """Append the record of a storage."""
        name = f"archive/data/{tensor.key}"
        if tensor.content is not None:
            self._offsets[tensor.key] = self.add_record(name, tensor.content, alignment=ALIGNMENT)
            return
        # The checksum of the payload is 0. PyTorch does not compare it, as after `set_crc32_options(False)`.
        self._add_header(name, tensor.nbytes, 0, ALIGNMENT)
        self._constants.append((self._start, bytes(self._pending)))
        self._offsets[tensor.key] = self._position
        self._start = self._position + tensor.nbytes
        self._pending.clear()

    def finish(self) -> ObjectArchive:
        """Append the central directory and return the archive."""
        directory_offset = self._position
        directory = b"".join(self._directory)
        count = len(self._directory)
        self._pending += directory + _end_of_directory(count, len(directory), directory_offset)
        self._constants.append((self._start, bytes(self._pending)))
        return ObjectArchive(tuple(self._constants), self._offsets, self._position)

    def _add_header(self, name: str, nbytes: int, checksum: int, alignment: int) -> None:
        offset = self._position
        self._directory.append(_central_header(name, nbytes, checksum, offset))
        self._pending += _local_header(name, nbytes, checksum, offset, alignment=alignment)


def _local_header(name: str, nbytes: int, checksum: int, offset: int, *, alignment: int) -> bytes:
    """Return the header before a record, with padding so that the record is aligned."""
    extra = b""
    field = nbytes
    if nbytes >= ZIP64_MARK:
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes)
        field = ZIP64_MARK
    # The padding is an extra field of its own: a tag, a length and zeros.
    end = offset + struct.calcsize(LOCAL_HEADER) + len(name) + len(extra) + 4
    padding = -end % alignment
    if alignment > 1:
        extra += struct.pack("<2sH", b"FB", padding) + bytes(padding)
    header = struct.pack(
        LOCAL_HEADER,
        *(b"PK\x03\x04", 45, 0, 0, 0, 0),
        *(checksum, field, field, len(name), len(extra)),
    )
    return header + name.encode() + extra


def _central_header(name: str, nbytes: int, checksum: int, offset: int) -> bytes:
    """Return the entry of a record in the central directory."""
    # The extra field has the numbers that do not fit in 32 bits, in this order: sizes, then the offset.
    wide: list[int] = []
    size_field = nbytes
    if nbytes >= ZIP64_MARK:
        wide += [nbytes, nbytes]
        size_field = ZIP64_MARK
    offset_field = offset
    if offset >= ZIP64_MARK:
        wide.append(offset)
        offset_field = ZIP64_MARK
    extra = b""
    if wide:
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide)
    header = struct.pack(
        CENTRAL_HEADER,
        *(b"PK\x01\x02", 45, 45, 0, 0, 0, 0),
        *(checksum, size_field, size_field, len(name), len(extra), 0, 0, 0, 0, offset_field),
    )
    return header + name.encode() + extra


def _end_of_directory(count: int, nbytes: int, offset: int) -> bytes:
    """Return the end of an archive, which locates the central directory."""
    end = b""
    offset_field = min(offset, ZIP64_MARK)
    count_field = min(count, ZIP64_COUNT_MARK)
    if offset_field == ZIP64_MARK or count_field == ZIP64_COUNT_MARK:
        end = struct.pack(
            "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, offset
        )
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + nbytes, 1)
    return end + struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, count_field, count_field, nbytes, offset_field, 0
    )
