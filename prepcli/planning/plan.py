"""A plan of a conversion, as pure data. Equal plans write the same bytes.

A conversion streams each tensor in C order, from its locations in the source to its locations in the output. A
location is an array, or a part of one (`planning.arrays`). A tensor's digest therefore does not depend on how it is
stored, and one engine saves, exports and reshards. Padding rows form a separate stream.

Manifests, notes and uploads record the digest of a plan's text. Its class and field names are therefore part of the
formats on disk: they are fixed here and may differ from the names in code.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import sub
from typing import Any, ClassVar

from prepcli.algebra.axis_map import AxisMap, SizedAxis, TensorDim, TensorIndex
from prepcli.algebra.boxes import Box, Range, full_box
from prepcli.algebra.grids import ArrayParts, ChunkGrid, ChunkTable, StridedChunks, loop_sums
from prepcli.core.formatting import count_text
from prepcli.planning.arrays import Array, Locations, MappedArray
from prepcli.planning.item_storage import Compression, ItemStorage, recorded_storage
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.tensors import DEFAULT_DIGEST, itemsize

# Classes with a text of their own. A tensor that is a whole array, a view or a part of an array has the name that its
# class had in the first release.
OWN_TEXTS = (Array, MappedArray, ChunkTable, ArrayParts)
# Fields added after the first release. Without a value they are left out of the text, so that digests of older plans on
# disk stay equal.
ADDED_FIELDS = {"columns", "item"}
# Name of each encoded field in code, and its name in the text with an equals sign, by class. They are computed once:
# a plan of a large model has 10^5 regions to encode.
_LABELS: dict[type, list[tuple[str, str]]] = {}


class ValueOperation(ABC):
    """A step from the read values of a stream to the written values. The engine has the classes.

    Attributes:
        makes_rows: Whether it generates the values instead of reading them.
    """

    __slots__ = ()
    makes_rows: ClassVar[bool] = False

    def __str__(self) -> str:
        """Return the operation in the line of a plan, or an empty string."""
        return ""

    @property
    def averages_rows(self) -> bool:
        """Whether it needs the true rows of its tensor, which another stream reads."""
        return False

    def written_dtype(self, dtype: str) -> str:
        """Return the dtype of the values after the operation, given the one before."""
        return dtype

    def kept_nbytes(self, stream: Stream) -> int:
        """Return its memory without the slabs of a stream."""
        return 0

    @abstractmethod
    def encode(self, stream: Stream) -> dict[str, str]:
        """Return the fields of the operation in the text of a stream."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Consecutive rows of a tensor, moved in order. Each stream has one digest.

    Attributes:
        name: Bare name of the tensor.
        dtype: Dtype of the tensor where it is read. Sizes and offsets count bytes of this dtype.
        shape: Shape of the tensor. A 0-d tensor has one row.
        rows: Range of rows to move.
        reads: Where the rows are read, or empty if they are filled.
        writes: Where the rows are written, or empty if they are only digested.
        operations: Steps from the values read to the values written, in order. Empty to keep the values.
        digest_algorithm: Algorithm of its digest. An output has one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: Range
    reads: Locations
    writes: Locations
    operations: tuple[ValueOperation, ...] = field(default=(), repr=False)
    digest_algorithm: str = field(default=DEFAULT_DIGEST, repr=False)

    @property
    def is_generated(self) -> bool:
        """Whether an operation generates the rows."""
        return any(operation.makes_rows for operation in self.operations)

    @property
    def is_changed(self) -> bool:
        """Whether the written values may differ from the read ones."""
        return bool(self.operations) and not self.is_generated

    @property
    def averages_rows(self) -> bool:
        """Whether the rows need the true rows of the tensor, which another stream reads."""
        return any(operation.averages_rows for operation in self.operations)

    @property
    def kept_nbytes(self) -> int:
        """Memory of the operations without the slabs."""
        return sum(operation.kept_nbytes(self) for operation in self.operations)

    @property
    def written_dtype(self) -> str:
        """Dtype of the written values."""
        dtype = self.dtype
        for operation in self.operations:
            dtype = operation.written_dtype(dtype)
        return dtype

    @property
    def written_nbytes(self) -> int:
        """Number of bytes to write."""
        dtype = self.written_dtype
        if dtype == self.dtype:
            return self.nbytes
        return self.nbytes // itemsize(self.dtype) * itemsize(dtype)

    @property
    def row_nbytes(self) -> int:
        """Bytes per row."""
        return math.prod(self.shape[1:]) * itemsize(self.dtype)

    @property
    def byte_range(self) -> Range:
        """Byte range of the rows in the tensor."""
        return self.rows[0] * self.row_nbytes, self.rows[1] * self.row_nbytes

    @property
    def nbytes(self) -> int:
        """Number of bytes in the rows."""
        return (self.rows[1] - self.rows[0]) * self.row_nbytes

    @property
    def box(self) -> Box:
        """Box of the streamed elements."""
        if not self.shape:
            return ()
        return (self.rows, *full_box(self.shape[1:]))


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A source file with its size, time and digest, to detect a later change.

    Attributes:
        path: Path relative to the source.
        size: Size in bytes.
        mtime_ns: Modification time.
        digest: XXH3-128 of its header, or of the index that points into it.
    """

    path: str
    size: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A data file to write.

    Attributes:
        path: Path relative to `Plan.item`.
        size: Size in bytes.
        header: First bytes of the file.
        constant_ranges: (offset, bytes) of other parts that do not come from tensors. Streams write the rest.
    """

    path: str
    size: int
    header: bytes = field(default=b"", repr=False)
    constant_ranges: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A small file to write: a config or a tokenizer.

    Attributes:
        path: Path relative to `Plan.item`.
        content: Content of the file, if it is not copied.
        copied_from: Path of the file to copy. It does not affect the plan's digest.
        stamp: Size and modification time of the copied file, so that another file is another plan.
        xxh3: Recorded digest of the copied file, compared when it is copied, or empty if there is none.
        make: Returns the content, if it follows from the source's files and takes long to make.
    """

    path: str
    content: bytes = b""
    copied_from: str = field(default="", repr=False)
    stamp: tuple[int, int] = (0, 0)
    xxh3: str = field(default="", repr=False)
    make: Callable[[], bytes] | None = field(default=None, repr=False, compare=False)

    def read_content(self) -> bytes:
        """Return the content of a file without a copied one."""
        if self.make is None:
            return self.content
        return self.make()


@dataclass(frozen=True, slots=True)
class PlacedChunks:
    """A box of a leaf's chunks at regular offsets.

    Attributes:
        first: Index of the first chunk.
        stop: Exclusive upper bound of the chunk indices, per dim.
        chunks: Where the chunks are stored.
    """

    first: tuple[int, ...]
    stop: tuple[int, ...]
    chunks: StridedChunks

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Return the index of every chunk, in C order."""
        return itertools.product(*map(range, self.first, self.stop))

    def offsets(self) -> Sequence[int]:
        """Return the offset of every chunk, in the order of `indices`."""
        counts = map(sub, self.stop, self.first)
        _, offset = self.chunks.find(self.first)
        return loop_sums([*zip(counts, self.chunks.strides)], offset)


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """A leaf to write.

    Attributes:
        path: Keys from the tree's root to the leaf. A number is an index of a list.
        dtype: Dtype of the written values.
        grid: Chunk grid.
        placed_chunks: Where the chunks are stored.
        item: Folder of the leaf's item in `Plan.item`. None for an output with one item.
    """

    path: tuple[str | int, ...]
    dtype: str
    grid: ChunkGrid
    placed_chunks: tuple[PlacedChunks, ...]
    item: str | None = None

    @property
    def name(self) -> str:
        """Dotted name of the leaf."""
        return ".".join(map(str, self.path))

    @property
    def chunk_nbytes(self) -> int:
        """Size of a chunk in bytes."""
        return math.prod(self.grid.chunk_shape) * itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the leaf in bytes, without the padding of edge chunks."""
        return math.prod(self.grid.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class DroppedTensor:
    """A source tensor, or rows or columns of one, dropped from the output.

    Attributes:
        name: Bare name of the tensor.
        nbytes: Size in bytes.
        rule: The rule that drops it.
        rows: Range of dropped rows.
        columns: Range of dropped columns. Without rows and columns the whole tensor is dropped.
    """

    name: str
    nbytes: int
    rule: str
    rows: Range | None = None
    columns: Range | None = None

    def record(self, display_name: str) -> dict[str, object]:
        """Return the entry in the manifest of the output."""
        fields = {**asdict(self), "name": display_name}
        if self.columns is None:
            del fields["columns"]
        return fields


@dataclass(frozen=True, slots=True)
class EqualityCheck:
    """Two tensors, such as tied weights, that must be equal bit for bit. The conversion stops if they differ."""

    name: str
    duplicate_of: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversion: all files, streams and checks. `print(plan)` lists the files and the tensors.

    Attributes:
        command: Name of the command.
        request: The command line, without options at their defaults.
        source_name: The source as the user named it.
        source_files: Files to read.
        streams: Tensors to move, in order.
        files: Data files to write.
        small_files: Configs and tokenizer files to write.
        leaves: Leaves to write, or empty if tensors are written to files as they are.
        dropped: Source tensors dropped from the output.
        checks: Pairs of tensors that must be equal.
        settings: The manifest's keys that describe the model.
        display_names: Full names of tensors, by bare name, where the two differ.
        item: Folder in the output that contains all files except the manifest and the metadata of a step, or empty for
            the output itself.
        compression: Compression of the chunks, or None for raw chunks.
        empty_nodes: Paths of the tree's nodes without leaves. The layout determines them.
    """

    command: str
    request: str
    source_name: str
    source_files: tuple[SourceFile, ...]
    streams: tuple[Stream, ...]
    files: tuple[OutputFile, ...]
    small_files: tuple[SmallFile, ...] = ()
    leaves: tuple[OutputLeaf, ...] = ()
    dropped: tuple[DroppedTensor, ...] = ()
    checks: tuple[EqualityCheck, ...] = ()
    settings: Manifest = field(default_factory=Manifest)
    display_names: Mapping[str, str] = field(default_factory=dict)
    item: str = ""
    compression: Compression | None = None
    empty_nodes: tuple[tuple[str | int, ...], ...] = field(default=(), repr=False)

    @property
    def read_nbytes(self) -> int:
        """Number of tensor bytes to read."""
        return sum(stream.nbytes for stream in self.streams if stream.reads)

    @property
    def write_nbytes(self) -> int:
        """Number of tensor bytes to write."""
        return sum(stream.written_nbytes for stream in self.streams if stream.writes)

    @property
    def storage(self) -> ItemStorage:
        """Storage of the leaves."""
        return recorded_storage(self.settings.get("storage"))

    @property
    def items(self) -> dict[str | None, tuple[OutputLeaf, ...]]:
        """The leaves of each item, by `OutputLeaf.item`. Empty for a plan without leaves."""
        items: dict[str | None, list[OutputLeaf]] = {}
        for leaf in self.leaves:
            items.setdefault(leaf.item, []).append(leaf)
        return {item: tuple(leaves) for item, leaves in items.items()}

    @property
    def chunk_count(self) -> int:
        """Number of chunks of all leaves."""
        return sum(math.prod(leaf.grid.chunk_counts) for leaf in self.leaves)

    def __repr__(self) -> str:
        """Return one line: command, source, and numbers of tensors, bytes and files to write."""
        tensors = len({stream.name for stream in self.streams if stream.writes})
        written = f"{count_text(tensors, 'tensor')}, {count_text(self.write_nbytes, 'byte')}"
        written += f" in {count_text(len(self.files), 'file')}"
        return f"<Plan {self.command} of {self.source_name}: {written}>"

    def __str__(self) -> str:
        """Return the line of `repr`, then one line per file, moved tensor and dropped tensor."""
        lines = [repr(self)]
        for file in self.files:
            lines.append(f"file  {file.path}  {count_text(file.size, 'byte')}")
        for stream in self.streams:
            dtypes = stream.dtype
            if stream.written_dtype != stream.dtype:
                dtypes += f" as {stream.written_dtype}"
            name = self.display_names.get(stream.name, stream.name)
            rows = f"rows {stream.rows[0]}:{stream.rows[1]}"
            size = count_text(stream.written_nbytes, "byte")
            parts = [f"{name}  {dtypes} {list(stream.shape)}", rows, size]
            parts += filter(None, map(str, stream.operations))
            lines.append(f"move  {'  '.join(parts)}")
        for tensor in self.dropped:
            lines.append(f"drop  {tensor.name}  {count_text(tensor.nbytes, 'byte')}  {tensor.rule}")
        return "\n".join(lines)


