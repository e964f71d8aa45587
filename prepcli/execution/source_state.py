"""Detection of changes to a source: size, time, inode and change time of its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prepcli.engine.files import io_error
from prepcli.errors import RERUN_HINT, Option, PrepError, text
from prepcli.planning.plan import Plan
from prepcli.remote.remote_files import RemoteBlob
from prepcli.sources.source import Source

# in the work folder: the state of the source when the run began
SOURCE_STATE_FILE = "source.json"

# inode and change time of each file
SourceState = list[list[int]]


def read_source_state(plan: Plan, source: Source) -> SourceState:
    """Return the inode and change time of each file of a source, or an empty list for a remote source.

    The state is not part of the plan: a source that was copied with its times is the same source, but its bytes
    are compared again.

    Args:
        plan: The plan, with the size and time of each file.
        source: The opened source.

    Returns:
        [inode, change time in ns] of each file.

    Raises:
        PrepError: The size or time of a file differs from the plan.
    """
    # Sizes and times are in the plan. Inode and change time also differ after a copy that keeps the time or
    # a `chmod`, where the bytes are equal, so that a difference only leads to a comparison.
    stats: list[os.stat_result] = []
    for path in source.files:
        try:
            stats.append(path.stat())
        except OSError as error:
            raise io_error(path, error) from error
    for expected, path, file_stat in zip(plan.source_files, source.files, stats):
        if (file_stat.st_size, file_stat.st_mtime_ns) != (expected.size, expected.mtime_ns):
            raise source_changed_error([path], source)
    if any(isinstance(blob, RemoteBlob) for blob in source.byte_sources):
        return []
    # Lists rather than tuples, because the state is stored as JSON and compared with what is read back.
    return [[file_stat.st_ino, file_stat.st_ctime_ns] for file_stat in stats]


def source_changed_error(paths: Sequence[Path], source: Source) -> PrepError:
    """Return the error for files that were written to."""
    names = ", ".join(path.name for path in paths)
    return PrepError(
        f"{names} changed while it was read",
        f"in {source.display_name}",
        text("{} with {}", RERUN_HINT, Option("restart", True)),
    )


def touched_files(source: Source, before: SourceState, *, now: SourceState) -> list[Path]:
    """Return the files with another inode or change time than before."""
    touched: list[Path] = []
    for path, state_before, state_now in zip(source.files, before, now):
        if state_before != state_now:
            touched.append(path)
    return touched
