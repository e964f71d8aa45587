"""Bytes that are in no plain local file: of blobs, and of leaves in host memory.

A blob is a byte sequence such as a remote file, or values computed from stored arrays.

`DerivedArrays` is the blob of all computed values: decoded chunks, decoded weights, and arrays in another order. Its
operations compute blocks, and every reader of an opened list of blobs keeps its blocks in one cache with one limit.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from prepcli.algebra.boxes import Box, Range, full_box, slices
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.formatting import format_bytes
from prepcli.engine.files import PAGE, Files
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.planning.arrays import Array
from prepcli.planning.tensors import itemsize
from prepcli.stores.buffers import Blob, BlobReader, ByteArray, ClosedAfterBlock

DEFAULT_CACHE_NBYTES = 16 << 20
# Each block may keep a file open.
MAX_BLOCKS = 64
MAX_PANEL_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class MemoryBlob:
    """A few bytes in memory."""

    name: str
    content: bytes

    def open(self) -> MemoryBlob:
        """Return the blob itself."""
        return self

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes from `offset` on."""
        data = self.content[offset : offset + into.size]
        into[:] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        """Do nothing."""


class ByteBlock(Protocol):
    """A part of the bytes of an operation. `nbytes` is its memory use."""

    nbytes: int

    def read(self, start: int, into: ByteArray) -> bool:
        """Fill `into` with the block's bytes from `start` on.

        Returns:
            False if the block, which may only be read forward, is past `start` already.
        """
        ...

    def close(self) -> None:
        """Release the block's resources."""
        ...


class MemoryBlock:
    """A block in memory."""

    def __init__(self, data: ByteArray, nbytes: int | None = None) -> None:
        self._data = data
        self.nbytes = data.nbytes if nbytes is None else nbytes

    def read(self, start: int, into: ByteArray) -> bool:
        """Fill `into` with the bytes from `start` on."""
        into[:] = self._data[start : start + into.size]
        return True

    def close(self) -> None:
        """Release the memory."""
        self._data = self._data[:0]


class BlockCache:
    """Blocks with at most `most_nbytes` of memory together. The least recently used are closed first."""

    def __init__(self, max_nbytes: int = DEFAULT_CACHE_NBYTES) -> None:
        self.most_nbytes = max_nbytes
        self._held: OrderedDict[Hashable, ByteBlock] = OrderedDict()

    def get(self, key: Hashable) -> ByteBlock | None:
        """Return a block, or None if it is not cached."""
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def make_room(self, nbytes: int) -> None:
        """Close the least recently used blocks until `nbytes` are free.

        Raises:
            ValueError: The limit is below `nbytes`.
        """
        if nbytes > self.most_nbytes:
            needed = format_bytes(nbytes)
            limit = format_bytes(self.most_nbytes)
            raise ValueError(f"decoding it takes {needed}, the memory limit leaves {limit} for it")
        # Sums are cheap: the cache has at most MAX_BLOCKS blocks.
        blocks = self._held
        while blocks and (
            sum(block.nbytes for block in blocks.values()) + nbytes > self.most_nbytes
            or len(blocks) >= MAX_BLOCKS
        ):
            blocks.popitem(last=False)[1].close()

    def put(self, key: Hashable, block: ByteBlock) -> ByteBlock:
        """Add a block, and return it. A block above the limit is kept alone."""
        self.make_room(min(block.nbytes, self.most_nbytes))
        self._held[key] = block
        return block

    def drop(self, key: Hashable) -> None:
        """Close a block if it is cached."""
        if block := self._held.pop(key, None):
            block.close()

    def close(self) -> None:
        """Close all blocks."""
        while self._held:
            self._held.popitem()[1].close()


