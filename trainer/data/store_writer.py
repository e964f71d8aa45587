"""Write a token store: under a name of its own, synced, then renamed.

Processes of several hosts may build a store at the same time, without a lock: each writes a folder of its own, and the
first one to finish renames it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from trainer.data.examples import TokenIds
from trainer.data.files import io_error
from trainer.data.partial_folders import is_abandoned, partial_name
from trainer.data.store import (
    DOCUMENT_END_NBYTES,
    DOCUMENTS_FILE,
    META_FILE,
    TOKENS_FILE,
    WEIGHTS_FILE,
    DamagedStoreError,
    StoreMeta,
    little_endian,
    read_meta,
)

LOCK_FILE = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # errors of file systems without locks
IN_USE = (errno.EEXIST, errno.ENOTEMPTY)  # errors of renaming a folder to the name of another


class TokenWriter:
    """Writer of the files of a new store."""

    def __init__(self, files: Mapping[str, BinaryIO], dtype: str) -> None:
        """Start an empty store.

        Args:
            files: The files by name, empty; with WEIGHTS_FILE if the store has loss weights.
            dtype: Dtype of the ids.
        """
        self._files = {name: _HashingFile(file) for name, file in files.items()}
        self.dtype = dtype
        self.n_tokens, self.n_documents, self.max_id = 0, 0, -1

    def append(self, ids: TokenIds, weights: npt.NDArray[np.uint8] | None = None) -> None:
        """Append ids to the current document.

        Args:
            ids: The ids.
            weights: Loss weight of each as a target, 0 or 1; None if all are 1.
        """
        self._files[TOKENS_FILE].write(ids.astype(little_endian(self.dtype)).tobytes())
        if WEIGHTS_FILE in self._files:
            self._files[WEIGHTS_FILE].write((np.ones(len(ids), np.uint8) if weights is None else weights).tobytes())
        else:
            assert weights is None
        self.n_tokens += len(ids)
        self.max_id = max(self.max_id, int(ids.max(initial=0))) if len(ids) else self.max_id

    def end_document(self) -> None:
        """End the current document."""
        self._files[DOCUMENTS_FILE].write(self.n_tokens.to_bytes(DOCUMENT_END_NBYTES, "little"))
        self.n_documents += 1

    def meta(self, identity: str) -> StoreMeta:
        """Return the metadata of the store, after all ids were appended."""
        return StoreMeta(
            identity=identity,
            dtype=self.dtype,
            n_tokens=self.n_tokens,
            n_documents=self.n_documents,
            max_id=self.max_id,
            digests={name: file.digest() for name, file in self._files.items()},
        )


class _HashingFile:
    """A sequentially written file with a running digest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._state = file, xxhash.xxh3_128()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._state.update(data)

    def digest(self) -> str:
        return self._state.hexdigest()


def dtype_for(max_id: int) -> str:
    """Return the smallest store dtype that holds ids up to `max_id`."""
    return "uint16" if max_id < 1 << 16 else "uint32"


def make_cache(cache: Path) -> None:
    """Create the folder of stores and its lock file; raise OSError if that fails."""
    cache.mkdir(parents=True, exist_ok=True)
    (cache / LOCK_FILE).touch()


@contextlib.contextmanager
def lock_cache(cache: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Create the folder of stores and lock it for writing; the lock is released when the process ends.

    The lock only avoids that two processes build one store. File systems without locks need none.

    Args:
        cache: The folder of stores.
        note: Called with a message if another process holds the lock.

    Raises:
        PrepError: The folder cannot be created or locked.
    """
    with contextlib.ExitStack() as stack:
        try:
            make_cache(cache)
            handle = stack.enter_context((cache / LOCK_FILE).open("ab"))
            _acquire_lock(handle, lambda: note(f"another process writes tokens to {cache}: waiting for it"))
        except OSError as error:
            raise io_error(cache, error) from error
        yield


def _acquire_lock(handle: BinaryIO, on_wait: Callable[[], None]) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def build_store(folder: Path, dtype: str, fill: Callable[[TokenWriter], None], *, has_weights: bool = False) -> None:
    """Build a store under a name of its own, sync it, then rename it.

    A complete store that another process put there meanwhile is kept; a damaged one is replaced. Incomplete stores that
    killed runs left in the cache are removed.

    Args:
        folder: Folder of the store; its name is the identity.
        dtype: Dtype of the ids.
        fill: Appends all ids to the writer.
        has_weights: Whether the store has loss weights.

    Raises:
        PrepError: The store cannot be written.
    """
    partial = folder.with_name(partial_name(folder.name))
    names = (TOKENS_FILE, DOCUMENTS_FILE, *([WEIGHTS_FILE] if has_weights else []))
    try:
        for leftover in filter(is_abandoned, [*folder.parent.iterdir()]):
            _remove_folder(leftover)
        partial.mkdir()
        _write_store(partial, folder.name, dtype, names=names, fill=fill)
        _publish(partial, folder)
        _fsync(folder.parent)
    except OSError as error:
        raise io_error(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, folder: Path) -> None:
    """Rename a complete store to its final name, unless a complete one has it; a damaged one is removed."""
    while True:
        try:
            partial.rename(folder)
            return
        except OSError as error:
            if error.errno not in IN_USE:
                raise
        with contextlib.suppress(DamagedStoreError):
            read_meta(folder)
            return
        damaged = folder.with_name(partial_name(folder.name))
        with contextlib.suppress(FileNotFoundError):  # another process has moved it away
            folder.rename(damaged)
        _remove_folder(damaged)


def _remove_folder(folder: Path) -> None:
    """Remove a folder that other processes may remove at the same time."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _write_store(
    folder: Path, identity: str, dtype: str, *, names: Sequence[str], fill: Callable[[TokenWriter], None]
) -> None:
    with contextlib.ExitStack() as stack:
        writer = TokenWriter({name: stack.enter_context((folder / name).open("wb")) for name in names}, dtype)
        fill(writer)
    (folder / META_FILE).write_text(json.dumps(asdict(writer.meta(identity)), indent=1) + "\n")
    for path in (*(folder / name for name in names), folder / META_FILE, folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
