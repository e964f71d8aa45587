"""`ItemReader`: reads leaves of an Orbax item into arrays, in parallel, each touched chunk once."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prepcli.algebra.boxes import Box, full_box, intersection, slices, strides, volume
from prepcli.algebra.chunks import StoredRange
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.errors import Command, DamagedError, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.engine import checkpoint_store
from prepcli.engine.blobs import open_blobs
from prepcli.engine.chunk_cache import ChunkCache
from prepcli.engine.files import PAGE
from prepcli.engine.fills import numpy_dtype
from prepcli.formats.again_hint import RECREATE_HINT
from prepcli.formats.checksums import BlockChecksums, read_checksums
from prepcli.formats.file_records import check_files
from prepcli.formats.manifest import find_manifest_folder, read_manifest
from prepcli.formats.orbax import OrbaxItem, find_item, read_item
from prepcli.formats.orbax_chunks import chunk_label
from prepcli.planning.arrays import Array
from prepcli.planning.checksum_blocks import chunk_blocks
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.state_names import PARAMS
from prepcli.planning.tensors import itemsize
from prepcli.restore.leaf_reader import BoxArrays, LeafReader
from prepcli.sources.averages import AVERAGE_SLOT
from prepcli.sources.decoded_arrays import DecodedArray, chunk_error, open_chunk
from prepcli.sources.openers.orbax_item import MAX_OPEN_FILES, is_read_directly
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import MAX_READ_THREADS
from prepcli.stores.paths import AnyPath, is_remote, without_read_ahead

# Upper limit of one read of a thread.
PIECE_NBYTES = 4 << 20
# Shorter runs are read together with the bytes between them, which is faster.
MIN_RUN_NBYTES = 32 << 10
MAX_THREADS = 8
# Upper limit per thread. Chunks that Orbax writes need about 2 MiB.
DECODE_MEMORY_NBYTES = 32 << 20


class DamagedLeafError(DamagedError):
    """Bytes of a leaf differ from their recorded checksum."""


def open_reader(
    path: AnyPath,
    verify: bool = True,
    hint: str = RECREATE_HINT,
) -> ItemReader:
    """Open an Orbax item, a training step, or the last step of a run.

    Args:
        path: Folder of the checkpoint.
        verify: Check the listed files, and every byte read against the recorded checksums, if there are any.
        hint: Advice in the error for a damaged checkpoint.

    Raises:
        PrepError: There is no checkpoint, it is broken, or prep did not write it.
    """
    folder = find_item(path)
    if folder is None:
        raise PrepError(
            f"{path} holds no Orbax checkpoint",
            "no folder in it has the files of one",
            "name another folder, such as a training step or an output of prep",
        )
    manifest_folder = find_manifest_folder(folder)
    item = read_item(folder)
    manifest = read_manifest(manifest_folder)
    if manifest is None:
        raise PrepError(
            f"{path} was not written by prep",
            "it has no manifest that describes the model",
            text("{} converts it", Command("save-init")),
        )
    # The files of a remote checkpoint were checked when it was opened as a source.
    if verify and isinstance(path, Path):
        check_files(manifest_folder, manifest)
    checksums = read_checksums(manifest_folder, manifest, item.arrays) if verify else None
    return ItemReader(item, manifest, checksums, hint)


class ItemReader(LeafReader):
    """CheckpointReader of an Orbax item.

    Attributes:
        manifest: Manifest of the checkpoint.
        folder: Folder of the item.
        leaves: Shape, dtype and read unit of each leaf, by dotted name.
        is_remote: Whether the data files are on a server.
    """

    def __init__(
        self,
        item: OrbaxItem,
        manifest: Manifest,
        checksums: BlockChecksums | None = None,
        hint: str = RECREATE_HINT,
    ) -> None:
        """Open the data files of an item.

        Args:
            item: The item.
            manifest: Manifest of the checkpoint.
            checksums: Recorded checksums, checked for every byte read.
            hint: Advice in the error for a damaged checkpoint.
        """
        self.manifest = manifest
        self.folder = item.folder
        self._checksums = checksums
        self._hint = hint
        item = replace(item, files=tuple(without_read_ahead(item.files)))
        self._item = item
        self._array_numbers: dict[str, int] = {}
        self.leaves: dict[str, checkpoint_store.LeafSpec] = {}
        for number, meta in enumerate(item.arrays):
            read_unit = _read_unit_shape(item, number)
            self._array_numbers[meta.name] = number
            self.leaves[meta.name] = checkpoint_store.LeafSpec(meta.shape, meta.dtype, read_unit)
        self.is_remote = is_remote(item.files)
        num_threads = min(MAX_THREADS, 2 * (os.cpu_count() or 1))
        if self.is_remote:
            num_threads = MAX_READ_THREADS
        # An item with more files than a process may hold open has no chunks that are read directly.
        blobs: Sequence[AnyPath] = ()
        if self.is_remote or len(item.files) <= MAX_OPEN_FILES:
            blobs = item.files
        super().__init__(open_blobs(blobs), num_threads=num_threads, buffer_nbytes=PIECE_NBYTES)

    def __enter__(self) -> ItemReader:
        return self

    @property
    def is_checked(self) -> bool:
        """Whether bytes are checked as they are read."""
        return self._checksums is not None

    def read(self, name: str, parts: BoxArrays) -> None:
        """Fill each array (C order) with its box of a leaf, cast to the array's dtype.

        Args:
            name: Dotted name of the leaf.
            parts: Arrays to fill, by their boxes of the leaf.

        Raises:
            PrepError: There is no such leaf, or a file is broken.
            DamagedLeafError: Bytes differ from their recorded checksum.
        """
        if name not in self._array_numbers:
            raise PrepError(
                f"{self.folder} has no leaf {name}",
                f"it has {count_text(len(self._array_numbers), 'other leaf', 'other leaves')}",
                text("{} shows their names", Command("inspect", str(self.folder))),
            )
        blob = DecodedArray(self._item, self._array_numbers[name])
        _check_arrays(blob.meta, parts)
        jobs = _split_into_jobs(blob, parts, self.is_checked)
        errors = self.run_reads(jobs, self._run_job)
        if not errors:
            return
        error = errors[0]
        if isinstance(error, PrepError) and not isinstance(error, DamagedLeafError):
            why = error.what
            if error.why:
                why = text("{}: {}", error.what, error.why)
            error_type = DamagedError if isinstance(error, DamagedError) else PrepError
            raise error_type(f"cannot read {name} of {self.folder}", why, error.hint) from error
        raise error

    def use_averages(self) -> None:
        """Read the moving averages (EMA) of all parameters under the names of the parameters from now on."""
        numbers: dict[str, int] = {}
        leaves: dict[str, checkpoint_store.LeafSpec] = {}
        for name, leaf in self.leaves.items():
            if name.startswith(f"{AVERAGE_SLOT}."):
                parameter = f"{PARAMS}.{name.removeprefix(f'{AVERAGE_SLOT}.')}"
                numbers[parameter] = self._array_numbers[name]
                leaves[parameter] = leaf
        self._array_numbers = numbers
        self.leaves = leaves

    def _run_job(self, job: _PieceJob | _ChunkJob, buffer: ByteArray) -> int:
        """Read a piece or decode a chunk. Return the number of bytes."""
        if isinstance(job, _ChunkJob):
            self._decode_chunk(job, buffer)
        else:
            self._read_piece(job, buffer)
        return job.nbytes

    def _read_piece(self, piece: _PieceJob, scratch: ByteArray) -> None:
        """Read a piece (a byte range of a chunk) into its array, or through `scratch` into all of its arrays."""
        # Pieces of compressed chunks are read by `_decode_chunk`.
        assert piece.stored is not None
        # A piece is read directly into its array if dtype and order agree, and for direct I/O the page
        # offset. This is the common case: each chunk is one shard of the mesh.
        offset = piece.stored.offset + piece.start
        alignment = 1 if self.is_remote else PAGE
        if (target := _direct_target(piece, offset, alignment)) is not None:
            self._files.read_at(piece.stored.file, offset, target)
            self._verify_piece(piece, target)
        else:
            run = StridedCopy(0, piece.stored.file, offset, piece.nbytes)
            data = self._files.read_run(run, scratch)
            self._verify_piece(piece, data)
            _copy_to_arrays(piece, data)

    def _verify_piece(self, piece: _PieceJob, data: ByteArray) -> None:
        """Raise DamagedLeafError unless a piece agrees with its recorded checksums."""
        if self._checksums is None:
            return
        damaged = self._checksums.first_damaged_block(piece.name, piece.index, piece.start, data)
        if damaged is None:
            return
        value = self._item.arrays[self._array_numbers[piece.name]].stored_chunk(piece.index)
        path = self._item.files[value.file] if isinstance(value, StoredRange) else self.folder
        chunk_offset = piece.stored.offset if piece.stored else 0
        start = chunk_offset + damaged[0]
        stop = chunk_offset + damaged[1]
        where = path if piece.stored else f"chunk {chunk_label(piece.index)} (decoded) in {path}"
        why = f"bytes {start:,} to {stop:,} of {where} differ from their recorded checksum"
        raise DamagedLeafError(f"{piece.name} of {self.folder} is damaged", why, self._hint)

    def _decode_chunk(self, chunk: _ChunkJob, scratch: ByteArray) -> None:
        """Decode a chunk in one thread, up to the end of its last piece, and copy its pieces."""
        cache = ChunkCache(DECODE_MEMORY_NBYTES)
        try:
            with contextlib.closing(open_chunk(chunk.blob, chunk.index, cache)) as reader:
                for piece in chunk.pieces:
                    data = scratch[: piece.nbytes]
                    reader.read(piece.start, data)
                    self._verify_piece(piece, data)
                    _copy_to_arrays(piece, data)
        except (ValueError, OSError) as error:
            raise chunk_error(chunk.blob, chunk.index, error) from error


def _read_unit_shape(item: OrbaxItem, array_number: int) -> tuple[int, ...]:
    """Return the read unit of a leaf: the shape of its checksum blocks, or of its chunks to decode."""
    meta = item.arrays[array_number]
    if not is_read_directly(item, array_number) or not meta.chunk_shape:
        return meta.chunk_shape
    blocks = chunk_blocks(meta.chunk_shape, meta.dtype)
    axis = blocks.axis
    length = meta.chunk_shape[axis]
    # The first block of a chunk starts at row 0 of the chunk. If blocks do not divide the chunk,
    # units of equal size do not fall on blocks, and the unit is a whole chunk.
    is_regular = length == meta.shape[axis] or length % blocks.rows == 0
    rows = min(blocks.rows, length) if is_regular else length
    return (*(1,) * axis, rows, *meta.chunk_shape[axis + 1 :])


def _copy_to_arrays(piece: _PieceJob, data: ByteArray) -> None:
    """Copy the bytes of a piece to all intersecting arrays."""
    values = data.view(numpy_dtype(piece.dtype)).reshape(_box_shape(piece.box))
    for box, array in piece.arrays.items():
        shared = intersection(piece.box, box)
        array[slices(shared, box)] = values[slices(shared, piece.box)]


@dataclass(frozen=True, slots=True)
class _PieceJob:
    """A box of a leaf, contiguous in one chunk.

    Attributes:
        name: Dotted name of the leaf.
        index: Index of the chunk.
        stored: Byte range of the chunk, if it is stored uncompressed in a file.
        start: First byte of the piece, relative to the decoded chunk.
        nbytes: Size of the piece in bytes.
        box: Box of the leaf.
        dtype: Stored dtype.
        arrays: The intersecting arrays, by their boxes.
    """

    name: str
    index: tuple[int, ...]
    stored: StoredRange | None
    start: int
    nbytes: int
    box: Box
    dtype: str
    arrays: BoxArrays


@dataclass(frozen=True, slots=True)
class _ChunkJob:
    """A chunk to decode, and its pieces in the order of their bytes."""

    blob: DecodedArray
    index: tuple[int, ...]
    pieces: tuple[_PieceJob, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def _check_arrays(meta: Array, arrays: BoxArrays) -> None:
    """Raise ValueError unless each box is inside the leaf and each array is contiguous and of its box's shape."""
    for box, array in arrays.items():
        is_inside = len(box) == len(meta.shape)
        for (low, high), extent in zip(box, meta.shape):
            is_inside = is_inside and 0 <= low <= high <= extent
        if not is_inside:
            raise ValueError(f"{meta.name} {meta.shape}: box {box} is not inside the leaf")
        if array.shape != _box_shape(box) or not array.flags.c_contiguous:
            raise ValueError(
                f"{meta.name} {meta.shape}: the array must be contiguous and have the shape of box {box},"
                f" it has {array.shape}"
            )


