"""What readers need of a checkpoint far away, in a folder here: small files whole, of large ones size and header.

So a remote checkpoint is opened by the reader of its format, as if it were here; only tensors are read from afar. What
was not fetched is a hole in its file and would read as zeros: nothing but `Remote.blobs` may be read for tensors.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import xxhash

from prepcli.console.formatting import format_bytes
from prepcli.engine.files import allocate_buffer
from prepcli.errors import PrepError
from prepcli.formats.safetensors import LENGTH_NBYTES, MAX_HEADER_NBYTES
from prepcli.remote.remote_files import (
    MAX_IN_FLIGHT,
    MAX_READ_AHEAD_NBYTES,
    RangeReader,
    ReadAheadCache,
    RemoteBlob,
    RemoteFile,
    read_range,
)
from prepcli.remote.retries import map_in_daemon_threads

SMALL_NBYTES = 64 << 20  # tokenizers are smaller; a file of settings that is larger is none
MAX_PATH_NBYTES = 1024
_MIRROR = "prep-remote-"
_LEAST_AGE_S = 60.0  # of a folder that nobody holds: one that was just made is not held yet
HEADER_READ_NBYTES = 64 << 10  # of a header, with its length: most are no longer


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A checkpoint far away: its files, by whom they are read, and the folder here that stands for it."""

    files: tuple[RemoteFile, ...]
    reader: RangeReader
    placeholder_folder: Path

    def blobs(self, paths: Iterable[Path], special_blobs: Sequence[object] = ()) -> tuple[RemoteBlob, ...]:
        """What is to be read in place of files of the mirror. PrepError where a reader has `others` instead: files of
        the mirror joined or decoded, of which there is only the size."""
        if special_blobs:
            why = "its tensors are not in its files as they stand: they are packed, or to be decoded first"
            raise PrepError(f"{self.reader.name} cannot be read from afar", why, "copy it to a folder here first")
        ahead, files = ReadAheadCache(self.reader), {file.path: file for file in self.files}
        return tuple(RemoteBlob(files[path.relative_to(self.placeholder_folder).as_posix()], ahead) for path in paths)


def create_placeholder_folder() -> Path:
    """An empty folder that goes when the process ends; those of processes that were killed go now."""
    for left in Path(tempfile.gettempdir()).glob(f"{_MIRROR}*"):
        if (fd := _claimed(left, _LEAST_AGE_S)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(fd)
    folder = Path(tempfile.mkdtemp(prefix=_MIRROR))
    _claimed(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _claimed(folder: Path, least_age_s: float = -math.inf) -> int | None:
    """A lock on a folder of this user's, held until it is closed or the process ends; None: it is not to be had."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if found.st_uid == os.getuid() and time.time() - found.st_mtime >= least_age_s:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except OSError:  # somebody else has it, or locks are unknown there
        pass
    os.close(fd)
    return None


def placeholder_path(folder: Path, file: RemoteFile) -> Path:
    """Where a file's stand-in goes. PrepError for a name that would lead out of the folder."""
    parts = PurePosixPath(file.path).parts
    is_plain = file.path.isprintable() and len(file.path.encode()) <= MAX_PATH_NBYTES
    if not parts or not is_plain or file.path.startswith("/") or ".." in parts or max(map(len, parts)) > 255:
        raise PrepError(
            f"{file.path!a} is no name for a file", "it leads out of the checkpoint's folder, or is beyond measure"
        )
    return folder.joinpath(*parts)


def write_small_file(folder: Path, file: RemoteFile, content: bytes) -> None:
    """A file that is wholly there. Its time stands for its content: two that are equal are of one time."""
    path = placeholder_path(folder, file)
    time_ns = xxhash.xxh3_64_intdigest(content) % 10**18
    with _failing(file):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(time_ns, time_ns))


def write_sparse_file(
    folder: Path, reader: RangeReader, file: RemoteFile, parts: Sequence[tuple[int, int]] = ()
) -> Path:
    """A file of the right size that has only these parts, each an offset and a length; more may be added later."""
    path = placeholder_path(folder, file)
    with _failing(file):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as stream:
            os.truncate(stream.fileno(), file.size)
            for offset, nbytes in parts:
                _copy(reader, file, offset, min(nbytes, file.size - offset), stream.fileno())
        os.utime(path, ns=(0, 0))
    return path


@contextlib.contextmanager
def _failing(file: RemoteFile) -> Iterator[None]:
    """What the system says of a stand-in, as an error that names the file."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise PrepError(f"there is no room or place for a stand-in of {file.path}", why, "set TMPDIR") from error


def _copy(ranges: RangeReader, file: RemoteFile, offset: int, nbytes: int, fd: int) -> None:
    done, memory = 0, allocate_buffer(max(1, min(nbytes, MAX_READ_AHEAD_NBYTES)))
    while done < nbytes:
        part = memory[: min(nbytes - done, memory.size)]
        read_range(ranges, file, offset + done, part)
        done += os.pwrite(fd, part.data, offset + done)


def write_header(folder: Path, reader: RangeReader, file: RemoteFile) -> None:
    """A safetensors file that has only its header; what has none has a few bytes, for its reader to see that."""
    path = write_sparse_file(folder, reader, file, [(0, HEADER_READ_NBYTES)])
    with path.open("rb") as stream:
        nbytes = LENGTH_NBYTES + int.from_bytes(stream.read(LENGTH_NBYTES), "little")
    if HEADER_READ_NBYTES < nbytes <= LENGTH_NBYTES + MAX_HEADER_NBYTES:
        write_sparse_file(folder, reader, file, [(HEADER_READ_NBYTES, nbytes - HEADER_READ_NBYTES)])


def write_headers(folder: Path, reader: RangeReader, files: Sequence[RemoteFile]) -> None:
    """All headers, several at a time: each costs the way there and back."""
    map_in_daemon_threads(lambda file: write_header(folder, reader, file), files, 2 * MAX_IN_FLIGHT)


def read_all(reader: RangeReader, file: RemoteFile) -> bytes:
    """The content of a small file. PrepError for one that is not small."""
    if file.size > SMALL_NBYTES:
        why = f"it has {format_bytes(file.size)}, settings and tokenizers have less than {format_bytes(SMALL_NBYTES)}"
        raise PrepError(f"{file.path} of {reader.name} is too large", why)
    content = np.empty(file.size, np.uint8)
    read_range(reader, file, 0, content)
    return content.tobytes()


@contextlib.contextmanager
def rename_in_errors(placeholder_folder: Path, display_name: str) -> Iterator[None]:
    """Errors in which the checkpoint has its own name, and no hint is of the folder that stands for it."""
    try:
        yield
    except PrepError as error:
        what, why = (text.replace(str(placeholder_folder), display_name) for text in (error.what, error.why))
        hint = "" if str(placeholder_folder) in error.hint or "hf download" in error.hint else error.hint
        raise PrepError(what, why, hint, error.code) from error
