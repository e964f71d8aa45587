"""Local placeholder files of a remote checkpoint: small files complete, large ones sparse with only their header.

The opener of a checkpoint's format reads the placeholders as if the checkpoint were local. Only tensors are read
remotely. Bytes that were not fetched are holes, which read as zeros: tensors must be read through
`RemoteCheckpoint.blobs`.
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

from prepcli.core.errors import PrepError
from prepcli.core.formatting import format_bytes
from prepcli.engine.blobs import MemoryBlob, StoredBlob
from prepcli.formats.safetensors import LENGTH_NBYTES, MAX_HEADER_NBYTES
from prepcli.stores.buffers import Blob, allocate_buffer
from prepcli.stores.byte_ranges import (
    MAX_IN_FLIGHT,
    MAX_READ_AHEAD_NBYTES,
    RangeReader,
    ReadAheadCache,
    RemoteBlob,
    RemoteFile,
    read_range,
)
from prepcli.stores.reading import io_error, resolve_named_path
from prepcli.stores.retries import map_in_daemon_threads
from prepcli.stores.writing import replacing_file

DOWNLOAD_PIECE_NBYTES = 8 << 20
# Maximum size of a file to fetch whole. Tokenizers are smaller.
SMALL_NBYTES = 64 << 20
MAX_PATH_NBYTES = 1024
MAX_NAME_CHARS = 255
_FOLDER_PREFIX = "prep-remote-"
# Minimum age of an unlocked folder to remove: a new folder is not locked yet.
_MIN_AGE_S = 60.0
# First read of a safetensors file. Most headers are smaller.
HEADER_READ_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A remote checkpoint: its files, their client, and the local folder of placeholder files."""

    files: tuple[RemoteFile, ...]
    reader: RangeReader
    placeholder_folder: Path

    def remote_files(self, paths: Iterable[Path]) -> tuple[RemoteBlob, ...]:
        """Return the remote files of placeholders."""
        # One cache for all files, so that READ_AHEAD_CACHE_NBYTES bounds the memory of the
        # checkpoint.
        cache = ReadAheadCache(self.reader)
        files = {file.path: file for file in self.files}
        return tuple(
            RemoteBlob(files[path.relative_to(self.placeholder_folder).as_posix()], cache)
            for path in paths
        )

    def remote_blobs(
        self, blobs: Sequence[Path | Blob], paths: Sequence[Path], files: Sequence[RemoteBlob]
    ) -> tuple[Path | Blob, ...]:
        """Return the byte sources of an opened checkpoint, with remote files in place of placeholders.

        Args:
            blobs: Byte sources of the opener. Empty if they are just the placeholders.
            paths: Placeholder files, by number.
            files: Their remote files.

        Raises:
            PrepError: A blob cannot be read remotely.
        """
        if not blobs:
            return tuple(files)
        file_of_path = dict(zip(paths, files))
        remote: list[Path | Blob] = []
        for blob in blobs:
            if isinstance(blob, Path):
                remote.append(file_of_path[blob])
            elif isinstance(blob, StoredBlob):
                remote.append(blob.with_files(files))
            elif isinstance(blob, RemoteBlob | MemoryBlob):
                # Bytes in memory, and files that were replaced before a training state was added.
                remote.append(blob)
            else:
                raise PrepError(
                    f"{self.reader.name} cannot be read remotely",
                    "its tensors are split within a file",
                    "copy it to a local folder first",
                )
        return tuple(remote)


def create_placeholder_folder() -> Path:
    """Create an empty temporary folder, removed at exit. Remove the folders of killed processes."""
    for leftover in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        if (fd := _try_lock(leftover, _MIN_AGE_S)) is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(fd)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    # The descriptor stays open until the process ends. The lock shows other processes that the
    # folder is in use.
    _try_lock(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _try_lock(folder: Path, min_age_s: float = -math.inf) -> int | None:
    """Lock a folder of this user until the descriptor is closed or the process ends.

    Returns:
        The descriptor of the lock, or None if the folder is locked, too young or another user's.
    """
    try:
        # /tmp is shared: O_NOFOLLOW refuses a symbolic link with this name.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if status.st_uid == os.getuid() and time.time() - status.st_mtime >= min_age_s:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    # Locked by another process, or the file system has no locks.
    except OSError:
        pass
    os.close(fd)
    return None


def placeholder_path(folder: Path, file: RemoteFile) -> Path:
    """Return the path of a file's placeholder.

    Raises:
        PrepError: The file's name would leave the folder, or is too long.
    """
    parts = PurePosixPath(file.path).parts
    is_plain = file.path.isprintable() and len(file.path.encode()) <= MAX_PATH_NBYTES
    if not is_plain or max(map(len, parts), default=0) > MAX_NAME_CHARS:
        raise PrepError(
            f"{file.path!a} is an invalid file name",
            "it is too long, or has unprintable characters",
            "rename it in its store",
        )
    return resolve_named_path(folder, file.path, "the list of files")


def write_small_file(folder: Path, file: RemoteFile, content: bytes) -> None:
    """Write a complete placeholder.

    Its modification time is a hash of its content, so equal files have equal times.
    """
    path = placeholder_path(folder, file)
    time_ns = xxhash.xxh3_64_intdigest(content) % 10**18
    with _translate_os_errors(file):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(time_ns, time_ns))


