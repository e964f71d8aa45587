"""The token store: a folder with the token ids of all documents. It gets its final name once it is complete on disk.

Processes of several hosts may build a store at the same time, without a lock: each writes a folder of its own, and the
first one to finish renames it.

- `tokens.bin`: ids of all documents, concatenated; uint16 or uint32, little-endian.
- `documents.bin`: end of each document in `tokens.bin`, in tokens; uint64, little-endian.
- `meta.json`: `StoreMeta`, with the XXH3-128 digests of both files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from trainer.data.files import io_error
from trainer.data.partial_folders import is_abandoned, partial_name
from trainer.models.errors import PrepError

TOKENS_FILE, DOCUMENTS_FILE, META_FILE, LOCK_FILE = "tokens.bin", "documents.bin", "meta.json", "lock"
DOCUMENT_END_NBYTES = 8
DIGEST_READ_NBYTES = 4 << 20
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # errors of file systems without locks
IN_USE = (errno.EEXIST, errno.ENOTEMPTY)  # errors of renaming a folder to the name of another


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """Metadata of a token store, as written to `meta.json`.

    Attributes:
        identity: Digest of all inputs of tokenization; also the store's folder name.
        dtype: Dtype of the ids, "uint16" or "uint32".
        n_tokens: Number of ids.
        n_documents: Number of documents.
        max_id: Largest id; -1 for an empty store.
        digests: XXH3-128 by file name; empty in stores of earlier versions.
    """

    identity: str
    dtype: str
    n_tokens: int
    n_documents: int
    max_id: int
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class MappedTokens:
    """A memory-mapped token store.

    Attributes:
        ids: [n_tokens] uint16 or uint32, ids of all documents, end-of-sequence ids included.
        ends: [n_documents] uint64, end of each document in `ids`.
        identity: Identity of the store.
        seq_length: Tokens of a block, or maximum tokens of a target.
    """

    ids: npt.NDArray[np.unsignedinteger[Any]]
    ends: npt.NDArray[np.uint64]
    identity: str
    seq_length: int

    @property
    def n_tokens(self) -> int:
        """Number of ids."""
        return len(self.ids)

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return len(self.ends)

    @property
    def n_blocks(self) -> int:
        """Number of complete blocks."""
        return self.n_tokens // self.seq_length


class TokenWriter:
    """Writer of the files of a new store."""

    def __init__(self, tokens: BinaryIO, documents: BinaryIO, dtype: str) -> None:
        self._tokens, self._documents = _HashingFile(tokens), _HashingFile(documents)
        self.dtype = dtype
        self.n_tokens, self.n_documents, self.max_id = 0, 0, -1

    def append(self, ids: npt.NDArray[np.uint32]) -> None:
        """Append ids to the current document."""
        self._tokens.write(ids.astype(_little_endian(self.dtype)).tobytes())
        self.n_tokens += len(ids)
        self.max_id = max(self.max_id, int(ids.max(initial=0))) if len(ids) else self.max_id

    def end_document(self) -> None:
        """End the current document."""
        self._documents.write(self.n_tokens.to_bytes(DOCUMENT_END_NBYTES, "little"))
        self.n_documents += 1

    def meta(self, identity: str) -> StoreMeta:
        """Return the metadata of the store, after all ids were appended."""
        digests = {TOKENS_FILE: self._tokens.digest(), DOCUMENTS_FILE: self._documents.digest()}
        return StoreMeta(
            identity=identity,
            dtype=self.dtype,
            n_tokens=self.n_tokens,
            n_documents=self.n_documents,
            max_id=self.max_id,
            digests=digests,
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


def _little_endian(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(dtype).newbyteorder("<")


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


def build_store(folder: Path, dtype: str, fill: Callable[[TokenWriter], None]) -> None:
    """Build a store under a name of its own, sync it, then rename it.

    A complete store that another process put there meanwhile is kept; a damaged one is replaced. Incomplete stores that
    killed runs left in the cache are removed.

    Args:
        folder: Folder of the store; its name is the identity.
        dtype: Dtype of the ids.
        fill: Appends all ids to the writer.

    Raises:
        PrepError: The store cannot be written.
    """
    partial = folder.with_name(partial_name(folder.name))
    try:
        for leftover in filter(is_abandoned, [*folder.parent.iterdir()]):
            _remove_folder(leftover)
        partial.mkdir()
        _write_store(partial, folder.name, dtype, fill)
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


def _write_store(folder: Path, identity: str, dtype: str, fill: Callable[[TokenWriter], None]) -> None:
    with (folder / TOKENS_FILE).open("wb") as tokens, (folder / DOCUMENTS_FILE).open("wb") as documents:
        writer = TokenWriter(tokens, documents, dtype)
        fill(writer)
    (folder / META_FILE).write_text(json.dumps(asdict(writer.meta(identity)), indent=1) + "\n")
    for path in (folder / TOKENS_FILE, folder / DOCUMENTS_FILE, folder / META_FILE, folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_meta(folder: Path, *, checks_digests: bool = True) -> StoreMeta:
    """Read the metadata of a store and check the sizes and digests of its files.

    Args:
        folder: The store.
        checks_digests: Read all bytes to check the digests; False if another process has done so.

    Raises:
        DamagedStoreError: The files differ from the metadata.
        PrepError: A file cannot be read.
    """
    try:
        meta = _parse_meta(folder, (folder / META_FILE).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in (TOKENS_FILE, DOCUMENTS_FILE)}
    except OSError as error:
        raise _damaged_store_error(folder, f"{error.filename}: {error.strerror}") from error
    expected_nbytes = {
        TOKENS_FILE: meta.n_tokens * np.dtype(meta.dtype).itemsize,
        DOCUMENTS_FILE: meta.n_documents * DOCUMENT_END_NBYTES,
    }
    for name, nbytes in expected_nbytes.items():
        if sizes[name] != nbytes:
            raise _damaged_store_error(folder, f"{name} has {sizes[name]:,} bytes, {META_FILE} records {nbytes:,}")
    for name, digest in meta.digests.items() if checks_digests else ():
        if _file_digest(folder / name) != digest:
            raise _damaged_store_error(folder, f"{name} differs from the digest that {META_FILE} records")
    return meta


def _file_digest(path: Path) -> str:
    """Return the XXH3-128 digest of a file."""
    state = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while data := file.read(DIGEST_READ_NBYTES):
                state.update(data)
    except OSError as error:
        raise io_error(path, error) from error
    return state.hexdigest()


def _parse_meta(folder: Path, data: bytes) -> StoreMeta:
    try:
        values = {"digests": {}} | json.loads(data)
        meta = StoreMeta(**{key.name: values[key.name] for key in fields(StoreMeta)})
        numbers = (meta.n_tokens, meta.n_documents, meta.max_id)
        is_valid = meta.dtype in ("uint16", "uint32") and all(type(number) is int for number in numbers)
        is_valid &= isinstance(meta.digests, dict) and {*meta.digests} in (set(), {TOKENS_FILE, DOCUMENTS_FILE})
    except (ValueError, TypeError, KeyError):
        raise _damaged_store_error(folder, f"{META_FILE} is malformed") from None
    if not is_valid or meta.identity != folder.name:
        raise _damaged_store_error(folder, f"{META_FILE} has invalid values or belongs to another store")
    return meta


class DamagedStoreError(PrepError):
    """Error for a store with missing, changed or malformed files."""


def _damaged_store_error(folder: Path, why: str) -> DamagedStoreError:
    return DamagedStoreError(
        f"the tokens in {folder} are damaged", why, f"`rm -r {folder}`: the next run makes them again"
    )


def map_tokens(folder: Path, meta: StoreMeta, seq_length: int) -> MappedTokens:
    """Map the files of a nonempty store into memory, without reading them."""
    ids = np.memmap(folder / TOKENS_FILE, _little_endian(meta.dtype), "r", shape=(meta.n_tokens,))
    ends = np.memmap(folder / DOCUMENTS_FILE, "<u8", "r", shape=(meta.n_documents,))
    return MappedTokens(ids=ids, ends=ends, identity=meta.identity, seq_length=seq_length)
