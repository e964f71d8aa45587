"""Read a torch distributed checkpoint (DCP): the boxes of each tensor, and their places in the files of the ranks.

`.metadata` is a pickle of dataclasses, interpreted without running code. It has the boxes of each tensor (one per rank
that saved a part) and for each box a byte range of a file. The range is an archive of one tensor, as
`torch.save(tensor)` writes it. Format: `torch/distributed/checkpoint/metadata.py` and `filesystem.py` of PyTorch 2.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from prepcli.core.errors import DamagedError, PrepError
from prepcli.engine.digest import digest
from prepcli.formats.shard_index import damage_hint
from prepcli.formats.torch_files import read_archived_tensor
from prepcli.formats.torch_objects import read_archived_object
from prepcli.formats.torch_pickle import (
    MAPPING_TYPES,
    MAX_NBYTES,
    BoundedReader,
    PickledCall,
    PickledMapping,
    PickledName,
    UnexpectedNameError,
    interpret_pickle,
)
from prepcli.formats.torch_state import DTYPES, SIZE_TYPE
from prepcli.formats.untrusted import (
    CutShortError,
    quote_name,
    read_small_file,
    stat_file,
    unreadable_error,
)
from prepcli.stores.reading import open_regular_file

METADATA_FILE = ".metadata"
SUFFIX = ".distcp"
# A tensor takes about 110 as PyTorch writes it. DeepSeek-V3 has 46,000 tensors.
MAX_METADATA_OPCODES = 6_000_000
# Maximum number of cells of a grid. The edges of a tensor's boxes divide the tensor into the cells.
MAX_CELLS = 1 << 20
_MODULE = "torch.distributed.checkpoint.metadata."
_TENSOR = f"{_MODULE}TensorStorageMetadata"
_BYTES = f"{_MODULE}BytesStorageMetadata"
_ALLOWED_NAMES = frozenset(
    {
        *MAPPING_TYPES,
        *DTYPES,
        *(f"{_MODULE}{name}" for name in ("Metadata", "ChunkStorageMetadata", "MetadataIndex")),
        *(
            f"{_MODULE}{name}"
            for name in ("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
        ),
        _TENSOR,
        _BYTES,
        SIZE_TYPE,
        "pathlib.PosixPath",
        # Python 3.11.0 to 3.11.3 pickles a member of an enum as a call of it, e.g. of the memory format.
        "builtins.getattr",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
    }
)
# Name of a file -> number.
_FileNumbers = dict[str, int]
# (name, offsets of a box) -> file, start and length of its archive. Other values have no offsets.
_Ranges = Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]


@dataclass(frozen=True, slots=True)
class DcpBox:
    """A box of a tensor and its elements in a file.

    Attributes:
        start: First index of the box along each dim.
        shape: Shape of the box.
        file: Number of the file.
        offset: Offset of the first element in the file.
        byte_strides: Bytes between elements along each dim, or None for C order.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: int
    offset: int
    byte_strides: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor. Its boxes cover every element once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[DcpBox, ...]


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """A checkpoint.

    Attributes:
        tensors: Its tensors.
        files: Files of the tensors, by number.
        non_tensors: Names of its other values.
        digest: Digest of `.metadata`.
        archives: File, first byte and length of the archive of each other value, by name.
    """

    tensors: tuple[DcpTensor, ...]
    files: tuple[Path, ...]
    non_tensors: tuple[str, ...]
    digest: str
    archives: Mapping[str, tuple[Path, int, int]]


def read_dcp_folder(folder: Path) -> DcpFolder:
    """Read the metadata of a checkpoint, and the header of each box.

    Raises:
        PrepError: A file is missing, unreadable or invalid. No other exception is raised, whatever the files hold.
    """
    path = folder / METADATA_FILE
    entries, ranges, metadata_digest = _read_metadata(path)
    numbers: _FileNumbers = {}
    tensors: list[DcpTensor] = []
    non_tensors: list[str] = []
    for name, entry in entries:
        if entry.callee.qualified_name == _BYTES:
            non_tensors.append(name)
            continue
        try:
            tensors.append(_read_tensor(folder, name, entry, ranges, numbers))
        except ValueError as error:
            raise _damaged_error(path, error, f"{quote_name(name)}: {error}") from error
    files = tuple(folder / file for file in numbers)
    archives: dict[str, tuple[Path, int, int]] = {}
    for name in non_tensors:
        if (name, None) in ranges:
            file, start, length = ranges[name, None]
            archives[name] = (folder / file, start, length)
    return DcpFolder(tuple(tensors), files, tuple(non_tensors), metadata_digest, archives)


