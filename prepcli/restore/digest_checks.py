"""Tensors against the digests that a manifest records: of whole tensors, for readers that cannot check parts."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import xxhash

from prepcli.console.progress import Progress
from prepcli.engine import pipeline
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import make_budget
from prepcli.engine.files import ByteArray
from prepcli.errors import PrepError
from prepcli.planning.boxes import Range
from prepcli.planning.plan import Stream, read_copies
from prepcli.sources.source import Source, SourceTensor

CHECK_MEMORY_NBYTES = 256 << 20  # of a check of all tensors
RECREATE_HINT = "make the checkpoint anew, or take an earlier one"


def damaged_error(source: Source, tensor: SourceTensor, hint: str) -> PrepError:
    """Return the error of a tensor that differs from its digest."""
    name = source.display_names().get(tensor.name, tensor.name)
    read = (source.byte_sources[number] for number in sorted(_files(tensor)))
    where = ", ".join(str(each) if isinstance(each, Path) else each.name for each in read)
    why = f"its bytes in {where} differ from the digest that the manifest records"
    return PrepError(f"{name} in {source.display_name} is damaged", why, hint)


def _files(tensor: SourceTensor) -> set[int]:
    """The numbers of what a tensor is read from."""
    stream = _stream(tensor, (0, tensor.shape[0] if tensor.shape else 1))
    return {copy.file for copy in read_copies(stream, stream.box)}


def _stream(tensor: SourceTensor, rows: Range) -> Stream:
    return Stream(tensor.name, tensor.dtype, tensor.shape, rows, tensor.placement, ())


def check_tensor(source: Source, tensor: SourceTensor, data: ByteArray, hint: str = RECREATE_HINT) -> None:
    """Raise PrepError unless all bytes of a tensor have the digests that are recorded, if any are."""
    row_nbytes = data.size // tensor.shape[0] if tensor.shape and tensor.shape[0] else data.size
    for low, high, wanted in tensor.digests:
        if xxhash.xxh3_128_hexdigest(data[low * row_nbytes : high * row_nbytes].data) != wanted:
            raise damaged_error(source, tensor, hint)


def check_tensors(
    source: Source, tensors: Collection[SourceTensor], progress: Progress, hint: str = RECREATE_HINT
) -> None:
    """Read tensors from end to end, within MEMORY_NBYTES.

    Raises:
        PrepError: A tensor differs from a digest that the manifest records.
    """
    pieces = [(tensor, (low, high), wanted) for tensor in tensors for low, high, wanted in tensor.digests]
    streams = [_stream(tensor, rows) for tensor, rows, _ in pieces]

    def compare(number: int, found: str) -> None:
        tensor, _, wanted = pieces[number]
        if found != wanted:
            raise damaged_error(source, tensor, hint)

    progress.begin("check", sum(stream.nbytes for stream in streams))
    try:
        spend = make_budget(CHECK_MEMORY_NBYTES)
        with open_blobs(source.byte_sources, spend.cache_nbytes) as files:
            pipeline.run(streams, files, None, spend, progress, on_digest=compare)
    finally:
        progress.end()
