"""Digests of complete tensors: checks against a manifest, and the digest of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import xxhash

from prepcli.console.progress import NullProgress, Progress
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import make_budget
from prepcli.engine.pipeline import Pipeline
from prepcli.errors import DamagedError
from prepcli.formats.again_hint import RECREATE_HINT, again_hint
from prepcli.planning.plan import Plan, Stream, read_copies
from prepcli.planning.tensor_match import DEFAULT_MATCH_OPTIONS
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, stored_axis_maps
from prepcli.sources.tensor_labels import label_tensor
from trainer.models.boxes import Range

# Memory budget of `check_tensors`.
CHECK_MEMORY_NBYTES = 256 << 20
# Memory budget of `sample_digest`.
SAMPLE_MEMORY_NBYTES = 32 << 20
# The first rows of each tensor distinguish models in milliseconds. True rows of a vocabulary come
# first, so that padding does not change them.
SAMPLE_ROWS = 4


def damaged_error(source: Source, tensor: SourceTensor, hint: str) -> DamagedError:
    """Return the error for a tensor with another digest."""
    names: list[str] = []
    for number in sorted(_file_numbers(tensor)):
        item = source.byte_sources[number]
        names.append(str(item) if isinstance(item, Path) else item.name)
    why = f"its bytes in {', '.join(names)} differ from their recorded digest"
    return DamagedError(
        f"{label_tensor(source, tensor)} in {source.display_name} is damaged", why, hint
    )


def _file_numbers(tensor: SourceTensor) -> set[int]:
    """Return the numbers of a tensor's files and blobs."""
    stream = row_stream(tensor, (0, num_rows(tensor)))
    return {copy.file for copy in read_copies(stream, stream.box)}


def num_rows(tensor: SourceTensor) -> int:
    """Return the rows of a tensor, or 1 for a 0-d tensor."""
    return tensor.shape[0] if tensor.shape else 1


def row_stream(tensor: SourceTensor, rows: Range) -> Stream:
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
    pieces: list[tuple[SourceTensor, str]] = []
    streams: list[Stream] = []
    for tensor in tensors:
        for low, high, digest in tensor.digests:
            pieces.append((tensor, digest))
            streams.append(row_stream(tensor, (low, high)))

    def compare(number: int, computed_digest: str) -> None:
        tensor, recorded_digest = pieces[number]
        if computed_digest != recorded_digest:
            raise damaged_error(source, tensor, hint)

    progress.begin("check", sum(stream.nbytes for stream in streams))
    try:
        _digest_streams(source, streams, CHECK_MEMORY_NBYTES, progress=progress, on_digest=compare)
    finally:
        progress.end()


def check_partly_read(source: Source, plan: Plan, progress: Progress) -> None:
    """Check the tensors that a plan reads in other rows or columns than those with a recorded digest.

    E.g. a plan without padding reads rows 0 to 5 of a tensor [8, 4], and the digest of a lock covers rows 0 to 8. The
    digest of the stream cannot be compared with it, so that the tensor is read once more. Other tensors are not read:
    the digests of their streams are compared while they are written.

    Raises:
        PrepError: A tensor differs from a digest.
    """
    digested: dict[str, set[tuple[tuple[int, ...], Range]]] = {}
    for tensor in source.all_tensors:
        columns = tensor.shape[1:]
        digested[tensor.name] = {(columns, (first, stop)) for first, stop, _ in tensor.digests}
    partly_read: set[str] = set()
    for stream in plan.streams:
        part = (stream.shape[1:], stream.rows)
        if stream.reads and part not in digested.get(stream.name, ()):
            partly_read.add(stream.name)
    tensors: list[SourceTensor] = []
    for tensor in source.all_tensors:
        if tensor.name in partly_read and tensor.digests:
            tensors.append(tensor)
    if tensors:
        check_tensors(source, tensors, progress, again_hint(source.manifest))


def tensor_digests(
    source: Source,
    pieces: Sequence[tuple[SourceTensor, Range]],
    memory_nbytes: int,
    *,
    progress: Progress,
    task: str,
) -> list[str]:
    """Return the digest of each range of rows, read within the memory limit.

    Args:
        source: The checkpoint.
        pieces: Tensors, each with a range of its rows.
        memory_nbytes: Memory limit.
        progress: Receives the bytes read.
        task: Name of the task in the progress.
    """
    streams = [row_stream(tensor, rows) for tensor, rows in pieces]
    return stream_digests(source, streams, memory_nbytes, progress=progress, task=task)


def stream_digests(
    source: Source,
    streams: Sequence[Stream],
    memory_nbytes: int,
    *,
    progress: Progress,
    task: str,
) -> list[str]:
    """Return the digest of each stream, read within the memory limit.

    The digest of a cast stream is the text of a `StreamDigest`. The arguments are as for `tensor_digests`.
    """
    if not streams:
        return []
    progress.begin(task, sum(stream.nbytes for stream in streams))
    try:
        digests = _digest_streams(source, streams, memory_nbytes, progress=progress)
    finally:
        progress.end()
    return [digests[number] for number in range(len(streams))]


def sample_digest(source: Source) -> str:
    """Return a digest of the first rows of each parameter, within SAMPLE_MEMORY_NBYTES.

    It distinguishes models in little time. It is the same for every format and mesh, and for a padded vocabulary.
    A difference only in later rows is not detected.

    Raises:
        PrepError: A parameter is missing, or the source cannot be read.
    """
    used = match_source_tensors(source, stored_axis_maps(source), DEFAULT_MATCH_OPTIONS).uses
    return _sample_digest(source, [t for t in source.tensors if t.name in used])


def towers_digest(source: Source) -> str:
    """Return a digest of the towers: the vision and audio parts of a multimodal model.

    It covers the first rows of each tensor, as in `sample_digest`.
    """
    return _sample_digest(source, source.tower_tensors)


def _sample_digest(source: Source, tensors: Iterable[SourceTensor]) -> str:
    # The order of the files must not change the digest.
    tensors = sorted(tensors, key=lambda tensor: tensor.name)
    streams = [row_stream(tensor, (0, min(num_rows(tensor), SAMPLE_ROWS))) for tensor in tensors]
    digests = _digest_streams(source, streams, SAMPLE_MEMORY_NBYTES)
    state = xxhash.xxh3_128()
    for number, tensor in enumerate(tensors):
        state.update(f"{tensor.name} {tensor.dtype} {digests[number]}\n".encode())
    return state.hexdigest()


def _digest_streams(
    source: Source,
    streams: Sequence[Stream],
    memory_nbytes: int,
    *,
    progress: Progress | None = None,
    on_digest: Callable[[int, str], None] = lambda number, digest: None,
) -> dict[int, str]:
    """Read streams and return their digests, by stream number. See `Pipeline.run`."""
    budget = make_budget(memory_nbytes)
    with open_blobs(source.byte_sources, budget.cache_nbytes) as files:
        progress = progress or NullProgress()
        return (
            Pipeline(
                streams, files, sink=None, budget=budget, progress=progress, on_digest=on_digest
            )
            .run()
            .digests
        )
