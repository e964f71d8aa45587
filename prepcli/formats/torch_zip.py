"""Locate the records of the zip archives that PyTorch has written since 1.6.

The central directory at the end of the file is read as a whole, records only on request. Records are stored without
compression. The offset of a record follows from its local header. Functions raise ValueError for invalid archives.
Format: APPNOTE.TXT of PKWARE.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from prepcli.formats.untrusted import CutShortError, quote_name

ZIP_MAGIC = b"PK\x03\x04"
MAX_DIRECTORY_NBYTES = 32 << 20
# End record with a comment, zip64 locator and zip64 end record.
MAX_TAIL_NBYTES = 22 + 0xFFFF + 20 + 56

# Format: section 4.3 of APPNOTE.TXT. PyTorch stores records at multiples of 64 bytes, padded by
# the extra field of the local header, so the offset of the data is known only from there:
#   header_offset + 30 (fixed part) + length of the name + length of the extra field
# The directory at the end has names and sizes: entry = 46 bytes + name + extra + comment.
_END = b"PK\x05\x06"
_END64 = b"PK\x06\x06"
_LOCATOR = b"PK\x06\x07"
_ENTRY = b"PK\x01\x02"
_END_FORM = "<4s4H2LH"
_END64_FORM = "<4sQ2H2L4Q"
_LOCATOR_FORM = "<4sLQL"
_ENTRY_FORM = "<4s6H3L5H2L"
_LOCAL_FORM = "<4s5H3L2H"
# These values say that the number is in the zip64 extra field.
_IN_ZIP64 = 0xFFFFFFFF
_COUNT_IN_ZIP64 = 0xFFFF
# Flags. The local header of a streamed record has no sizes.
_ENCRYPTED = 1
_STREAMED = 8


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record in the central directory. `is_stored` is True if it is neither compressed nor encrypted."""

    name: str
    nbytes: int
    header_offset: int
    is_stored: bool


@dataclass(frozen=True, slots=True)
class ZipArchive:
    """Records of an archive by name, without their common folder `root`."""

    root: str
    records: Mapping[str, ZipRecord]
    directory: bytes
    directory_offset: int


def read_archive(file: BinaryIO) -> ZipArchive:
    """Read and check the central directory of an archive."""
    size = file.seek(0, os.SEEK_END)
    count, directory_offset, nbytes = _locate_directory(file, size)
    if nbytes > MAX_DIRECTORY_NBYTES:
        raise ValueError(
            f"its directory has {nbytes:,} bytes, the limit is {MAX_DIRECTORY_NBYTES:,}"
        )
    directory = _read_range(file, directory_offset, nbytes)
    records: dict[str, ZipRecord] = {}
    for record in _iter_records(directory, count):
        # Readers differ in which of two records they take: one file would hold two models.
        if records.setdefault(record.name, record) is not record:
            raise ValueError(f"it has {quote_name(record.name)} twice")
        if (
            record.is_stored
            and record.header_offset + struct.calcsize(_LOCAL_FORM) + record.nbytes
            > directory_offset
        ):
            raise ValueError(f"{quote_name(record.name)} overlaps its directory")
    root = _find_root(records)
    return ZipArchive(
        root,
        {name[len(root) :]: record for name, record in records.items()},
        directory,
        directory_offset,
    )


def locate_record(file: BinaryIO, archive: ZipArchive, name: str) -> tuple[int, int]:
    """Return offset and size of a record. Raise ValueError if its local header disagrees with the directory."""
    record = archive.records.get(name)
    if record is None:
        raise ValueError(f"it has no record {quote_name(name)}")
    if not record.is_stored:
        raise ValueError(
            f"{quote_name(name)} in it is compressed or encrypted, which PyTorch never does"
        )
    local_header = struct.unpack(
        _LOCAL_FORM, _read_range(file, record.header_offset, struct.calcsize(_LOCAL_FORM))
    )
    magic, _, flags, method, _, _, _, compressed_nbytes, nbytes, name_nbytes, extra_nbytes = (
        local_header
    )
    name_offset = record.header_offset + struct.calcsize(_LOCAL_FORM)
    has_same_name = (
        magic == ZIP_MAGIC and _read_range(file, name_offset, name_nbytes) == record.name.encode()
    )
    has_same_sizes = flags & _STREAMED or {compressed_nbytes, nbytes} <= {record.nbytes, _IN_ZIP64}
    if method or not has_same_name or not has_same_sizes:
        raise ValueError(f"its directory and the header of {quote_name(name)} differ")
    data_offset = name_offset + name_nbytes + extra_nbytes
    if data_offset + record.nbytes > archive.directory_offset:
        raise ValueError(f"{quote_name(name)} overlaps its directory")
    return data_offset, record.nbytes


def read_record(file: BinaryIO, archive: ZipArchive, name: str, max_nbytes: int) -> bytes:
    """Return the content of a small record."""
    offset, nbytes = locate_record(file, archive, name)
    if nbytes > max_nbytes:
        raise ValueError(
            f"{quote_name(name)} in it has {nbytes:,} bytes, the limit is {max_nbytes:,}"
        )
    return _read_range(file, offset, nbytes)