class Operation(ABC):
    """Computes bytes from stored arrays, in blocks of equal size. The last block may be smaller."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Number of bytes."""

    @abstractmethod
    def block_nbytes(self, memory_nbytes: int) -> int:
        """Return the size of a block, whose computation takes at most about half of the memory."""

    @abstractmethod
    def open_block(
        self, byte_range: Range, reader: DerivedReader, *, keep_whole: bool
    ) -> ByteBlock:
        """Open a block.

        Args:
            byte_range: Range of the block in the bytes of the operation.
            reader: Reads the stored arrays. Its cache limits the memory.
            keep_whole: Whether any part may be read again, in any order.
        """


class RowOperation(Operation):
    """Computes the rows of an array. All dims except the last are rows.

    Attributes:
        shape: Shape of the array.
        dtype: Dtype of the array.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Number of values in a row."""
        return math.prod(self.shape[-1:])

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def block_nbytes(self, memory_nbytes: int) -> int:
        """Return the size of a block."""
        return self.block_rows(memory_nbytes) * self.columns * itemsize(self.dtype)

    def open_block(
        self, byte_range: Range, reader: DerivedReader, *, keep_whole: bool
    ) -> ByteBlock:
        """Compute a block in memory."""
        row_nbytes = self.columns * itemsize(self.dtype)
        rows = (byte_range[0] // row_nbytes, byte_range[1] // row_nbytes)
        return MemoryBlock(self.read_rows(rows, reader).reshape(-1).view(np.uint8))

    @abstractmethod
    def block_rows(self, memory_nbytes: int) -> int:
        """Return the number of rows to compute at a time."""

    @abstractmethod
    def read_rows(self, rows: Range, reader: DerivedReader) -> np.ndarray:
        """Return rows of the array, contiguous."""


class CastRows(RowOperation):
    """Values of another operation, each rounded once more to a dtype."""

    def __init__(self, operation: RowOperation, dtype: str) -> None:
        self.operation = operation
        self.shape = operation.shape
        self.dtype = dtype

    def block_rows(self, memory_nbytes: int) -> int:
        """Return the number of rows to compute at a time."""
        return self.operation.block_rows(memory_nbytes)

    def read_rows(self, rows: Range, reader: DerivedReader) -> np.ndarray:
        """Return rounded rows."""
        values = self.operation.read_rows(rows, reader)
        return round_to_dtype(values.astype(np.float32), numpy_dtype(self.dtype))


# Without slots: a cached property needs the dict of the instance.
@dataclass(frozen=True)
class DerivedArrays:
    """A blob of the bytes that several operations compute, one operation after another.

    Attributes:
        name: Name in messages.
        operations: The operations.
        stored: Files and blobs that they read, by file number.
    """

    name: str
    operations: tuple[Operation, ...]
    stored: tuple[Path | Blob, ...] = ()

    @cached_property
    def offsets(self) -> list[int]:
        """Offset of each operation's bytes, then the size of the blob."""
        return [*itertools.accumulate((each.nbytes for each in self.operations), initial=0)]

    def number_at(self, offset: int) -> int:
        """Return the number of the operation with the byte at an offset."""
        return bisect.bisect_right(self.offsets, offset) - 1

    def open(self, cache: BlockCache | None = None) -> DerivedReader:
        """Open the arrays for reading, with a cache shared with other readers, or a small one of their own."""
        return DerivedReader(self, cache or BlockCache())


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A stored tensor as a matrix in C order. Formats group its dims into rows and columns."""

    tensor: Array
    rows: int
    columns: int


class _Panel(MemoryBlock):
    """Part of a stored matrix in memory: all of a range of rows, in a range of columns."""

    def __init__(self, rows: Range, columns: Range, octets: np.ndarray) -> None:
        super().__init__(octets.reshape(-1))
        self.rows = rows
        self.columns = columns
        self.octets = octets

    def contains(self, rows: Range, columns: Range) -> bool:
        """Return whether the panel has these rows, and at least these columns."""
        first, stop = self.columns
        return self.rows == rows and first <= columns[0] and columns[1] <= stop


class DerivedReader:
    """Reader of computed bytes, for one thread.

    Attributes:
        files: Reader of the stored files and blobs. It shares the cache.
        cache: Cache of the blocks.
    """

    def __init__(self, blob: DerivedArrays, cache: BlockCache) -> None:
        self._blob = blob
        self.cache = cache
        self.files = open_blobs(blob.stored, cache)
        self._panel_nbytes = min(cache.most_nbytes // 8, MAX_PANEL_NBYTES)

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes from `offset` on.

        Raises:
            PrepError: A stored array cannot be read, or its values are invalid.
        """
        done = 0
        while done < into.size:
            number = self._blob.number_at(offset + done)
            operation = self._blob.operations[number]
            position = offset + done - self._blob.offsets[number]
            block_nbytes = operation.block_nbytes(self.cache.most_nbytes)
            start = position % block_nbytes
            first = position - start
            stop = min(first + block_nbytes, operation.nbytes)
            part = into[done : done + stop - position]
            self._read_block(operation, (number, first), (first, stop), start, part)
            done += part.size

    def _read_block(
        self,
        operation: Operation,
        position: tuple[int, int],
        byte_range: Range,
        start: int,
        into: ByteArray,
    ) -> None:
        key = (self, *position)
        block = self.cache.get(key)
        if block is not None and block.read(start, into):
            return
        # A cached block that cannot go back to `start` is not read in the order of its bytes. It is computed once
        # more, and all of it is kept for later reads.
        is_reread = block is not None
        self.cache.drop(key)
        block = operation.open_block(byte_range, self, keep_whole=is_reread)
        self.cache.put(key, block).read(start, into)

    def read_matrix(
        self, matrix: StoredMatrix, rows: Range, columns: Range | None = None
    ) -> np.ndarray:
        """Return rows of a stored matrix in its dtype, or only some of their columns."""
        tensor = matrix.tensor
        dtype = numpy_dtype(tensor.dtype)
        if columns is None or columns == (0, matrix.columns):
            row_nbytes = matrix.columns * dtype.itemsize
            data = np.empty((rows[1] - rows[0]) * row_nbytes, np.uint8)
            self.files.read_at(tensor.file, tensor.offset + rows[0] * row_nbytes, data)
            return data.view(dtype).reshape(-1, matrix.columns)
        # A decoded row of a format that packs columns needs a few bytes of each stored row: such runs are read for
        # many decoded rows at once.
        key = (self, tensor.name)
        panel = self.cache.get(key)
        if not isinstance(panel, _Panel) or not panel.contains(rows, columns):
            self.cache.drop(key)
            panel = self._read_panel(matrix, rows, columns)
            self.cache.put(key, panel)
        first = columns[0] - panel.columns[0]
        part = panel.octets.view(dtype)[:, first : first + columns[1] - columns[0]]
        return np.ascontiguousarray(part)

    def _read_panel(self, matrix: StoredMatrix, rows: Range, columns: Range) -> _Panel:
        """Read the given columns of a matrix, and further columns after them up to the size of a panel."""
        tensor = matrix.tensor
        item_nbytes = itemsize(tensor.dtype)
        count = rows[1] - rows[0]
        width = max(columns[1] - columns[0], self._panel_nbytes // (count * item_nbytes))
        stop = min(columns[0] + width, matrix.columns)
        octets = np.empty((count, (stop - columns[0]) * item_nbytes), np.uint8)
        for number in range(count):
            first = (rows[0] + number) * matrix.columns + columns[0]
            offset = tensor.offset + first * item_nbytes
            self.files.read_at(tensor.file, offset, octets[number])
        return _Panel(rows, (columns[0], stop), octets)

    def close(self) -> None:
        """Close the files, and all blocks in the cache."""
        self.files.close()
        self.cache.close()


def open_blobs(
    blobs: Sequence[Path | Blob], cache: BlockCache | int = DEFAULT_CACHE_NBYTES
) -> Files | FilesAndBlobs:
    """Open files and blobs for reading by number.

    Args:
        blobs: Paths of files, and blobs.
        cache: Cache of the blocks of all blobs, or its maximum memory.

    Returns:
        A reader, to be closed as a context manager.
    """
    paths = [blob for blob in blobs if isinstance(blob, Path)]
    if len(paths) == len(blobs):
        return Files(paths)
    return FilesAndBlobs(blobs, BlockCache(cache) if isinstance(cache, int) else cache)


def can_share_reader(blobs: Sequence[object]) -> bool:
    """Return whether several threads can read through one reader: all are files of this machine."""
    # Each reader of blobs has a cache of decoded chunks, which must have room for the largest of them.
    return all(isinstance(blob, Path) for blob in blobs)


class FilesAndBlobs(ClosedAfterBlock):
    """A reader of numbered files and blobs."""

    # Blobs are decoded, or come from a store.
    are_in_memory: ClassVar[bool] = False

    def __init__(self, blobs: Sequence[Path | Blob], cache: BlockCache) -> None:
        # The reader of each blob, or the number of its file in `_files`.
        self._readers: list[int | BlobReader] = []
        paths = [blob for blob in blobs if isinstance(blob, Path)]
        # If a blob cannot be opened, the inner stack closes the ones before it. Otherwise `close` does.
        with contextlib.ExitStack() as stack:
            self._files = stack.enter_context(Files(paths))
            numbers = itertools.count()
            for blob in blobs:
                if isinstance(blob, Path):
                    self._readers.append(next(numbers))
                    continue
                reader = blob.open(cache) if isinstance(blob, DerivedArrays) else blob.open()
                stack.callback(reader.close)
                self._readers.append(reader)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the files and the readers of the blobs."""
        self._stack.close()

    def read_run(self, copy: StridedCopy, into: ByteArray) -> ByteArray:
        """Read one run. See `RunReader.read_run`."""
        reader = self._readers[copy.file]
        if isinstance(reader, int):
            return self._files.read_run(_with_file_number(copy, reader), into)
        page_offset = copy.file_offset % PAGE
        view = into[page_offset : page_offset + copy.width]
        reader.read_at(copy.file_offset, view)
        return view

    def read_runs(self, copies: Sequence[StridedCopy], into: ByteArray) -> ByteArray:
        """Read the runs of all copies. See `RunReader.read_runs`."""
        # Neighbours of one file are read together, which keeps the pages of `Files` aligned in `into`.
        filled = 0
        for reader, group in itertools.groupby(copies, lambda copy: self._readers[copy.file]):
            if isinstance(reader, int):
                file_copies = [_with_file_number(copy, reader) for copy in group]
                filled += self._files.read_runs(file_copies, into[filled:]).size
                continue
            for copy in group:
                for offset in copy.run_offsets():
                    reader.read_at(offset, into[filled : filled + copy.run_nbytes])
                    filled += copy.run_nbytes
        return into[:filled]

    def read_at(self, number: int, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes of a file or blob from `offset` on."""
        reader = self._readers[number]
        if isinstance(reader, int):
            self._files.read_at(reader, offset, into)
        else:
            reader.read_at(offset, into)


def _with_file_number(copy: StridedCopy, number: int) -> StridedCopy:
    """Return the same copy in another file."""
    return StridedCopy(copy.tensor_offset, number, copy.file_offset, copy.width, copy.dims)


@dataclass(frozen=True, slots=True)
class HostShard:
    """A part of a leaf to be saved.

    Attributes:
        box: Index range of the shard in the leaf, (start, stop) per axis.
        fetch: Returns a copy on the host, in C order. Later training steps do not change it.
            Called once at most.
    """

    box: Box
    fetch: Callable[[], np.ndarray]


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """A leaf to be saved.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        shards: The parts that this process saves. The shards of all processes cover every element
            once.
    """

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[HostShard, ...]

    @classmethod
    def whole(
        cls, shape: tuple[int, ...], dtype: str, *, fetch: Callable[[], np.ndarray]
    ) -> HostLeaf:
        """Return a leaf that this process saves as one shard."""
        return cls(shape, dtype, (HostShard(tuple((0, extent) for extent in shape), fetch),))

    @property
    def num_elements(self) -> int:
        """Number of elements in the shards of this process."""
        total = 0
        for shard in self.shards:
            total += math.prod(stop - start for start, stop in shard.box)
        return total

    def fetch(self) -> np.ndarray:
        """Copy the whole leaf to the host. Its shards must cover it."""
        # One process without splits has one shard. It is returned as it is, without a second copy.
        first, *others = self.shards
        values = first.fetch()
        if not others:
            return values
        whole = full_box(self.shape)
        leaf = np.empty(self.shape, values.dtype)
        leaf[slices(first.box, whole)] = values
        for shard in others:
            leaf[slices(shard.box, whole)] = shard.fetch()
        return leaf

    def on_host(self) -> HostLeaf:
        """Fetch all shards to host memory. Each fetched array can be read only once, to free its memory early."""
        # `pop` returns the array and drops the reference to it. A function that keeps the reference
        # would hold all arrays in host memory until the whole save is complete.
        shards = tuple(HostShard(shard.box, [shard.fetch()].pop) for shard in self.shards)
        return HostLeaf(self.shape, self.dtype, shards)


def fetch_shard(name: str, dtype: str, shard: HostShard) -> np.ndarray:
    """Fetch a shard of a leaf. Raise ValueError if it has another shape than its box, or another dtype."""
    # A wrong shape would shift all bytes behind it in the file.
    values = shard.fetch()
    shape = tuple(stop - start for start, stop in shard.box)
    if values.shape != shape or values.dtype != numpy_dtype(dtype):
        raise ValueError(
            f"a shard of {name} was fetched as {values.shape} {values.dtype}, not {shape}"
        )
    return values


class HostLeafReader:
    """A reader of leaves in host memory.

    A copy's file number is the number of a leaf, its file offset counts bytes of the leaf in C order. A leaf is fetched
    when its first byte is read, and released after its last byte. Every byte must be read exactly once.
    """

    def __init__(self, leaves: Sequence[HostLeaf]) -> None:
        self._leaves = leaves
        self._fetched: dict[int, ByteArray] = {}
        self._read_nbytes = [0] * len(leaves)

    def read_run(self, copy: StridedCopy, into: ByteArray) -> ByteArray:
        """Read one run. See `RunReader.read_run`."""
        page_offset = copy.file_offset % PAGE
        return self.read_runs((copy,), into[page_offset:])

    def read_runs(self, copies: Sequence[StridedCopy], into: ByteArray) -> ByteArray:
        """Read the runs of all copies. See `RunReader.read_runs`."""
        filled = 0
        for copy in copies:
            data = self._leaf_bytes(copy.file)
            # NumPy copies all runs in one assignment of a view. E.g. the view of 3 runs of 8 bytes, 100 bytes
            # apart, has the shape (3, 8) and the strides (100, 1).
            counts, steps = zip(*copy.repeats, (copy.run_nbytes, 1))
            runs = np.lib.stride_tricks.as_strided(
                data[copy.file_offset :], counts, steps, writeable=False
            )
            into[filled : filled + copy.nbytes].reshape(counts)[...] = runs
            filled += copy.nbytes
            self._read_nbytes[copy.file] += copy.nbytes
            if self._read_nbytes[copy.file] == data.size:
                del self._fetched[copy.file]
        return into[:filled]

    def _leaf_bytes(self, number: int) -> ByteArray:
        """Return the bytes of a leaf. Fetch it if necessary."""
        if number not in self._fetched:
            leaf = self._leaves[number]
            array = np.ascontiguousarray(leaf.fetch())
            # `ascontiguousarray` makes a 0-d array 1-d
            expected = (leaf.shape or (1,), numpy_dtype(leaf.dtype))
            if array.size and (array.shape, array.dtype) != expected:
                raise ValueError(
                    f"a leaf of {leaf.shape} {leaf.dtype} was fetched as {array.shape} {array.dtype}"
                )
            self._fetched[number] = array.reshape(-1).view(np.uint8)
        return self._fetched[number]
