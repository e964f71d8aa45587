"""The zip archive that PyTorch has written since 1.6: where its records lie.

The directory at the end of the file is read as a whole, of everything else only what is asked for. A record is stored
as it is, so its bytes are those of the file; where they begin, only the header before them says. All raises ValueError
with the reason.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from prepcli.formats.untrusted import quote_name

ZIP_MAGIC = b"PK\x03\x04"
MAX_DIRECTORY_NBYTES = 32 << 20
MAX_TAIL_NBYTES = 22 + 0xFFFF + 20 + 56  # the end of the directory with a comment, and what zip64 puts before it

_END, _END64, _LOCATOR, _ENTRY = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x01\x02"
_END_FORM, _END64_FORM, _LOCATOR_FORM = "<4s4H2LH", "<4sQ2H2L4Q", "<4sLQL"
_ENTRY_FORM, _LOCAL_FORM = "<4s6H3L5H2L", "<4s5H3L2H"
_WIDE, _WIDE_COUNT = 0xFFFFFFFF, 0xFFFF  # the number is in the zip64 part
_ENCRYPTED, _STREAMED = 1, 8  # flags: the second says that the local header has no sizes


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """An entry of the archive as its directory has it; `header` is where its own header lies, `plain` whether its bytes
    are stored as they are."""

    name: str
    nbytes: int
    header_offset: int
    is_stored: bool


@dataclass(frozen=True, slots=True)
class ZipArchive:
    """The records by name, without the folder that they are all in; `end` is where the directory begins."""

    root: str
    records: Mapping[str, ZipRecord]
    directory: bytes
    directory_offset: int


def read_archive(file: BinaryIO) -> ZipArchive:
    """Directory of an archive of PyTorch's."""
    size = file.seek(0, os.SEEK_END)
    count, start, nbytes = _directory_place(file, size)
    if nbytes > MAX_DIRECTORY_NBYTES:
        raise ValueError(f"its directory has {nbytes:,} bytes, allowed are {MAX_DIRECTORY_NBYTES:,}")
    directory = _read(file, start, nbytes)
    found: dict[str, ZipRecord] = {}
    for record in _entries(directory, count):
        if found.setdefault(record.name, record) is not record:
            raise ValueError(f"it has {quote_name(record.name)} twice")
        if record.is_stored and record.header_offset + struct.calcsize(_LOCAL_FORM) + record.nbytes > start:
            raise ValueError(f"{quote_name(record.name)} reaches into its directory")
    root = _root(found)
    return ZipArchive(root, {name[len(root) :]: record for name, record in found.items()}, directory, start)


def locate_record(file: BinaryIO, archive: ZipArchive, name: str) -> tuple[int, int]:
    """First byte and length of a record, of which the header before it says the same as the directory."""
    record = archive.records.get(name)
    if record is None:
        raise ValueError(f"it has no record {quote_name(name)}")
    if not record.is_stored:
        raise ValueError(f"{quote_name(name)} in it is compressed or encrypted: PyTorch stores its records as they are")
    head = struct.unpack(_LOCAL_FORM, _read(file, record.header_offset, struct.calcsize(_LOCAL_FORM)))
    magic, _, flags, method, _, _, _, packed, nbytes, name_nbytes, extra_nbytes = head
    after = record.header_offset + struct.calcsize(_LOCAL_FORM)
    same_name = magic == ZIP_MAGIC and _read(file, after, name_nbytes) == record.name.encode()
    same_sizes = flags & _STREAMED or {packed, nbytes} <= {record.nbytes, _WIDE}
    if method or not same_name or not same_sizes:
        raise ValueError(f"its directory and the header of {quote_name(name)} differ")
    first = after + name_nbytes + extra_nbytes
    if first + record.nbytes > archive.directory_offset:
        raise ValueError(f"{quote_name(name)} reaches into its directory")
    return first, record.nbytes


def read_record(file: BinaryIO, archive: ZipArchive, name: str, max_nbytes: int) -> bytes:
    """All of a small record."""
    first, nbytes = locate_record(file, archive, name)
    if nbytes > max_nbytes:
        raise ValueError(f"{quote_name(name)} in it has {nbytes:,} bytes, allowed are {max_nbytes:,}")
    return _read(file, first, nbytes)


