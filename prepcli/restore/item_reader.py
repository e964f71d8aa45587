"""`ItemReader`: reads leaves of an Orbax item into arrays, in parallel, each touched chunk once."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter, mul
from pathlib import Path

from prepcli.algebra.boxes import Box, full_box, intersection, strides, volume
from prepcli.algebra.grids import ChunkIndex, StoredRange
from prepcli.algebra.strided_copies import LeafBoxPart
from prepcli.core.errors import Command, DamagedError, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.engine.blobs import BlockCache, open_blobs
from prepcli.formats.checksums import BlockChecksums, read_checksums
from prepcli.formats.manifest import RECREATE_HINT, check_files, find_manifest_folder, read_manifest
from prepcli.formats.orbax import OrbaxItem, find_item, read_item
from prepcli.formats.orbax_chunks import chunk_label
from prepcli.planning.arrays import Array, Locations, chunk_blocks, identity_axis_map, whole_array
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.tensors import PARAMS, LeafSpec, itemsize
from prepcli.restore.box_reads import (
    MIN_GAP_NBYTES,
    PIECE_NBYTES,
    BoxArrays,
    BoxReader,
    Target,
    WindowRead,
    split_window,
)
from prepcli.sources.decoded_arrays import DecodeChunks
from prepcli.sources.openers.orbax_item import MAX_OPEN_FILES, is_read_directly
from prepcli.sources.source import AVERAGE_SLOT
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import MAX_READ_THREADS
from prepcli.stores.paths import AnyPath, is_remote, without_read_ahead

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


class ItemReader(BoxReader):
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
        """Open the data files of an item."""
        self.manifest = manifest
        self.folder = item.folder
        self._checksums = checksums
        self._hint = hint
        item = replace(item, files=tuple(without_read_ahead(item.files)))
        self._item = item
        self._array_numbers: dict[str, int] = {}
        self.leaves: dict[str, LeafSpec] = {}
        for number, meta in enumerate(item.arrays):
            # The read unit is a checksum block, or a chunk to decode.
            read_unit = meta.chunk_shape
            if is_read_directly(item, number) and meta.chunk_shape:
                blocks = chunk_blocks(meta.chunk_shape, meta.dtype)
                axis = blocks.axis
                length = meta.chunk_shape[axis]
                # The first block of a chunk starts at row 0 of the chunk. If blocks do not divide the chunk,
                # units of equal size do not fall on blocks, and the unit is a whole chunk.
                is_regular = length == meta.shape[axis] or length % blocks.rows == 0
                rows = min(blocks.rows, length) if is_regular else length
                read_unit = (*(1,) * axis, rows, *meta.chunk_shape[axis + 1 :])
            self._array_numbers[meta.name] = number
            self.leaves[meta.name] = LeafSpec(meta.shape, meta.dtype, read_unit)
        in_store = is_remote(item.files)
        num_threads = min(MAX_THREADS, 2 * (os.cpu_count() or 1))
        if in_store:
            num_threads = MAX_READ_THREADS
        # An item with more files than a process may hold open has no chunks that are read directly.
        blobs: Sequence[AnyPath] = ()
        if in_store or len(item.files) <= MAX_OPEN_FILES:
            blobs = item.files
        super().__init__(open_blobs(blobs), num_threads=num_threads, is_remote=in_store)

    @property
    def is_checked(self) -> bool:
        """Whether bytes are checked as they are read."""
        return self._checksums is not None

    def read(self, name: str, parts: BoxArrays) -> None:
        """Fill each array (C order) with its box of a leaf, cast to the array's dtype.

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
        number = self._array_numbers[name]
        meta = self._item.arrays[number]
        for box, array in parts.items():
            is_inside = len(box) == len(meta.shape)
            for (low, high), extent in zip(box, meta.shape):
                is_inside = is_inside and 0 <= low <= high <= extent
            if not is_inside:
                raise ValueError(f"{meta.name} {meta.shape}: box {box} is not inside the leaf")
            shape = tuple(high - low for low, high in box)
            if array.shape != shape or not array.flags.c_contiguous:
                raise ValueError(
                    f"{meta.name} {meta.shape}: the array must be contiguous and have the shape of box {box},"
                    f" it has {array.shape}"
                )
        errors = self.run_reads(self._jobs(number, parts), partial(self._run_job, number))
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
        leaves: dict[str, LeafSpec] = {}
        for name, leaf in self.leaves.items():
            if name.startswith(f"{AVERAGE_SLOT}."):
                parameter = f"{PARAMS}.{name.removeprefix(f'{AVERAGE_SLOT}.')}"
                numbers[parameter] = self._array_numbers[name]
                leaves[parameter] = leaf
        self._array_numbers = numbers
        self.leaves = leaves

    def _jobs(self, number: int, parts: BoxArrays) -> Iterator[_ChunkJob]:
        """Yield the reads of a leaf: one window each, or all windows of a chunk to decode."""
        array = self._item.arrays[number]
        is_direct = is_read_directly(self._item, number)
        axis_map = identity_axis_map(array.name, array.chunk_shape)
        atoms = [dim[0].atom for dim in axis_map.leaf_dims]
        targets_by_chunk: dict[ChunkIndex, list[Target]] = {}
        for box, out in parts.items():
            if not volume(box):
                continue
            for index in array.grid.overlapping(box):
                corner = map(mul, index, array.chunk_shape)
                in_chunk = tuple((low - by, high - by) for (low, high), by in zip(box, corner))
                needed = intersection(in_chunk, full_box(array.chunk_shape))
                part = LeafBoxPart(in_chunk, array.name, dict(zip(atoms, needed)))
                targets_by_chunk.setdefault(index, []).append(Target(axis_map, part, out))
        for index, targets in sorted(targets_by_chunk.items(), key=itemgetter(0)):
            place: Locations = ()
            if is_direct:
                stored = array.stored_chunk(index)
                assert isinstance(stored, StoredRange)
                position = (stored.file, stored.offset)
                place = (whole_array(array.name, array.dtype, array.chunk_shape, position),)
            reads_blocks = self.is_checked or not is_direct
            reads = _chunk_reads(array, place, targets, reads_blocks=reads_blocks)
            if is_direct:
                yield from (_ChunkJob(index, (read,)) for read in reads)
            else:
                yield _ChunkJob(index, tuple(reads))

    def _run_job(self, number: int, job: _ChunkJob, buffer: ByteArray) -> int:
        """Read a window or decode a chunk of array `number`. Return the number of bytes."""
        check = partial(self._verify, number, job.index)
        if job.reads[0].locations:
            return self.read_window(job.reads[0], buffer, check)
        # Decode a chunk in one thread, up to the end of its last window.
        blob = DecodeChunks(self._item, number)
        cache = BlockCache(DECODE_MEMORY_NBYTES)
        with contextlib.closing(blob.open_chunk(job.index, cache)) as reader:
            for read in job.reads:
                data = buffer[: read.nbytes]
                reader.read(_offset(blob.array, read.window), data)
                check(read, data)
                read.fill(data)
        return sum(read.nbytes for read in job.reads)

    def _verify(self, number: int, index: ChunkIndex, read: WindowRead, data: ByteArray) -> None:
        """Raise DamagedLeafError unless a window of a chunk of array `number` agrees with its checksums."""
        if self._checksums is None:
            return
        array = self._item.arrays[number]
        start = _offset(array, read.window)
        damaged = self._checksums.first_damaged_block(array.name, index, start, data)
        if damaged is None:
            return
        value = array.stored_chunk(index)
        where: object = self.folder
        offset = 0
        if isinstance(value, StoredRange):
            where = self._item.files[value.file]
        if read.locations:
            offset = read.locations[0].position[1]
        else:
            where = f"chunk {chunk_label(index)} (decoded) in {where}"
        span = f"bytes {offset + damaged[0]:,} to {offset + damaged[1]:,}"
        why = f"{span} of {where} differ from their recorded checksum"
        raise DamagedLeafError(f"{array.name} of {self.folder} is damaged", why, self._hint)


