"""Digests of complete tensors: checks against a manifest, also of an earlier prep, and the digest of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, Command, DamagedError, text
from prepcli.core.formatting import format_bytes
from prepcli.core.observer import LockedProgress, NullProgress, Observer, Progress
from prepcli.engine.blobs import can_share_reader, open_blobs
from prepcli.engine.budget import make_budget
from prepcli.engine.casts import value_operations
from prepcli.engine.digest import StreamDigest, algorithm_of, record_digest_of_pieces
from prepcli.engine.lanes import count_lanes, lanes_have_threads, run_pipelines
from prepcli.engine.pipeline import Pipeline, PipelineUnit
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import NO_MANIFEST, RECREATE_HINT, again_hint
from prepcli.planning.arrays import location_copies
from prepcli.planning.libraries import LayoutScale, recorded_scale
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Stream
from prepcli.planning.tensors import DEFAULT_DIGEST, qualify, split_name
from prepcli.sources.source import (
    Source,
    SourceTensor,
    file_position,
    label_tensor,
    match_source_tensors,
    stored_rows,
)
from prepcli.sources.tensor_match import DEFAULT_MATCH_OPTIONS
from prepcli.stores.buffers import Blob
from prepcli.stores.paths import AnyPath, path_in_folder

# Name of the comparison with recorded digests in progress reports.
CHECK_TASK = "check"
# Default memory budget of `check_tensors`.
CHECK_MEMORY_NBYTES = 256 << 20
# Memory budget of `sample_digest`.
SAMPLE_MEMORY_NBYTES = 32 << 20
# The first rows of each tensor distinguish models in milliseconds. True rows of a vocabulary come
# first, so that padding does not change them.
SAMPLE_ROWS = 4


def damaged_error(source: Source, tensor: SourceTensor, hint: str) -> DamagedError:
    """Return the error for a tensor with another digest."""
    stream = row_stream(tensor, (0, num_rows(tensor)))
    numbers = {copy.file for copy in location_copies(stream.reads, stream.box)}
    items = [source.byte_sources[number] for number in sorted(numbers)]
    names = [str(item) if isinstance(item, Path) else item.name for item in items]
    why = f"its bytes in {', '.join(names)} differ from their recorded digest"
    # A tensor without bytes is in no file.
    checkpoint_name = checkpoint_of(source, items[0]) if items else source.display_name
    if checkpoint_name != source.display_name:
        hint = GET_AGAIN_HINT
    what = f"{label_tensor(source, tensor)} in {checkpoint_name} is damaged"
    return DamagedError(what, why, hint)


def checkpoint_of(source: Source, item: AnyPath | Blob) -> str:
    """Return the name of the checkpoint with a file or blob: the source, or e.g. the adapter of a merge."""
    if isinstance(item, AnyPath) and path_in_folder(item, source.root) is None:
        return str(item.parent)
    return source.display_name


def num_rows(tensor: SourceTensor) -> int:
    """Return the rows of a tensor, or 1 for a 0-d tensor."""
    return tensor.shape[0] if tensor.shape else 1


def row_stream(tensor: SourceTensor, rows: Range, algorithm: str = DEFAULT_DIGEST) -> Stream:
    """Return a read-only stream of rows of a tensor, with a digest of this algorithm."""
    place = tensor.placement
    return Stream(
        tensor.name, tensor.dtype, tensor.shape, rows, place, (), digest_algorithm=algorithm
    )


def recorded_streams(tensor: SourceTensor) -> list[Stream]:
    """Return a read-only stream of each range of rows with a recorded digest, with the algorithm of that digest."""
    streams: list[Stream] = []
    for low, high, digest in tensor.digests:
        streams.append(row_stream(tensor, (low, high), algorithm_of(digest)))
    return streams


def check_tensors(
    source: Source,
    tensors: Iterable[SourceTensor],
    progress: Progress,
    hint: str = RECREATE_HINT,
    *,
    memory_nbytes: int = CHECK_MEMORY_NBYTES,
) -> None:
    """Read tensors completely, and compare them with their recorded digests."""
    pieces: list[tuple[SourceTensor, str]] = []
    streams: list[Stream] = []
    for tensor in tensors:
        pieces += [(tensor, digest) for _, _, digest in tensor.digests]
        streams += recorded_streams(tensor)

    def compare(number: int, computed: StreamDigest) -> None:
        tensor, recorded_digest = pieces[number]
        if computed.read != recorded_digest:
            raise damaged_error(source, tensor, hint)

    _digest_streams(source, streams, memory_nbytes, progress, CHECK_TASK, on_digest=compare)


class RecordedDigests:
    """The recorded digests of a source's tensors, by their rows and columns."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._digests: dict[tuple[str, tuple[int, ...], Range], str] = {}
        for tensor in source.all_tensors:
            for first, stop, digest in tensor.digests:
                self._digests[tensor.name, tensor.shape[1:], (first, stop)] = digest

    def find(self, stream: Stream) -> str | None:
        """Return the digest of the bytes of a stream, or None if none of its algorithm covers its rows and columns."""
        digest = self._digests.get((stream.name, stream.shape[1:], stream.rows))
        if digest is None or algorithm_of(digest) != stream.digest_algorithm:
            return None
        return digest

    def compare(self, stream: Stream, digest: str) -> None:
        """Raise DamagedError if the bytes of a stream have another digest than the recorded one."""
        if self.find(stream) not in (None, digest):
            tensor = next(each for each in self._source.all_tensors if each.name == stream.name)
            raise damaged_error(self._source, tensor, again_hint(self._source.manifest))


