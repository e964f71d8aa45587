"""Write the lock file of a model: the required digests of its files and tensors."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.checkpoint_options import (
    check_recorded_names,
    check_result_path,
    common_options,
    open_checkpoint,
    source_line,
    write_result,
)
from prepcli.commands.operations.inspection_options import LockOptions
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.results import LockedModel
from prepcli.commands.pages.html_page import check_page_path
from prepcli.commands.pages.inspection_page import write_lock_page
from prepcli.core.errors import RERUN_HINT
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.execution.data_checks import (
    read_file_states,
    read_source_state,
    source_changed_error,
    touched_files,
)
from prepcli.formats.lock_file import Lock, encode_lock
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.planning.plan import Stream
from prepcli.restore.digest_checks import num_rows, recorded_streams, row_stream, stream_digests
from prepcli.sources.locate import check_stream
from prepcli.sources.recorded_sources import RowDigests, make_lock, settings_files
from prepcli.sources.source import Source

LOCK_SUFFIX = ".lock.json"


@public
def lock(
    checkpoint: PathLike,
    out: PathLike | None = None,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[LockOptions],
) -> LockedModel:
    """Read a checkpoint completely, and write the digests of its files and tensors to a lock file.

    Every operation with the option `lock` then refuses a checkpoint with any other byte.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        out: The lock file. Default: the checkpoint's name and `.lock.json`, in the working directory.
        progress: Receives the bytes read. Default: none. See `Progress`.
        **options: See `LockOptions`.

    Returns:
        The path of the lock file and counts. If an equal file exists, `already_done` is True.

    Raises:
        UsageError: An argument is invalid.
        OutputExistsError: `out` exists with other content.
        DamagedError: A tensor differs from its digest in the checkpoint's manifest.
        PrepError: The checkpoint cannot be read, or the page cannot be written.

    Example:
        locked = prep.lock("gpt-neo-1.3B")
        prep.save_init("gpt-neo-1.3B", lock=locked.path)
    """
    started_s = time.monotonic()
    observer = observer_of(progress)
    page = None if options["html"] is None else Path(options["html"])
    if page is not None:
        check_page_path(page)
    # Quantised weights are locked as they are stored, without a note that they may be decoded.
    stored = {**options, "verbatim": None, "quantized": "stored"}
    common = common_options(checkpoint, None, stored)
    # Values that a scale of another trainer's layout has rounded are locked as they are stored, too.
    located, source = open_checkpoint(common, observer, allow_adapters=True, kept_scales="rounded")
    if common.stream:
        check_stream(located)
    observer.note(source_line(source))
    check_recorded_names([source.display_name, *(stamp.path for stamp in source.file_stamps)])
    # The name of the folder, e.g. `m-init`, and not the one of the model in its manifest.
    name = Path(source.display_name).name or located.model_name
    is_local = not located.files.is_remote and located.files.commit is None
    path = Path(out) if out is not None else Path(f"{name}{LOCK_SUFFIX}")
    check_result_path(path)

    def read_content() -> Lock:
        return make_lock(
            source,
            # However the path of a folder is spelled, equal content has an equal lock.
            name=name if is_local else source.display_name,
            revision=located.files.commit,
            algorithm=_algorithm(source),
            digests=_digest_tensors(source, common.memory_nbytes, observer.progress()),
            progress=observer.progress(),
        )

    content = _read_unchanged(source, read_content, observer)
    already_done = write_result(
        path,
        encode_lock(content),
        options["overwrite"],
        why="its content differs from the lock of the present checkpoint",
        hint="{} approves the present checkpoint",
    )
    if page is not None:
        write_lock_page(page, content)
        observer.note(f"wrote {page}")
    return LockedModel(
        path=path,
        source=content.source,
        revision=content.revision,
        files=len(content.files),
        tensors=len(content.tensors),
        nbytes=sum(file.bytes for file in content.files.values()),
        seconds=time.monotonic() - started_s,
        already_done=already_done,
    )


def _read_unchanged(source: Source, read_content: Callable[[], Lock], observer: Observer) -> Lock:
    """Return the lock of a source that does not change while it is read.

    A lock of old and new bytes would approve a checkpoint that never existed.
    """
    settings = [*settings_files(source).values()]
    weights_before = read_source_state(source.file_stamps, source, RERUN_HINT)
    settings_before = read_file_states(settings)
    content = read_content()
    weights_now = read_source_state(source.file_stamps, source, RERUN_HINT)
    touched = touched_files(source.files, weights_before, now=weights_now)
    touched += touched_files(settings, settings_before, now=read_file_states(settings))
    if touched:
        # A copy that keeps the time or a `chmod` leaves the bytes equal.
        names = ", ".join(path.name for path in touched)
        observer.note(f"{names} may have changed while it was read: comparing")
        if read_content() != content:
            raise source_changed_error(touched, source, RERUN_HINT)
    return content


def _algorithm(source: Source) -> str:
    """Return the algorithm of the digests of tensors: that of the manifest, so that both are compared."""
    return (source.manifest or NO_MANIFEST).tensor_digest


def _digest_tensors(
    source: Source, memory_nbytes: int, progress: Progress
) -> dict[str, RowDigests]:
    """Compute the digests of each tensor.

    The manifest of a checkpoint may record one digest per row range instead. The digests then have the same ranges,
    and are compared with the recorded ones. Other tensors have one digest of all rows.

    Returns:
        Tensor name -> (first row, end, digest) of each range, e.g. {"w": ((0, 64, "9f..."), (64, 100, "03..."))}.

    Raises:
        DamagedError: A digest differs from the one in the manifest.
    """
    streams: list[Stream] = []
    for tensor in source.all_tensors:
        whole = row_stream(tensor, (0, num_rows(tensor)), _algorithm(source))
        streams += recorded_streams(tensor) or [whole]
    computed = stream_digests(
        source, streams, memory_nbytes, progress=progress, task="lock tensors"
    )
    digests: dict[str, list[tuple[int, int, str]]] = {}
    for stream, digest in zip(streams, computed):
        digests.setdefault(stream.name, []).append((*stream.rows, digest.read))
    return {name: tuple(ranges) for name, ranges in digests.items()}
