"""The data files of an output, looked at before it gets its name: each byte that was written is still there.

Reading all of them back would cost as much as writing them. A file that was cut while it was written has holes, or
another size; a file that was changed since has another change time. Only what lies at a hole is read back.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prepcli.engine.files import io_error
from prepcli.engine.no_follow import open_no_follow
from prepcli.errors import PrepError
from prepcli.execution.resume import StreamReader, find_damaged
from prepcli.planning.coverage import FileSpan, stream_write_spans
from prepcli.planning.plan import Plan

HOLE_MARGIN_NBYTES = 1 << 17  # of a hole: blocks of a file system that were cut in the middle

FileStamps = dict[Path, tuple[int, ...]]


def check_data_files(plan: Plan, files: Sequence[Path], digests: Mapping[int, str], reader: StreamReader) -> None:
    """Raise PrepError unless the data files have their sizes, and hold what was written wherever they have holes."""
    holes = [hole for number, file in enumerate(plan.files) for hole in _holes(number, files[number], file.size)]
    if not holes:
        return
    near = {n for n, stream in enumerate(plan.streams) if n in digests and _overlaps(holes, stream_write_spans(stream))}
    if find_damaged(reader, {number: digests[number] for number in near}, files):
        raise _changed_error(files[0].parent)


def _holes(number: int, path: Path, size: int) -> Iterator[FileSpan]:
    try:
        fd = open_no_follow(path, os.O_RDONLY)
        try:
            if os.fstat(fd).st_size != size:
                raise _changed_error(path)
            yield from (
                (number, low - HOLE_MARGIN_NBYTES, high + HOLE_MARGIN_NBYTES) for low, high in _hole_ranges(fd, size)
            )
        finally:
            os.close(fd)
    except OSError as error:
        raise io_error(path, error) from error


def _hole_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """The holes of a file; none where the file system does not tell."""
    at = 0
    while at < size:
        try:
            low = os.lseek(fd, at, os.SEEK_HOLE)
        except OSError:
            return
        try:
            at = os.lseek(fd, low, os.SEEK_DATA) if low < size else size
        except OSError as error:
            if error.errno != errno.ENXIO:
                return
            at = size  # nothing but a hole is left
        if low < at:
            yield low, at


def _overlaps(holes: Sequence[FileSpan], spans: Iterator[FileSpan]) -> bool:
    return any(file == at and low < stop and start < high for file, low, high in spans for at, start, stop in holes)


def read_stamps(files: Sequence[Path]) -> FileStamps:
    """What changes with each write to these files, and with nothing that reads or syncs them."""
    return {path: _stamp(path) for path in files}


def check_unchanged(before: FileStamps) -> None:
    """Raise PrepError where a file was written to, cut or replaced since."""
    for path, stamp in before.items():
        if _stamp(path) != stamp:
            raise _changed_error(path)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.lstat()
    except OSError as error:
        raise io_error(path, error) from error
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _changed_error(path: Path) -> PrepError:
    hint = "run the same command again: what is damaged is written anew"
    return PrepError(f"{path} was changed by somebody else", "while it was written", hint)
