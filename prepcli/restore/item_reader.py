"""Leaves of an Orbax item into arrays of any process: each touched chunk is read once, in parallel, within some MiB.

A chunk that is compressed is decoded from its first byte to the last one that is needed, by one thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any

import numpy as np

from prepcli.engine.budget import Budget, BufferPool
from prepcli.engine.chunk_cache import ChunkCache
from prepcli.engine.files import PAGE, ByteArray, Files
from prepcli.engine.fills import numpy_dtype
from prepcli.errors import PrepError
from prepcli.formats.checksums import BlockChecksums, read_checksums
from prepcli.formats.manifest import find_manifest_folder, read_manifest
from prepcli.formats.orbax import ArrayMeta, chunk_key, find_item
from prepcli.formats.orbax_read import OrbaxItem, read_item
from prepcli.formats.orbax_store import StoredRange
from prepcli.planning.boxes import Box, full_box, intersect, strides, volume
from prepcli.planning.checksum_blocks import chunk_blocks
from prepcli.planning.strided_copies import StridedCopy
from prepcli.planning.tensors import itemsize
from prepcli.restore.digest_checks import RECREATE_HINT
from prepcli.sources.decoded_arrays import DecodedArray, chunk_error, open_chunk
from prepcli.sources.openers.orbax_item import MAX_OPEN_FILES, is_read_directly
from trainer.models import checkpoint_store

PIECE_NBYTES = 4 << 20  # read at a time by a thread
MIN_RUN_NBYTES = 32 << 10  # shorter runs are read with what lies between them: to ask for each would take longer
MAX_THREADS = 8
DECODE_MEMORY_NBYTES = 32 << 20  # that a thread may need to decode a chunk: of those that Orbax writes, some 2 MiB

BoxArrays = Mapping[Box, np.ndarray]


class DamagedLeafError(PrepError):
    """Bytes differ from their recorded checksum."""


def open_reader(path: Path, verify: bool = True, hint: str = RECREATE_HINT) -> ItemReader:
    """Open the checkpoint that `path` means: an item, a training step, or the last step of a run.

    Args:
        path: Folder of the checkpoint.
        verify: Check every byte that is read against the recorded checksums, where the checkpoint has them.
        hint: What the user can do about a damaged checkpoint.

    Raises:
        PrepError: There is no checkpoint, it is broken, or prep did not write it.
    """
    folder = find_item(path)
    if folder is None:
        raise PrepError(f"{path} holds no Orbax checkpoint")
    home = find_manifest_folder(folder)
    item, manifest = read_item(folder), read_manifest(home)
    if manifest is None:
        raise PrepError(f"{path} was not written by prep", "it has no manifest: nothing says what model it is of")
    return ItemReader(item, manifest, read_checksums(home, manifest, item.arrays) if verify else None, hint)


class ItemReader:
    """A state.Reader of an item: `facts`, and `leaves` by dotted name. Several threads may call `read`; `read_nbytes`
    counts what it read. With `checksums` only bytes that agree with them are passed on."""

    def __init__(
        self,
        item: OrbaxItem,
        manifest: Mapping[str, Any],
        checksums: BlockChecksums | None = None,
        hint: str = RECREATE_HINT,
    ) -> None:
        self.manifest, self.folder, self.read_nbytes = manifest, item.folder, 0
        self._checksums, self._hint = checksums, hint
        self._item, self._numbers = item, {meta.name: number for number, meta in enumerate(item.arrays)}
        self.leaves = {meta.name: checkpoint_store.LeafSpec(meta.shape, meta.dtype) for meta in item.arrays}
        self._threads = min(MAX_THREADS, 2 * (os.cpu_count() or 1))
        self._buffers = BufferPool(Budget(self._threads * PIECE_NBYTES, PIECE_NBYTES, self._threads))
        self._files = Files(item.files if len(item.files) <= MAX_OPEN_FILES else ())
        self._counting = threading.Lock()
        self._closing = weakref.finalize(self, self._files.close)

    def __enter__(self) -> ItemReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._closing()

    @property
    def is_checked(self) -> bool:
        """Whether bytes are checked as they are read."""
        return self._checksums is not None

    def read(self, name: str, parts: BoxArrays) -> None:
        """Fill each array (C order) with its box of the leaf, cast to its dtype. PrepError names leaf and file."""
        if name not in self._numbers:
            raise PrepError(f"{self.folder} has no leaf {name}", f"it has {len(self._numbers)} others")
        blob = DecodedArray(self._item, self._numbers[name])
        _check_parts(blob.meta, parts)
        jobs = _Queue(_shares(blob, parts, self.is_checked))
        with ThreadPoolExecutor(self._threads) as threads:
            done = [threads.submit(self._work, jobs) for _ in range(self._threads)]
        errors = [error for each in done if (error := each.exception())]
        if errors and isinstance(errors[0], PrepError) and not isinstance(errors[0], DamagedLeafError):
            why = f"{errors[0].what}: {errors[0].why}" if errors[0].why else errors[0].what
            raise PrepError(f"cannot read {name} of {self.folder}", why, errors[0].hint) from errors[0]
        if errors:
            raise errors[0]

    def _work(self, jobs: _Queue) -> None:
        buffers = self._buffers.acquire(1)
        try:
            while (share := jobs.next()) is not None:
                self._decode(share, buffers[0]) if isinstance(share, _Chunk) else self._do(share, buffers[0])
                with self._counting:
                    self.read_nbytes += share.nbytes
        except BaseException:
            jobs.stop()
            raise
        finally:
            self._buffers.release(buffers)

    def _do(self, job: _Job, scratch: ByteArray) -> None:
        """Read a piece straight to its place, or into scratch and from there to all places that it has."""
        assert job.stored is not None  # of an array that is not decoded
        offset = job.stored.offset + job.start
        if (straight := _straight(job, offset)) is not None:
            self._files.read_at(job.stored.file, offset, straight)
            self._check(job, straight)
        else:
            data = self._files.read_run(StridedCopy(0, job.stored.file, offset, job.nbytes), scratch)
            self._check(job, data)
            _spread(job, data)

    def _check(self, job: _Job, data: ByteArray) -> None:
        """Raise DamagedLeaf unless a piece agrees with its recorded checksums."""
        span = self._checksums.first_damaged_block(job.name, job.index, job.start, data) if self._checksums else None
        if span is None:
            return
        value = self._item.chunks[self._numbers[job.name]].get(job.index)
        path = self._item.files[value.file] if isinstance(value, StoredRange) else self.folder
        low, high = (job.stored.offset + at if job.stored else at for at in span)
        within = path if job.stored else f"chunk {chunk_key(job.index)} (decoded) in {path}"
        why = f"bytes {low:,} to {high:,} of {within} differ from their recorded checksum"
        raise DamagedLeafError(f"{job.name} of {self.folder} is damaged", why, self._hint)

    def _decode(self, chunk: _Chunk, scratch: ByteArray) -> None:
        """Decode a chunk as far as its pieces go, which follow each other in it."""
        room = ChunkCache(DECODE_MEMORY_NBYTES)
        try:
            with contextlib.closing(open_chunk(chunk.blob, chunk.index, room)) as held:
                for job in chunk.jobs:
                    held.read(job.start, scratch[: job.nbytes])
                    self._check(job, scratch[: job.nbytes])
                    _spread(job, scratch[: job.nbytes])
        except (ValueError, OSError) as error:
            raise chunk_error(chunk.blob, chunk.index, error) from error


def _spread(job: _Job, data: ByteArray) -> None:
    """The bytes of a piece to all places that it has."""
    values = data.view(numpy_dtype(job.dtype)).reshape([high - low for low, high in job.box])
    for box, array in job.parts.items():
        shared = _shared(job.box, box)
        array[_slices(shared, box)] = values[_slices(shared, job.box)]


@dataclass(frozen=True, slots=True)
class _Job:
    """A box of a leaf that lies in one piece in chunk `index`, `nbytes` from byte `start` of it, and the parts it
    touches; `stored`: where the chunk lies, if it lies in a file as it is."""

    name: str
    index: tuple[int, ...]
    stored: StoredRange | None
    start: int
    nbytes: int
    box: Box
    dtype: str
    parts: BoxArrays


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk that is decoded, and its pieces in their order in it."""

    blob: DecodedArray
    index: tuple[int, ...]
    jobs: tuple[_Job, ...]

    @property
    def nbytes(self) -> int:
        return sum(job.nbytes for job in self.jobs)


