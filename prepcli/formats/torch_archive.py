"""The zip archives of `torch.save`: read their tensors, and write them. Payloads stay where they are.

The directory at the end of an uncompressed zip archive is read with `zipfile`, and checked so that every reader of zip
archives finds the same records in it. Format: section 4.3 of APPNOTE.TXT of PKWARE. An archive has one folder with the
pickle of an object and one record per storage. A tensor is a view of a storage. Invalid archives and objects raise
ValueError.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from prepcli.algebra.boxes import strides
from prepcli.core.json_values import quote_name
from prepcli.engine.digest import record_digest
from prepcli.formats.torch_pickle import (
    MAPPING_TYPES,
    MAX_NBYTES,
    PROTO,
    STORAGE_DTYPES,
    PersistentRef,
    PickledCall,
    PickledMapping,
    PickledName,
    PickledValue,
    StoredTensor,
    interpret_pickle,
    pickle_value,
)
from prepcli.planning.arrays import Array, whole_array
from prepcli.planning.tensors import itemsize
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
    """An archive of PyTorch. Only its directory is read, records on request.

    Attributes:
        records: Records by name, without their common folder.
        directory: Bytes of the directory.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Read and check the directory."""
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
        # All records are in one folder, which PyTorch names after the saved file.
        names = [info.orig_filename for info in infos]
        pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(set(pickles)) != 1:
            raise ValueError(f"it is a zip archive with {len(pickles)} pickles of tensors, not one")
        root = pickles[0].removesuffix("data.pkl")
        if strays := [name for name in names if not name.startswith(root)]:
            raise ValueError(f"{quote_name(strays[0])} in it is not under {quote_name(root)}")
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


# Payloads start at a multiple of this offset in their archive, as PyTorch aligns them.
ALIGNMENT = 64
MAX_DIMS = 64
# Contiguous runs of a view: each is read separately.
MAX_RUNS = 1 << 18
INT64_LIMIT = 1 << 63
# Nesting of a tensor in parameters and subclasses. A pickle may repeat the outermost one.
MAX_WRAPS = 8
MAX_FLAGS = 16
UTILS_MODULE = "torch._utils."
PARAMETER_REBUILDERS = {
    f"{UTILS_MODULE}_rebuild_parameter",
    f"{UTILS_MODULE}_rebuild_parameter_with_state",
}
# Qualified name -> number of arguments.
TENSOR_REBUILDERS = {
    f"{UTILS_MODULE}_rebuild_tensor": 4,
    f"{UTILS_MODULE}_rebuild_tensor_v2": 6,
    f"{UTILS_MODULE}_rebuild_tensor_v3": 7,
}
TYPED_TENSOR_REBUILDER = "torch._tensor._rebuild_from_type_v2"
TENSOR_TYPES = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter"}
_REBUILDERS = frozenset({*TENSOR_REBUILDERS, *PARAMETER_REBUILDERS, TYPED_TENSOR_REBUILDER})
SIZE_TYPE = "torch.Size"
# Python 3.13 pickles the classes of paths under the private module that defines them.
PATH_TYPES = {
    "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath",
}  # fmt: skip
SETTINGS_TYPES = {  # types of settings and counters next to tensors
    *PATH_TYPES, "torch.device", "builtins.set", "builtins.frozenset", "builtins.complex", "builtins.bytearray",
    "builtins.slice", "builtins.range", "_codecs.encode", "argparse.Namespace", "numpy.dtype", "numpy.ndarray",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
}  # fmt: skip
_NOT_BUILT = "it is not built as PyTorch builds a tensor"


@dataclass(frozen=True, slots=True)
class ObjectArchive:
    """The archive of an object.

    Attributes:
        constant_ranges: Offset and bytes of everything outside of the streamed tensors.
        offsets: Offset of each tensor, by the key of its storage.
        nbytes: Size of the archive.
    """

    constant_ranges: tuple[tuple[int, bytes], ...]
    offsets: Mapping[str, int]
    nbytes: int


def encode_object(root: PickledValue) -> ObjectArchive:
    """Return the archive of an object with tensors at any depth, without the payloads of streamed tensors."""
    writer = ArchiveWriter()
    for name, data in (
        ("data.pkl", PROTO + pickle_value(root) + b"."),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        writer.add(f"archive/{name}", len(data), data)
    offsets: dict[str, int] = {}
    for tensor in _tensors_in(root):
        name = f"archive/data/{tensor.key}"
        offsets[tensor.key] = writer.add(name, tensor.nbytes, tensor.content, alignment=ALIGNMENT)
    constant_ranges, nbytes = writer.finish()
    return ObjectArchive(constant_ranges, offsets, nbytes)


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


# Type of a storage -> dtype of its elements. An untyped storage counts bytes.
STORAGES = {
    **{f"torch.{kind}Storage": dtype for kind, dtype in STORAGE_DTYPES.items()},
    **{f"torch.cuda.{kind}Storage": dtype for kind, dtype in STORAGE_DTYPES.items()},
    **dict.fromkeys(("torch.UntypedStorage", "torch._UntypedStorage", "torch.storage.UntypedStorage",
                     "torch.storage._UntypedStorage"), "uint8"),
}  # fmt: skip
DTYPES = {
    f"torch.{name}": name
    for name in (
        *STORAGE_DTYPES.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip
ALLOWED_NAMES = frozenset(
    {*MAPPING_TYPES, *STORAGES, *DTYPES, *_REBUILDERS, *TENSOR_TYPES, SIZE_TYPE, *SETTINGS_TYPES}
)
# Name -> reason why the file is not supported.
UNSUPPORTED_NAMES: Mapping[str, str] = {
    f"{UTILS_MODULE}_rebuild_qtensor": "it holds quantised tensors",
    f"{UTILS_MODULE}_rebuild_sparse_tensor": "it holds sparse tensors",
    f"{UTILS_MODULE}_rebuild_nested_tensor": "it holds nested tensors",
    f"{UTILS_MODULE}_rebuild_meta_tensor_no_storage": "it holds tensors of the meta device, which have no values",
    f"{UTILS_MODULE}_rebuild_wrapper_subclass": "it holds tensors of a wrapper subclass",
    f"{UTILS_MODULE}_rebuild_device_tensor_from_numpy": "it holds tensors of a device with its own storage format",
    f"{UTILS_MODULE}_rebuild_device_tensor_from_cpu_tensor": "it holds tensors of a device with its own storage format",
    "torch.storage._load_from_bytes": "it holds a pickle within the pickle",
    **dict.fromkeys(("torch.complex32", "torch.complex128", "torch.float4_e2m1fn_x2", "torch.ComplexDoubleStorage"),
                    "it holds tensors of a dtype that is not supported"),
    **{f"torch.{kind}Storage": "it holds quantised tensors" for kind in
       ("QUInt8", "QInt8", "QInt32", "QUInt4x2", "QUInt2x4")},
}  # fmt: skip


class TorchArchive:
    """An archive of `torch.save`.

    Attributes:
        root: The pickled object, see `interpret_pickle`.
        digest: XXH3-128 of the metadata.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Read the directory and the pickle."""
        self._zip = ZipArchive(file)
        # Older versions of torch.save do not record the byte order. Their files count as little endian.
        if "byteorder" in self._zip.records and self._zip.read("byteorder", 16) != b"little":
            raise ValueError("it was written on a big-endian machine")
        if any(name.startswith("code/") for name in self._zip.records):
            raise ValueError("it is a TorchScript archive; save the model's state_dict() instead")
        pickled = self._zip.read("data.pkl", MAX_NBYTES)
        self.root = interpret_pickle(pickled, ALLOWED_NAMES)
        self.digest = record_digest(pickled + self._zip.directory)
        # Storage key -> offset and size.
        self._storages: dict[str, tuple[int, int]] = {}

    def find_tensor(self, value: object, name: str = "", file: int = 0) -> Array:
        """Return a tensor of the pickle. Raise ValueError if it is invalid."""
        call = _unwrap_parameter(value)
        args = call.args
        num_args = TENSOR_REBUILDERS.get(call.callee.qualified_name)
        if num_args is None or call.state is not None:
            raise ValueError(_NOT_BUILT)
        # At most one mapping of flags follows the other arguments.
        all_flags = args[max(num_args, 6) :]
        if len(args) < num_args or len(all_flags) > 1:
            raise ValueError(_NOT_BUILT)
        storage = args[0]
        fields = storage.persistent_id if isinstance(storage, PersistentRef) else None
        if not isinstance(fields, tuple) or len(fields) not in (5, 6) or fields[0] != "storage":
            raise ValueError("it refers to an object that is not a storage")
        storage_type = fields[1]
        key = fields[2]
        # `uint8` for an untyped storage.
        dtype = None
        if isinstance(storage_type, PickledName):
            dtype = STORAGES.get(storage_type.qualified_name)
        if dtype is None or not isinstance(key, str):
            raise ValueError("it refers to a storage of an unknown type")
        if len(fields) == 6 and fields[5] is not None:
            what = "it refers to a part of a storage"
            raise ValueError(f"{what} (a format of very old versions of PyTorch)")
        storage_nbytes = _parse_count(fields[4]) * itemsize(dtype)
        if num_args == 7:
            stored_dtype = args[6]
            if (
                not isinstance(stored_dtype, PickledName)
                or stored_dtype.qualified_name not in DTYPES
            ):
                raise ValueError("its dtype is unknown")
            dtype = DTYPES[stored_dtype.qualified_name]
        for flags in all_flags:
            if not isinstance(flags, PickledMapping):
                continue
            if len(flags.items) > MAX_FLAGS:
                raise ValueError(_NOT_BUILT)
            if any(flag is not False for _, flag in flags.items):
                raise ValueError("it is a conjugate or negative view, whose values are not stored")
        first = _parse_count(args[1])
        shape = parse_counts(args[2])
        byte_strides = _byte_strides(
            shape,
            parse_counts(args[3]),
            first=first,
            item_nbytes=itemsize(dtype),
            storage_nbytes=storage_nbytes,
        )
        if key not in self._storages:
            self._storages[key] = self._zip.locate(f"data/{key}")
        offset, stored_nbytes = self._storages[key]
        if storage_nbytes > stored_nbytes:
            why = f"its tensors need {storage_nbytes:,}"
            raise ValueError(f"storage {quote_name(key)} has {stored_nbytes:,} bytes, {why}")
        if 0 not in shape:
            offset += first * itemsize(dtype)
        return whole_array(name, dtype, shape, (file, offset), byte_strides)


def is_tensor(value: object) -> bool:
    """Return whether a value of a pickle is a tensor."""
    return isinstance(value, PickledCall) and value.callee.qualified_name in _REBUILDERS


def _unwrap_parameter(value: object) -> PickledCall:
    """Return the call that builds a tensor, without the calls that wrap it in a parameter or subclass."""
    for _ in range(MAX_WRAPS):
        if not isinstance(value, PickledCall):
            break
        name = value.callee.qualified_name
        if name == TYPED_TENSOR_REBUILDER and len(value.args) == 4:
            # The last argument has the Python attributes of the tensor.
            callee, tensor_type, args, _ = value.args
            if not (
                isinstance(callee, PickledName)
                and isinstance(args, tuple)
                and isinstance(tensor_type, PickledName)
                and tensor_type.qualified_name in TENSOR_TYPES
            ):
                raise ValueError("it is a tensor of a custom class")
            value = PickledCall(callee, args)
        elif name in PARAMETER_REBUILDERS and value.args:
            value = value.args[0]
        elif name == TYPED_TENSOR_REBUILDER:
            break
        else:
            return value
    raise ValueError(_NOT_BUILT)


def parse_counts(value: object) -> tuple[int, ...]:
    """Return the numbers of a shape or of strides: of a `torch.Size`, tuple or list."""
    if isinstance(value, PickledCall) and value.callee.qualified_name == SIZE_TYPE:
        value = value.args[0] if len(value.args) == 1 else value
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMS:
        raise ValueError("its shape or its strides are not a list of numbers")
    return tuple(map(_parse_count, value))


def _parse_count(value: object) -> int:
    if type(value) is not int or not 0 <= value < INT64_LIMIT:  # bool is a subclass of int
        raise ValueError("one of its numbers is not a whole number from 0 to 2^63 - 1")
    return value


def _byte_strides(
    shape: Sequence[int],
    element_strides: Sequence[int],
    *,
    first: int,
    item_nbytes: int,
    storage_nbytes: int,
) -> tuple[int, ...] | None:
    """Return the strides of a view in bytes, or None for C order."""
    if len(element_strides) != len(shape):
        raise ValueError(f"it has {len(shape)} dims and {len(element_strides)} strides")
    if math.prod(max(extent, 1) for extent in shape) * item_nbytes >= INT64_LIMIT:
        raise ValueError("it has a shape of 2^63 bytes or more")
    if 0 in shape:
        return None
    # E.g. a [3, 2] tensor that is the transpose of a stored [2, 3]: offset 0, strides (1, 3).
    # Its last element has index 0 + (3 - 1) * 1 + (2 - 1) * 3 = 5, so the storage has 6 or more.
    end = first + 1
    # The stride of an extent of 1 moves no element, and PyTorch leaves any number there.
    steps: list[int] = []
    for extent, step, c_step in zip(shape, element_strides, strides(shape)):
        end += (extent - 1) * step
        steps.append(step if extent > 1 else c_step)
    if end * item_nbytes > storage_nbytes:
        raise ValueError(
            f"it reaches to byte {end * item_nbytes:,} of a storage of {storage_nbytes:,}"
        )
    if tuple(steps) == strides(shape):
        return None
    pairs = zip(steps, shape)
    stride_extents = sorted((stride, extent) for stride, extent in pairs if extent > 1)
    if stride_extents[0][0] == 0:
        why = "it is an expanded view, whose elements share memory"
        raise ValueError(f"{why}: save its `.contiguous()` copy")
    last_offset = 0
    # From the smallest stride on: elements are distinct if each stride steps over all offsets
    # that the dims before it reach. Sufficient, and true for every slice and transpose.
    for stride, extent in stride_extents:
        if stride <= last_offset:
            raise ValueError("it is a view whose elements overlap: save its `.contiguous()` copy")
        last_offset += stride * (extent - 1)
    # Dims that continue the run of the dims before them lengthen it. e.g. [2, 3] with the strides
    # (10, 1): a run of 3 elements, 2 runs.
    run_elements = 1
    for stride, extent in stride_extents:
        if stride == run_elements:
            run_elements *= extent
    if (run_count := math.prod(shape) // run_elements) > MAX_RUNS:
        raise ValueError(f"it is a view in {run_count:,} pieces: save its `.contiguous()` copy")
    return tuple(step * item_nbytes for step in steps)