def _read_range(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    file.seek(offset)
    data = file.read(nbytes)
    if len(data) < nbytes:
        raise CutShortError("it is cut short")
    return data


def _locate_directory(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """Return number of entries, offset and size of the directory, from the end record."""
    tail_start = max(0, size - MAX_TAIL_NBYTES)
    tail = _read_range(file, tail_start, size - tail_start)
    end_position = tail.rfind(_END)
    if end_position < 0 or len(tail) - end_position < struct.calcsize(_END_FORM):
        raise CutShortError("it has no directory at its end: it is cut short")
    _, disk, other_disk, disk_count, count, nbytes, directory_offset, comment_nbytes = (
        struct.unpack_from(_END_FORM, tail, end_position)
    )
    if end_position + struct.calcsize(_END_FORM) + comment_nbytes != len(tail):
        raise CutShortError("bytes follow its end, or it is cut short")
    end_offset = tail_start + end_position
    if disk or other_disk or disk_count != count:
        raise ValueError("it is one part of a split archive")
    # PyTorch always writes the zip64 locator.
    if tail.startswith(_LOCATOR, max(0, end_position - struct.calcsize(_LOCATOR_FORM))):
        end_offset, count, nbytes, directory_offset = _locate_zip64_directory(
            file, end_offset - struct.calcsize(_LOCATOR_FORM)
        )
    # Other readers correct for bytes before or between the parts of an archive. PyTorch writes
    # none, and two readers could find two directories.
    if directory_offset + nbytes != end_offset:
        raise ValueError(
            f"its directory ends at byte {directory_offset + nbytes:,}, and its end record begins at {end_offset:,}"
        )
    return count, directory_offset, nbytes


def _locate_zip64_directory(file: BinaryIO, locator_offset: int) -> tuple[int, int, int, int]:
    """Return where the zip64 end record starts, and the entry count, size and offset of the directory."""
    _, _, end_offset, _ = struct.unpack(
        _LOCATOR_FORM, _read_range(file, locator_offset, struct.calcsize(_LOCATOR_FORM))
    )
    if end_offset + struct.calcsize(_END64_FORM) != locator_offset:
        raise ValueError("its zip64 end record is invalid")
    fields = struct.unpack(_END64_FORM, _read_range(file, end_offset, struct.calcsize(_END64_FORM)))
    magic, _, _, _, disk, other_disk, disk_count, count, nbytes, directory_offset = fields
    if magic != _END64 or disk or other_disk or disk_count != count:
        raise ValueError("its zip64 end record is invalid")
    return end_offset, count, nbytes, directory_offset


def _iter_records(directory: bytes, count: int) -> Iterator[ZipRecord]:
    """Yield the records of a zip directory, and check their number."""
    position = 0
    record_count = 0
    while position < len(directory):
        if (
            len(directory) - position < struct.calcsize(_ENTRY_FORM)
            or directory[position : position + 4] != _ENTRY
        ):
            raise ValueError(f"its directory is broken at its byte {position:,}")
        fields = struct.unpack_from(_ENTRY_FORM, directory, position)
        position += struct.calcsize(_ENTRY_FORM)
        name = directory[position : position + fields[10]]
        extra = directory[position + fields[10] : position + fields[10] + fields[11]]
        position += sum(fields[10:13])
        if position > len(directory):
            raise CutShortError("its directory is cut short")
        record_count += 1
        yield _parse_record(name, fields, extra)
    if record_count != count:
        raise ValueError(f"its directory has {record_count:,} entries, its end record {count:,}")


def _parse_record(raw_name: bytes, fields: Sequence[Any], extra: bytes) -> ZipRecord:
    """Check an entry of a zip directory, and return its record."""
    flags = fields[3]
    method = fields[4]
    compressed_nbytes = fields[8]
    nbytes = fields[9]
    disk = fields[13]
    header_offset = fields[16]
    try:
        name = raw_name.decode()
    except UnicodeDecodeError as error:
        raise ValueError("the name of a record in it is not UTF-8") from error
    if any(part in ("", "..", ".") for part in name.split("/")) or "\\" in name or "\0" in name:
        raise ValueError(f"it has a record called {quote_name(name)}, which is not a plain path")
    nbytes, compressed_nbytes, header_offset = _apply_zip64_extra(
        extra, [nbytes, compressed_nbytes, header_offset]
    )
    is_stored = (
        not flags & _ENCRYPTED
        and not method
        and compressed_nbytes == nbytes
        and disk in (0, _COUNT_IN_ZIP64)
    )
    return ZipRecord(name, nbytes, header_offset, is_stored)


def _apply_zip64_extra(extra: bytes, numbers: list[int]) -> list[int]:
    """Replace numbers marked as too large by the numbers in the zip64 extra field, in order."""
    position = 0
    zip64_data = b""
    while position + 4 <= len(extra):
        tag, nbytes = struct.unpack_from("<2H", extra, position)
        if tag == 1:
            zip64_data = extra[position + 4 : position + 4 + nbytes]
        position += 4 + nbytes
    # The extra field has only the numbers that did not fit, in this order: size, compressed
    # size, offset.
    missing_count = numbers.count(_IN_ZIP64)
    if len(zip64_data) < 8 * missing_count:
        raise ValueError("an entry of its directory lacks its zip64 numbers")
    large_numbers = iter(struct.unpack_from(f"<{missing_count}Q", zip64_data))
    return [next(large_numbers) if number == _IN_ZIP64 else number for number in numbers]


def _find_root(records: Mapping[str, ZipRecord]) -> str:
    """Return the folder of all records, with a slash. PyTorch names it after the saved file."""
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise ValueError(f"it is a zip archive with {len(pickles)} pickles of tensors, not one")
    root = pickles[0].removesuffix("data.pkl")
    if strays := [name for name in records if not name.startswith(root)]:
        raise ValueError(f"{quote_name(strays[0])} in it is not under {quote_name(root)}")
    return root
