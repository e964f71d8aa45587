"""Torch distributed checkpoints (DCP) without torch: read the tensors of a folder, and write `.metadata`.

`.metadata` is a pickle of dataclasses, interpreted without running code. It has the boxes of each tensor (one per rank
that saved a part) and for each box a byte range of a file. The range is an archive of one tensor, as
`torch.save(tensor)` writes it. A data file is a row of such archives. Format:
`torch/distributed/checkpoint/metadata.py` and `filesystem.py` of PyTorch 2.
"""

from __future__ import annotations

import io
import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from prepcli.algebra.boxes import Box, strides
from prepcli.algebra.grids import ArrayPart, ArrayParts
from prepcli.core.errors import DamagedError, PrepError
from prepcli.core.json_values import quote_name
from prepcli.engine.digest import record_digest
from prepcli.formats.model_files import FileHeader, ModelFiles, damage_hint
from prepcli.formats.torch_archive import (
    DTYPES,
    PATH_TYPES,
    SIZE_TYPE,
    TorchArchive,
    parse_counts,
)
from prepcli.formats.torch_files import to_python
from prepcli.formats.torch_pickle import (
    MAPPING_TYPES,
    MAX_NBYTES,
    PROTO,
    PickledCall,
    PickledMapping,
    PickledName,
    UnexpectedNameError,
    interpret_pickle,
    pickle_call,
    pickle_global,
    pickle_mapping,
    pickle_tuple,
    pickle_value,
)
from prepcli.planning.arrays import Array, parted_array, whole_array
from prepcli.planning.tensors import itemsize
from prepcli.stores.files import (
    CutShortError,
    open_regular_file,
    read_small_file,
    stat_file,
    unreadable_error,
)
from prepcli.stores.paths import AnyPath, StorePath, is_remote, read_each

METADATA_FILE = ".metadata"
SUFFIX = ".distcp"
# A tensor takes about 110 as PyTorch writes it. DeepSeek-V3 has 46,000 tensors.
MAX_METADATA_OPCODES = 6_000_000
# Maximum number of cells of a grid. The edges of a tensor's boxes divide the tensor into the cells.
MAX_CELLS = 1 << 20
# In a store, the header of a tensor at the start of its archive and the directory at the end are requested. Each has
# less than 2 KiB.
_ARCHIVE_END_NBYTES = 4 << 10
# Boxes of a file that one thread reads, with one more request than boxes.
_BOXES_PER_RUN = 32
DCP_MODULE = "torch.distributed.checkpoint.metadata"
_TENSOR = f"{DCP_MODULE}.TensorStorageMetadata"
_BYTES = f"{DCP_MODULE}.BytesStorageMetadata"
_CLASSES = ("Metadata", "ChunkStorageMetadata", "MetadataIndex", "TensorProperties", "StorageMeta")
_ALLOWED_NAMES = frozenset(
    {
        *MAPPING_TYPES,
        *DTYPES,
        *(f"{DCP_MODULE}.{name}" for name in (*_CLASSES, "_MEM_FORMAT_ENCODING")),
        _TENSOR,
        _BYTES,
        SIZE_TYPE,
        *PATH_TYPES,
        # Python 3.11.0 to 3.11.3 pickles a member of an enum as a call of it, e.g. of the memory format.
        "builtins.getattr",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
    }
)
# (name, offsets of a box) -> file, start and length of its archive. Other values have no offsets.
_Ranges = Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]


@dataclass(frozen=True, slots=True)
class DcpFolder(ModelFiles):
    """A checkpoint. Each tensor is in one piece or in boxes. The digest of each file is that of `.metadata`.

    Attributes:
        non_tensors: Names of its other values.
        archives: File, first byte and length of the archive of each other value, by name.
    """

    non_tensors: tuple[str, ...] = ()
    archives: Mapping[str, tuple[AnyPath, int, int]] = field(default_factory=dict)

    @property
    def others(self) -> tuple[str, ...]:
        """Descriptions of the values other than tensors."""
        return tuple(f"{name} is not a tensor" for name in self.non_tensors)


def select_dcp_files(names: Sequence[str]) -> list[str]:
    """Return the data files of a checkpoint. Empty if it is not complete: its metadata is written last."""
    if METADATA_FILE not in names:
        return []
    return [name for name in names if name.lower().endswith(SUFFIX)]