def _read(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    file.seek(offset)
    found = file.read(nbytes)
    if len(found) < nbytes:
        raise ValueError("it is cut short")
    return found


def _directory_place(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """Entries, first byte and length of the directory, by what stands behind it."""
    tail_start = max(0, size - MAX_TAIL_NBYTES)
    tail = _read(file, tail_start, size - tail_start)
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < struct.calcsize(_END_FORM):
        raise ValueError("it has no directory at its end: it is cut short")
    _, disk, other_disk, here, count, nbytes, start, comment_nbytes = struct.unpack_from(_END_FORM, tail, at)
    if at + struct.calcsize(_END_FORM) + comment_nbytes != len(tail):
        raise ValueError("it goes on behind its end, or lacks some of it")
    ends_at = tail_start + at
    if disk or other_disk or here != count:
        raise ValueError("it is one of several parts")
    if tail.startswith(_LOCATOR, max(0, at - struct.calcsize(_LOCATOR_FORM))):  # PyTorch always has it
        ends_at, count, nbytes, start = _wide_place(file, ends_at - struct.calcsize(_LOCATOR_FORM))
    if start + nbytes != ends_at:
        raise ValueError(f"its directory ends at byte {start + nbytes:,}, what describes it begins at {ends_at:,}")
    return count, start, nbytes


def _wide_place(file: BinaryIO, at: int) -> tuple[int, int, int, int]:
    """The same of an archive with zip64, by the locator at a byte, with the byte at which its description begins."""
    _, _, ends_at, _ = struct.unpack(_LOCATOR_FORM, _read(file, at, struct.calcsize(_LOCATOR_FORM)))
    if ends_at + struct.calcsize(_END64_FORM) != at:
        raise ValueError("the description of a large archive in it is broken")
    found = struct.unpack(_END64_FORM, _read(file, ends_at, struct.calcsize(_END64_FORM)))
    magic, _, _, _, disk, other_disk, here, count, nbytes, start = found
    if magic != _END64 or disk or other_disk or here != count:
        raise ValueError("the description of a large archive in it is broken")
    return ends_at, count, nbytes, start


def _entries(directory: bytes, count: int) -> Iterator[ZipRecord]:
    at, seen = 0, 0
    while at < len(directory):
        if len(directory) - at < struct.calcsize(_ENTRY_FORM) or directory[at : at + 4] != _ENTRY:
            raise ValueError(f"its directory is broken at its byte {at:,}")
        found = struct.unpack_from(_ENTRY_FORM, directory, at)
        at += struct.calcsize(_ENTRY_FORM)
        name, extra = directory[at : at + found[10]], directory[at + found[10] : at + found[10] + found[11]]
        at += sum(found[10:13])
        if at > len(directory):
            raise ValueError("its directory is cut short")
        seen += 1
        yield _record(name, found, extra)
    if seen != count:
        raise ValueError(f"its directory has {seen:,} entries, it promises {count:,}")


def _record(raw: bytes, found: Sequence[Any], extra: bytes) -> ZipRecord:
    flags, method, packed, nbytes, disk, header = found[3], found[4], found[8], found[9], found[13], found[16]
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError("the name of a record in it is not UTF-8") from error
    if any(part in ("", "..", ".") for part in name.split("/")) or "\\" in name or "\0" in name:
        raise ValueError(f"it has a record called {quote_name(name)}, which is no plain path")
    nbytes, packed, header = _widened(extra, [nbytes, packed, header])
    plain = not flags & _ENCRYPTED and not method and packed == nbytes and disk in (0, _WIDE_COUNT)
    return ZipRecord(name, nbytes, header, plain)


def _widened(extra: bytes, numbers: list[int]) -> list[int]:
    """The numbers, those that are too large for their fields taken from the zip64 part, in this order."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        tag, nbytes = struct.unpack_from("<2H", extra, at)
        if tag == 1:
            wide = extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    needed = numbers.count(_WIDE)
    if len(wide) < 8 * needed:
        raise ValueError("an entry of its directory lacks its large numbers")
    large = iter(struct.unpack_from(f"<{needed}Q", wide))
    return [next(large) if number == _WIDE else number for number in numbers]


def _root(records: Mapping[str, ZipRecord]) -> str:
    """The folder, with a slash, that all records are in: the name that a file had when it was saved."""
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise ValueError(f"it is a zip archive with {len(pickles)} pickles of tensors, not one")
    root = pickles[0].removesuffix("data.pkl")
    if strays := [name for name in records if not name.startswith(root)]:
        raise ValueError(f"{quote_name(strays[0])} in it is not below {quote_name(root)}")
    return root