# Class -> its name in the text, and the fields whose names in the text differ from those in code
NAMES: dict[type, tuple[str, dict[str, str]]] = {
    Plan: (
        "Plan",
        {"source_files": "sources", "display_names": "names", "compression": "zstd_level"},
    ),
    SourceFile: ("SourceFile", {}),
    Stream: ("Stream", {"reads": "left", "writes": "right"}),
    ChunkGrid: ("Grid", {"chunk_shape": "chunk"}),
    StridedChunks: ("Lattice", {}),
    AxisMap: ("AxisMap", {"leaf_dims": "leaf", "name_parts": "name", "source_dims": "source"}),
    SizedAxis: ("Factor", {"fixed": "held"}),
    TensorDim: ("TensorDim", {}),
    TensorIndex: ("Choice", {"listed_indices": "numbers"}),
    OutputFile: ("OutFile", {"constant_ranges": "fixed"}),
    SmallFile: ("SmallFile", {}),
    OutputLeaf: ("Leaf", {"placed_chunks": "placed"}),
    PlacedChunks: ("Placed", {"chunks": "places"}),
    DroppedTensor: ("Dropped", {}),
    EqualityCheck: ("Same", {"duplicate_of": "other"}),
    Compression: ("Compression", {}),
}


for _cls, (_, _names) in NAMES.items():
    _LABELS[_cls] = [(f.name, f"{_names.get(f.name, f.name)}=") for f in fields(_cls) if f.repr]