def check_before_reading(
    source: Source, streams: Iterable[Stream], memory_nbytes: int, progress: Progress
) -> None:
    """Check the tensors with recorded digests of another form than the one to read.

    Decoded and mapped tensors are made from stored ones, which are read here once more, completely. So are tensors of
    which other rows or columns are read: e.g. a plan without padding reads rows 0 to 5 of a tensor [8, 4], and the
    digest of a lock covers rows 0 to 8. No other tensor is read: the digest of its stream is compared with the recorded
    one, by the reader of the stream.
    """
    unchecked = find_transformed(source, streams)
    if unchecked:
        check_tensors(
            source, unchecked, progress, again_hint(source.manifest), memory_nbytes=memory_nbytes
        )


def find_transformed(source: Source, streams: Iterable[Stream]) -> Collection[SourceTensor]:
    """Return the stored tensors with a recorded digest that the streams read in another form."""
    recorded = RecordedDigests(source)
    tensors = {tensor.name: tensor for tensor in source.all_tensors}
    unchecked: dict[tuple[str, tuple[int, int]], SourceTensor] = {}
    for stream in streams:
        if not stream.reads or recorded.find(stream):
            continue
        for stored in tensors[stream.name].stored:
            if stored.digests:
                unchecked[stored.name, file_position(stored)] = stored
    return unchecked.values()


def check_after_reading(
    source: Source,
    streams: Sequence[Stream],
    digests: Sequence[str],
    memory_nbytes: int,
    progress: Progress,
) -> None:
    """Compare streams with the recorded digests after they were read, e.g. before a comparison calls them equal.

    See `check_before_reading` for the progress.
    """
    recorded = RecordedDigests(source)
    for stream, digest in zip(streams, digests):
        recorded.compare(stream, digest)
    check_before_reading(source, streams, memory_nbytes, progress)


def stream_digests(
    source: Source,
    streams: Sequence[Stream],
    memory_nbytes: int,
    *,
    progress: Progress,
    task: str,
    is_checked: bool = True,
) -> list[StreamDigest]:
    """Return the digests of each stream, read within the memory limit.

    Args:
        source: The source of the streams.
        streams: Read-only streams.
        memory_nbytes: Limit of the memory.
        progress: Receives the number of read bytes.
        task: Name of the task of the progress.
        is_checked: Whether the tensors are compared with their recorded digests.

    Raises:
        DamagedError: A tensor differs from its recorded digest.
    """
    if not streams:
        return []
    recorded = RecordedDigests(source)

    def compare(number: int, digest: StreamDigest) -> None:
        recorded.compare(streams[number], digest.read)

    if is_checked:
        check_before_reading(source, streams, memory_nbytes, progress)
    on_digest = compare if is_checked else _ignore_digest
    digests = _digest_streams(source, streams, memory_nbytes, progress, task, on_digest=on_digest)
    return [digests[number] for number in range(len(streams))]


def _ignore_digest(number: int, digest: StreamDigest) -> None:
    """Do nothing with the digest of a stream."""


