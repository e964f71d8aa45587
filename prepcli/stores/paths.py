"""Paths of files in a bucket or on the hub, read like local ones, and the folders of their local copies.

A checkpoint in a store is listed once. A `StorePath` names a file or a folder of the listing. It has the methods of
`pathlib.Path` that readers of formats use, and is a `Blob`: its bytes are read by ranges, at the listed version.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import io
import math
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

import numpy as np
import xxhash

from prepcli.core.errors import PrepError
from prepcli.core.formatting import format_bytes
from prepcli.stores.buffers import Blob, ByteArray
from prepcli.stores.byte_ranges import (
    MAX_IN_FLIGHT,
    RangeReader,
    ReadAheadCache,
    RemoteFile,
    map_in_daemon_threads,
    read_range,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_FOLDER_PREFIX = "prep-remote-"
# Minimum age of an unlocked folder to remove: a new folder is not locked yet.
_MIN_AGE_S = 60.0
T = TypeVar("T")
U = TypeVar("U")
# Maximum size of a file to fetch whole. Tokenizers are smaller.
SMALL_NBYTES = 64 << 20
# A listing and an index are untrusted. These limits bound what they make this machine fetch.
MAX_SMALL_FILES_NBYTES = 1 << 30  # total size of the files fetched whole
MAX_INDEX_NBYTES = 1 << 30  # total size of the single reads, e.g. of the nodes of an OCDBT index
MAX_PATH_NBYTES = 1024
MAX_NAME_CHARS = 255
COPY_HINT = "copy it to a local folder first"


def create_temporary_folder() -> Path:
    """Create an empty temporary folder, removed at exit. Remove the folders of killed processes."""
    for leftover in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        if (fd := _try_lock(leftover, _MIN_AGE_S)) is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(fd)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    # The descriptor stays open until the process ends. The lock shows other processes that the
    # folder is in use.
    _try_lock(folder)
    atexit.register(_remove, folder)
    return folder


def _remove(folder: Path) -> None:
    """Remove a folder. Daemon threads may still write into it: under its name they find no folder any more."""
    with suppress(OSError):
        folder = folder.rename(f"{folder}-removed")
    shutil.rmtree(folder, ignore_errors=True)


def _try_lock(folder: Path, min_age_s: float = -math.inf) -> int | None:
    """Lock a folder of this user until the descriptor is closed or the process ends."""
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


class StoreListing:
    """The files of one checkpoint in a store, their client, and the small ones fetched so far.

    Several threads may use it. It is pickled for other processes.
    """

    def __init__(
        self,
        name: str,
        reader: RangeReader,
        files: Iterable[RemoteFile],
        download: Callable[[str], Path] | None = None,
    ) -> None:
        """Keep a listing.

        Args:
            name: Name of the checkpoint in messages.
            reader: Reads byte ranges of the files.
            files: The files.
            download: Returns a complete local file of a name. Default: a copy in a temporary folder.
        """
        self.name = name
        self.reader = reader
        self.files = {file.path: file for file in files}
        self.cache = ReadAheadCache(reader)
        self._download = download
        self.copies: dict[str, Path] = {}
        self._copy_folder: Path | None = None
        self._copied_nbytes = 0
        self._index_nbytes = 0
        self._lock = threading.Lock()
        # Names in a folder by its path, in their order.
        self._folders: dict[str, dict[str, None]] = {"": {}}
        for path in sorted(self.files):
            _check_name(path)
            while path:
                folder, _, name = path.rpartition("/")
                is_new = folder not in self._folders
                self._folders.setdefault(folder, {})[name] = None
                path = folder if is_new else ""

    def __reduce__(self) -> tuple[type[StoreListing], tuple[object, ...]]:
        """Pickle the listing without fetched bytes."""
        return StoreListing, (self.name, self.reader, [*self.files.values()], self._download)

    @property
    def root(self) -> StorePath:
        """The folder of all files."""
        return StorePath(self, PurePosixPath())

    def names(self, folder: str) -> list[str] | None:
        """Return the names in a folder, or None if there is none. The top folder is the empty text."""
        names = self._folders.get(folder)
        return None if names is None else [*names]

    def read(self, file: RemoteFile, offset: int, nbytes: int) -> bytes:
        """Return bytes of a file, or fewer if it ends before. A file with a local copy needs no request."""
        count = max(0, min(nbytes, file.size - offset))
        if (copy := self.copies.get(file.path)) is not None:
            with copy.open("rb") as stream:
                stream.seek(offset)
                return stream.read(count)
        with self._lock:
            self._index_nbytes += count
        if self._index_nbytes > MAX_INDEX_NBYTES:
            why = f"it has more than {format_bytes(MAX_INDEX_NBYTES)}"
            raise PrepError(f"the index of {self.name} is too large", why, COPY_HINT)
        content = np.empty(count, np.uint8)
        if count:
            self.cache.read(file, offset, content)
        return content.tobytes()

    def local_copy(self, file: RemoteFile) -> Path:
        """Return a complete local copy of a small file. It is fetched once."""
        copy = self.copies.get(file.path)
        if copy is None:
            copy = self.copies[file.path] = self._copy(file)
        return copy

    def _copy(self, file: RemoteFile) -> Path:
        _check_is_small(self.reader, file)
        if self._download is not None:
            return self._download(file.path)
        with self._lock:
            self._copied_nbytes += file.size
            if self._copied_nbytes > MAX_SMALL_FILES_NBYTES:
                why = f"its small files have more than {format_bytes(MAX_SMALL_FILES_NBYTES)} together"
                what = f"{self.name} is not a checkpoint"
                raise PrepError(what, why, "name the folder of a checkpoint")
            if self._copy_folder is None:
                self._copy_folder = create_temporary_folder()
            folder = self._copy_folder
        content = read_all(self.reader, file)
        copy = folder / file.path
        # The time is a hash of the content, so that equal files have equal times.
        time_ns = xxhash.xxh3_64_intdigest(content) % 10**18
        # Two threads may fetch one file. The rename keeps a reader of the first copy from an incomplete second one.
        part = copy.with_name(f".{secrets.token_hex(8)}")
        try:
            # Not `parents=True`, which would create the removed temporary folder again while the process ends.
            for parent in reversed(PurePosixPath(file.path).parents[:-1]):
                (folder / parent).mkdir(exist_ok=True)
            part.write_bytes(content)
            os.utime(part, ns=(time_ns, time_ns))
            part.replace(copy)
        except OSError as error:
            why = error.strerror or str(error)
            raise PrepError(f"cannot write a copy of {file.path}", why, "set TMPDIR") from error
        return copy


def _check_name(path: str) -> None:
    """Raise PrepError for a name that would leave the folder of local copies, or is too long."""
    parts = path.split("/")
    is_plain = path.isprintable() and len(path.encode()) <= MAX_PATH_NBYTES
    if not is_plain or max(map(len, parts)) > MAX_NAME_CHARS:
        why = "it is too long, or has unprintable characters"
        raise PrepError(f"{path!a} is an invalid file name", why, "rename it in its store")
    # For a store these are ordinary names.
    if not {"", ".", ".."}.isdisjoint(parts):
        why = "it is not inside the folder"
        raise PrepError(f"the list of files names {path!r:.100}", why, "rename it in its store")


@dataclass(frozen=True, slots=True)
class StoreStat:
    """Size of a file in a store. It has no time: the digest of the listing identifies its content."""

    st_size: int
    st_mtime_ns: int = 0


@dataclass(frozen=True, slots=True)
class StorePath:
    """A file or folder in a store, with the methods of `pathlib.Path` that readers use. It is a `Blob`.

    Attributes:
        listing: The files of the checkpoint.
        path: Path in the listing.
        reads_ahead: Whether small reads of its bytes may request bytes after them.
    """

    listing: StoreListing
    path: PurePosixPath
    reads_ahead: bool = True

    def __str__(self) -> str:
        """Return the path after the name of the checkpoint, for messages."""
        return self.listing.name if self._key == "" else f"{self.listing.name}/{self.path}"

    def __truediv__(self, name: str | PurePosixPath) -> StorePath:
        """Return a path inside this folder."""
        return replace(self, path=self.path / name)

    @property
    def _key(self) -> str:
        return "" if self.path == PurePosixPath() else self.path.as_posix()

    @property
    def file(self) -> RemoteFile:
        """The listed file.

        Raises:
            FileNotFoundError: There is none with this name.
        """
        file = self.listing.files.get(self._key)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return file

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.name or self.listing.name.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """End of the name from its last dot on."""
        return self.path.suffix

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the text of the path."""
        return (self.listing.name, *self.path.parts)

    @property
    def parent(self) -> StorePath:
        """The folder of the path. The top folder is its own parent."""
        return replace(self, path=self.path.parent)

    @property
    def parents(self) -> Sequence[StorePath]:
        """The folders above, the nearest first."""
        return [replace(self, path=parent) for parent in self.path.parents]

    def with_name(self, name: str) -> StorePath:
        """Return the path of another name in the same folder."""
        return replace(self, path=self.path.with_name(name))

    def resolve(self) -> StorePath:
        """Return the path itself: a store has no links."""
        return self

    def absolute(self) -> StorePath:
        """Return the path itself."""
        return self

    def exists(self) -> bool:
        """Return whether it is a file or a folder."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return self._key in self.listing.files

    def is_dir(self) -> bool:
        """Return whether it is a folder, i.e. has files."""
        return self.listing.names(self._key) is not None

    def is_symlink(self) -> bool:
        """Return False: a store has no links."""
        return False

    def iterdir(self) -> Iterator[StorePath]:
        """Yield the files and folders of a folder.

        Raises:
            FileNotFoundError: It is no folder.
        """
        names = self.listing.names(self._key)
        if names is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        yield from (self / name for name in names)

    def stat(self) -> StoreStat:
        """Return the size of a file.

        Raises:
            FileNotFoundError: There is none.
        """
        return StoreStat(self.file.size)

    def local(self) -> Path:
        """Return a complete local copy of a small file. See `StoreListing.local_copy`."""
        return self.listing.local_copy(self.file)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of a file, or fewer if it ends before. See `StoreListing.read`."""
        return self.listing.read(self.file, offset, nbytes)

    def read_exactly(self, start: int, stop: int) -> bytes:
        """Return a byte range of a file. No bytes around it are requested."""
        content = np.empty(stop - start, np.uint8)
        self.listing.cache.read(self.file, start, content, reads_ahead=False)
        return content.tobytes()

    def stream(self, buffering: int = -1) -> BinaryIO:
        """Open a file, or its local copy if it has one, as a stream from its first byte.

        Args:
            buffering: Bytes to read at once. By default they grow while the stream is read in order.

        Raises:
            FileNotFoundError: There is no such file.
        """
        if (copy := self.listing.copies.get(self._key)) is not None:
            return cast(BinaryIO, copy.open("rb", buffering))
        if buffering > 1:
            stream = _StoreStream(self.file, ReadAheadCache(self.listing.reader), reads_ahead=False)
            return cast(BinaryIO, io.BufferedReader(stream, buffering))
        stream = _StoreStream(self.file, ReadAheadCache(self.listing.reader), reads_ahead=True)
        return cast(BinaryIO, stream if buffering == 0 else io.BufferedReader(stream))

    def open(self) -> StorePath:
        """Return the path itself, which reads its bytes. The connections belong to the client of the store."""
        return self

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes from `offset` on."""
        self.listing.cache.read(self.file, offset, into, reads_ahead=self.reads_ahead)

    def close(self) -> None:
        """Do nothing."""


AnyPath = Path | StorePath
# Of a function that returns a path on the same disk or in the same store.
PathT = TypeVar("PathT", Path, StorePath, AnyPath)


class _StoreStream(io.RawIOBase):
    """Stream of a remote file, read by byte ranges at its listed version."""

    def __init__(self, file: RemoteFile, cache: ReadAheadCache, *, reads_ahead: bool) -> None:
        self._file = file
        self._cache = cache
        self._reads_ahead = reads_ahead
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset from the start, the position or the end, and return the offset from the start."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer, unless the file ends before, and return the number of bytes."""
        into = np.frombuffer(memoryview(buffer), np.uint8)
        count = max(0, min(into.size, self._file.size - self._position))
        if count:
            self._cache.read(
                self._file, self._position, into[:count], reads_ahead=self._reads_ahead
            )
        self._position += count
        return count


