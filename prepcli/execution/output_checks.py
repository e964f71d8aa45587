"""Integrity checks of an output's data files before it is published.

Reading all of them back would cost as much as writing them. A file truncated during the writes has holes or another
size. A changed file has another change time. Only the streams next to a hole are read back.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prepcli.core.errors import RESUME_HINT, PrepError
from prepcli.engine.no_follow import open_no_follow
from prepcli.execution.resume import StreamReader, find_damaged
from prepcli.planning.coverage import FileSpan, stream_write_spans
from prepcli.planning.plan import Plan
from prepcli.stores.files import io_error

# On each side of a hole: file systems truncate in the middle of a block.
HOLE_MARGIN_NBYTES = 1 << 17

FileStamps = dict[Path, tuple[int, ...]]


def check_data_files(
    plan: Plan, files: Sequence[Path], *, digests: Mapping[int, str], reader: StreamReader
) -> None:
    """Check the sizes of the data files, and read streams next to holes back.

    Args:
        plan: The plan of the output.
        files: Paths of the data files, in the plan's order.
        digests: Digests of the streams, by number.
        reader: Reads streams back from the data files.

    Raises:
        PrepError: A file has another size, or lost bytes of a stream.
    """
    # A hole inside written bytes means that another program truncated the file while it was written:
    # later writes extend it again. Planned gaps and bytes of zeros are holes too, which is harmless.
    holes: list[FileSpan] = []
    for number, file in enumerate(plan.files):
        holes += _file_holes(number, files[number], file.size)
    if not holes:
        return
    touched: dict[int, str] = {}
    for number, stream in enumerate(plan.streams):
        if number in digests and _overlap_any_hole(holes, stream_write_spans(stream)):
            touched[number] = digests[number]
    if find_damaged(reader, touched, files=files):
        raise _changed_error(files[0].parent)


def _file_holes(number: int, path: Path, size: int) -> Iterator[FileSpan]:
    """Yield the holes of a data file, each widened by HOLE_MARGIN_NBYTES."""
    try:
        fd = open_no_follow(path, os.O_RDONLY)
        try:
            if os.fstat(fd).st_size != size:
                raise _changed_error(path)
            for low, high in _hole_ranges(fd, size):
                yield number, low - HOLE_MARGIN_NBYTES, high + HOLE_MARGIN_NBYTES
        finally:
            os.close(fd)
    except OSError as error:
        raise io_error(path, error) from error


def _hole_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each hole of a file, or none if the file system does not report holes."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_HOLE)
        except OSError:
            return
        try:
            position = os.lseek(fd, start, os.SEEK_DATA) if start < size else size
        except OSError as error:
            if error.errno != errno.ENXIO:
                return
            # The rest of the file is a hole.
            position = size
        if start < position:
            yield start, position


def _overlap_any_hole(holes: Sequence[FileSpan], spans: Sequence[FileSpan]) -> bool:
    for file, low, high in spans:
        for hole_file, start, stop in holes:
            if file == hole_file and low < stop and start < high:
                return True
    return False


def read_stamps(files: Sequence[Path]) -> FileStamps:
    """Return one stamp per file. Writes change a stamp, reads and syncs do not."""
    return {path: _file_stamp(path) for path in files}


def check_unchanged(stamps: FileStamps) -> None:
    """Raise PrepError if a file was written to, truncated or replaced since its stamp was read."""
    for path, stamp in stamps.items():
        if _file_stamp(path) != stamp:
            raise _changed_error(path)


def _file_stamp(path: Path) -> tuple[int, ...]:
    try:
        file_stat = path.lstat()
    except OSError as error:
        raise io_error(path, error) from error
    return file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns


def _changed_error(path: Path) -> PrepError:
    return PrepError(
        f"{path} was changed by another program", "it changed while it was written", RESUME_HINT
    )