def sample_digest(source: Source) -> str:
    """Return a digest of the first rows of each parameter, within SAMPLE_MEMORY_NBYTES.

    It distinguishes models in little time. It is the same for every format and mesh, and for a padded vocabulary.
    A difference only in later rows is not detected.
    """
    used = match_source_tensors(source, stored_rows(source), DEFAULT_MATCH_OPTIONS).uses
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
    digests = _digest_streams(source, streams, SAMPLE_MEMORY_NBYTES, NullProgress(), "sample")
    lines: list[bytes] = []
    for number, tensor in enumerate(tensors):
        lines.append(f"{tensor.name} {tensor.dtype} {digests[number].read}\n".encode())
    return record_digest_of_pieces(lines)


def _digest_streams(
    source: Source,
    streams: Sequence[Stream],
    memory_nbytes: int,
    progress: Progress,
    task: str,
    *,
    on_digest: Callable[[int, StreamDigest], None] = _ignore_digest,
) -> dict[int, StreamDigest]:
    """Read streams as a task of the progress, and return their digests, by stream number.

    `on_digest` is called in several threads. See `Pipeline`.
    """
    total_nbytes = sum(stream.nbytes for stream in streams)
    num_lanes = 1
    if can_share_reader(source.byte_sources):
        num_lanes = count_lanes(total_nbytes, memory_nbytes)
    budget = make_budget(memory_nbytes // num_lanes)
    # The lanes share the iterator of the list. It is written in C, so that two threads may call it.
    units = iter([PipelineUnit(number, (number,)) for number in range(len(streams))])
    pipelines: list[Pipeline] = []
    locked_progress = LockedProgress(progress)
    progress.begin(task, total_nbytes)
    try:
        with open_blobs(source.byte_sources, budget.cache_nbytes) as files:
            has_threads = lanes_have_threads(
                [stream.nbytes for stream in streams],
                num_lanes,
                are_in_memory=files.are_in_memory,
            )
            for _ in range(num_lanes):
                pipeline = Pipeline(
                    streams,
                    files,
                    sink=None,
                    budget=budget,
                    progress=locked_progress,
                    units=units,
                    on_digest=on_digest,
                    has_threads=has_threads,
                )
                pipelines.append(pipeline)
            run_pipelines(pipelines)
    finally:
        progress.end()
    digests: dict[int, StreamDigest] = {}
    for pipeline in pipelines:
        digests |= pipeline.result.digests
    return digests


# Tensors with a scale in the layout of another trainer, such as MaxText's queries


def stored_scale(output: Source, name: str) -> LayoutScale | None:
    """Return the scale of the stored values of a tensor. See `SourceHints.kept_scales`.

    Args:
        output: The output, opened with its stored values.
        name: Name of the tensor in `output.all_tensors`, e.g. of a moment.
    """
    manifest = output.manifest or NO_MANIFEST
    slot, tensor = split_name(name)
    record = manifest.scales.get(qualify(slot, output.names.full_name(tensor)))
    # The opener of Orbax items compares the records with the layout. Other formats have no scale.
    if record is None or not manifest.lost_values or output.tensor_file_names:
        return None
    return recorded_scale(record, record["significant"])


def written_stream(
    tensor: SourceTensor, rows: Range, dtype: str, scale: LayoutScale | None
) -> Stream:
    """Return a stream of the rows of an output: scaled, and cast to its dtype."""
    operations = value_operations(tensor.dtype, dtype, scale=scale)
    return replace(row_stream(tensor, rows), operations=operations)


def note_missing_file_digests(
    display_name: str, manifest: Manifest | None, observer: Observer
) -> None:
    """Print a note if a manifest has no digests of the checkpoint's settings and tokenizer files."""
    if manifest and "files" not in manifest:
        unchecked = "its settings and tokenizer files are not checked"
        observer.note(f"{display_name} was written by an earlier prep: {unchecked}")


def check_without_checksums(
    source: Source,
    tensors: Sequence[SourceTensor],
    observer: Observer,
    *,
    hint: str = RECREATE_HINT,
) -> None:
    """Check the digests of whole tensors, for a checkpoint without checksums of its chunks.

    Tensors without digests are skipped.
    """
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor.digests)
    if not nbytes:
        return
    cost = f"checking it reads another {format_bytes(nbytes)}"
    name = f"{source.display_name} has no {CHECKSUMS_FILE} (written by an earlier prep)"
    reshard = Command("reshard")
    observer.note(text("{}: {}; {} writes a checkpoint with checksums", name, cost, reshard))
    check_tensors(source, tensors, observer.progress(), hint)