def iter_text(plan: Plan) -> Iterator[str]:
    """Yield the text of a plan in pieces. The whole text of 200,000 tensors takes hundreds of megabytes."""
    # One axis map serves all tensors of a leaf: its text is made once.
    axis_map_texts: dict[int, str] = {}
    separator = f"{NAMES[Plan][0]}("
    for name, label in _LABELS[Plan]:
        value = getattr(plan, name)
        yield separator + label
        separator = ", "
        if type(value) is not tuple:
            yield encode_text(value, axis_map_texts)
            continue
        yield "("
        for number, item in enumerate(value):
            yield (", " if number else "") + encode_text(item, axis_map_texts)
        yield ",)" if len(value) == 1 else ")"
    yield ")"


def encode_text(value: Any, axis_map_texts: dict[int, str] | None = None) -> str:
    """Return the text that encodes an object of a plan, or a tuple of objects."""
    if axis_map_texts is None:
        axis_map_texts = {}
    if type(value) is tuple:
        end = ",)" if len(value) == 1 else ")"
        return "(" + ", ".join([encode_text(item, axis_map_texts) for item in value]) + end
    if type(value) is Array:
        return _array_text(value)
    if type(value) is MappedArray:
        return _mapped_array_text(value, axis_map_texts)
    if type(value) not in NAMES:
        # Of other types, such as int and str, `repr` is stable between versions of Python.
        return repr(value)
    if type(value) is AxisMap and id(value) in axis_map_texts:
        return axis_map_texts[id(value)]
    if type(value) is Compression and value.codec_name == "zstd":
        # The only codec of the first release: its text is the level.
        return repr(value.level)
    field_texts: list[str] = []
    for name, label in _LABELS[type(value)]:
        field = getattr(value, name)
        if field is None and name in ADDED_FIELDS:
            continue
        # Most fields are numbers and need no call.
        if type(field) is tuple or type(field) in NAMES:
            field_texts.append(label + encode_text(field, axis_map_texts))
        else:
            field_texts.append(label + repr(field))
    if type(value) is Stream:
        # The first release wrote these two fields of every stream.
        texts = {"fill": "None", "cast": "''"}
        for operation in value.operations:
            texts |= operation.encode(value)
        if value.digest_algorithm != DEFAULT_DIGEST:
            texts["digest"] = repr(value.digest_algorithm)
        field_texts += [f"{name}={text}" for name, text in texts.items()]
    text = f"{NAMES[type(value)][0]}({', '.join(field_texts)})"
    if type(value) is AxisMap:
        axis_map_texts[id(value)] = text
    return text