def read_all(reader: RangeReader, file: RemoteFile) -> bytes:
    """Read the content of a small file."""
    _check_is_small(reader, file)
    content = np.empty(file.size, np.uint8)
    read_range(reader, file, offset=0, into=content)
    return content.tobytes()


def _check_is_small(reader: RangeReader, file: RemoteFile) -> None:
    """Raise PrepError for a file too large to fetch whole."""
    if file.size > SMALL_NBYTES:
        why = f"it has {format_bytes(file.size)}, the limit for settings and tokenizers is {format_bytes(SMALL_NBYTES)}"
        what = f"{file.path} of {reader.name} is too large"
        raise PrepError(what, why, "copy the checkpoint to a local folder without this file")


def path_in_folder(path: AnyPath, folder: AnyPath) -> PurePath | None:
    """Return the path of a file from a folder, or None if the folder does not have it."""
    if isinstance(path, StorePath) and isinstance(folder, StorePath):
        is_inside = path.listing is folder.listing and path.path.is_relative_to(folder.path)
        return path.path.relative_to(folder.path) if is_inside else None
    if isinstance(path, Path) and isinstance(folder, Path):
        return path.relative_to(folder) if path.is_relative_to(folder) else None
    return None


def local_copy(path: AnyPath) -> Path:
    """Return a small file on a disk: the path itself, or a complete local copy of a file in a store."""
    return path.local() if isinstance(path, StorePath) else path


