"""Whether a source is still the one that was planned: size and time, and what tells that somebody put its time back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prepcli.engine.files import io_error
from prepcli.errors import PrepError
from prepcli.planning.plan import Plan
from prepcli.remote.remote_files import RemoteBlob
from prepcli.sources.source import Source

SOURCE_STATE_FILE = "source.json"  # in the folder of a run: the state of the source when it began

SourceState = list[list[int]]  # inode and change time of each file


def read_source_state(plan: Plan, source: Source) -> SourceState:
    """Inode and change time of each file of a source; nothing for one that is far away.

    They are no part of the plan: a source that is copied or touched stays the same one, but its bytes are compared.

    Raises:
        PrepError: A file has another size or time than the plan says.
    """
    stats = [_stat(path) for path in source.files]
    for fact, path, found in zip(plan.source_files, source.files, stats):
        if (found.st_size, found.st_mtime_ns) != (fact.size, fact.mtime_ns):
            raise source_changed_error([path], source)
    if any(isinstance(blob, RemoteBlob) for blob in source.byte_sources):
        return []
    return [[found.st_ino, found.st_ctime_ns] for found in stats]


def source_changed_error(paths: Sequence[Path], source: Source) -> PrepError:
    """The error of files that were written to."""
    names = ", ".join(path.name for path in paths)
    return PrepError(f"{names} changed while it was read", f"in {source.display_name}", "run again with `--restart`")


def touched_files(source: Source, before: SourceState, now: SourceState) -> list[Path]:
    """The files whose inode or change time differs."""
    return [path for path, a, b in zip(source.files, before, now) if a != b]


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise io_error(path, error) from error