@dataclass(frozen=True, slots=True)
class _ChunkJob:
    """Reads of windows of one chunk. Their boxes count from the first element of the chunk."""

    index: ChunkIndex
    reads: tuple[WindowRead, ...]


def _offset(array: Array, window: Box) -> int:
    """Return the offset of a window of a chunk in the bytes of the chunk."""
    byte_strides = strides(array.chunk_shape, itemsize(array.dtype))
    return sum(low * stride for (low, _), stride in zip(window, byte_strides))


def _chunk_reads(
    array: Array, place: Locations, targets: Sequence[Target], *, reads_blocks: bool
) -> Iterator[WindowRead]:
    """Yield the reads of a chunk that fill its part of the targets, as whole checksum blocks on request."""
    needed = [tuple(target.part.atom_ranges.values()) for target in targets]
    if reads_blocks:
        windows = _block_pieces(needed, array)
    else:
        item_nbytes = itemsize(array.dtype)
        max_volume = max(1, PIECE_NBYTES // item_nbytes)
        axis_strides = strides(array.chunk_shape, item_nbytes)
        windows = split_window(_bounding_box(needed), axis_strides, max_volume)
    for window in windows:
        # The bounding box of several boxes may contain windows that no box needs.
        touched = [
            target for target, box in zip(targets, needed) if volume(intersection(box, window))
        ]
        if touched:
            yield WindowRead(array.name, array.dtype, place, window, touched, MIN_GAP_NBYTES)


def _bounding_box(boxes: Sequence[Box]) -> Box:
    bounds: list[tuple[int, int]] = []
    for spans in zip(*boxes):
        lows, highs = zip(*spans)
        bounds.append((min(lows), max(highs)))
    return tuple(bounds)


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
        # E.g. a chunk of 10 rows in blocks of 4: the rows 1:3, 6:7 and 9:10 become 0:4, 4:8 and 8:10,
        # and their union is 0:10.
        spans: list[tuple[int, int]] = []
        for box in boxes:
            first, stop = box[axis]
            if first < stop and all(low <= i < high for i, (low, high) in zip(outer, box)):
                first = first // blocks.rows * blocks.rows
                stop = -(-stop // blocks.rows) * blocks.rows
                spans.append((first, min(stop, meta.chunk_shape[axis])))
        union: list[tuple[int, int]] = []
        for low, high in sorted(spans):
            if union and low <= union[-1][1]:
                union[-1] = (union[-1][0], max(union[-1][1], high))
            else:
                union.append((low, high))
        for low, high in union:
            for first in range(low, high, length):
                span = (first, min(first + length, high))
                yield (*((i, i + 1) for i in outer), span, *inner_box)