def read_dcp_folder(folder: AnyPath) -> DcpFolder:
    """Read the metadata of a checkpoint, and the header of each box.

    Raises:
        PrepError: A file is missing, unreadable or invalid. No other exception is raised, whatever the files hold.
    """
    path = folder / METADATA_FILE
    entries, ranges, metadata_digest = _read_metadata(path)
    named_tensors: list[tuple[str, PickledCall]] = []
    archives: dict[str, tuple[AnyPath, int, int]] = {}
    non_tensors: list[str] = []
    for name, entry in entries.items():
        if entry.callee.qualified_name != _BYTES:
            named_tensors.append((name, entry))
            continue
        non_tensors.append(name)
        if (name, None) in ranges:
            file, start, length = ranges[name, None]
            archives[name] = (folder / file, start, length)
    layouts: list[_TensorLayout] = []
    for name, entry in named_tensors:
        with _damage_of(path, name):
            layouts.append(_parse_tensor(name, entry, ranges))
    stored_boxes = _read_archives(folder, [box for layout in layouts for box in layout.boxes])
    # The files of tensors, numbered in the order of their first box.
    numbers: dict[str, int] = {}
    tensors: list[Array] = []
    for layout in layouts:
        parts: list[ArrayPart] = []
        for archive in layout.boxes:
            number = numbers.setdefault(archive.file, len(numbers))
            stored = stored_boxes[archive]
            offset = archive.first + stored.offset
            parts.append(ArrayPart(archive.box, number, offset, stored.element_strides))
        with _damage_of(path, layout.name):
            _check_tiling(layout.shape, parts)
        named = (layout.name, layout.dtype, layout.shape)
        if not parts:
            joined = whole_array(*named, (0, 0))
        elif len(parts) > 1:
            joined = parted_array(*named, ArrayParts(tuple(parts)))
        else:
            part = parts[0]
            is_in_c_order = part.strides == strides(layout.shape, itemsize(layout.dtype))
            joined = whole_array(
                *named, (part.file, part.offset), None if is_in_c_order else part.strides
            )
        tensors.append(joined)
    headers: list[FileHeader] = []
    for file in numbers:
        stat = stat_file(folder / file)
        headers.append(
            FileHeader(folder / file, stat.st_size, stat.st_mtime_ns, metadata_digest, ())
        )
    return DcpFolder(
        folder,
        tuple(headers),
        tuple(tensors),
        non_tensors=tuple(non_tensors),
        archives=archives,
    )


def read_dcp_value(folder: DcpFolder, name: str) -> object:
    """Return a value other than a tensor."""
    if name not in folder.archives:
        with _damage_of(folder.path / METADATA_FILE):
            raise ValueError(f"it has no {quote_name(name)}")
    path, start, length = folder.archives[name]
    with _damage_of(path, name), open_regular_file(path) as file:
        return to_python(TorchArchive(io.BufferedReader(_Window(file, start, length))))


@contextmanager
def _damage_of(path: AnyPath, name: str = "") -> Iterator[None]:
    """Raise PrepError for the errors of reading a file, with the name of the tensor or value."""
    try:
        yield
    except OSError as error:
        raise unreadable_error(path, error) from error
    except ValueError as error:
        why = f"{quote_name(name)}: {error}" if name else str(error)
        what = f"{path.parent.name}/{path.name} is broken"
        raise DamagedError(what, why, damage_hint(path, error)) from error


