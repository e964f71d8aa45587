"""The bytes of a tensor in its own order, wherever they lie, within two small buffers."""

from __future__ import annotations

from collections.abc import Iterator

from prepcli.engine.files import ByteArray, RunReader, allocate_buffer
from prepcli.engine.permute import scatter
from prepcli.engine.pipeline import needs_permute
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import split_stream_evenly

RUN_NBYTES = 4 << 20


def allocate_run_buffers(run_nbytes: int = RUN_NBYTES) -> tuple[ByteArray, ByteArray]:
    """What `values` needs for runs of this length; to be used again for the next stream."""
    return allocate_buffer(run_nbytes), allocate_buffer(run_nbytes)


def read_values(
    files: RunReader, stream: Stream, buffers: tuple[ByteArray, ByteArray]
) -> Iterator[tuple[int, ByteArray]]:
    """The left side of a stream in runs of whole elements, with the byte of the tensor where each begins.

    Where they are cut depends on the shape and the buffers alone. A run is overwritten by the next.
    """
    read, ordered = buffers
    for slab in split_stream_evenly(0, stream, read.size):
        if needs_permute(slab.reads):
            yield slab.start, scatter(slab, files.read_runs(slab.reads, read), ordered[: slab.nbytes])
        else:
            yield slab.start, files.read_runs(slab.reads, read)