def _split_into_jobs(
    blob: DecodedArray, arrays: BoxArrays, is_checked: bool
) -> Iterator[_PieceJob | _ChunkJob]:
    """Yield the jobs to fill the arrays of a leaf.

    A chunk is a unit of storage, a piece is a contiguous part of a chunk. Uncompressed chunks have one job per piece.
    Other chunks are decoded as a whole, so they have one job per chunk.
    """
    is_direct = is_read_directly(blob.item, blob.array_number)
    for index, pieces in _touched_chunks(blob, arrays, is_direct=is_direct, is_checked=is_checked):
        if is_direct:
            yield from pieces
        else:
            yield _ChunkJob(blob, index, tuple(pieces))


def _touched_chunks(
    blob: DecodedArray, arrays: BoxArrays, *, is_direct: bool, is_checked: bool
) -> Iterator[tuple[tuple[int, ...], Iterator[_PieceJob]]]:
    """Yield the index and the pieces of every needed chunk, in C order of the grid."""
    meta = blob.meta
    arrays_by_chunk: dict[tuple[int, ...], dict[Box, np.ndarray]] = {}
    for box, array in arrays.items():
        if not volume(box):
            continue
        index_ranges: list[range] = []
        for (low, high), length in zip(box, meta.chunk_shape):
            # E.g. low 5, high 9 in chunks of 4: chunks 1 and 2.
            index_ranges.append(range(low // length, -(-high // length)))
        for index in itertools.product(*index_ranges):
            arrays_by_chunk.setdefault(index, {})[box] = array
    for index in sorted(arrays_by_chunk):
        value = blob.stored_value(index) if is_direct else None
        stored = value if isinstance(value, StoredRange) else None
        chunk_arrays = arrays_by_chunk[index]
        pieces = _piece_jobs(meta, stored, index=index, arrays=chunk_arrays, is_checked=is_checked)
        yield index, pieces


def _piece_jobs(
    meta: Array,
    stored: StoredRange | None,
    *,
    index: tuple[int, ...],
    arrays: BoxArrays,
    is_checked: bool,
) -> Iterator[_PieceJob]:
    """Yield the pieces of a chunk for the boxes of `arrays`, as whole checksum blocks if they are checked."""
    item_nbytes = itemsize(meta.dtype)
    byte_strides = strides(meta.chunk_shape, item_nbytes)
    corner = [i * length for i, length in zip(index, meta.chunk_shape)]
    chunk_box = _shifted_box(full_box(meta.chunk_shape), corner, 1)
    needed = [_shifted_box(intersection(box, chunk_box), corner, -1) for box in arrays]
    if is_checked:
        pieces = _block_pieces(needed, meta)
    else:
        pieces = _contiguous_pieces(_bounding_box(needed), meta.chunk_shape, item_nbytes)
    for piece in pieces:
        box = _shifted_box(piece, corner, 1)
        touching: dict[Box, np.ndarray] = {}
        for array_box, array in arrays.items():
            if volume(intersection(array_box, box)):
                touching[array_box] = array
        # The bounding box of several boxes may contain pieces that no box needs.
        if touching:
            yield _PieceJob(
                name=meta.name,
                index=index,
                stored=stored,
                start=sum(low * stride for (low, _), stride in zip(piece, byte_strides)),
                nbytes=volume(piece) * item_nbytes,
                box=box,
                dtype=meta.dtype,
                arrays=touching,
            )


def _box_shape(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


def _shifted_box(box: Box, corner: Sequence[int], sign: int) -> Box:
    """Return a box moved by `sign` times `corner`."""
    return tuple((low + sign * by, high + sign * by) for (low, high), by in zip(box, corner))


def _bounding_box(boxes: Sequence[Box]) -> Box:
    bounds: list[tuple[int, int]] = []
    for spans in zip(*boxes):
        lows, highs = zip(*spans)
        bounds.append((min(lows), max(highs)))
    return tuple(bounds)


def _innermost_cut_axis(box: Box, chunk_shape: Sequence[int]) -> int:
    """Return the innermost axis with a smaller extent in the box than in the chunk, or 0."""
    for axis in reversed(range(len(box))):
        if box[axis] != (0, chunk_shape[axis]):
            return axis
    return 0


def _contiguous_pieces(box: Box, chunk_shape: Sequence[int], item_nbytes: int) -> Iterator[Box]:
    """Cover a box of a chunk with boxes, each contiguous in the chunk and of at most PIECE_NBYTES.

    The box is widened to whole trailing dims if its runs are short or cover most of the chunk.
    """
    byte_strides = strides(chunk_shape, item_nbytes)
    # The first axis with more than one index: after it, whole trailing dims are contiguous.
    first = 0
    while first < len(box) and box[first][1] - box[first][0] <= 1:
        first += 1
    widened = (*box[: first + 1], *full_box(chunk_shape[first + 1 :]))
    last = _innermost_cut_axis(box, chunk_shape)
    run_nbytes = item_nbytes
    if box:
        run_nbytes = (box[last][1] - box[last][0]) * byte_strides[last]
    if run_nbytes < MIN_RUN_NBYTES or 2 * volume(box) >= volume(widened):
        box = widened
        last = min(first, len(box) - 1)
    if not box:
        yield box
        return
    # Pieces are cut along the outermost axis where one step fits into a piece.
    axis = last
    while axis < len(box) - 1 and byte_strides[axis] > PIECE_NBYTES:
        axis += 1
    # E.g. steps of 1 MiB: 4 steps per piece.
    length = max(1, PIECE_NBYTES // byte_strides[axis])
    outer_ranges = [range(low, high) for low, high in box[:axis]]
    for outer in itertools.product(*outer_ranges):
        for low in range(*box[axis], length):
            rows = (low, min(low + length, box[axis][1]))
            yield (*_single_index_box(outer), rows, *box[axis + 1 :])


def _single_index_box(index: Sequence[int]) -> Box:
    return tuple((i, i + 1) for i in index)


def _block_pieces(boxes: Sequence[Box], meta: Array) -> Iterator[Box]:
    """Cover boxes of a chunk with boxes of whole checksum blocks.

    Blocks outside of them are omitted. Each yielded box is contiguous in the chunk. It has at most
    PIECE_NBYTES, or is a single larger block.
    """
    if not meta.chunk_shape:
        yield ()
        return
    blocks = chunk_blocks(meta.chunk_shape, meta.dtype)
    axis = blocks.axis
    # Rows per piece: as many whole blocks as fit, or one block if it is larger than a piece.
    length = max(1, PIECE_NBYTES // blocks.block_nbytes) * blocks.rows
    inner_box = full_box(meta.chunk_shape[axis + 1 :])
    outer_ranges = [range(low, high) for low, high in _bounding_box(boxes)[:axis]]
    for outer in itertools.product(*outer_ranges):
        spans: list[tuple[int, int]] = []
        for box in boxes:
            if all(low <= i < high for i, (low, high) in zip(outer, box)):
                spans.append(box[axis])
        for low, high in _whole_block_spans(spans, blocks.rows, meta.chunk_shape[axis]):
            for first in range(low, high, length):
                span = (first, min(first + length, high))
                yield (*_single_index_box(outer), span, *inner_box)


def _whole_block_spans(
    spans: Iterable[tuple[int, int]], block_rows: int, num_rows: int
) -> Iterator[tuple[int, int]]:
    """Widen spans of rows to whole checksum blocks. Yield the union as disjoint spans, ascending.

    Args:
        spans: First row and end of each span.
        block_rows: Number of rows per block. The last block may have fewer.
        num_rows: Number of rows of the chunk.
    """
    # E.g. a chunk of 10 rows in blocks of 4: the spans 1:3, 6:7 and 9:10 become 0:4, 4:8 and 8:10,
    # and their union is 0:10.
    widened: list[tuple[int, int]] = []
    for low, high in spans:
        if low < high:
            first = low // block_rows * block_rows
            stop = min(num_rows, -(-high // block_rows) * block_rows)
            widened.append((first, stop))
    widened.sort()
    union: list[tuple[int, int]] = []
    for low, high in widened:
        if union and low <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], high))
        else:
            union.append((low, high))
    yield from union


def _direct_target(piece: _PieceJob, offset: int, alignment: int) -> ByteArray | None:
    """Return the array bytes of a piece if they can be read without a copy: same dtype, and contiguous.

    Args:
        piece: The piece.
        offset: Offset of the piece in its file.
        alignment: Direct I/O needs the address and the offset to agree modulo PAGE. 1 for other reads.
    """
    if len(piece.arrays) > 1:
        return None
    ((box, array),) = piece.arrays.items()
    if array.dtype != numpy_dtype(piece.dtype) or intersection(piece.box, box) != piece.box:
        return None
    target = array[slices(piece.box, box)]
    if not target.flags.c_contiguous or (target.ctypes.data - offset) % alignment:
        return None
    return target.reshape(-1).view(np.uint8)
