"""Statistics of the tensors of a checkpoint, whose values are compared with their recorded digests first."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from prepcli.core.observer import Observer
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import MIN_MEMORY_NBYTES
from prepcli.formats.manifest import again_hint
from prepcli.inspection.contents import CheckpointContents
from prepcli.inspection.tensor_stats import TensorStats, compute_stats, stored_nbytes
from prepcli.planning.tensor_match import DEFAULT_MATCH_OPTIONS
from prepcli.restore.digest_checks import check_tensors
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.opening import open_source
from prepcli.sources.quantization import is_quantized
from prepcli.sources.source import (
    Source,
    SourceTensor,
    label_tensors,
    match_source_tensors,
    stored_axis_maps,
)
from prepcli.stores.byte_ranges import MAX_IN_FLIGHT, map_in_daemon_threads
from prepcli.stores.paths import is_remote, without_read_ahead


def check_values(
    located: LocatedCheckpoint, names: Collection[str] | None, observer: Observer
) -> None:
    """Compare an output of prep with its recorded digests, before statistics of its values are shown.

    A bucket sends the bytes twice: statistics are of leaves as they are stored, and digests of tensors.

    Args:
        located: The checkpoint.
        names: Names of the shown tensors or leaves. None for all.
        observer: Receives progress.

    Raises:
        DamagedError: A tensor differs from its digest.
    """
    if located.manifest is None:
        return
    # Quantised weights have digests as they are stored, and scaled values as they are scaled.
    verbatim = True if is_quantized(located.files.path) else None
    source = open_source(located, verbatim=verbatim, kept_scales="all")
    tensors = source.all_tensors
    if names is not None:
        tensors = _named_tensors(source, names)
    check_tensors(
        source,
        tensors,
        observer.progress(),
        again_hint(located.manifest),
        # `inspect` has no option for memory.
        memory_nbytes=MIN_MEMORY_NBYTES,
    )


def _named_tensors(source: Source, names: Collection[str]) -> Sequence[SourceTensor]:
    """Return the tensors of some leaves or tensors, by name. All tensors if they have other names."""
    uses = match_source_tensors(source, stored_axis_maps(source), DEFAULT_MATCH_OPTIONS).uses
    labels = label_tensors(source, uses)
    tensors: list[SourceTensor] = []
    found: set[str] = set()
    for tensor in source.all_tensors:
        label = labels[tensor.name]
        shown = {label.tensor, *label.leaf.split(", ")} & {*names}
        if shown:
            tensors.append(tensor)
            found |= shown
    # The leaves of another library have names of their own.
    return tensors if found == {*names} else source.all_tensors


def compute_statistics(
    contents: CheckpointContents, entries: Sequence[SourceTensor], observer: Observer
) -> list[TensorStats | None]:
    """Read the data of tensors, and compute the statistics of each."""
    progress = observer.progress()
    progress.begin("inspect", sum(map(stored_nbytes, entries)))
    has_server = is_remote(contents.byte_sources)
    # One thread at a time reports progress.
    progress_lock = threading.Lock()

    def advance(nbytes: int) -> None:
        with progress_lock:
            progress.advance(nbytes)

    try:
        with open_blobs(without_read_ahead(contents.byte_sources)) as files:

            def compute(entry: SourceTensor) -> TensorStats | None:
                return compute_stats(entry, files, advance, is_remote=has_server)

            if not has_server:
                return [compute(entry) for entry in entries]
            # A store limits the rate of each connection.
            return map_in_daemon_threads(compute, entries, num_threads=2 * MAX_IN_FLIGHT)
    finally:
        progress.end()
