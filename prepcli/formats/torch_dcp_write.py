"""Write a torch distributed checkpoint (DCP) without torch: `.metadata`, and the bytes around each tensor.

A file of DCP is a row of archives, one per tensor, as `torch.save(tensor)` writes them. An archive is an uncompressed
zip with the payload as its last record. `.metadata` is a pickle of dataclasses with the byte range of each archive.
Format: `torch/distributed/checkpoint/metadata.py` and `filesystem.py` of PyTorch 2.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prepcli.formats.torch_state import STORAGE_DTYPES
from prepcli.planning.tensors import itemsize
from trainer.models.boxes import strides

DATA_FILE = "__0_{}.distcp"
# Payloads start at a multiple of this offset in their archive, as PyTorch aligns them.
ALIGNMENT = 64
# A field of 32 bits with this value means that an extra field has the number in 64 bits.
ZIP64_MARK = 0xFFFFFFFF
LOCAL_HEADER = "<4sHHHHHIIIHH"
CENTRAL_HEADER = "<4sHHHHHHIIIHHHHHII"
_METADATA = "torch.distributed.checkpoint.metadata"
_PROTO = b"\x80\x02"
_MARK = b"("
_STORAGE_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
SUPPORTED_DTYPES = frozenset(_STORAGE_NAMES)


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
class DcpEntry:
    """A tensor and the byte range of its archive in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


def encode_archive(dtype: str, shape: Sequence[int]) -> TensorArchive:
    """Return the archive of a tensor in C order, without the payload."""
    payload_nbytes = math.prod(shape) * itemsize(dtype)
    records = {
        "archive/data.pkl": _tensor_pickle(dtype, shape),
        "archive/byteorder": b"little",
        "archive/version": b"3\n",
    }
    prefix = b""
    directory = b""
    for name, data in records.items():
        checksum = zlib.crc32(data)
        directory += _central_header(name, len(data), checksum, len(prefix))
        prefix += _local_header(name, len(data), checksum, len(prefix), alignment=1) + data
    # The checksum of the payload is 0. PyTorch does not compare it, as after `set_crc32_options(False)`.
    name = "archive/data/0"
    directory += _central_header(name, payload_nbytes, 0, len(prefix))
    prefix += _local_header(name, payload_nbytes, 0, len(prefix), alignment=ALIGNMENT)
    count = len(records) + 1
    suffix = directory + _end_of_directory(count, len(directory), len(prefix) + payload_nbytes)
    return TensorArchive(prefix, suffix, len(prefix) + payload_nbytes + len(suffix))


def encode_metadata(entries: Iterable[DcpEntry]) -> bytes:
    """Return the content of `.metadata` for tensors that are stored whole."""
    memo = _Memo()
    tensors: list[bytes] = []
    planner: list[bytes] = []
    ranges: list[bytes] = []
    for entry in entries:
        name = memo.refer(_pickle_text(entry.name))
        zeros = memo.refer(_pickle_size([0] * len(entry.shape)))
        size = memo.refer(_pickle_size(entry.shape))
        chunk = memo.instance(
            f"{_METADATA} ChunkStorageMetadata", {"offsets": zeros, "sizes": size}
        )
        fields = {
            "properties": memo.refer(_pickle_properties(entry.dtype)),
            "size": size,
            "chunks": b"](" + chunk + b"e",
        }
        tensors += [name, memo.instance(f"{_METADATA} TensorStorageMetadata", fields)]
        planner += [name, _pickle_tuple([name])]
        index = {"fqn": name, "index": _pickle_int(0), "offset": zeros}
        info = {
            "relative_path": memo.refer(_pickle_text(entry.file)),
            "offset": _pickle_int(entry.offset),
            "length": _pickle_int(entry.length),
        }
        ranges += [
            memo.instance(f"{_METADATA} MetadataIndex", index),
            memo.instance("torch.distributed.checkpoint.filesystem _StorageInfo", info),
        ]
    fields = {
        "state_dict_metadata": _mapping(tensors),
        "planner_data": _mapping(planner),
        "storage_data": _mapping(ranges),
        "storage_meta": b"N",
        "version": _pickle_text("1.0.0"),
    }
    metadata = memo.instance(f"{_METADATA} Metadata", fields)
    return _PROTO + b"".join(memo.definitions) + metadata + b"."


