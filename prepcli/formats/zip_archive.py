"""Uncompressed zip archives: locate their records, and write them. Payloads stay where they are.

The directory at the end is read with `zipfile`, and checked so that every reader of zip archives finds the same records
in it. Invalid archives raise ValueError. Format: section 4.3 of APPNOTE.TXT of PKWARE.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable
from typing import BinaryIO

from prepcli.core.json_values import quote_name
from prepcli.stores.files import CutShortError

ZIP_MAGIC = b"PK\x03\x04"
_ENTRY_MAGIC = b"PK\x01\x02"
_END_MAGIC = b"PK\x05\x06"
_END64_MAGIC = b"PK\x06\x06"
_LOCATOR_MAGIC = b"PK\x06\x07"
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
# The records at the end of an archive: zip64 end record, its locator, end record.
_TAIL_NBYTES = _END64.size + _LOCATOR.size + _END.size
# A field with this value says that the zip64 extra field or end record has the number.
_IN_ZIP64 = 0xFFFFFFFF
_COUNT_IN_ZIP64 = 0xFFFF
# Flags of a record. The local header of a streamed record has no sizes.
_ENCRYPTED = 1
_STREAMED = 8
_UTF8 = 1 << 11

# A record takes 60 to 120 bytes of the directory, and about 1 KB of memory.
MAX_DIRECTORY_NBYTES = 16 << 20


class ZipArchive:
    """An archive. Only its directory is read, records on request.

    Attributes:
        records: Records by name, without their common folder.
        directory: Bytes of the directory.
    """

    def __init__(self, file: BinaryIO, find_root: Callable[[list[str]], str] | None = None) -> None:
        """Read and check the directory.

        Args:
            file: The archive.
            find_root: Returns the common folder of the names of all records, with a slash. Default: there is none.
        """
        self._file = file
        start, nbytes, count = self._locate_directory()
        self.directory = self._read(start, nbytes)
        # `zipfile` accepts entries with a name that is cut short.
        position = 0
        num_entries = 0
        while position < nbytes:
            is_entry = self.directory.startswith(_ENTRY_MAGIC, position)
            if not is_entry or nbytes - position < _ENTRY.size:
                raise ValueError(f"its directory is broken at its byte {position:,}")
            position += _ENTRY.size + sum(_ENTRY.unpack_from(self.directory, position)[10:13])
            num_entries += 1
        if position > nbytes:
            raise CutShortError("its directory is cut short")
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
            raise ValueError(f"its directory is broken: {error}") from error
        infos = archive.infolist()
        if not num_entries == len(infos) == count or archive.start_dir != start:
            raise ValueError(f"its directory has {num_entries:,} entries, its end record {count:,}")
        for name in (info.orig_filename for info in infos):
            has_dots = any(part in ("", "..", ".") for part in name.split("/"))
            if has_dots or "\\" in name or "\0" in name:
                what = f"it has a record called {quote_name(name)}"
                raise ValueError(f"{what}, which is not a plain path")
        root = ""
        if find_root is not None:
            root = find_root([info.orig_filename for info in infos])
        self.records: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = info.orig_filename.removeprefix(root)
            # Readers differ in which of two records they take: one file would hold two models.
            if self.records.setdefault(name, info) is not info:
                raise ValueError(f"it has {quote_name(info.orig_filename)} twice")
            if info.header_offset >= start:
                raise ValueError(f"{quote_name(name)} overlaps its directory")
        self._starts = [*sorted(info.header_offset for info in infos), start]

    def locate(self, name: str) -> tuple[int, int]:
        """Return offset and size of a record, which no other record overlaps.

        Raises:
            ValueError: There is none, it is compressed, or its local header disagrees with the directory.
        """
        info = self.records.get(name)
        if info is None:
            raise ValueError(f"it has no record {quote_name(name)}")
        is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & _ENCRYPTED
        is_whole = info.compress_size == info.file_size and info.volume in (0, _COUNT_IN_ZIP64)
        if not is_plain or not is_whole:
            why = f"{quote_name(name)} in it is compressed or encrypted, which is not supported"
            raise ValueError(why)
        raw_name = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")
        header = self._read(info.header_offset, _LOCAL.size + len(raw_name))
        fields = _LOCAL.unpack_from(header)
        magic, _, flags, method = fields[:4]
        compressed_nbytes, nbytes, name_nbytes, extra_nbytes = fields[7:]
        has_same_name = name_nbytes == len(raw_name) and header.endswith(raw_name)
        sizes = {compressed_nbytes, nbytes}
        has_same_sizes = flags & _STREAMED or sizes <= {info.file_size, _IN_ZIP64}
        if magic != ZIP_MAGIC or method or not has_same_name or not has_same_sizes:
            raise ValueError(f"its directory and the header of {quote_name(name)} differ")
        # PyTorch pads with the extra field of the local header, so that the data is aligned.
        offset = info.header_offset + len(header) + extra_nbytes
        following = bisect_right(self._starts, info.header_offset)
        if offset + info.file_size > self._starts[following]:
            is_last = following == len(self._starts) - 1
            what = "its directory" if is_last else "another record"
            raise ValueError(f"{quote_name(name)} overlaps {what}")
        return offset, info.file_size

    def read(self, name: str, max_nbytes: int) -> bytes:
        """Return the content of a small record."""
        offset, nbytes = self.locate(name)
        if nbytes > max_nbytes:
            why = f"{quote_name(name)} in it has {nbytes:,} bytes, the limit is {max_nbytes:,}"
            raise ValueError(why)
        return self._read(offset, nbytes)

    def _read(self, offset: int, nbytes: int) -> bytes:
        self._file.seek(offset)
        data = self._file.read(nbytes)
        if len(data) < nbytes:
            raise CutShortError("it is cut short")
        return data

    def _locate_directory(self) -> tuple[int, int, int]:
        """Return offset, size and number of entries of the directory."""
        size = self._file.seek(0, os.SEEK_END)
        tail_nbytes = min(size, _TAIL_NBYTES)
        tail = self._read(size - tail_nbytes, tail_nbytes).rjust(_TAIL_NBYTES, b"\0")
        fields = _END.unpack_from(tail, _TAIL_NBYTES - _END.size)
        magic, disk, other_disk, disk_count, count, nbytes, start, comment_nbytes = fields
        # Other readers search for an end record in front of a comment, which PyTorch never writes.
        if magic != _END_MAGIC or comment_nbytes:
            if _END_MAGIC in tail:
                raise CutShortError("bytes follow its end, or it is cut short")
            raise CutShortError("it has no directory at its end: it is cut short")
        if disk or other_disk or disk_count != count:
            raise ValueError("it is one part of a split archive")
        end = size - _END.size
        locator_magic, _, end64, _ = _LOCATOR.unpack_from(tail, _END64.size)
        # PyTorch always writes the zip64 end record.
        if locator_magic == _LOCATOR_MAGIC:
            end = size - _TAIL_NBYTES
            magic, _, _, _, *fields = _END64.unpack_from(tail)
            disk, other_disk, disk_count, count, nbytes, start = fields
            is_split = disk or other_disk or disk_count != count
            if magic != _END64_MAGIC or end64 != end or is_split:
                raise ValueError("its zip64 end record is invalid")
        # Other readers correct for bytes before or between the parts of an archive. PyTorch writes
        # none, and two readers could find two directories.
        stop = start + nbytes
        if stop != end:
            why = f"its directory ends at byte {stop:,}, and its end record begins at {end:,}"
            raise ValueError(why)
        if nbytes > MAX_DIRECTORY_NBYTES:
            limit = f"the limit is {MAX_DIRECTORY_NBYTES:,}"
            raise ValueError(f"its directory has {nbytes:,} bytes, {limit}")
        return start, nbytes, count


# Writing


class ArchiveWriter:
    """Collects the records of an archive in their order."""

    def __init__(self) -> None:
        self._constants: list[tuple[int, bytes]] = []
        # Bytes from `_start` to the next payload.
        self._start = 0
        self._pending = bytearray()
        self._directory: list[bytes] = []

    def add(self, name: str, nbytes: int, data: bytes | None, *, alignment: int = 1) -> int:
        """Append a record and return the offset of its data, which is None for a streamed record."""
        raw_name = name.encode()
        # The checksum of a streamed payload is 0. PyTorch does not compare it, as after
        # `set_crc32_options(False)`.
        checksum = zlib.crc32(data or b"")
        header_offset = self._start + len(self._pending)
        # The extra field has the numbers that do not fit in 32 bits, in this order: sizes, then the offset.
        large: list[int] = []
        if nbytes >= _IN_ZIP64:
            large += [nbytes, nbytes]
        if header_offset >= _IN_ZIP64:
            large.append(header_offset)
        extra = b""
        if large:
            extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large)
        size = min(nbytes, _IN_ZIP64)
        header = _ENTRY.pack(
            *(_ENTRY_MAGIC, 45, 45, 0, 0, 0, 0, checksum, size, size),
            *(len(raw_name), len(extra), 0, 0, 0, 0, min(header_offset, _IN_ZIP64)),
        )
        self._directory.append(header + raw_name + extra)
        extra = b""
        if size == _IN_ZIP64:
            extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes)
        if alignment > 1:
            # The padding is an extra field of its own: a tag, a length and zeros.
            end = header_offset + _LOCAL.size + len(raw_name) + len(extra) + 4
            extra += struct.pack("<2sH", b"FB", -end % alignment) + bytes(-end % alignment)
        # fmt: off
        self._pending += _LOCAL.pack(
            ZIP_MAGIC, 45, 0, 0, 0, 0, checksum, size, size, len(raw_name), len(extra)
        )
        # fmt: on
        self._pending += raw_name + extra
        offset = self._start + len(self._pending)
        if data is None:
            self._constants.append((self._start, bytes(self._pending)))
            self._start = offset + nbytes
            self._pending.clear()
        else:
            self._pending += data
        return offset

    def finish(self) -> tuple[tuple[tuple[int, bytes], ...], int]:
        """Return offset and bytes of everything outside of streamed records, and the size of the archive."""
        count = len(self._directory)
        start = self._start + len(self._pending)
        directory = b"".join(self._directory)
        self._pending += directory
        count_field = min(count, _COUNT_IN_ZIP64)
        start_field = min(start, _IN_ZIP64)
        if start_field == _IN_ZIP64 or count_field == _COUNT_IN_ZIP64:
            sizes = (count, count, len(directory), start)
            self._pending += _END64.pack(_END64_MAGIC, 44, 45, 45, 0, 0, *sizes)
            self._pending += _LOCATOR.pack(_LOCATOR_MAGIC, 0, start + len(directory), 1)
        fields = (0, 0, count_field, count_field, len(directory), start_field, 0)
        self._pending += _END.pack(_END_MAGIC, *fields)
        self._constants.append((self._start, bytes(self._pending)))
        nbytes = self._start + len(self._pending)
        return tuple(self._constants), nbytes
