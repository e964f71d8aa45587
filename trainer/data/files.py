"""Data files, identified by their content, and records of their digests in the cache of token stores.

A change of a file while it is read is an error. A record lets a process open tokens without reading all data files for
their digests, as `make` trusts the times of files. It is a file `opened-KEY.json` in the cache. The key is a digest of
the paths and of the settings of tokenization.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, cast

import xxhash

from prepcli.core.errors import RERUN_HINT, PrepError
from prepcli.core.json_values import load_json
from prepcli.stores.files import ACCESS_HINT, open_regular_file, read_regular_file, write_file

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

FILE_READ_NBYTES = 1 << 20
# Receives messages for the user, e.g. about skipped lines.
Note: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file, its size and the identity of its content."""

    path: Path | str  # Path of a local file, or the name of a remote one
    nbytes: int  # Size in bytes
    # XXH3-128 of a local file's bytes when it was hashed. For a remote file the version in the list of its store,
    # e.g. its ETag.
    digest: str
    # Opens a remote file at its listed version. None for a local file.
    open_remote: Callable[[], BinaryIO] | None = field(default=None, compare=False)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file without a buffer. An OSError in the block becomes a PrepError with the name of the file."""
        try:
            # A remote file is opened at its listed version.
            if self.open_remote is not None:
                stream = self.open_remote()
            else:
                stream = open_regular_file(Path(self.path), buffering=0)
            with stream:
                yield stream
        except OSError as error:
            raise io_error(self.path, error) from error

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


MAX_EMPTY_NOTES = 3
# Prefix of the files with digests of data files. The folder of a run has them after a failed start.
OPENED_PREFIX = "opened"
# Parts of the files of several processes. Each part has a record of its own until all are read.
HASH_PARTS = 64
# Path, size, and time in nanoseconds of a local file, or digest of a remote one.
Stamp: TypeAlias = tuple[str, int, int | str]


def file_stamps(files: Sequence[Path | DataFile]) -> list[Stamp]:
    """Return the stamp of each file, without reading it.

    Raises:
        PrepError: A file is missing.
    """
    stamps: list[Stamp] = []
    for file in files:
        if isinstance(file, DataFile):
            stamps.append((str(file.path), file.nbytes, file.digest))
            continue
        try:
            status = file.stat()
        except OSError as error:
            raise io_error(file, error) from error
        stamps.append((str(file.resolve()), status.st_size, status.st_mtime_ns))
    return stamps


@dataclass(frozen=True, slots=True)
class DigestRecord:
    """What an earlier call found out about data files."""

    identity: str  # Identity of their tokens
    # Digest of each file, empty for an empty one. None if an earlier version wrote the record.
    digests: Sequence[str] | None


def write_record(cache: Path, key: str, stamps: Sequence[Stamp], record: DigestRecord) -> None:
    """Write the record of files by stamps from before they were read. A read-only cache gets no record."""
    content = json.dumps({**asdict(record), "stamps": stamps}).encode()
    with suppress(OSError, PrepError):
        cache.mkdir(parents=True, exist_ok=True)
        write_file(_record_path(cache, key), content)


def read_record(cache: Path, key: str, stamps: Sequence[Stamp]) -> DigestRecord | None:
    """Return the record of files, or None if there is no record of these stamps."""
    try:
        values = load_json(read_regular_file(_record_path(cache, key)))
        recorded = [tuple(stamp) for stamp in values["stamps"]]
        digests = values.get("digests")
        is_valid = digests is None or len(digests) == len(stamps)
        if recorded == list(stamps) and isinstance(values["identity"], str) and is_valid:
            return DigestRecord(values["identity"], digests)
    except (OSError, PrepError, ValueError, TypeError, KeyError):
        pass
    return None


def share_digests(
    found: Sequence[Path | DataFile],
    cache: Path,
    key: str,
    stamps: Sequence[Stamp],
    *,
    process: int,
    of: int,
) -> list[str]:
    """Return the digests of files, empty for empty ones. Several processes read different files.

    The files are divided into parts. Each process begins with another part, records its digests under `key` in the
    cache, and reads only parts without a record.
    """
    bounds = [len(found) * part // HASH_PARTS for part in range(HASH_PARTS + 1)]
    first = process * HASH_PARTS // of
    digests = [""] * len(found)
    for part in (*range(first, HASH_PARTS), *range(first)):
        items = slice(bounds[part], bounds[part + 1])
        if not found[items]:
            continue
        name = f"{key}-{part}"
        record = read_record(cache, name, stamps[items])
        if record is None:
            # The first process to know all digests has written the whole record, and then removed those of parts.
            whole = read_record(cache, key, stamps)
            if whole is not None and whole.digests is not None:
                return [*whole.digests]
        if record is None or record.digests is None:
            part_digests: list[str] = []
            for file in found[items]:
                try:
                    file = file if isinstance(file, DataFile) else hash_file(file)
                    part_digests.append(file.digest)
                except EmptyFileError:
                    part_digests.append("")
            record = DigestRecord("", part_digests)
            write_record(cache, name, stamps[items], record)
        digests[items] = record.digests or ()
    return digests


def remove_shared_digests(cache: Path, key: str) -> None:
    """Remove the records of `share_digests`, which the record of all files replaces."""
    with suppress(OSError):
        for path in cache.glob(f"{OPENED_PREFIX}-{key}-*.json"):
            path.unlink(missing_ok=True)


def path_of(file: Path | DataFile) -> str:
    """Return the path of a file, hashed or not."""
    if isinstance(file, DataFile):
        return str(file.path)
    return str(file)


def hash_files(
    found: Sequence[Path | DataFile], note: Note, digests: Sequence[str] = ()
) -> list[DataFile]:
    """Return files with their digests, which may be known. Empty ones are skipped with a note.

    Raises:
        PrepError: A file cannot be read, or all are empty.
    """
    files: list[DataFile] = []
    empty: list[EmptyFileError] = []
    for index, file in enumerate(found):
        try:
            if isinstance(file, DataFile):
                files.append(check_not_empty(file))
            elif digests and digests[index]:
                files.append(DataFile(file, file.stat().st_size, digests[index]))
            else:
                files.append(hash_file(file))
        except EmptyFileError as error:
            empty.append(error)
        except OSError as error:
            raise io_error(path_of(file), error) from error
    if empty and not files:
        raise empty[0]
    for error in empty[:MAX_EMPTY_NOTES]:
        note(f"skipped: {error.what}")
    if len(empty) > MAX_EMPTY_NOTES:
        note(f"skipped {len(empty):,} empty files in all")
    return files


def _record_path(cache: Path, key: str) -> Path:
    return cache / f"{OPENED_PREFIX}-{key}.json"
