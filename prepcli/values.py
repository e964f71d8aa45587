"""The bytes of a tensor in its own order, wherever they lie, within two small buffers."""

from __future__ import annotations

from collections.abc import Iterator

from prepcli.engine import scattered
from prepcli.files import PAGE, Bytes, Files, buffer
from prepcli.permute import scatter
from prepcli.plan import Stream
from prepcli.slabs import even_slabs

SLAB_NBYTES = 4 << 20


def values(files: Files, stream: Stream, slab_nbytes: int = SLAB_NBYTES) -> Iterator[tuple[int, Bytes]]:
    """The left side of a stream in runs of whole elements, at most `slab_nbytes` each, with the byte of the tensor
    where each begins. Where they are cut depends on the shape alone. A run is overwritten by the next."""
    buffers = [buffer(slab_nbytes + 2 * PAGE) for _ in range(2)]
    for slab in even_slabs(0, stream, slab_nbytes):
        if scattered(slab.left):
            yield slab.start, scatter(slab, files.read_runs(slab.left, buffers[0]), buffers[1][: slab.nbytes])
        else:
            yield slab.start, files.read_runs(slab.left, buffers[0])