class _Queue:
    """Jobs that several threads take one after another."""

    def __init__(self, jobs: Iterator[_Job | _Chunk]) -> None:
        self._jobs, self._lock = jobs, threading.Lock()

    def next(self) -> _Job | _Chunk | None:
        """The next job; None once there is none, or the work was stopped."""
        with self._lock:
            return next(self._jobs, None)

    def stop(self) -> None:
        """Leave what was not begun."""
        with self._lock:
            self._jobs = iter(())


def _check_parts(meta: ArrayMeta, parts: BoxArrays) -> None:
    for box, array in parts.items():
        inside = len(box) == len(meta.shape) and all(0 <= a <= b <= n for (a, b), n in zip(box, meta.shape))
        if not inside or array.shape != tuple(high - low for low, high in box) or not array.flags.c_contiguous:
            raise ValueError(f"{meta.name} {meta.shape}: box {box} and an array of shape {array.shape}")


def _shares(blob: DecodedArray, parts: BoxArrays, checked: bool) -> Iterator[_Job | _Chunk]:
    """What threads take one after another: pieces where they can be read alone, else chunks."""
    direct = is_read_directly(blob.item, blob.array_number)
    for index, jobs in _chunks(blob, parts, direct, checked):
        if direct:
            yield from jobs
        else:
            yield _Chunk(blob, index, tuple(jobs))