def _array_text(array: Array) -> str:
    """Return the text of a whole array or view. Its dtype and shape are in the text of the stream."""
    if isinstance(array.chunks, ArrayParts):
        return _parts_text(array.chunks)
    position = f"file={array.file}, offset={array.offset}"
    if array.strides is None:
        return f"Flat({position})"
    return f"Strided({position}, steps={array.strides})"


def _parts_text(chunks: ArrayParts) -> str:
    """Return the text of parts: (box, file, offset, strides) of each."""
    return f"Parts({', '.join(repr(tuple(part)) for part in chunks.parts)})"


def _mapped_array_text(tensor: MappedArray, axis_map_texts: dict[int, str]) -> str:
    """Return the text of a part of an array."""
    array = tensor.array
    chunks = array.chunks
    grid = array.grid
    if array.strides is not None and isinstance(chunks, StridedChunks):
        # Elements of a view may have gaps. In the text, each of them is a chunk.
        grid = ChunkGrid(array.shape, (1,) * len(array.shape))
        chunks = StridedChunks(chunks.file, chunks.offset, chunks.first, array.strides)
    if isinstance(chunks, ChunkTable):
        positions = {index: chunks.find(index) for index in chunks.indices()}
        places = f"Scatter(chunks={positions})"
    elif isinstance(chunks, ArrayParts):
        places = _parts_text(chunks)
    else:
        places = encode_text(chunks)
    fields = [
        f"row={encode_text(tensor.axis_map, axis_map_texts)}",
        f"at={encode_text(tensor.stacked_indices)}",
        f"grid={encode_text(grid)}",
        f"places={places}",
        f"itemsize={itemsize(array.dtype)}",
    ]
    if tensor.starts is not None:
        fields.append(f"starts={tensor.starts}")
    return f"Region({', '.join(fields)})"
