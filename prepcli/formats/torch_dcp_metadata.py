"""Write the `.metadata` of a torch distributed checkpoint (DCP) without torch. See `torch_dcp` for its content.

A data file is a row of archives, see `torch_zip.encode_object`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prepcli.formats.torch_dcp import DCP_MODULE
from prepcli.formats.torch_pickle import (
    PROTO,
    pickle_call,
    pickle_global,
    pickle_mapping,
    pickle_tuple,
    pickle_value,
)

DATA_FILE = "__0_{}.distcp"


@dataclass(frozen=True, slots=True)
class DcpEntry:
    """A tensor or another object, and the byte range of its archive in a file.

    Attributes:
        name: The keys of `path`, joined by dots.
        dtype: Dtype of a tensor. Empty for another object.
        shape: Shape of a tensor.
        file: Name of the file.
        offset: First byte of the archive.
        length: Size of the archive.
        path: Keys in the nested state dict. Empty for the name alone.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    path: tuple[str | int, ...] = ()


def encode_metadata(entries: Iterable[DcpEntry]) -> bytes:
    """Return the content of `.metadata` for whole tensors."""
    memo = _Memo()
    stored: list[bytes] = []
    planner: list[bytes] = []
    ranges: list[bytes] = []
    for entry in entries:
        name = memo.refer(pickle_value(entry.name))
        zeros = memo.refer(_pickle_size([0] * len(entry.shape)))
        index = {"fqn": name, "index": b"N", "offset": b"N"}
        if entry.dtype:
            index = {"fqn": name, "index": pickle_value(0), "offset": zeros}
            stored += [name, _tensor_metadata(memo, entry, zeros)]
        else:
            stored += [name, memo.instance("BytesStorageMetadata", {})]
        keys = [memo.refer(pickle_value(key)) for key in entry.path or (entry.name,)]
        planner += [name, pickle_tuple(keys)]
        info = {
            "relative_path": memo.refer(pickle_value(entry.file)),
            "offset": pickle_value(entry.offset),
            "length": pickle_value(entry.length),
        }
        ranges += [
            memo.instance("MetadataIndex", index),
            memo.instance("_StorageInfo", info, "torch.distributed.checkpoint.filesystem"),
        ]
    fields = {
        "state_dict_metadata": pickle_mapping(stored),
        "planner_data": pickle_mapping(planner),
        "storage_data": pickle_mapping(ranges),
        "storage_meta": b"N",
        "version": pickle_value("1.0.0"),
    }
    metadata = memo.instance("Metadata", fields)
    return PROTO + b"".join(memo.definitions) + metadata + b"."


def _tensor_metadata(memo: _Memo, entry: DcpEntry, zeros: bytes) -> bytes:
    """Return a pickled TensorStorageMetadata with one chunk."""
    size = memo.refer(_pickle_size(entry.shape))
    chunk = memo.instance("ChunkStorageMetadata", {"offsets": zeros, "sizes": size})
    fields = {
        "properties": memo.refer(_pickle_properties(entry.dtype)),
        "size": size,
        "chunks": b"](" + chunk + b"e",
    }
    return memo.instance("TensorStorageMetadata", fields)


def _pickle_properties(dtype: str) -> bytes:
    """Return a pickled TensorProperties: dtype, layout, requires_grad, memory format and pin_memory."""
    layout = pickle_call("torch.serialization _get_layout", [pickle_value("torch.strided")])
    memory_format = pickle_call(f"{DCP_MODULE} _MEM_FORMAT_ENCODING", [pickle_value(0)])
    false = pickle_value(False)
    state = [pickle_global(f"torch {dtype}"), layout, false, memory_format, false]
    return pickle_global(f"{DCP_MODULE} TensorProperties") + b")\x81" + pickle_tuple(state) + b"b"


def _pickle_size(numbers: Iterable[int]) -> bytes:
    """Return a pickled `torch.Size`."""
    return pickle_call("torch Size", [pickle_value(tuple(numbers))])


class _Memo:
    """Objects with one definition in a pickle and references by number.

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

    def instance(self, name: str, fields: Mapping[str, bytes], module: str = DCP_MODULE) -> bytes:
        """Return a pickled dataclass."""
        items: list[bytes] = []
        for key, value in fields.items():
            items += [self.refer(pickle_value(key)), value]
        return (
            self.refer(pickle_global(f"{module} {name}")) + b")\x81" + pickle_mapping(items) + b"b"
        )