def read_dcp_ranges(folder: Path) -> list[tuple[str, int, int]]:
    """Return the file, the first byte and the length of each archive. Only the metadata is read.

    Raises:
        PrepError: The metadata is missing, unreadable or invalid.
    """
    _, ranges, _ = _read_metadata(folder / METADATA_FILE)
    return list(ranges.values())


def _read_metadata(path: Path) -> tuple[list[tuple[str, PickledCall]], _Ranges, str]:
    """Return the entries of a checkpoint by name, the byte ranges of the archives, and the digest of the file."""
    data = read_small_file(path, MAX_NBYTES)
    try:
        reader = BoundedReader.from_bytes(data)
        root = interpret_pickle(reader, _ALLOWED_NAMES, max_opcodes=MAX_METADATA_OPCODES).root
        metadata = _object_attributes(root)
        entries = list(_dict_items(metadata.get("state_dict_metadata")))
        ranges = dict(_iter_ranges(metadata.get("storage_data")))
    except UnexpectedNameError as error:
        why = "DCP writes no such name, and prep runs no code of a file"
        raise PrepError(
            f"{path.name} refers to `{error.name}`", why, "save the model again"
        ) from error
    except ValueError as error:
        raise _damaged_error(path, error) from error
    return entries, ranges, digest(data)


def read_dcp_value(folder: DcpFolder, name: str) -> object:
    """Return a value other than a tensor.

    Raises:
        PrepError: It is missing or damaged.
    """
    if name not in folder.archives:
        error = ValueError(f"it has no {quote_name(name)}")
        raise _damaged_error(folder.files[0].parent / METADATA_FILE, error)
    path, start, length = folder.archives[name]
    try:
        with open_regular_file(path) as file:
            window = io.BufferedReader(_Window(file, start, length))
            return read_archived_object(window).root
    except OSError as error:
        raise unreadable_error(path, error) from error
    except (UnexpectedNameError, ValueError) as error:
        raise _damaged_error(path, error, f"{quote_name(name)}: {error}") from error


def _damaged_error(path: Path, error: Exception, why: str = "") -> DamagedError:
    """Return the error for a broken file. `why` replaces the text of the error."""
    what = f"{path.parent.name}/{path.name} is broken"
    return DamagedError(what, why or str(error), damage_hint(path, error))


def _dict_items(value: object) -> Iterator[tuple[str, PickledCall]]:
    """Yield the objects of a mapping by name. Raise ValueError for a repeated name."""
    if not isinstance(value, PickledMapping):
        raise ValueError("it has no list of tensors")
    names: set[str] = set()
    for name, item in value.items:
        if not isinstance(name, str) or not isinstance(item, PickledCall):
            raise ValueError("its list of tensors does not have the form that PyTorch writes")
        if name in names:
            raise ValueError(f"it has {quote_name(name)} twice")
        names.add(name)
        yield name, item


def _object_attributes(value: object) -> dict[str, object]:
    """Return the attributes of a pickled dataclass."""
    state = value.state if isinstance(value, PickledCall) else None
    if not isinstance(state, PickledMapping):
        raise ValueError("it has an object without attributes")
    attributes: dict[str, object] = {}
    for name, attribute in state.items:
        if isinstance(name, str):
            attributes[name] = attribute
    return attributes


def _size_numbers(value: object) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    if not isinstance(value, PickledCall) or value.callee.qualified_name != SIZE_TYPE:
        raise ValueError("it has a shape of another type than torch.Size")
    numbers = value.args[0] if value.args else ()
    if not isinstance(numbers, tuple | list):
        raise ValueError("it has a shape without numbers")
    counts: list[int] = []
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError(f"it has the extent {number!r:.40}")
        counts.append(number)
    return tuple(counts)


def _iter_ranges(
    value: object,
) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]]:
    """Yield the byte range of each box. A box is the part of a tensor from one rank.

    Yields:
        Name of the tensor and index of the box's first element, then file, first byte and length of the range.
    """
    if not isinstance(value, PickledMapping):
        raise ValueError("it has no list of byte ranges")
    for key, item in value.items:
        index = _object_attributes(key)
        info = _object_attributes(item)
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
        # Values other than tensors have no offsets.
        offsets = None
        if index.get("offset") is not None:
            offsets = _size_numbers(index["offset"])
        elif Path(file).name != file:
            raise ValueError(f"the file {quote_name(file)} is outside of the folder")
        yield (name, offsets), (file, start, length)


