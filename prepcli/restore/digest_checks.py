"""Digests of tensors that are read for them: checks against a manifest, and the digest that identifies a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import xxhash

from prepcli.console.progress import NullProgress, Progress
from prepcli.engine import pipeline
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import make_budget
from prepcli.errors import DamagedError
from prepcli.planning.accounting import DEFAULT_MATCH_OPTIONS
from prepcli.planning.boxes import Range
from prepcli.planning.plan import Stream, read_copies
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, stored_rows
from prepcli.sources.tensor_labels import label_tensor

CHECK_MEMORY_NBYTES = 256 << 20  # memory budget of `check_tensors`
SAMPLE_MEMORY_NBYTES = 32 << 20  # memory budget of `sample_digest`
SAMPLE_ROWS = 4
RECREATE_HINT = "create the checkpoint again, or use an earlier one"


def damaged_error(source: Source, tensor: SourceTensor, hint: str) -> DamagedError:
    """Return the error for a tensor that differs from its digest."""
    byte_sources = (source.byte_sources[number] for number in sorted(_file_numbers(tensor)))
    source_names = ", ".join(str(item) if isinstance(item, Path) else item.name for item in byte_sources)
    why = f"its bytes in {source_names} differ from the digest that the manifest records"
    return DamagedError(f"{label_tensor(source, tensor)} in {source.display_name} is damaged", why, hint)


def _file_numbers(tensor: SourceTensor) -> set[int]:
    """Return the numbers of a tensor's files and blobs."""
    stream = _stream(tensor, (0, tensor.shape[0] if tensor.shape else 1))
    return {copy.file for copy in read_copies(stream, stream.box)}


def _stream(tensor: SourceTensor, rows: Range) -> Stream:
    """Return a read-only stream of rows of a tensor."""
    return Stream(tensor.name, tensor.dtype, tensor.shape, rows, tensor.placement, ())


def check_tensors(
    source: Source, tensors: Collection[SourceTensor], progress: Progress, hint: str = RECREATE_HINT
) -> None:
    """Read tensors completely, within CHECK_MEMORY_NBYTES, and compare them with their recorded digests.

    Args:
        source: The checkpoint.
        tensors: The tensors to check.
        progress: Receives the bytes read.
        hint: Advice in the error for a damaged checkpoint.

    Raises:
        PrepError: A tensor differs from a digest.
    """
    pieces = [(tensor, (low, high), digest) for tensor in tensors for low, high, digest in tensor.digests]
    streams = [_stream(tensor, rows) for tensor, rows, _ in pieces]

    def compare(number: int, computed_digest: str) -> None:
        tensor, _, recorded_digest = pieces[number]
        if computed_digest != recorded_digest:
            raise damaged_error(source, tensor, hint)

    progress.begin("check", sum(stream.nbytes for stream in streams))
    try:
        _digest(source, streams, CHECK_MEMORY_NBYTES, progress=progress, on_digest=compare)
    finally:
        progress.end()


def sample_digest(source: Source) -> str:
    """Return a digest of the first rows of each parameter, within SAMPLE_MEMORY_NBYTES.

    It tells a model from others in little time. It is the same for every format and mesh, and for a padded vocabulary.
    A difference in other rows alone is not seen.

    Raises:
        PrepError: A parameter is missing, or the source cannot be read.
    """
    used = match_source_tensors(source, stored_rows(source), DEFAULT_MATCH_OPTIONS).uses
    tensors = sorted((tensor for tensor in source.tensors if tensor.name in used), key=lambda tensor: tensor.name)
    streams = [_stream(t, (0, min(t.shape[0], SAMPLE_ROWS) if t.shape else 1)) for t in tensors]
    digests = _digest(source, streams, SAMPLE_MEMORY_NBYTES)
    lines = (f"{tensor.name} {tensor.dtype} {digests[number]}\n" for number, tensor in enumerate(tensors))
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def _digest(
    source: Source,
    streams: Sequence[Stream],
    memory_nbytes: int,
    *,
    progress: Progress | None = None,
    on_digest: Callable[[int, str], None] = lambda number, digest: None,
) -> dict[int, str]:
    """Read streams and return their digests, by stream number; see `pipeline.run`."""
    budget = make_budget(memory_nbytes)
    with open_blobs(source.byte_sources, budget.cache_nbytes) as files:
        progress = progress or NullProgress()
        return pipeline.run(streams, files, sink=None, budget=budget, progress=progress, on_digest=on_digest).digests