# Zip records


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
    extra = b""
    field = nbytes
    if nbytes >= ZIP64_MARK:
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes)
        field = ZIP64_MARK
    header = struct.pack(
        CENTRAL_HEADER,
        *(b"PK\x01\x02", 45, 45, 0, 0, 0, 0),
        *(checksum, field, field, len(name), len(extra), 0, 0, 0, 0, offset),
    )
    return header + name.encode() + extra


def _end_of_directory(count: int, nbytes: int, offset: int) -> bytes:
    """Return the end of an archive, which locates the central directory."""
    end = b""
    field = offset
    if offset >= ZIP64_MARK:
        end = struct.pack(
            "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, offset
        )
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + nbytes, 1)
        field = ZIP64_MARK
    return end + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, nbytes, field, 0)


# Pickles of protocol 2


def _tensor_pickle(dtype: str, shape: Sequence[int]) -> bytes:
    """Return the pickle of a contiguous tensor with the storage `0`."""
    count = math.prod(shape)
    storage = [
        _pickle_text("storage"),
        _pickle_global(f"torch {_STORAGE_NAMES[dtype]}Storage"),
        _pickle_text("0"),
        _pickle_text("cpu"),
        _pickle_int(count),
    ]
    steps = strides(shape, 1)
    hooks = _pickle_global("collections OrderedDict") + b")R"
    arguments = [
        _pickle_tuple(storage) + b"Q",
        _pickle_int(0),
        _pickle_tuple(map(_pickle_int, shape)),
        _pickle_tuple(map(_pickle_int, steps)),
        b"\x89",
        hooks,
    ]
    return (
        _PROTO
        + _pickle_global("torch._utils _rebuild_tensor_v2")
        + _pickle_tuple(arguments)
        + b"R."
    )


def _pickle_properties(dtype: str) -> bytes:
    """Return a pickled TensorProperties: dtype, layout, requires_grad, memory format and pin_memory."""
    layout = (
        _pickle_global("torch.serialization _get_layout")
        + _pickle_tuple([_pickle_text("torch.strided")])
        + b"R"
    )
    memory_format = (
        _pickle_global(f"{_METADATA} _MEM_FORMAT_ENCODING") + _pickle_tuple([_pickle_int(0)]) + b"R"
    )
    state = [_pickle_global(f"torch {dtype}"), layout, b"\x89", memory_format, b"\x89"]
    return _pickle_global(f"{_METADATA} TensorProperties") + b")\x81" + _pickle_tuple(state) + b"b"


class _Memo:
    """Objects that a pickle has once and refers to by number.

    Each is pushed, stored and popped at the start of the pickle. Without the memo a tensor takes four times the bytes.

    Attributes:
        definitions: Pickled definitions of the objects, in order.
    """

    def __init__(self) -> None:
        self.definitions: list[bytes] = []
        self._references: dict[bytes, bytes] = {}

    def refer(self, value: bytes) -> bytes:
        """Return a reference to an immutable object, given in its pickled form."""
        if value not in self._references:
            number = struct.pack("<I", len(self._references))
            self.definitions.append(value + b"r" + number + b"0")
            self._references[value] = b"j" + number
        return self._references[value]

    def instance(self, name: str, fields: Mapping[str, bytes]) -> bytes:
        """Return a pickled dataclass."""
        items: list[bytes] = []
        for key, value in fields.items():
            items += [self.refer(_pickle_text(key)), value]
        return self.refer(_pickle_global(name)) + b")\x81" + _mapping(items) + b"b"


def _pickle_global(name: str) -> bytes:
    """Return the pickle opcode that imports a global, given as `MODULE NAME`."""
    module, _, last = name.partition(" ")
    return f"c{module}\n{last}\n".encode()


def _pickle_size(numbers: Iterable[int]) -> bytes:
    return (
        _pickle_global("torch Size")
        + _pickle_tuple([_pickle_tuple(map(_pickle_int, numbers))])
        + b"R"
    )


def _mapping(items: Iterable[bytes]) -> bytes:
    """Return a mapping of alternating keys and values."""
    return b"}" + _MARK + b"".join(items) + b"u"


def _pickle_tuple(parts: Iterable[bytes]) -> bytes:
    return _MARK + b"".join(parts) + b"t"


def _pickle_text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _pickle_int(value: int) -> bytes:
    """Return the pickle of an integer of up to 64 bits."""
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)
