"""XXH3-64 of checksum blocks, taken from the bytes that a run writes: nothing is read for them.

Slabs reach a block in pieces. A block whose pieces come in the order of its bytes is hashed as they pass; any other
keeps the sum 0, which stands for unknown, and is read back once the output is whole.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from prepcli.engine.digest import CHECKSUM_DTYPE, checksum
from prepcli.engine.files import PAGE, ByteArray, Files, allocate_buffer, io_error
from prepcli.engine.no_follow import read_no_follow, write_no_follow
from prepcli.planning.checksum_blocks import BLOCK_NBYTES, ChecksumBlock
from prepcli.planning.chunk_extents import ChunkExtent
from prepcli.planning.strided_copies import StridedCopy

UNKNOWN = 0
SHORTEST_RUN = 4 << 10  # of a copy that repeats: following shorter runs takes longer than reading the block back
MAX_OPEN_BLOCKS = 4096  # blocks that are hashed at once, some 700 bytes each

ChecksumArray = npt.NDArray[np.uint64]


class ChecksumRecorder:
    """The sums of a run's blocks, by number. `observe` follows what is written, one slab after the other."""

    def __init__(self, path: Path, extents: Sequence[ChunkExtent]) -> None:
        """Go on from the sums that an earlier run saved in `path`, as far as they are whole."""
        self._path, self._extents = path, extents
        self._starts = [(extent.file, extent.offset) for extent in extents]
        self.sums = load_checksums(path, max((extent.blocks.stop_number for extent in extents), default=0))
        self._open: dict[
            int, tuple[xxhash.xxh3_64, int]
        ] = {}  # of each block that is begun, the next byte of its chunk

    @contextlib.contextmanager
    def recording(self, copies: Sequence[StridedCopy], data: ByteArray) -> Iterator[None]:
        """Take in the runs of copies, beside what is done within."""
        with ThreadPoolExecutor(1) as beside:
            observed = beside.submit(self.record, copies, data)
            yield
            observed.result()

    def record(self, copies: Sequence[StridedCopy], data: ByteArray) -> None:
        """Take in the runs of copies, which follow each other in `data`."""
        at = 0
        for copy in copies:
            run = copy.run_nbytes
            if copy.repeats and run < SHORTEST_RUN:
                at += copy.nbytes
                continue
            for offset in copy.run_offsets():
                self._record_run(copy.file, offset, data[at : at + run])
                at += run

    def _record_run(self, file: int, offset: int, data: ByteArray) -> None:
        at = 0
        while at < data.size:
            extent = self._extents[bisect.bisect_right(self._starts, (file, offset + at)) - 1]
            chunk, start = divmod(offset + at - extent.offset, extent.stride_nbytes)
            size = min(data.size - at, extent.blocks.per_chunk.chunk_nbytes - start)
            self._record_in_chunk(extent, extent.first_block(chunk), start, data[at : at + size])
            at += size

    def _record_in_chunk(self, extent: ChunkExtent, first: int, start: int, data: ByteArray) -> None:
        for block in extent.blocks.per_chunk.overlapping(start, start + data.size):
            number = first + block.number
            if self.sums[number] == UNKNOWN:
                self._record_in_block(
                    number, block, max(block.start, start), data[max(0, block.start - start) : block.stop - start]
                )

    def _record_in_block(self, number: int, block: ChecksumBlock, start: int, data: ByteArray) -> None:
        if data.size == block.stop - block.start:
            self.sums[number] = checksum(data.data)
            return
        state, following = self._open.pop(number, (None, block.start))
        if start != following:
            return
        state = state or xxhash.xxh3_64()
        state.update(data.data)
        if start + data.size == block.stop:
            self.sums[number] = state.intdigest() or 1
        elif len(self._open) < MAX_OPEN_BLOCKS:
            self._open[number] = state, start + data.size

    def save(self) -> None:
        """Write the sums, so that a later run, or the process that finishes the output, has them."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        data = self.sums.astype(CHECKSUM_DTYPE).tobytes()
        try:
            write_no_follow(fresh, data + xxhash.xxh3_128_digest(data))
            os.replace(fresh, self._path)
        except OSError as error:
            raise io_error(self._path, error) from error


def load_checksums(path: Path, block_count: int) -> ChecksumArray:
    """Sums that `Recorder.save` wrote; all unknown where the file is missing, torn or of another size."""
    found = np.zeros(block_count, np.uint64)
    with contextlib.suppress(OSError):
        data = read_no_follow(path)
        size = block_count * found.itemsize
        if len(data) == size + 16 and xxhash.xxh3_128_digest(data[:size]) == data[size:]:
            found[:] = np.frombuffer(data[:size], CHECKSUM_DTYPE)
    return found


def compute_unknown(checksums: ChecksumArray, extents: Sequence[ChunkExtent], files: Sequence[Path]) -> None:
    """Compute the sums that are unknown from the files that were written."""
    if checksums.all():
        return
    room = allocate_buffer(BLOCK_NBYTES + 2 * PAGE)
    with Files(files) as opened:
        for extent in extents:
            for start, number, block in _unknown_blocks(checksums, extent):
                run = StridedCopy(0, extent.file, start + block.start, block.stop - block.start)
                checksums[number] = checksum(opened.read_run(run, room).data)


def _unknown_blocks(checksums: ChecksumArray, extent: ChunkExtent) -> Iterator[tuple[int, int, ChecksumBlock]]:
    """Where a chunk begins, and number and place in it, of each block whose sum is unknown."""
    chunk = extent.blocks.per_chunk
    for at in range(extent.chunk_count):
        first = extent.first_block(at)
        if not checksums[first : first + chunk.block_count].all():
            for block in chunk.overlapping(0, chunk.chunk_nbytes):
                if checksums[first + block.number] == UNKNOWN:
                    yield extent.offset + at * extent.stride_nbytes, first + block.number, block
