"""Read the bytes of a tensor in C order, however they are stored, within two small buffers."""

from __future__ import annotations

from collections.abc import Iterator

from prepcli.engine.files import RunReader
from prepcli.engine.permute import needs_permute, scatter
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import split_stream_evenly
from prepcli.stores.buffers import ByteArray, allocate_buffer

RUN_NBYTES = 4 << 20


def allocate_run_buffers(run_nbytes: int = RUN_NBYTES) -> tuple[ByteArray, ByteArray]:
    """Allocate the buffers that `read_values` needs for runs of this length. They can be reused for other streams."""
    return allocate_buffer(run_nbytes), allocate_buffer(run_nbytes)


def read_values(
    files: RunReader, stream: Stream, *, buffers: tuple[ByteArray, ByteArray]
) -> Iterator[tuple[int, ByteArray]]:
    """Read a stream in runs of whole elements.

    Args:
        files: Reader of the source files.
        stream: The stream.
        buffers: Buffers from `allocate_run_buffers`.

    Yields:
        (offset of the run in the tensor, bytes). A run is overwritten by the next one. Run boundaries depend on the
        tensor's shape and the buffers alone.
    """
    read_buffer, ordered_buffer = buffers
    for slab in split_stream_evenly(0, stream, max_nbytes=read_buffer.size):
        data = files.read_runs(slab.reads, read_buffer)
        if needs_permute(slab.reads):
            data = scatter(slab, data, out=ordered_buffer[: slab.nbytes])
        yield slab.start, data
