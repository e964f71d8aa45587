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
    """Remove a damaged folder. It loses its name at once. Another process may remove it too.

    Raises:
        PrepError: The folder cannot be renamed.
    """
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
    """Remove the incomplete stores of a cache without a write for a day, or for a month if they have shards.

    Args:
        cache: The folder of stores.
        is_complete: Returns whether a folder is a complete store.
    """
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
