"""The token store: a folder that has its name only when it is whole and on disk.

`tokens.bin` has the ids of all documents one after another, `documents.bin` where each document ends (uint64, in
tokens), `meta.json` the rest, with the XXH3-128 of both files. Numbers are little-endian.
"""

from __future__ import annotations

import contextlib
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
from trainer.models.errors import PrepError

TOKENS_FILE, DOCUMENTS_FILE, META_FILE, LOCK_FILE = "tokens.bin", "documents.bin", "meta.json", "lock"
PARTIAL_GLOB = "[0-9a-f]" * 32 + ".partial"  # stores that are not whole: named by identity, 32 hex digits
DOCUMENT_END_NBYTES = 8
DIGEST_READ_NBYTES = 4 << 20  # at a time, for a digest


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """What a store says of itself. `dtype`: "uint16" or "uint32"; `max_id`: the largest id in it, -1 for none;
    `digests`: by file, empty in stores that earlier versions wrote."""

    identity: str
    dtype: str
    n_tokens: int
    n_documents: int
    max_id: int
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class MappedTokens:
    """The ids of all documents, end-of-text ids included, memory-mapped, and how long a block of them is.

    `ids`: [n_tokens] uint16 or uint32; `ends`: [n_documents] uint64, where each document ends in `ids`.
    """

    ids: npt.NDArray[np.unsignedinteger[Any]]
    ends: npt.NDArray[np.uint64]
    identity: str
    seq_length: int

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def n_documents(self) -> int:
        return len(self.ends)

    @property
    def n_blocks(self) -> int:
        return self.n_tokens // self.seq_length


class TokenWriter:
    """The files of a store that comes to be."""

    def __init__(self, tokens: BinaryIO, documents: BinaryIO, dtype: str) -> None:
        self._tokens, self._documents = _HashingFile(tokens), _HashingFile(documents)
        self.dtype = dtype
        self.n_tokens, self.n_documents, self.max_id = 0, 0, -1

    def append(self, ids: npt.NDArray[np.uint32]) -> None:
        """Append ids to the document that is being written."""
        self._tokens.write(ids.astype(_little_endian(self.dtype)).tobytes())
        self.n_tokens += len(ids)
        self.max_id = max(self.max_id, int(ids.max(initial=0))) if len(ids) else self.max_id

    def end_document(self) -> None:
        self._documents.write(self.n_tokens.to_bytes(DOCUMENT_END_NBYTES, "little"))
        self.n_documents += 1

    def meta(self, identity: str) -> StoreMeta:
        """Return what the store says of itself, once all is added."""
        digests = {TOKENS_FILE: self._tokens.digest(), DOCUMENTS_FILE: self._documents.digest()}
        return StoreMeta(identity, self.dtype, self.n_tokens, self.n_documents, self.max_id, digests)


class _HashingFile:
    """A file that is written from end to end, and the digest of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._state = file, xxhash.xxh3_128()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._state.update(data)

    def digest(self) -> str:
        return self._state.hexdigest()


def dtype_for(max_id: int) -> str:
    """The smallest dtype of a store that holds ids up to this one."""
    return "uint16" if max_id < 1 << 16 else "uint32"


def _little_endian(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(dtype).newbyteorder("<")


@contextlib.contextmanager
def lock_cache(cache: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Make the folder of stores, and be the only process that writes to it; the lock goes with the process."""
    with contextlib.ExitStack() as stack:
        try:
            cache.mkdir(parents=True, exist_ok=True)
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


def build_store(folder: Path, dtype: str, fill: Callable[[TokenWriter], None]) -> None:
    """Make a store: written as `NAME.partial`, then durable, then under its name, in place of a damaged one. Call it
    with the cache locked.

    What runs that were killed left in the cache is dropped. PrepError if the disk refuses.
    """
    partial = folder.with_name(folder.name + ".partial")
    try:
        for left in folder.parent.glob(PARTIAL_GLOB):
            shutil.rmtree(left)
        partial.mkdir()
        _write_store(partial, folder.name, dtype, fill)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        _fsync(folder.parent)
    except OSError as error:
        raise io_error(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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


def read_meta(folder: Path) -> StoreMeta:
    """Return what a store says of itself, checked against the sizes and digests of its files.

    All of the files is read, at the speed of the disk: less than the texts that they were made of.

    Raises:
        Damaged: The files are not what was written.
    """
    try:
        meta = _parse_meta(folder, (folder / META_FILE).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in (TOKENS_FILE, DOCUMENTS_FILE)}
    except OSError as error:
        raise _damaged_store_error(folder, f"{error.filename}: {error.strerror}") from error
    promised = {
        TOKENS_FILE: meta.n_tokens * np.dtype(meta.dtype).itemsize,
        DOCUMENTS_FILE: meta.n_documents * DOCUMENT_END_NBYTES,
    }
    for name, nbytes in promised.items():
        if sizes[name] != nbytes:
            raise _damaged_store_error(folder, f"{name} has {sizes[name]:,} bytes, {META_FILE} promises {nbytes:,}")
    for name, digest in meta.digests.items():
        if _file_digest(folder / name) != digest:
            raise _damaged_store_error(folder, f"{name} differs from the digest that {META_FILE} records")
    return meta


def _file_digest(path: Path) -> str:
    """XXH3-128 of a file."""
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
        found = {"digests": {}} | json.loads(data)
        meta = StoreMeta(**{each.name: found[each.name] for each in fields(StoreMeta)})
        numbers = (meta.n_tokens, meta.n_documents, meta.max_id)
        is_sound = meta.dtype in ("uint16", "uint32") and all(type(number) is int for number in numbers)
        is_sound &= isinstance(meta.digests, dict) and {*meta.digests} in (set(), {TOKENS_FILE, DOCUMENTS_FILE})
    except (ValueError, TypeError, KeyError):
        raise _damaged_store_error(folder, f"{META_FILE} is not what was written") from None
    if not is_sound or meta.identity != folder.name:
        raise _damaged_store_error(folder, f"{META_FILE} is that of another store, or not what was written")
    return meta


class DamagedStoreError(PrepError):
    """The files of a store are not what was written."""


def _damaged_store_error(folder: Path, why: str) -> DamagedStoreError:
    return DamagedStoreError(
        f"the tokens in {folder} are broken", why, f"`rm -r {folder}`: the next run makes them again"
    )


def map_tokens(folder: Path, meta: StoreMeta, seq_length: int) -> MappedTokens:
    """Map a store that has at least one block; nothing is read yet."""
    ids = np.memmap(folder / TOKENS_FILE, _little_endian(meta.dtype), "r", shape=(meta.n_tokens,))
    ends = np.memmap(folder / DOCUMENTS_FILE, "<u8", "r", shape=(meta.n_documents,))
    return MappedTokens(ids, ends, meta.identity, seq_length)