def is_remote(paths: Iterable[object]) -> bool:
    """Return whether a path is in a store on a server."""
    return any(isinstance(path, StorePath) for path in paths)


def map_files(read: Callable[..., T], paths: Sequence[AnyPath], *more: Iterable[object]) -> list[T]:
    """Return `read(path, ...)` of all files in order, as `map` does. Files in a store are read several at a time."""
    if not is_remote(paths):
        return [*map(read, paths, *more)]
    return read_each(lambda arguments: read(*arguments), list(zip(paths, *more)), in_store=True)


def read_each(read: Callable[[U], T], items: Sequence[U], in_store: bool) -> list[T]:
    """Return `read(item)` of all items in order. Items in a store are read several at a time."""
    if in_store:
        return map_in_daemon_threads(read, items, num_threads=2 * MAX_IN_FLIGHT)
    return [read(item) for item in items]


def fetch_copies(paths: Iterable[AnyPath]) -> None:
    """Fetch the local copies of small files in a store, several at a time. Their later reads need no request."""
    stored = dict.fromkeys(path for path in paths if isinstance(path, StorePath) and path.is_file())
    if not stored:
        return
    map_in_daemon_threads(StorePath.local, list(stored), num_threads=2 * MAX_IN_FLIGHT)


_AnyBlob = TypeVar("_AnyBlob", Path | Blob, Blob, AnyPath)


def without_read_ahead(blobs: Iterable[_AnyBlob]) -> list[_AnyBlob]:
    """Return byte sources without read-ahead of their remote files.

    The bytes around them may belong to another process.
    """
    return [
        replace(blob, reads_ahead=False) if isinstance(blob, StorePath) else blob for blob in blobs
    ]