def write_sparse_file(
    folder: Path, reader: RangeReader, file: RemoteFile, *, ranges: Sequence[tuple[int, int]] = ()
) -> Path:
    """Write, or extend, a sparse placeholder of the file's size.

    Args:
        folder: Folder of placeholder files.
        reader: Reads the remote file.
        file: The remote file.
        ranges: The ranges to fetch, as (offset, bytes).

    Raises:
        PrepError: A range cannot be read, or the placeholder cannot be written.
    """
    path = placeholder_path(folder, file)
    with _translate_os_errors(file):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as stream:
            # Sets the size without allocating blocks: ranges never fetched stay holes.
            os.truncate(stream.fileno(), file.size)
            for offset, nbytes in ranges:
                _copy_range(
                    reader, file, offset, nbytes=min(nbytes, file.size - offset), fd=stream.fileno()
                )
        os.utime(path, ns=(0, 0))
    return path


@contextlib.contextmanager
def _translate_os_errors(file: RemoteFile) -> Iterator[None]:
    """Raise the OSErrors of the block as PrepErrors with the name of the file."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise PrepError(f"cannot write a placeholder of {file.path}", why, "set TMPDIR") from error


def _copy_range(
    reader: RangeReader, file: RemoteFile, offset: int, *, nbytes: int, fd: int
) -> None:
    done = 0
    memory = allocate_buffer(max(1, min(nbytes, MAX_READ_AHEAD_NBYTES)))
    while done < nbytes:
        part = memory[: min(nbytes - done, memory.size)]
        read_range(reader, file, offset=offset + done, into=part)
        done += os.pwrite(fd, part.data, offset + done)


def write_header(folder: Path, reader: RangeReader, file: RemoteFile) -> None:
    """Write a sparse placeholder of a safetensors file with its header, or its first bytes if the length is invalid."""
    path = write_sparse_file(folder, reader, file, ranges=[(0, HEADER_READ_NBYTES)])
    with path.open("rb") as stream:
        nbytes = LENGTH_NBYTES + int.from_bytes(stream.read(LENGTH_NBYTES), "little")
    # The length is untrusted. Above MAX_HEADER_NBYTES nothing more is read, and the opener reports
    # the invalid header.
    if HEADER_READ_NBYTES < nbytes <= LENGTH_NBYTES + MAX_HEADER_NBYTES:
        rest = (HEADER_READ_NBYTES, nbytes - HEADER_READ_NBYTES)
        write_sparse_file(folder, reader, file, ranges=[rest])


def write_headers(folder: Path, reader: RangeReader, files: Sequence[RemoteFile]) -> None:
    """Write the placeholders of safetensors files with their headers, several at a time."""
    map_in_daemon_threads(
        lambda file: write_header(folder, reader, file), files, num_threads=2 * MAX_IN_FLIGHT
    )


def read_all(reader: RangeReader, file: RemoteFile) -> bytes:
    """Read the content of a small file.

    Raises:
        PrepError: The file has more than SMALL_NBYTES, or cannot be read.
    """
    if file.size > SMALL_NBYTES:
        why = f"it has {format_bytes(file.size)}, the limit for settings and tokenizers is {format_bytes(SMALL_NBYTES)}"
        what = f"{file.path} of {reader.name} is too large"
        raise PrepError(what, why, "copy the checkpoint to a local folder without this file")
    content = np.empty(file.size, np.uint8)
    read_range(reader, file, offset=0, into=content)
    return content.tobytes()


def download_file(reader: RangeReader, file: RemoteFile, path: Path) -> None:
    """Replace a local file by the content of a remote file of any size, in bounded memory.

    Raises:
        PrepError: The file cannot be read or written.
    """
    try:
        with replacing_file(path) as local_file:
            for offset in range(0, file.size, DOWNLOAD_PIECE_NBYTES):
                piece = np.empty(min(DOWNLOAD_PIECE_NBYTES, file.size - offset), np.uint8)
                read_range(reader, file, offset=offset, into=piece)
                local_file.write(piece.data)
    except OSError as error:
        raise io_error(path, error) from error


@contextlib.contextmanager
def rename_in_errors(placeholder_folder: Path, display_name: str) -> Iterator[None]:
    """Replace the path of the placeholder folder in errors of the block by the checkpoint's name.

    Drop a hint that contains the path.
    """

    def name_checkpoint(message: str) -> str:
        return message.replace(str(placeholder_folder), display_name)

    try:
        yield
    except PrepError as error:
        hint = error.hint
        if str(placeholder_folder) in hint or "hf download" in hint:
            hint = ""
        raise type(error)(
            name_checkpoint(error.what), name_checkpoint(error.why), hint, error.code
        ) from error
