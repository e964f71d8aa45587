"""Data files, identified by their content; a file that changes while it is read is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from trainer.models.errors import RERUN_HINT, PrepError

FILE_READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file, its size, and the XXH3-128 digest of its bytes when it was hashed."""

    path: Path
    nbytes: int
    digest: str


def hash_file(path: Path) -> DataFile:
    """Read a file to get its size and digest; raise PrepError if it is empty or cannot be read."""
    state, nbytes = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as handle:
            while block := handle.read(FILE_READ_NBYTES):
                state.update(block)
                nbytes += len(block)
    except OSError as error:
        raise io_error(path, error) from error
    if not nbytes:
        raise _empty_file_error(path)
    return DataFile(path, nbytes, state.hexdigest())


def read_blocks(file: DataFile, split: Callable[[BinaryIO], Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks, and check at the end that they are the hashed ones.

    Args:
        file: The file, with its digest.
        split: Yields the bytes of an open file, such as its lines.

    Raises:
        PrepError: The file cannot be read, or changed since it was hashed.
    """
    state = xxhash.xxh3_128()
    try:
        with file.path.open("rb") as handle:
            for block in split(handle):
                state.update(block)
                yield block
    except OSError as error:
        raise io_error(file.path, error) from error
    if state.hexdigest() != file.digest:
        raise changed_file_error(file.path)


def changed_file_error(path: Path) -> PrepError:
    """Return the error for a file that changed since it was hashed."""
    why = "its digest differs from the one taken before, so its tokens could not be identified"
    return PrepError(f"{path} changed while it was read", why, f"{RERUN_HINT} once it is complete")


def check_readable(path: Path) -> None:
    """Raise PrepError unless a file can be opened and has content; the content is not read."""
    try:
        with path.open("rb") as handle:
            is_empty = not handle.read(1)
    except OSError as error:
        raise io_error(path, error) from error
    if is_empty:
        raise _empty_file_error(path)


def _empty_file_error(path: Path) -> PrepError:
    return PrepError(f"{path} is empty", "looked for text, found 0 bytes", "remove it, or name the other files")


def io_error(path: Path, error: OSError) -> PrepError:
    """Return an operating system error as a PrepError that names the file."""
    return PrepError(f"cannot read or write {path}", error.strerror or str(error))
