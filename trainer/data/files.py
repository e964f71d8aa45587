"""Data files, identified by their content. A change of a file while it is read is an error."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, cast

import xxhash

from prepcli.core.errors import RERUN_HINT, PrepError
from prepcli.stores.files import ACCESS_HINT, open_regular_file

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

FILE_READ_NBYTES = 1 << 20

# Receives messages for the user, e.g. about skipped lines.
Note: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file, its size and the identity of its content.

    Attributes:
        path: Path of a local file, or the name of a remote one.
        nbytes: Size in bytes.
        digest: XXH3-128 of a local file's bytes when it was hashed. For a remote file the version
            in the list of its store, e.g. its ETag.
        open_remote: Opens a remote file at its listed version. None for a local file.
    """

    path: Path | str
    nbytes: int
    digest: str
    open_remote: Callable[[], BinaryIO] | None = field(default=None, compare=False)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file without a buffer.

        An OSError in the block becomes a PrepError with the name of the file.
        """
        try:
            with self._open_stream() as stream:
                yield stream
        except OSError as error:
            raise io_error(self.path, error) from error

    def _open_stream(self) -> BinaryIO:
        """Open a remote file at its listed version, or a local file."""
        if self.open_remote is not None:
            return self.open_remote()
        return open_regular_file(Path(self.path), buffering=0)

    def check_digest(self, digest: str) -> None:
        """Raise PrepError if a local file has changed since it was hashed."""
        if self.open_remote is None and digest != self.digest:
            raise changed_file_error(self.path)


class HashingStream(io.RawIOBase):
    """A stream read from its start to its end, with a running digest.

    Attributes:
        position: Bytes read so far.
    """

    def __init__(self, stream: BinaryIO) -> None:
        """Read from a stream at its start."""
        self._stream = stream
        self._state = xxhash.xxh3_128()
        self.position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read bytes into a buffer. Return their number, 0 at the end."""
        view = memoryview(buffer).cast("B")
        count = self._stream.readinto(view)  # type: ignore[attr-defined]
        self._state.update(view[:count])
        self.position += count
        return count

    def digest(self) -> str:
        """Read the stream to its end. Return the XXH3-128 digest of all its bytes."""
        while self.read(FILE_READ_NBYTES):
            pass
        return self._state.hexdigest()


def stream_blocks(blocks: Iterator[bytes]) -> BinaryIO:
    """Return a buffered stream of bytes that come in blocks."""
    return cast(BinaryIO, io.BufferedReader(_BlockStream(blocks), FILE_READ_NBYTES))


class _BlockStream(io.RawIOBase):
    """Stream of bytes that come in blocks."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def hash_file(path: Path) -> DataFile:
    """Read a file to get its size and digest. Raise PrepError if it is empty or unreadable."""
    with DataFile(path, 0, "").open() as stream:
        hashing = HashingStream(stream)
        digest = hashing.digest()
    if not hashing.position:
        raise empty_file_error(path)
    return DataFile(path, hashing.position, digest)


def check_not_empty(file: DataFile) -> DataFile:
    """Return a remote file. Raise EmptyFileError if its store lists it without content."""
    if not file.nbytes:
        raise empty_file_error(file.path)
    return file


class ChangedFileError(PrepError):
    """A data file has another digest than before."""


def changed_file_error(path: Path | str) -> ChangedFileError:
    """Return the error for a changed file."""
    why = "its digest differs from the one taken before, so its tokens could not be identified"
    hint = f"{RERUN_HINT} once it is complete"
    return ChangedFileError(f"{path} changed while it was read", why, hint)


def check_readable(path: Path) -> None:
    """Raise PrepError unless a file can be opened and has content. Only one byte is read."""
    with DataFile(path, 0, "").open() as stream:
        is_empty = not stream.read(1)
    if is_empty:
        raise empty_file_error(path)


class EmptyFileError(PrepError):
    """A data file has no content."""


def empty_file_error(path: Path | str) -> EmptyFileError:
    """Return the error for a file without content."""
    return EmptyFileError(
        f"{path} is empty", "looked for text, found 0 bytes", "remove it, or name the other files"
    )


def io_error(path: Path | str, error: OSError) -> PrepError:
    """Return an operating system error as a PrepError with the name of the file."""
    return PrepError(f"cannot read or write {path}", error.strerror or str(error), ACCESS_HINT)
