"""Folders with a temporary name until they are complete and on disk.

Any number of processes may write the same folder at the same time, because its content is a function of its inputs.
Each one writes under a temporary name, and the first one to finish renames it.
"""

from __future__ import annotations

import errno
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import xxhash

from prepcli.stores.files import fsync_path

# Errors of renaming a folder to a name that a nonempty folder has.
IN_USE = (errno.EEXIST, errno.ENOTEMPTY)
PARTIAL_SUFFIX = ".partial"
# The store of an identity, and temporary folders, also of earlier versions
STORE_NAME = re.compile(r"[0-9a-f]{32}(\..*)?(\.partial)?|shards-[0-9a-f]{32}")
# An incomplete store counts as abandoned if nothing was written for this time. A process that writes one creates a
# folder in it for each shard. The time is far above the difference of two clocks.
ABANDONED_AFTER_S = 24 * 60 * 60


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder. It gets its name at the end, unless another process was first.

    An error or an interruption removes the temporary folder. A kill leaves it, and a later process removes it
    with the next complete folder of the name.

    Args:
        folder: The folder. Its parent is created.

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
    """Remove a damaged folder. It loses its name at once. Another process may remove it too."""
    removed = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:12]}{PARTIAL_SUFFIX}")
    with suppress(FileNotFoundError):
        folder.rename(removed)
        shutil.rmtree(removed)


def remove_abandoned(cache: Path, is_complete: Callable[[Path], bool]) -> None:
    """Remove the incomplete stores of a cache without a write for a day.

    Args:
        cache: The folder of stores.
        is_complete: Returns whether a folder is a complete store.
    """
    for folder in [*cache.iterdir()]:
        with suppress(FileNotFoundError):
            age_s = time.time() - folder.stat().st_mtime
            is_old = age_s > ABANDONED_AFTER_S and STORE_NAME.fullmatch(folder.name) is not None
            if is_old and folder.is_dir() and not is_complete(folder):
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
