"""Write a torch distributed checkpoint (DCP) without torch: `.metadata`, and the bytes around each tensor.

A file of DCP is a row of archives, one per tensor, as `torch.save(tensor)` writes them. An archive is an uncompressed
zip with the payload as its last record. `.metadata` is a pickle of dataclasses with the byte range of each archive.
Format: `torch/distributed/checkpoint/metadata.py` and `filesystem.py` of PyTorch 2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prepcli.formats.torch_pickle_write import (
    PROTO,
    pickle_global,
    pickle_int,
    pickle_mapping,
    pickle_text,
    pickle_tuple,
    pickle_value,
)

DATA_FILE = "__0_{}.distcp"
_METADATA = "torch.distributed.checkpoint.metadata"


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
        name = memo.refer(pickle_text(entry.name))
        zeros = memo.refer(_pickle_size([0] * len(entry.shape)))
        index = {"fqn": name, "index": b"N", "offset": b"N"}
        if entry.dtype:
            index = {"fqn": name, "index": pickle_int(0), "offset": zeros}
            stored += [name, _tensor_metadata(memo, entry, zeros)]
        else:
            stored += [name, memo.instance(f"{_METADATA} BytesStorageMetadata", {})]
        keys = [memo.refer(pickle_value(key)) for key in entry.path or (entry.name,)]
        planner += [name, pickle_tuple(keys)]
        info = {
            "relative_path": memo.refer(pickle_text(entry.file)),
            "offset": pickle_int(entry.offset),
            "length": pickle_int(entry.length),
        }
        ranges += [
            memo.instance(f"{_METADATA} MetadataIndex", index),
            memo.instance("torch.distributed.checkpoint.filesystem _StorageInfo", info),
        ]
    fields = {
        "state_dict_metadata": pickle_mapping(stored),
        "planner_data": pickle_mapping(planner),
        "storage_data": pickle_mapping(ranges),
        "storage_meta": b"N",
        "version": pickle_text("1.0.0"),
    }
    metadata = memo.instance(f"{_METADATA} Metadata", fields)
    return PROTO + b"".join(memo.definitions) + metadata + b"."


def _tensor_metadata(memo: _Memo, entry: DcpEntry, zeros: bytes) -> bytes:
    """Return a pickled TensorStorageMetadata with one chunk."""
    size = memo.refer(_pickle_size(entry.shape))
    chunk = memo.instance(f"{_METADATA} ChunkStorageMetadata", {"offsets": zeros, "sizes": size})
    fields = {
        "properties": memo.refer(_pickle_properties(entry.dtype)),
        "size": size,
        "chunks": b"](" + chunk + b"e",
    }
    return memo.instance(f"{_METADATA} TensorStorageMetadata", fields)


# Pickles


def _pickle_properties(dtype: str) -> bytes:
    """Return a pickled TensorProperties: dtype, layout, requires_grad, memory format and pin_memory."""
    layout = (
        pickle_global("torch.serialization _get_layout")
        + pickle_tuple([pickle_text("torch.strided")])
        + b"R"
    )
    memory_format = (
        pickle_global(f"{_METADATA} _MEM_FORMAT_ENCODING") + pickle_tuple([pickle_int(0)]) + b"R"
    )
    state = [pickle_global(f"torch {dtype}"), layout, b"\x89", memory_format, b"\x89"]
    return pickle_global(f"{_METADATA} TensorProperties") + b")\x81" + pickle_tuple(state) + b"b"


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
            items += [self.refer(pickle_text(key)), value]
        return self.refer(pickle_global(name)) + b")\x81" + pickle_mapping(items) + b"b"


def _pickle_size(numbers: Iterable[int]) -> bytes:
    """Return a pickled `torch.Size`."""
    size = pickle_tuple([pickle_tuple(map(pickle_int, numbers))])
    return pickle_global("torch Size") + size + b"R"