class _Window(io.RawIOBase):
    """A byte range of a file as a file object."""

    # `pieces` are bytes of the file in memory, with their offsets.
    def __init__(
        self, file: BinaryIO, start: int, length: int, pieces: Sequence[tuple[int, bytes]] = ()
    ) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._pieces = pieces
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}
        self._position = max(0, origins[whence] + offset)
        return self._position

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read bytes at the position, at most to the end of the window. A piece in memory may have fewer."""
        nbytes = min(len(buffer), max(0, self._length - self._position))
        offset = self._start + self._position
        for start, content in self._pieces:
            if start <= offset < start + len(content):
                data = content[offset - start : offset - start + nbytes]
                break
        else:
            self._file.seek(offset)
            data = self._file.read(nbytes)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


# The metadata


def _read_metadata(path: AnyPath) -> tuple[dict[str, PickledCall], _Ranges, str]:
    """Return the entries of a checkpoint by name, the byte ranges of the archives, and the digest of the file."""
    data = read_small_file(path, MAX_NBYTES)
    entries: dict[str, PickledCall] = {}
    with _damage_of(path):
        try:
            root = interpret_pickle(data, _ALLOWED_NAMES, max_opcodes=MAX_METADATA_OPCODES)
        except UnexpectedNameError as error:
            what = f"{path.name} refers to {quote_name(error.name)}"
            why = "DCP writes no such name, and prep runs no code of a file"
            raise PrepError(what, why, "save the model again") from error
        metadata = _attributes(root)
        listed = metadata.get("state_dict_metadata")
        if not isinstance(listed, PickledMapping):
            raise ValueError("it has no list of tensors")
        for name, item in listed.items:
            if not isinstance(name, str) or not isinstance(item, PickledCall):
                why = "its list of tensors does not have the form that PyTorch writes"
                raise ValueError(why)
            if name in entries:
                raise ValueError(f"it has {quote_name(name)} twice")
            entries[name] = item
        ranges: _Ranges = {}
        value = metadata.get("storage_data")
        if not isinstance(value, PickledMapping):
            raise ValueError("it has no list of byte ranges")
        for key, item in value.items:
            index = _attributes(key)
            info = _attributes(item)
            name = index.get("fqn")
            file = info.get("relative_path")
            start = info.get("offset")
            length = info.get("length")
            if not isinstance(name, str) or not isinstance(file, str):
                raise ValueError("it has a byte range without a name")
            if type(start) is not int or type(length) is not int or min(start, length) < 0:
                raise ValueError(f"the byte range of {quote_name(name)} is invalid")
            if info.get("transform_descriptors"):
                raise ValueError(f"{quote_name(name)} is compressed, which prep does not support")
            if Path(file).name != file:
                where = f"its file {quote_name(file)} is outside of the folder"
                raise ValueError(f"{quote_name(name)}: {where}")
            # Values other than tensors have no offsets.
            offsets = None if index.get("offset") is None else parse_counts(index["offset"])
            ranges[name, offsets] = (file, start, length)
    return entries, ranges, record_digest(data)


def _attributes(value: object) -> dict[str, object]:
    state = value.state if isinstance(value, PickledCall) else None
    if not isinstance(state, PickledMapping):
        raise ValueError("it has an object without attributes")
    return {name: attribute for name, attribute in state.items if isinstance(name, str)}


# Tensors


@dataclass(frozen=True, slots=True)
class _BoxArchive:
    """A box of a tensor, and the byte range of its archive in a file."""

    name: str
    dtype: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    first: int
    length: int

    @property
    def stop(self) -> int:
        return self.first + self.length

    @property
    def box(self) -> Box:
        return tuple((first, first + extent) for first, extent in zip(self.start, self.shape))


@dataclass(frozen=True, slots=True)
class _TensorLayout:
    """A tensor in the metadata. Empty boxes are left out."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[_BoxArchive, ...]


def _parse_tensor(name: str, entry: PickledCall, ranges: _Ranges) -> _TensorLayout:
    """Return the boxes of a tensor in the metadata."""
    if entry.callee.qualified_name != _TENSOR:
        raise ValueError(f"it is a {entry.callee.qualified_name}")
    attributes = _attributes(entry)
    shape = parse_counts(attributes.get("size"))
    properties = attributes.get("properties")
    state = properties.state if isinstance(properties, PickledCall) else None
    values: Iterable[object] = state if isinstance(state, tuple) else ()
    if isinstance(state, PickledMapping):
        values = [value for _, value in state.items]
    for value in values:
        if isinstance(value, PickledName) and value.qualified_name in DTYPES:
            dtype = DTYPES[value.qualified_name]
            break
    else:
        raise ValueError("it has no dtype that prep supports")
    chunks = attributes.get("chunks")
    if not isinstance(chunks, list):
        raise ValueError("it has no boxes")
    boxes: list[_BoxArchive] = []
    for chunk in chunks:
        chunk_attributes = _attributes(chunk)
        start = parse_counts(chunk_attributes.get("offsets"))
        box_shape = parse_counts(chunk_attributes.get("sizes"))
        if (name, start) not in ranges:
            raise ValueError(f"its box at {list(start)} has no byte range")
        if 0 not in box_shape:
            boxes.append(_BoxArchive(name, dtype, start, box_shape, *ranges[name, start]))
    return _TensorLayout(name, dtype, shape, tuple(boxes))


