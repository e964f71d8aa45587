"""Write shards of leaves from host memory into the chunks of an output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
