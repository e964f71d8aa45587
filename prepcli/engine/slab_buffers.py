"""Which buffers a slab needs on its way from the source to the sink."""

from __future__ import annotations

from prepcli.engine.files import PAGE, ByteArray
from prepcli.planning.slabs import Slab
from prepcli.planning.strided_copies import StridedCopy


def needs_permute(copies: tuple[StridedCopy, ...]) -> bool:
    """Whether the packed runs of copies differ from the tensor's byte order."""
    return len(copies) > 1 or any(copy.dims for copy in copies)


def buffers_needed(slab: Slab, is_gathered: bool) -> int:
    """Return the number of buffers for a slab: one, or two if its bytes are permuted, cast or gathered."""
    return 1 + (needs_permute(slab.reads) or slab.is_cast or is_gathered)


def needs_gather(slab: Slab, is_aligned: bool) -> bool:
    """Whether the sink needs a slab's bytes in another order or, for aligned writes, at another page offset."""
    if not slab.writes or needs_permute(slab.writes):
        return bool(slab.writes)
    if not is_aligned:
        return False
    is_single_run = slab.reads and not needs_permute(slab.reads) and not slab.is_cast
    return bool(is_single_run and (slab.reads[0].file_offset - slab.writes[0].file_offset) % PAGE)


def page_offset_view(slab: Slab, into: ByteArray, *, nbytes: int) -> ByteArray:
    """Return a view of a buffer with the page offset of the first byte to write."""
    page_offset = slab.writes[0].file_offset % PAGE if slab.writes else 0
    return into[page_offset : page_offset + nbytes]
