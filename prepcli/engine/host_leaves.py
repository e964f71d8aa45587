"""Leaves in host memory: read through the engine's reader interface, or written shard by shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from prepcli.algebra.boxes import slices
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.checkpoint_store import HostLeaf, HostShard
from prepcli.engine.checksum_recorder import ChecksumRecorder
from prepcli.engine.files import PAGE, Files
from prepcli.engine.fills import numpy_dtype
from prepcli.planning.chunk_placement import shard_copies
from prepcli.planning.plan import OutputLeaf
from prepcli.stores.buffers import ByteArray, allocate_buffer

# A sync between shards bounds the dirty pages in the page cache, which count as memory of the job.
MAX_UNSYNCED_NBYTES = 256 << 20


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


def write_shards(
    leaves: Iterable[tuple[OutputLeaf, HostLeaf]],
    sink: Files,
    *,
    checksums: ChecksumRecorder | None,
) -> None:
    """Write the shards of leaves to an output, and make them durable.

    Beyond the existing shards, host memory holds one more shard and a copy of one chunk.

    Args:
        leaves: Leaves of the output, each with the shards to write.
        sink: Files of the output.
        checksums: Records the checksums of written blocks.

    Raises:
        PrepError: A file cannot be written.
    """
    unsynced_nbytes = 0
    for output_leaf, leaf in leaves:
        for shard in leaf.shards:
            for copy, data in _chunk_data(output_leaf, shard):
                if checksums:
                    checksums.record((copy,), data)
                sink.write((copy,), data)
                unsynced_nbytes += data.size
                if unsynced_nbytes >= MAX_UNSYNCED_NBYTES:
                    sink.sync()
                    unsynced_nbytes = 0
    sink.sync()


def _chunk_data(leaf: OutputLeaf, shard: HostShard) -> Iterator[tuple[StridedCopy, ByteArray]]:
    """Yield the copy to each chunk and its bytes, with the page offset of the file as direct I/O needs it."""
    values = shard.fetch()
    shape = tuple(stop - start for start, stop in shard.box)
    if (values.shape, values.dtype) != (shape, numpy_dtype(leaf.dtype)):
        raise ValueError(
            f"a shard of {leaf.name} was fetched as {values.shape} {values.dtype}, not {shape}"
        )
    # A shard may cover parts of chunks, e.g. where shards are smaller than the least chunk. The copies
    # of two shards of one chunk then write disjoint bytes of it.
    buffer = allocate_buffer(min(values.nbytes, leaf.chunk_nbytes) + 2 * PAGE)
    for part, copy in shard_copies(leaf, shard.box):
        page_offset = copy.file_offset % PAGE
        data = buffer[page_offset : page_offset + copy.nbytes]
        piece = values[slices(part, shard.box)]
        data.view(values.dtype).reshape(piece.shape)[...] = piece
        yield copy, data
