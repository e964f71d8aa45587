"""Write a token store: under a name of its own, synced, then renamed.

Processes of several hosts may build a store at the same time, without a lock: each writes a folder
of its own, and the first one to finish renames it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from prepcli.core.errors import PrepError
from prepcli.stores.files import fsync_path
from trainer.data.examples import ReadPosition, TokenIds
from trainer.data.files import io_error
from trainer.data.partial_folders import (
    is_abandoned,
    partial_name,
    unowned_partial_name,
    writer_has_ended,
)
from trainer.data.store import (
    DOCUMENT_END_DTYPE,
    DOCUMENTS_FILE,
    LOSS_WEIGHTS,
    MAX_LOSS_WEIGHTS,
    META_FILE,
    TOKENS_FILE,
    WEIGHTS_FILE,
    DamagedStoreError,
    MappedTokens,
    StoreMeta,
    little_endian,
    read_meta,
)
from trainer.data.store_journal import (
    JOURNAL_FILE,
    RestoredFiles,
    SavedState,
    StoreJournal,
    read_journal,
    restore_files,
)

LOCK_FILE = "lock"
# Tokens or documents that are copied together.
COPY_TOKENS = 1 << 20
EMPTY_DIGEST = xxhash.xxh3_128().hexdigest()
# Errors of file systems without locks, e.g. Lustre without `flock` and some network mounts.
NO_LOCKS = (
    errno.ENOLCK,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EINVAL,
)
# Errors of renaming a folder to a name that a nonempty folder has.
IN_USE = (errno.EEXIST, errno.ENOTEMPTY)


class TokenWriter:
    """Writer of the files of a store.

    Attributes:
        dtype: Dtype of the ids.
        n_tokens: Ids so far.
        n_documents: Documents so far.
        max_id: Largest id so far, or -1.
        position: Position after the examples of the store.
        ignored: Number of each ignored part of conversations so far, by name.
    """

    def __init__(
        self, files: Mapping[str, BinaryIO], restored: RestoredFiles, journal: StoreJournal
    ) -> None:
        """Continue a store.

        Args:
            files: Open files by name, positioned at their end. WEIGHTS_FILE is one of them if the store has
                loss weights.
            restored: State of the files.
            journal: Journal of the store.
        """
        self._files = {
            name: HashingFile(file, restored.digests[name]) for name, file in files.items()
        }
        self._journal = journal
        meta = restored.state.meta
        self.position = restored.state.position
        self._identity = meta.identity
        self.dtype = meta.dtype
        self.n_tokens = meta.n_tokens
        self.n_documents = meta.n_documents
        self.max_id = meta.max_id
        self.ignored = dict(meta.ignored)
        self._loss_weights = [*meta.loss_weights]

    def count_ignored(self, counts: Mapping[str, int]) -> None:
        """Add the ignored parts of appended conversations."""
        for name, count in counts.items():
            self.ignored[name] = self.ignored.get(name, 0) + count

    def append(
        self,
        ids: TokenIds,
        weights: npt.NDArray[np.float32] | None = None,
        *,
        ends: npt.ArrayLike = (),
    ) -> None:
        """Append ids. The first ones continue the current document.

        Args:
            ids: The ids.
            weights: Loss weight of each as a target, 0 to 1. None if all are 1.
            ends: End of each complete document in `ids`. E.g. ids [5, 2, 7] with the ends [2] complete a
                document, and begin the next one.

        Raises:
            PrepError: The store has too many different loss weights.
        """
        self._files[TOKENS_FILE].write(ids.astype(little_endian(self.dtype)).tobytes())
        if WEIGHTS_FILE in self._files:
            if weights is None:
                weights = np.ones(len(ids), np.float32)
            self._files[WEIGHTS_FILE].write(self._encode_weights(weights).tobytes())
        else:
            assert weights is None
        # Ids after the last end belong to no document yet, so a store that is cut off between two parts
        # of a document continues it.
        document_ends = np.asarray(ends, np.uint64) + np.uint64(self.n_tokens)
        self._files[DOCUMENTS_FILE].write(document_ends.astype(DOCUMENT_END_DTYPE).tobytes())
        self.n_tokens += len(ids)
        self.n_documents += len(document_ends)
        if len(ids):
            self.max_id = max(self.max_id, int(ids.max()))

    def append_documents(
        self, tokens: MappedTokens, *, max_id: int, first_token: int = 0, first_document: int = 0
    ) -> None:
        """Append the documents of another store with the same dtype.

        Args:
            tokens: The other store.
            max_id: Its largest id.
            first_token: Number of its tokens in this store already.
            first_document: Number of its documents in this store already.
        """
        # Ends count from the first token of the other store, which is before the end of this one by
        # the tokens that it has already.
        shift = np.uint64(self.n_tokens - first_token)
        for low in range(first_token, tokens.n_tokens, COPY_TOKENS):
            part = slice(low, low + COPY_TOKENS)
            self._files[TOKENS_FILE].write(tokens.ids[part].tobytes())
            if tokens.weight_codes is not None:
                weights = tokens.decode_weights(tokens.weight_codes[part])
                self._files[WEIGHTS_FILE].write(self._encode_weights(weights).tobytes())
        for low in range(first_document, tokens.n_documents, COPY_TOKENS):
            ends = tokens.ends[low : low + COPY_TOKENS] + shift
            self._files[DOCUMENTS_FILE].write(ends.astype(DOCUMENT_END_DTYPE).tobytes())
        self.n_tokens += tokens.n_tokens - first_token
        self.n_documents += tokens.n_documents - first_document
        self.max_id = max(self.max_id, max_id)

    def _encode_weights(self, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        """Return the index of each weight in the store's weights. New ones are added in order."""
        values, firsts, inverse = np.unique(weights, return_index=True, return_inverse=True)
        codes = np.empty(len(values), np.uint8)
        for number in np.argsort(firsts):
            weight = float(values[number])
            if weight not in self._loss_weights:
                if len(self._loss_weights) == MAX_LOSS_WEIGHTS:
                    why = f"a dataset may have {MAX_LOSS_WEIGHTS} different ones"
                    raise PrepError("the data has too many loss weights", why, "round them")
                self._loss_weights.append(weight)
            codes[number] = self._loss_weights.index(weight)
        return codes[inverse]

    def commit(self, position: ReadPosition) -> None:
        """Set the position after the appended examples, and save the state about once per second.

        A later run continues from the saved state, after a kill.

        Args:
            position: Read position after the appended examples.
        """
        self.position = position
        if self._journal.is_due():
            self.start_save()

    def start_save(self) -> None:
        """Start to save the state of the store, in a thread."""
        self._journal.save(SavedState(self.meta(), self.position))

    def meta(self) -> StoreMeta:
        """Return the metadata of the store so far."""
        return StoreMeta(
            identity=self._identity,
            dtype=self.dtype,
            n_tokens=self.n_tokens,
            n_documents=self.n_documents,
            max_id=self.max_id,
            digests={name: file.digest() for name, file in self._files.items()},
            ignored=dict(sorted(self.ignored.items())),
            loss_weights=[*self._loss_weights],
        )


