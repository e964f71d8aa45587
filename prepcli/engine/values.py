"""The bytes of a tensor in its own order, wherever they lie, within two small buffers."""

from __future__ import annotations

from collections.abc import Iterator

from prepcli.engine.files import Bytes, Reads, buffer
from prepcli.engine.permute import scatter
from prepcli.engine.pipeline import scattered
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import even_slabs

SLAB_NBYTES = 4 << 20


def run_buffers(run_nbytes: int = SLAB_NBYTES) -> tuple[Bytes, Bytes]:
    """What `values` needs for runs of this length; to be used again for the next stream."""
    return buffer(run_nbytes), buffer(run_nbytes)


def values(files: Reads, stream: Stream, buffers: tuple[Bytes, Bytes]) -> Iterator[tuple[int, Bytes]]:
    """The left side of a stream in runs of whole elements, with the byte of the tensor where each begins.

    Where they are cut depends on the shape and the buffers alone. A run is overwritten by the next.
    """
    read, ordered = buffers
    for slab in even_slabs(0, stream, read.size):
        if scattered(slab.left):
            yield slab.start, scatter(slab, files.read_runs(slab.left, read), ordered[: slab.nbytes])
        else:
            yield slab.start, files.read_runs(slab.left, read)
