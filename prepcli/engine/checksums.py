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

from prepcli.engine.digest import SUM_DTYPE, checksum
from prepcli.engine.files import PAGE, Bytes, Files, buffer, io_error
from prepcli.engine.own_files import read_own, write_own
from prepcli.planning.checksum_blocks import BLOCK_NBYTES, Block
from prepcli.planning.extents import Extent
from prepcli.planning.moves import Copy

UNKNOWN = 0
SHORTEST_RUN = 4 << 10  # of a copy that repeats: following shorter runs takes longer than reading the block back
MOST_OPEN = 4096  # blocks that are hashed at once, some 700 bytes each

Sums = npt.NDArray[np.uint64]


class Recorder:
    """The sums of a run's blocks, by number. `observe` follows what is written, one slab after the other."""

    def __init__(self, path: Path, extents: Sequence[Extent]) -> None:
        """Go on from the sums that an earlier run saved in `path`, as far as they are whole."""
        self._path, self._extents = path, extents
        self._starts = [(extent.file, extent.offset) for extent in extents]
        self.sums = load_sums(path, max((extent.blocks.stop for extent in extents), default=0))
        self._open: dict[
            int, tuple[xxhash.xxh3_64, int]
        ] = {}  # of each block that is begun, the next byte of its chunk

    @contextlib.contextmanager
    def observing(self, copies: Sequence[Copy], data: Bytes) -> Iterator[None]:
        """Take in the runs of copies, beside what is done within."""
        with ThreadPoolExecutor(1) as beside:
            observed = beside.submit(self.observe, copies, data)
            yield
            observed.result()

    def observe(self, copies: Sequence[Copy], data: Bytes) -> None:
        """Take in the runs of copies, which follow each other in `data`."""
        at = 0
        for copy in copies:
            run = copy.run
            if copy.repeats and run < SHORTEST_RUN:
                at += copy.nbytes
                continue
            for offset in copy.offsets():
                self._run(copy.file, offset, data[at : at + run])
                at += run

    def _run(self, file: int, offset: int, data: Bytes) -> None:
        at = 0
        while at < data.size:
            extent = self._extents[bisect.bisect_right(self._starts, (file, offset + at)) - 1]
            chunk, start = divmod(offset + at - extent.offset, extent.slot_nbytes)
            size = min(data.size - at, extent.blocks.chunk.chunk_nbytes - start)
            self._part(extent, extent.first_block(chunk), start, data[at : at + size])
            at += size

    def _part(self, extent: Extent, first: int, start: int, data: Bytes) -> None:
        for block in extent.blocks.chunk.touched(start, start + data.size):
            number = first + block.number
            if self.sums[number] == UNKNOWN:
                self._piece(number, block, max(block.low, start), data[max(0, block.low - start) : block.high - start])

    def _piece(self, number: int, block: Block, start: int, data: Bytes) -> None:
        if data.size == block.high - block.low:
            self.sums[number] = checksum(data.data)
            return
        state, following = self._open.pop(number, (None, block.low))
        if start != following:
            return
        state = state or xxhash.xxh3_64()
        state.update(data.data)
        if start + data.size == block.high:
            self.sums[number] = state.intdigest() or 1
        elif len(self._open) < MOST_OPEN:
            self._open[number] = state, start + data.size

    def save(self) -> None:
        """Write the sums, so that a later run, or the process that finishes the output, has them."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        data = self.sums.astype(SUM_DTYPE).tobytes()
        try:
            write_own(fresh, data + xxhash.xxh3_128_digest(data))
            os.replace(fresh, self._path)
        except OSError as error:
            raise io_error(self._path, error) from error


def load_sums(path: Path, count: int) -> Sums:
    """Sums that `Recorder.save` wrote; all unknown where the file is missing, torn or of another size."""
    found = np.zeros(count, np.uint64)
    with contextlib.suppress(OSError):
        data = read_own(path)
        size = count * found.itemsize
        if len(data) == size + 16 and xxhash.xxh3_128_digest(data[:size]) == data[size:]:
            found[:] = np.frombuffer(data[:size], SUM_DTYPE)
    return found


def read_back(sums: Sums, extents: Sequence[Extent], files: Sequence[Path]) -> None:
    """Compute the sums that are unknown from the files that were written."""
    if sums.all():
        return
    room = buffer(BLOCK_NBYTES + 2 * PAGE)
    with Files(files) as opened:
        for extent in extents:
            for start, number, block in _unknown(sums, extent):
                run = Copy(0, extent.file, start + block.low, block.high - block.low)
                sums[number] = checksum(opened.read_run(run, room).data)


def _unknown(sums: Sums, extent: Extent) -> Iterator[tuple[int, int, Block]]:
    """Where a chunk begins, and number and place in it, of each block whose sum is unknown."""
    chunk = extent.blocks.chunk
    for at in range(extent.count):
        first = extent.first_block(at)
        if not sums[first : first + chunk.count].all():
            for block in chunk.touched(0, chunk.chunk_nbytes):
                if sums[first + block.number] == UNKNOWN:
                    yield extent.offset + at * extent.slot_nbytes, first + block.number, block