def _read_archives(folder: AnyPath, boxes: Iterable[_BoxArchive]) -> dict[_BoxArchive, Array]:
    """Read the headers of boxes in the order of their bytes. Files in a store are read several at a time."""
    in_order = sorted(boxes, key=lambda box: (box.file, box.first))
    runs: list[list[_BoxArchive]] = []
    for _, boxes_of_file in itertools.groupby(in_order, key=lambda box: box.file):
        while run := list(itertools.islice(boxes_of_file, _BOXES_PER_RUN)):
            runs.append(run)

    def read(run: list[_BoxArchive]) -> list[Array]:
        path = folder / run[0].file
        headers: list[Array] = []
        nbytes = stat_file(path).st_size
        with (
            _damage_of(path, run[0].name),
            open_regular_file(path, buffering=_ARCHIVE_END_NBYTES) as file,
        ):
            for box in run:
                with _damage_of(path, box.name):
                    if box.stop > nbytes:
                        raise CutShortError(f"it is cut short: it ends before byte {box.stop:,}")
            pieces = _read_archive_ends(path, run) if isinstance(path, StorePath) else ()
            for box in run:
                with _damage_of(path, box.name):
                    window = _Window(file, box.first, box.length, pieces)
                    archive = TorchArchive(io.BufferedReader(window))
                    # Its offset counts from the start of the archive.
                    tensor = archive.find_tensor(archive.root)
                    if (tensor.dtype, tensor.shape) != (box.dtype, box.shape):
                        stored = f"{tensor.dtype} {list(tensor.shape)}"
                        expected = f"{box.dtype} {list(box.shape)}"
                        raise ValueError(f"it has {stored} where {expected} should be")
                    headers.append(tensor)
        return headers

    headers: dict[_BoxArchive, Array] = {}
    for run, run_headers in zip(runs, read_each(read, runs, is_remote([folder]))):
        headers.update(zip(run, run_headers))
    return headers


def _read_archive_ends(path: StorePath, boxes: Sequence[_BoxArchive]) -> list[tuple[int, bytes]]:
    """Return the first and last bytes of archives with their offsets in the file.

    One request reads the end of an archive and the start of the next one.
    """
    ranges: list[tuple[int, int]] = []
    for box in boxes:
        first_stop = min(box.stop, box.first + _ARCHIVE_END_NBYTES)
        last_start = max(box.first, box.stop - _ARCHIVE_END_NBYTES)
        for start, stop in ((box.first, first_stop), (last_start, box.stop)):
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
            else:
                ranges.append((start, stop))
    return [(start, path.read_exactly(start, stop)) for start, stop in ranges]


def _check_tiling(shape: tuple[int, ...], parts: Sequence[ArrayPart]) -> None:
    """Raise ValueError unless boxes cover every element of a tensor once."""
    # The edges of all boxes cut each dim into intervals, e.g. the boxes [0, 4) and [4, 7) of 7 rows. Each cell of
    # this grid must be in one box.
    if math.prod(shape) == 0:
        return
    edges: list[list[int]] = []
    for dim, extent in enumerate(shape):
        ends = {0, extent}
        for part in parts:
            ends |= {*part.box[dim]}
        if max(ends) > extent:
            raise ValueError("a box of it ends outside of the tensor")
        edges.append(sorted(ends))
    num_cells = math.prod(len(line) - 1 for line in edges)
    if num_cells > MAX_CELLS:
        raise ValueError(f"its boxes make a grid of {num_cells:,} cells")
    covered: set[tuple[int, ...]] = set()
    for part in parts:
        ranges: list[range] = []
        for line, (start, stop) in zip(edges, part.box):
            ranges.append(range(line.index(start), line.index(stop)))
        for cell in itertools.product(*ranges):
            if cell in covered:
                raise ValueError("two boxes of it overlap")
            covered.add(cell)
    if len(covered) < num_cells:
        raise ValueError("its boxes do not cover all elements")


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
        numbers = pickle_value((0,) * len(entry.shape))
        zeros = memo.refer(pickle_call("torch Size", [numbers]))
        index = {"fqn": name, "index": b"N", "offset": b"N"}
        if entry.dtype:
            index = {"fqn": name, "index": pickle_value(0), "offset": zeros}
            size = memo.refer(pickle_call("torch Size", [pickle_value(entry.shape)]))
            chunk = memo.instance("ChunkStorageMetadata", {"offsets": zeros, "sizes": size})
            layout = pickle_call("torch.serialization _get_layout", [pickle_value("torch.strided")])
            memory_format = pickle_call(f"{DCP_MODULE} _MEM_FORMAT_ENCODING", [pickle_value(0)])
            false = pickle_value(False)
            state = [pickle_global(f"torch {entry.dtype}"), layout, false, memory_format, false]
            properties = pickle_global(f"{DCP_MODULE} TensorProperties")
            fields = {
                "properties": memo.refer(properties + b")\x81" + pickle_tuple(state) + b"b"),
                "size": size,
                "chunks": b"](" + chunk + b"e",
            }
            stored += [name, memo.instance("TensorStorageMetadata", fields)]
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
