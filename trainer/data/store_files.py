"""Files of token stores: folders with a temporary name until they are complete, digests, and arrays over several files.

Any number of processes may write the same folder at the same time, because its content is a function of its inputs.
Each one writes under a temporary name, and the first one to finish renames it.
"""

from __future__ import annotations

import errno
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from prepcli.stores.files import fsync_path, open_regular_file
from trainer.data.files import io_error

# Errors of renaming a folder to a name that a nonempty folder has.
IN_USE = (errno.EEXIST, errno.ENOTEMPTY)
PARTIAL_SUFFIX = ".partial"
# The store of an identity, and temporary folders, also of earlier versions
STORE_NAME = re.compile(r"[0-9a-f]{32}(\..*)?(\.partial)?|shards-[0-9a-f]{32}")
# A complete shard
SHARD_NAME = re.compile(r"[0-9]{5}")
# An incomplete store counts as abandoned if nothing was written for this time, which is far above the difference of two
# clocks. A job may continue one with shards after days in a queue.
ABANDONED_AFTER_S = 24 * 60 * 60
ABANDONED_SHARDS_AFTER_S = 30 * ABANDONED_AFTER_S


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder. It gets its name at the end, unless another process was first.

    An error or an interruption removes the temporary folder. A kill leaves it, and a later process removes it
    with the next complete folder of the name.

    Raises:
        OSError: It cannot be written.
    """
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:12]}{PARTIAL_SUFFIX}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        # The files are on disk before the folder gets its name.
        for path in temporary.iterdir():
            fsync_path(path)
        fsync_path(temporary)
        _rename(temporary, folder)
        fsync_path(folder.parent)
    except FileNotFoundError:
        # The process that completed the folder removes all others, file by file.
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of killed processes for a complete folder."""
    for leftover in folder.parent.glob(f"{folder.name}.*{PARTIAL_SUFFIX}"):
        shutil.rmtree(leftover, ignore_errors=True)


def _rename(temporary: Path, folder: Path) -> None:
    """Rename a complete folder, unless a complete one has the name."""
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in IN_USE:
            raise


def discard_folder(folder: Path) -> None:
    """Remove a damaged folder, which loses its name at once. Another process may remove it too."""
    removed = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:12]}{PARTIAL_SUFFIX}")
    try:
        folder.rename(removed)
    except FileNotFoundError:
        return
    except OSError as error:
        raise io_error(folder, error) from error
    # NFS keeps files that a process has mapped. A later process removes them.
    shutil.rmtree(removed, ignore_errors=True)


def remove_abandoned(cache: Path, is_complete: Callable[[Path], bool]) -> None:
    """Remove the incomplete stores of a cache without a write for a day, or for a month if they have shards."""
    for folder in [*cache.iterdir()]:
        with suppress(FileNotFoundError):
            if not STORE_NAME.fullmatch(folder.name) or not folder.is_dir() or is_complete(folder):
                continue
            # A large compressed file is one shard, and only its files change while it is written.
            paths = [folder, *folder.rglob("*")]
            age_s = time.time() - max(path.stat().st_mtime for path in paths)
            limit_s = ABANDONED_AFTER_S
            if any(SHARD_NAME.fullmatch(path.name) for path in paths):
                limit_s = ABANDONED_SHARDS_AFTER_S
            if age_s > limit_s:
                shutil.rmtree(folder, ignore_errors=True)


class HashingFile:
    """A sequentially written file with a running digest."""

    def __init__(self, file: BinaryIO) -> None:
        """Write to an empty file."""
        self._file = file
        self._state = xxhash.xxh3_128()

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self._state.update(data)

    def digest(self) -> str:
        """Return the digest of all bytes."""
        return self._state.hexdigest()


DIGEST_READ_NBYTES = 4 << 20


def file_digest(path: Path) -> str:
    """Return the XXH3-128 digest of a file."""
    return files_digest([path])


def files_digest(paths: Sequence[Path]) -> str:
    """Return the XXH3-128 digest of the bytes of all files, one after the other."""
    state = xxhash.xxh3_128()
    for path in paths:
        try:
            with open_regular_file(path) as file:
                while data := file.read(DIGEST_READ_NBYTES):
                    state.update(data)
        except OSError as error:
            raise io_error(path, error) from error
    return state.hexdigest()


# Files that a process maps at the same time, of all arrays together. Each one has a file descriptor.
MAX_MAPS = 128


class TokenArray(Protocol):
    """A one-dimensional array of a store. NumPy arrays are such arrays."""

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def __getitem__(self, items: slice, /) -> npt.NDArray[Any]:
        """Return consecutive items."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ArrayFile:
    """A file with a part of an array."""

    path: Path  # The file
    n_items: int  # Number of its items
    offset: int = 0  # Is added to each item
    # Replacement of each item by its value. None keeps the items.
    codes: npt.NDArray[np.uint8] | None = None


class JoinedArray:
    """An array whose items are in several files, one after the other.

    A file is mapped into memory when it is read. A map costs no memory of its own: the pages belong to the page
    cache, all processes of a host share them, and the system may drop them at any time.

    Attributes:
        dtype: Dtype of the items.
    """

    def __init__(self, files: Sequence[ArrayFile], dtype: np.dtype[Any]) -> None:
        """Join files in order."""
        self.dtype = dtype
        self._files = files
        self._ends = np.cumsum([file.n_items for file in files], dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of items."""
        return int(self._ends[-1])

    def __getitem__(self, items: slice, /) -> npt.NDArray[Any]:
        """Return consecutive items."""
        return self.read(items, is_mapped=True)

    def read(self, items: slice, *, is_mapped: bool = False) -> npt.NDArray[Any]:
        """Return consecutive items, without a map by default: its pages would count as memory of the process."""
        low, high, step = items.indices(len(self))
        assert step == 1, items
        parts: list[npt.NDArray[Any]] = []
        index = int(np.searchsorted(self._ends, low, side="right"))
        while low < high:
            file = self._files[index]
            first = int(self._ends[index]) - file.n_items
            end = min(high - first, file.n_items)
            if low - first < end:
                if is_mapped:
                    part = _map_file(file, self.dtype)[low - first : end]
                else:
                    offset = (low - first) * self.dtype.itemsize
                    count = end - (low - first)
                    part = np.fromfile(file.path, self.dtype, count, offset=offset)
                if file.offset:
                    part = part + self.dtype.type(file.offset)
                if file.codes is not None:
                    part = file.codes[part]
                parts.append(part)
            low = first + end
            index += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.empty(0, self.dtype), *parts])


@lru_cache(MAX_MAPS)
def _map_file(file: ArrayFile, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Map a file of one array. Another array maps its path anew, e.g. after a damaged shard was replaced."""
    # A plain array: each slice of a memmap creates another object of that class, which is slow.
    return np.asarray(np.memmap(file.path, dtype, "r", shape=(file.n_items,)))