class HashingFile:
    """A sequentially written file with a running digest."""

    def __init__(self, file: BinaryIO, state: xxhash.xxh3_128) -> None:
        """Continue a file.

        Args:
            file: The file, at its end.
            state: Digest of its bytes.
        """
        self._file = file
        self._state = state

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self._state.update(data)

    def digest(self) -> str:
        """Return the digest of all bytes."""
        return self._state.hexdigest()


def dtype_for(max_id: int) -> str:
    """Return the smallest store dtype for ids up to `max_id`."""
    if max_id < 1 << 16:
        return "uint16"
    return "uint32"


def make_cache(cache: Path) -> None:
    """Create the folder of stores and its lock file.

    Raises:
        OSError: The system refuses to write.
    """
    cache.mkdir(parents=True, exist_ok=True)
    (cache / LOCK_FILE).touch()


@contextlib.contextmanager
def lock_cache(cache: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Create the folder of stores and lock it for writing.

    The lock is released when the process ends.

    The lock only saves work: without it, two processes may build the same store. File systems
    without locks are supported.

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
            _acquire_lock(
                handle, lambda: note(f"another process writes tokens to {cache}: waiting for it")
            )
        except OSError as error:
            raise io_error(cache, error) from error
        yield


def _acquire_lock(handle: BinaryIO, on_wait: Callable[[], None]) -> None:
    """Lock a file. Call `on_wait` if another process holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def build_store(
    folder: Path, dtype: str, fill: Callable[[TokenWriter], None], *, has_weights: bool = False
) -> None:
    """Build a store under a name of its own, sync it, then rename it.

    The build continues the one of a killed run, from the last state in its journal. If another
    process has published the store meanwhile, a complete one is kept and a damaged one is replaced.
    Incomplete stores of other killed runs are removed from the cache. An error removes the
    incomplete store. An interruption leaves it to the next run.

    Args:
        folder: Folder of the store. Its name is the identity.
        dtype: Dtype of the ids.
        fill: Appends the missing ids to the writer.
        has_weights: Whether the store has loss weights.

    Raises:
        PrepError: The store cannot be written.
    """
    # A kill while filling leaves a partial folder with a journal, from which the next run
    # continues. A kill after the journal is removed leaves a partial folder without one, which the
    # next run removes. A kill after the rename leaves the complete store: all files are durable
    # before the rename.
    partial = folder.with_name(partial_name(folder.name))
    names = [TOKENS_FILE, DOCUMENTS_FILE]
    if has_weights:
        names.append(WEIGHTS_FILE)
    try:
        _take_over(partial, folder.name, names)
        for leftover in filter(is_abandoned, [*folder.parent.iterdir()]):
            remove_folder(leftover)
        _write_store(partial, folder.name, dtype, names=names, fill=fill)
        (partial / JOURNAL_FILE).unlink()
        publish_folder(partial, folder, read_meta)
        fsync_path(folder.parent)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise io_error(folder, error) from error
        raise
    except BaseException:
        # An interruption, e.g. Ctrl-C. This process may live on. Under its name the folder would
        # count as still being written, and the next run would copy it instead of renaming it.
        with contextlib.suppress(OSError):
            partial.rename(folder.with_name(unowned_partial_name(folder.name)))
        raise


def _take_over(partial: Path, identity: str, names: Sequence[str]) -> None:
    """Create a folder from the largest incomplete store of another process, or an empty one.

    The folder of an ended process of this host is renamed. Other folders are copied, because their
    processes may still write. Bytes recorded in the journal do not change any more.

    Args:
        partial: The folder to create.
        identity: Identity of the store.
        names: Names of its files.
    """
    # The sizes that a journal records are durable. Bytes after them, which a copy may tear, are cut
    # off by `restore_files`.
    journals = {path: read_journal(path) for path in partial.parent.glob(f"{identity}.*.partial")}
    sizes = {path: states[-1].meta.n_tokens for path, states in journals.items() if states}
    for path in sorted(filter(sizes.get, sizes), key=lambda path: sizes[path], reverse=True):
        try:
            if writer_has_ended(path):
                path.rename(partial)
            else:
                _copy_files(path, partial, (JOURNAL_FILE, *names))
            return
        except OSError:
            # Another process took it over, completed it or removed it.
            shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()


def _copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    target.mkdir()
    for name in names:
        shutil.copyfile(source / name, target / name)


def publish_folder(partial: Path, folder: Path, read: Callable[[Path], object]) -> None:
    """Rename a complete folder to its final name, unless a complete one has it.

    A damaged folder of the name is removed.

    Args:
        partial: The complete folder.
        folder: Its final name.
        read: Raises DamagedStoreError for a damaged folder.
    """
    # Several hosts may get here at once. A rename to a nonempty folder fails, so the first one
    # wins. Each failed round has found a store of that name. Either it is complete, or it is moved
    # away.
    while True:
        try:
            partial.rename(folder)
            return
        except OSError as error:
            if error.errno not in IN_USE:
                raise
        with contextlib.suppress(DamagedStoreError):
            read(folder)
            remove_folder(partial)
            return
        damaged = folder.with_name(partial_name(folder.name))
        with contextlib.suppress(FileNotFoundError):
            # Another process has moved it away.
            folder.rename(damaged)
        remove_folder(damaged)


def remove_folder(folder: Path) -> None:
    """Remove a folder. Another process may remove it at the same time."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _write_store(
    folder: Path,
    identity: str,
    dtype: str,
    *,
    names: Sequence[str],
    fill: Callable[[TokenWriter], None],
) -> None:
    """Fill the files of a store, sync them, and write its metadata."""
    empty = StoreMeta(
        identity,
        dtype,
        n_tokens=0,
        n_documents=0,
        max_id=-1,
        digests=dict.fromkeys(names, EMPTY_DIGEST),
    )
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for name in names:
            # Mode "r+b" keeps the tokens of a killed run, and needs an existing file.
            (folder / name).touch()
            files[name] = stack.enter_context((folder / name).open("r+b"))
        restored = restore_files(files, read_journal(folder), SavedState(empty, ReadPosition()))
        journal = stack.enter_context(
            contextlib.closing(StoreJournal(folder, files.values(), restored.state))
        )
        writer = TokenWriter(files, restored, journal)
        fill(writer)
        # The last state, so that a kill during the writing of the metadata loses no token. Leaving
        # the block waits for it, then closes the files.
        writer.start_save()
    # The files are synced before the folder gets its final name, and the folder itself last, so
    # that the names of the files in it are durable too.
    values = asdict(writer.meta())
    # Stores without these values have the metadata of earlier versions.
    if not values["ignored"]:
        del values["ignored"]
    if values["loss_weights"] == [*LOSS_WEIGHTS]:
        del values["loss_weights"]
    (folder / META_FILE).write_text(json.dumps(values, indent=1) + "\n")
    for path in (*(folder / name for name in names), folder / META_FILE, folder):
        fsync_path(path)
