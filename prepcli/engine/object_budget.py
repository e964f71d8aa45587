"""Divide a memory limit between the buffers of a pipeline and its objects."""

from __future__ import annotations

from prepcli.engine.budget import (
    MAX_BUFFERS,
    MAX_SLAB_NBYTES,
    MIB,
    Budget,
    bookkeeping_nbytes,
    make_budget,
)
from prepcli.engine.files import PAGE
from prepcli.engine.object_assembler import PieceLimits

MIN_BUFFERS = 4
# Larger requests are hardly faster, and take long to repeat.
MAX_PIECE_NBYTES = 64 * MIB
MIN_PIECE_NBYTES = 4 * MIB
MAX_SENDING_THREADS = 8
MAX_PARTS_IN_FLIGHT = 4


def make_object_budget(
    nbytes: int,
    *,
    min_buffer_nbytes: int,
    kept_nbytes: int,
    object_nbytes: int,
    largest_nbytes: int,
    part_nbytes: int,
    num_compressing: int = 0,
) -> tuple[Budget, PieceLimits]:
    """Divide a memory limit.

    Args:
        nbytes: The limit.
        min_buffer_nbytes: Preferred minimum size of a slab.
        kept_nbytes: Memory for data of the whole run. See `make_budget`.
        object_nbytes: Usual size of an object. If possible, a piece is not smaller.
        largest_nbytes: Size of the largest object.
        part_nbytes: Size of a part of its multipart upload.
        num_compressing: Number of threads with a compressor each. 0 without compression. Each piece then has a
            compressed copy while it is sent, and each split object keeps a compressor.

    Returns:
        The budget of the pipeline, and the limits of the pieces.

    Raises:
        UsageError: The limit is too small.
    """
    # This also checks that the limit is large enough for the kept data.
    make_budget(nbytes, kept_nbytes=kept_nbytes)
    reserved_nbytes = bookkeeping_nbytes(nbytes)
    usable_nbytes = nbytes - reserved_nbytes - max(0, kept_nbytes - reserved_nbytes // 4)
    # Two thirds for objects: 512 MiB have 298 MiB of pieces and 4 buffers of 32 MiB, 32 MiB have 16 MiB
    # of pieces and 4 buffers of 2 MiB.
    pieces_nbytes = usable_nbytes * 2 // 3
    buffers_nbytes = usable_nbytes - pieces_nbytes
    slab_nbytes = _slab_nbytes(buffers_nbytes // MIN_BUFFERS)
    if slab_nbytes < min_buffer_nbytes <= _slab_nbytes(buffers_nbytes // 2):
        slab_nbytes = -(-min_buffer_nbytes // PAGE) * PAGE
    buffer_count = min(MAX_BUFFERS, buffers_nbytes // (slab_nbytes + 2 * PAGE))
    budget = Budget(nbytes - pieces_nbytes, slab_nbytes, buffer_count)
    if num_compressing:
        # The other half is for the copies.
        pieces_nbytes //= 2
    piece_nbytes = min(MAX_PIECE_NBYTES, max(object_nbytes, pieces_nbytes // 4))
    if piece_nbytes <= pieces_nbytes and largest_nbytes <= piece_nbytes:
        return budget, PieceLimits(pieces_nbytes, piece_nbytes, num_threads=MAX_SENDING_THREADS)
    # A multipart upload has one part in memory that is filled, and the parts that are sent.
    max_parts = pieces_nbytes // 4 // part_nbytes
    parts_in_flight = max(1, min(MAX_PARTS_IN_FLIGHT, max_parts - 1))
    split_files = max(1, max_parts // (1 + parts_in_flight))
    if num_compressing:
        split_files = min(split_files, num_compressing)
    pieces_nbytes -= split_files * (1 + parts_in_flight) * part_nbytes
    # At least two pieces, so that one is assembled while another one is sent.
    piece_nbytes = max(MIN_PIECE_NBYTES, min(piece_nbytes, pieces_nbytes // 2))
    limits = PieceLimits(
        max(pieces_nbytes, piece_nbytes), piece_nbytes, split_files, parts_in_flight
    )
    return budget, limits


def _slab_nbytes(buffer_nbytes: int) -> int:
    """Return the largest slab for a buffer. A buffer is two pages longer."""
    return min(MAX_SLAB_NBYTES, (buffer_nbytes - 2 * PAGE) // PAGE * PAGE)
