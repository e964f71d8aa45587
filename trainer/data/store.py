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

TOKENS, DOCUMENTS, META, LOCK = "tokens.bin", "documents.bin", "meta.json", "lock"
PARTIALS = "[0-9a-f]" * 32 + ".partial"  # stores that are not whole: named by identity, 32 hex digits
END_NBYTES = 8
READ_NBYTES = 4 << 20  # at a time, for a digest


@dataclass(frozen=True, slots=True)
class Meta:
    """What a store says of itself. `dtype`: "uint16" or "uint32"; `max_id`: the largest id in it, -1 for none;
    `digests`: by file, empty in stores that earlier versions wrote."""

    identity: str
    dtype: str
    n_tokens: int
    n_documents: int
    max_id: int
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
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


class Writer:
    """The files of a store that comes to be."""

    def __init__(self, tokens: BinaryIO, documents: BinaryIO, dtype: str) -> None:
        self._tokens, self._documents = _Hashed(tokens), _Hashed(documents)
        self.dtype = dtype
        self.n_tokens, self.n_documents, self.max_id = 0, 0, -1

    def add(self, ids: npt.NDArray[np.uint32]) -> None:
        """Append ids to the document that is being written."""
        self._tokens.write(ids.astype(_little(self.dtype)).tobytes())
        self.n_tokens += len(ids)
        self.max_id = max(self.max_id, int(ids.max(initial=0))) if len(ids) else self.max_id

    def end_document(self) -> None:
        self._documents.write(self.n_tokens.to_bytes(END_NBYTES, "little"))
        self.n_documents += 1

    def meta(self, identity: str) -> Meta:
        """Return what the store says of itself, once all is added."""
        digests = {TOKENS: self._tokens.digest(), DOCUMENTS: self._documents.digest()}
        return Meta(identity, self.dtype, self.n_tokens, self.n_documents, self.max_id, digests)


class _Hashed:
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


def _little(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(dtype).newbyteorder("<")


@contextlib.contextmanager
def locked(cache: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Make the folder of stores, and be the only process that writes to it; the lock goes with the process."""
    with contextlib.ExitStack() as stack:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context((cache / LOCK).open("ab"))
            _take(handle, lambda: note(f"another process writes tokens to {cache}: waiting for it"))
        except OSError as error:
            raise io_error(cache, error) from error
        yield


def _take(handle: BinaryIO, on_wait: Callable[[], None]) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(handle, fcntl.LOCK_EX)


def build(folder: Path, dtype: str, fill: Callable[[Writer], None]) -> None:
    """Make a store: written as `NAME.partial`, then durable, then under its name, in place of a damaged one. Call it
    with the cache locked.

    What runs that were killed left in the cache is dropped. PrepError if the disk refuses.
    """
    partial = folder.with_name(folder.name + ".partial")
    try:
        for left in folder.parent.glob(PARTIALS):
            shutil.rmtree(left)
        partial.mkdir()
        _write(partial, folder.name, dtype, fill)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        raise io_error(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, identity: str, dtype: str, fill: Callable[[Writer], None]) -> None:
    with (folder / TOKENS).open("wb") as tokens, (folder / DOCUMENTS).open("wb") as documents:
        writer = Writer(tokens, documents, dtype)
        fill(writer)
    (folder / META).write_text(json.dumps(asdict(writer.meta(identity)), indent=1) + "\n")
    for path in (folder / TOKENS, folder / DOCUMENTS, folder / META, folder):
        _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_meta(folder: Path) -> Meta:
    """Return what a store says of itself, checked against the sizes and digests of its files.

    All of the files is read, at the speed of the disk: less than the texts that they were made of.

    Raises:
        Damaged: The files are not what was written.
    """
    try:
        meta = _parsed(folder, (folder / META).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in (TOKENS, DOCUMENTS)}
    except OSError as error:
        raise _broken(folder, f"{error.filename}: {error.strerror}") from error
    promised = {
        TOKENS: meta.n_tokens * np.dtype(meta.dtype).itemsize,
        DOCUMENTS: meta.n_documents * END_NBYTES,
    }
    for name, nbytes in promised.items():
        if sizes[name] != nbytes:
            raise _broken(folder, f"{name} has {sizes[name]:,} bytes, {META} promises {nbytes:,}")
    for name, digest in meta.digests.items():
        if _digest(folder / name) != digest:
            raise _broken(folder, f"{name} differs from the digest that {META} records")
    return meta


def _digest(path: Path) -> str:
    """XXH3-128 of a file."""
    state = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while data := file.read(READ_NBYTES):
                state.update(data)
    except OSError as error:
        raise io_error(path, error) from error
    return state.hexdigest()


def _parsed(folder: Path, data: bytes) -> Meta:
    try:
        found = {"digests": {}} | json.loads(data)
        meta = Meta(**{each.name: found[each.name] for each in fields(Meta)})
        numbers = (meta.n_tokens, meta.n_documents, meta.max_id)
        is_sound = meta.dtype in ("uint16", "uint32") and all(type(number) is int for number in numbers)
        is_sound &= isinstance(meta.digests, dict) and {*meta.digests} in (set(), {TOKENS, DOCUMENTS})
    except (ValueError, TypeError, KeyError):
        raise _broken(folder, f"{META} is not what was written") from None
    if not is_sound or meta.identity != folder.name:
        raise _broken(folder, f"{META} is that of another store, or not what was written")
    return meta


class Damaged(PrepError):
    """The files of a store are not what was written."""


def _broken(folder: Path, why: str) -> Damaged:
    return Damaged(f"the tokens in {folder} are broken", why, f"`rm -r {folder}`: the next run makes them again")


def map_tokens(folder: Path, meta: Meta, seq_length: int) -> Tokens:
    """Map a store that has at least one block; nothing is read yet."""
    ids = np.memmap(folder / TOKENS, _little(meta.dtype), "r", shape=(meta.n_tokens,))
    ends = np.memmap(folder / DOCUMENTS, "<u8", "r", shape=(meta.n_documents,))
    return Tokens(ids, ends, meta.identity, seq_length)