def _chunks(
    blob: DecodedArray, parts: BoxArrays, direct: bool, checked: bool
) -> Iterator[tuple[tuple[int, ...], Iterator[_Job]]]:
    """Every chunk that a part touches, in C order of the grid, cut into pieces."""
    meta = blob.meta
    touched: dict[tuple[int, ...], dict[Box, np.ndarray]] = {}
    for box, array in parts.items():
        if volume(box):
            spans = (range(low // length, -(-high // length)) for (low, high), length in zip(box, meta.chunk_shape))
            for index in itertools.product(*spans):
                touched.setdefault(index, {})[box] = array
    for index in sorted(touched):
        value = blob.stored_value(index) if direct else None
        yield index, _jobs(meta, value if isinstance(value, StoredRange) else None, index, touched[index], checked)


def _jobs(
    meta: ArrayMeta, stored: StoredRange | None, index: tuple[int, ...], found: BoxArrays, checked: bool
) -> Iterator[_Job]:
    item, steps = itemsize(meta.dtype), strides(meta.chunk_shape, itemsize(meta.dtype))
    corner = [i * length for i, length in zip(index, meta.chunk_shape)]
    needed = [_moved(_shared(box, _chunk_box(corner, meta)), corner, -1) for box in found]
    bound = _bound(needed)
    for piece in _whole_blocks(bound, meta) if checked else _pieces(bound, meta.chunk_shape, item):
        box = _moved(piece, corner, 1)
        near = {part: array for part, array in found.items() if volume(_shared(part, box))}
        if near:
            start = sum(low * step for (low, _), step in zip(piece, steps))
            yield _Job(meta.name, index, stored, start, volume(piece) * item, box, meta.dtype, near)


def _chunk_box(corner: Sequence[int], meta: ArrayMeta) -> Box:
    return tuple((low, low + length) for low, length in zip(corner, meta.chunk_shape))


def _moved(box: Box, corner: Sequence[int], sign: int) -> Box:
    return tuple((low + sign * by, high + sign * by) for (low, high), by in zip(box, corner))


def _bound(boxes: Sequence[Box]) -> Box:
    return tuple((min(low for low, _ in spans), max(high for _, high in spans)) for spans in zip(*boxes))


def _pieces(box: Box, chunk: Sequence[int], item: int) -> Iterator[Box]:
    """Boxes that cover a box of a chunk, each in one piece there and of at most PIECE_NBYTES: widened to whole trailing
    dims where the runs of the box are short, or are most of the chunk anyway."""
    steps = strides(chunk, item)
    first = next((axis for axis, (low, high) in enumerate(box) if high - low > 1), len(box))
    wide = (*box[: first + 1], *full_box(chunk[first + 1 :]))
    last = _last_cut(box, chunk)
    run = (box[last][1] - box[last][0]) * steps[last] if box else item
    if run < MIN_RUN_NBYTES or 2 * volume(box) >= volume(wide):
        box, last = wide, min(first, len(box) - 1)
    if not box:
        yield box
        return
    axis = next((n for n in range(last, len(box)) if steps[n] <= PIECE_NBYTES), len(box) - 1)
    length = max(1, PIECE_NBYTES // steps[axis])
    for outer in itertools.product(*(range(*span) for span in box[:axis])):
        for low in range(*box[axis], length):
            rows = (low, min(low + length, box[axis][1]))
            yield (*((i, i + 1) for i in outer), rows, *box[axis + 1 :])


def _whole_blocks(box: Box, meta: ArrayMeta) -> Iterator[Box]:
    """Boxes of whole checksum blocks that cover a box of a chunk, each in one piece there and of at most
    PIECE_NBYTES, or one block."""
    if not box:
        yield box
        return
    blocks = chunk_blocks(meta.chunk_shape, meta.dtype)
    axis, rows = blocks.axis, blocks.rows
    low, high = box[axis][0] // rows * rows, min(meta.chunk_shape[axis], -(-box[axis][1] // rows) * rows)
    length = max(1, PIECE_NBYTES // blocks.block_nbytes) * rows
    for outer in itertools.product(*(range(*span) for span in box[:axis])):
        for first in range(low, high, length):
            span = (first, min(first + length, high))
            yield (*((i, i + 1) for i in outer), span, *full_box(meta.chunk_shape[axis + 1 :]))


def _last_cut(box: Box, chunk: Sequence[int]) -> int:
    """The innermost axis of which a box has not all; the outermost one if it has all of them."""
    return max((axis for axis, (span, n) in enumerate(zip(box, chunk)) if span != (0, n)), default=0)


def _shared(a: Box, b: Box) -> Box:
    return tuple(map(intersect, a, b))


def _slices(box: Box, within: Box) -> tuple[slice | EllipsisType, ...]:
    """Where a box lies in the array of another; with an ellipsis, so that a 0-d array gives a view too."""
    return (*(slice(low - start, high - start) for (low, high), (start, _) in zip(box, within)), ...)


def _straight(job: _Job, offset: int) -> ByteArray | None:
    """The bytes of the array that are those of the piece, where direct I/O can put them there as they are."""
    if len(job.parts) > 1:
        return None
    ((box, array),) = job.parts.items()
    if array.dtype != numpy_dtype(job.dtype) or _shared(job.box, box) != job.box:
        return None
    place = array[_slices(job.box, box)]
    if not place.flags.c_contiguous or (place.ctypes.data - offset) % PAGE:
        return None
    return place.reshape(-1).view(np.uint8)