def _read_tensor(
    folder: Path, name: str, entry: PickledCall, ranges: _Ranges, numbers: _FileNumbers
) -> DcpTensor:
    """Read the boxes of a tensor, and number their files."""
    if entry.callee.qualified_name != _TENSOR:
        raise ValueError(f"it is a {entry.callee.qualified_name}")
    attributes = _object_attributes(entry)
    shape = _size_numbers(attributes.get("size"))
    dtype = _read_dtype(attributes.get("properties"))
    chunks = attributes.get("chunks")
    if not isinstance(chunks, list):
        raise ValueError("it has no boxes")
    boxes: list[DcpBox] = []
    for chunk in chunks:
        chunk_attributes = _object_attributes(chunk)
        start = _size_numbers(chunk_attributes.get("offsets"))
        box_shape = _size_numbers(chunk_attributes.get("sizes"))
        if (name, start) not in ranges:
            raise ValueError(f"its box at {list(start)} has no byte range")
        if 0 in box_shape:
            continue
        file, first, length = ranges[name, start]
        if Path(file).name != file:
            raise ValueError(f"its file {quote_name(file)} is outside of the folder")
        try:
            offset, strides = _read_box(folder / file, (first, length), dtype, box_shape)
        except ValueError as error:
            why = f"{quote_name(name)}: {error}"
            raise _damaged_error(folder / file, error, why) from error
        number = numbers.setdefault(file, len(numbers))
        boxes.append(DcpBox(start, box_shape, number, offset, strides))
    _check_tiling(shape, boxes)
    return DcpTensor(name, dtype, shape, tuple(boxes))


def _read_dtype(properties: object) -> str:
    """Return the dtype in pickled TensorProperties, the first item of their state."""
    state = properties.state if isinstance(properties, PickledCall) else None
    if isinstance(state, PickledMapping):
        values = [value for _, value in state.items]
    elif isinstance(state, tuple):
        values = list(state)
    else:
        values = []
    for value in values:
        if isinstance(value, PickledName) and value.qualified_name in DTYPES:
            return DTYPES[value.qualified_name]
    raise ValueError("it has no dtype that prep supports")


def _read_box(
    path: Path, byte_range: tuple[int, int], dtype: str, shape: tuple[int, ...]
) -> tuple[int, tuple[int, ...] | None]:
    """Return the offset of a box's first element in its file, and its strides."""
    start, length = byte_range
    if start + length > stat_file(path).st_size:
        raise CutShortError(f"it is cut short: it ends before byte {start + length:,}")
    try:
        with open_regular_file(path) as file:
            view, offset = read_archived_tensor(io.BufferedReader(_Window(file, start, length)))
    except OSError as error:
        raise unreadable_error(path, error) from error
    if (view.dtype, view.shape) != (dtype, shape):
        stored = f"{view.dtype} {list(view.shape)}"
        raise ValueError(f"it has {stored} where {dtype} {list(shape)} should be")
    return start + offset, view.byte_strides


def _check_tiling(shape: tuple[int, ...], boxes: list[DcpBox]) -> None:
    """Raise ValueError unless boxes cover every element of a tensor once."""
    # The edges of all boxes cut each dim into intervals, e.g. the boxes [0, 4) and [4, 7) of 7 rows. Each cell of
    # this grid must be in one box.
    if math.prod(shape) == 0:
        return
    edges: list[list[int]] = []
    for dim, extent in enumerate(shape):
        ends = {0, extent}
        for box in boxes:
            ends |= {box.start[dim], box.start[dim] + box.shape[dim]}
        if max(ends) > extent:
            raise ValueError("a box of it ends outside of the tensor")
        edges.append(sorted(ends))
    num_cells = math.prod(len(line) - 1 for line in edges)
    if num_cells > MAX_CELLS:
        raise ValueError(f"its boxes make a grid of {num_cells:,} cells")
    covered: set[tuple[int, ...]] = set()
    for box in boxes:
        ranges: list[range] = []
        for line, start, extent in zip(edges, box.start, box.shape):
            ranges.append(range(line.index(start), line.index(start + extent)))
        for cell in itertools.product(*ranges):
            if cell in covered:
                raise ValueError("two boxes of it overlap")
            covered.add(cell)
    if len(covered) < num_cells:
        raise ValueError("its boxes do not cover all elements")


class _Window(io.RawIOBase):
    """A byte range of a file as a file object."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to an offset of the window."""
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}
        self._position = max(0, origins[whence] + offset)
        return self._position

    def tell(self) -> int:
        """Return the position in the window."""
        return self._position

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read bytes at the position, at most to the end of the window."""
        nbytes = min(len(buffer), max(0, self._length - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(nbytes)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
