"""Compute the XXH3-64 of checksum blocks while a run writes them, without reading files.

A block may be written in several pieces. If the pieces are written in byte order, the block is hashed piece by piece.
Otherwise its checksum stays 0 (unknown), and is computed from the files when the output is complete.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import xxhash

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.digest import block_checksum
from prepcli.engine.files import PAGE, RunReader
from prepcli.planning.arrays import BLOCK_NBYTES, ChecksumBlock
from prepcli.planning.chunk_placement import ChunkExtent, count_blocks
from prepcli.stores.buffers import ByteArray, allocate_buffer

UNKNOWN = 0
# Hashing shorter runs takes longer than reading the block back.
MIN_RUN_NBYTES = 4 << 10
# Blocks hashed at the same time, of about 700 bytes each.
MAX_OPEN_BLOCKS = 4096

ChecksumArray = npt.NDArray[np.uint64]


class ChecksumRecorder:
    """Records the checksums of an output's blocks while slabs are written.

    `sums` has the checksum of each block, by block number.
    """

    def __init__(self, extents: Sequence[ChunkExtent], sums: ChecksumArray | None = None) -> None:
        """Begin without a checksum.

        Args:
            extents: Positions of the output's chunks in files, sorted by file and offset.
            sums: Checksums by block number, of several recorders. None for new ones.
        """
        self._extents = extents
        self._starts = [(extent.file, extent.offset) for extent in extents]
        self.sums = np.zeros(count_blocks(extents), np.uint64) if sums is None else sums
        # Blocks recorded since the last call of `take_new`
        self._new: list[int] = []
        # Number of a partly hashed block -> hash state, next byte of the chunk
        self._open: dict[int, tuple[xxhash.xxh3_64, int]] = {}

    @contextlib.contextmanager
    def recording(self, copies: Sequence[StridedCopy], data: ByteArray) -> Iterator[None]:
        """Record the runs of copies in a thread while the block of the `with` statement runs."""
        with ThreadPoolExecutor(1) as executor:
            future = executor.submit(self.record, copies, data)
            yield
            future.result()

    def record(self, copies: Sequence[StridedCopy], data: ByteArray) -> None:
        """Record the runs of copies from `data`, where they are packed one after another."""
        data_offset = 0
        for copy in copies:
            run_nbytes = copy.run_nbytes
            if copy.repeats and run_nbytes < MIN_RUN_NBYTES:
                data_offset += copy.nbytes
                continue
            for file_offset in copy.run_offsets():
                run = data[data_offset : data_offset + run_nbytes]
                self._record_run(copy.file, file_offset, run)
                data_offset += run_nbytes

    def _record_run(self, file: int, offset: int, data: ByteArray) -> None:
        """Record a run over one or several chunks."""
        done = 0
        while done < data.size:
            # The last extent that starts at or before the byte. e.g. extent at 4096 with chunks every
            # 8192 bytes: byte 14000 is byte 1712 of its chunk 1.
            extent = self._extents[bisect.bisect_right(self._starts, (file, offset + done)) - 1]
            chunk, start = divmod(offset + done - extent.offset, extent.stride_nbytes)
            piece_nbytes = min(data.size - done, extent.blocks.per_chunk.chunk_nbytes - start)
            first = extent.first_block(chunk)
            for block in extent.blocks.per_chunk.overlapping(start, start + piece_nbytes):
                number = first + block.number
                if self.sums[number] == UNKNOWN:
                    block_start = max(block.start, start)
                    part_start = done + block_start - start
                    part_stop = done + min(block.stop, start + piece_nbytes) - start
                    part = data[part_start:part_stop]
                    self._record_in_block(number, block, block_start, part)
            done += piece_nbytes

    def _record_in_block(
        self, number: int, block: ChecksumBlock, start: int, data: ByteArray
    ) -> None:
        """Hash a run inside a block if it continues the hashed bytes."""
        if data.size == block.stop - block.start:
            self.sums[number] = block_checksum(data.data)
            self._new.append(number)
            return
        state, next_start = self._open.pop(number, (None, block.start))
        # A run that does not continue the hashed bytes ends the hash: the block stays unknown, and is
        # read back at the end.
        if start != next_start:
            return
        state = state or xxhash.xxh3_64()
        state.update(data.data)
        if start + data.size == block.stop:
            # 0 means unknown, so that a digest of 0 is recorded as 1, as `checksum` does
            self.sums[number] = state.intdigest() or 1
            self._new.append(number)
        elif len(self._open) < MAX_OPEN_BLOCKS:
            self._open[number] = state, start + data.size

    def take_new(self) -> ChecksumArray:
        """Return the numbers of the blocks recorded since the last call."""
        numbers = np.array(self._new, np.uint64)
        self._new = []
        return numbers


def compute_unknown(
    checksums: ChecksumArray, extents: Sequence[ChunkExtent], written: RunReader
) -> None:
    """Compute unknown checksums from the written bytes, in place.

    Args:
        checksums: Checksums by block number.
        extents: Positions of the chunks to look at in the output's data files.
        written: Reader of the data files.
    """
    scratch = allocate_buffer(BLOCK_NBYTES + 2 * PAGE)
    for extent in extents:
        # A leaf may have 10^5 blocks, of which nearly all are known.
        if checksums[extent.blocks.first_number : extent.blocks.stop_number].all():
            continue
        for start, number, block in _unknown_blocks(checksums, extent):
            run = StridedCopy(0, extent.file, start + block.start, block.stop - block.start)
            checksums[number] = block_checksum(written.read_run(run, scratch).data)


def _unknown_blocks(
    checksums: ChecksumArray, extent: ChunkExtent
) -> Iterator[tuple[int, int, ChecksumBlock]]:
    """Yield the chunk offset, the number and the block, for each block with an unknown checksum."""
    chunk = extent.blocks.per_chunk
    for position in range(extent.chunk_count):
        first = extent.first_block(position)
        if checksums[first : first + chunk.block_count].all():
            continue
        chunk_offset = extent.offset + position * extent.stride_nbytes
        for block in chunk.overlapping(0, chunk.chunk_nbytes):
            number = first + block.number
            if checksums[number] == UNKNOWN:
                yield chunk_offset, number, block
