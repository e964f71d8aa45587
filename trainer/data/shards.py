"""Make a token store: its missing shards, and its metadata once it has all of them.

A shard is a function of its range of the data. Any process may make it: one of several, or a later one after a
kill. No process waits for another one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from prepcli.core.formatting import count_text
from trainer.data.encode import OverlongRule, batch_examples, encode_batches, fit_documents
from trainer.data.fields import ExampleBuilder
from trainer.data.files import ChangedFileError, DataFile, Note, io_error
from trainer.data.records import RecordSettings, ShardLayout, ShardReader
from trainer.data.store import (
    DOCUMENT_END_DTYPE,
    DOCUMENTS_FILE,
    LOSS_WEIGHTS,
    MAX_LOSS_WEIGHTS,
    META_FILE,
    STORE_FILE,
    TOKENS_FILE,
    WEIGHTS_FILE,
    DamagedStoreError,
    ShardMeta,
    StoreMeta,
    damaged_store_error,
    is_complete,
    join_shards,
    little_endian,
    read_meta,
    read_shard,
    shard_name,
    too_many_weights_error,
    write_meta,
)
from trainer.data.store_files import (
    HashingFile,
    discard_folder,
    new_folder,
    remove_abandoned,
    remove_leftovers,
)
from trainer.data.tokenizer import TextTokenizer, TokenIds
from trainer.recipe.text_fields import FileType

# Minimum bytes of data of a shard, and maximum number of shards. A kill loses at most one shard of each process.
SHARD_NBYTES = 16 << 20
MAX_SHARDS = 1024
# Called with the bytes tokenized so far, the total bytes, and the tokens so far.
TokenizeProgress = Callable[[int, int, int], None]


def dtype_for(max_id: int) -> str:
    """Return the smallest store dtype for ids up to `max_id`."""
    if max_id < 1 << 16:
        return "uint16"
    return "uint32"


class ShardWriter:
    """Writer of the files of a shard.

    Attributes:
        dtype: Dtype of the ids.
        n_tokens: Ids so far.
        n_documents: Documents so far.
        max_id: Largest id so far, or -1.
        ignored: Number of each ignored part of conversations so far, by name.
        n_bad_lines: Number of skipped invalid records.
    """

    def __init__(self, files: Mapping[str, HashingFile], dtype: str) -> None:
        """Start a shard. WEIGHTS_FILE is one of its open files if the store has loss weights."""
        self._files = files
        self.dtype = dtype
        self.n_tokens = 0
        self.n_documents = 0
        self.max_id = -1
        self.ignored: Counter[str] = Counter()
        self.n_bad_lines = 0
        self._loss_weights = [*LOSS_WEIGHTS]

    def append(
        self,
        ids: TokenIds,
        weights: npt.NDArray[np.float32] | None = None,
        *,
        ends: npt.ArrayLike = (),
    ) -> None:
        """Append ids with their loss weights. The first ones continue the current document.

        `ends` are the ends of complete documents in `ids`. E.g. ids [5, 2, 7] with the ends [2] complete a
        document, and begin the next one.

        Raises:
            PrepError: The shard has too many different loss weights.
        """
        self._files[TOKENS_FILE].write(ids.astype(little_endian(self.dtype)).tobytes())
        if WEIGHTS_FILE in self._files:
            if weights is None:
                weights = np.ones(len(ids), np.float32)
            self._files[WEIGHTS_FILE].write(self._encode_weights(weights).tobytes())
        else:
            assert weights is None
        document_ends = np.asarray(ends, np.uint64) + np.uint64(self.n_tokens)
        self._files[DOCUMENTS_FILE].write(document_ends.astype(DOCUMENT_END_DTYPE).tobytes())
        self.n_tokens += len(ids)
        self.n_documents += len(document_ends)
        if len(ids):
            self.max_id = max(self.max_id, int(ids.max()))

    def _encode_weights(self, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        """Return the index of each weight in the shard's weights. New ones are added in order."""
        values, firsts, inverse = np.unique(weights, return_index=True, return_inverse=True)
        codes = np.empty(len(values), np.uint8)
        for number in np.argsort(firsts):
            weight = float(values[number])
            if weight not in self._loss_weights:
                if len(self._loss_weights) == MAX_LOSS_WEIGHTS:
                    raise too_many_weights_error()
                self._loss_weights.append(weight)
            codes[number] = self._loss_weights.index(weight)
        return codes[inverse]

    def meta(self, identity: str, layout: str) -> ShardMeta:
        """Return the metadata of the shard, in a store of an identity and a layout."""
        return ShardMeta(
            identity=identity,
            dtype=self.dtype,
            n_tokens=self.n_tokens,
            n_documents=self.n_documents,
            max_id=self.max_id,
            digests={name: file.digest() for name, file in self._files.items()},
            ignored=dict(sorted(self.ignored.items())),
            loss_weights=[*self._loss_weights],
            n_bad_lines=self.n_bad_lines,
            layout=layout,
        )


@contextmanager
def writing_shard(
    store: Path, shard: int, dtype: str, *, has_weights: bool = False, layout: str = ""
) -> Iterator[ShardWriter]:
    """Write a shard of a store. It is complete and on disk at the end of the block. An error removes it.

    Raises:
        PrepError: The shard cannot be written.
    """
    names = [TOKENS_FILE, DOCUMENTS_FILE]
    if has_weights:
        names.append(WEIGHTS_FILE)
    try:
        with new_folder(store / shard_name(shard)) as folder:
            with ExitStack() as stack:
                files = {name: stack.enter_context(_create(folder / name)) for name in names}
                hashing = {name: HashingFile(file) for name, file in files.items()}
                writer = ShardWriter(hashing, dtype)
                yield writer
            content = json.dumps(writer.meta(store.name, layout).to_json(), indent=1)
            (folder / META_FILE).write_text(content + "\n")
    except OSError as error:
        raise io_error(store, error) from error


def _create(path: Path) -> BinaryIO:
    """Create a file of a shard. The bytes are dropped if another process has completed the shard meanwhile."""
    try:
        return path.open("xb")
    except FileNotFoundError:
        # The other process has removed the folder, and `new_folder` accepts that at the end.
        return open(os.devnull, "wb")


@dataclass(frozen=True, slots=True)
class StoreJob:
    """The inputs of a missing store."""

    folder: Path  # The store. Its name is the identity.
    files: Sequence[DataFile]  # The data files, with their digests
    file_type: FileType  # Their type
    builder: ExampleBuilder  # Builds an example of each record
    tokenizer: TextTokenizer  # Tokenizer of their texts
    settings: RecordSettings  # Settings of reading
    overlong: OverlongRule  # What becomes of documents longer than a sequence
    dtype: str  # Dtype of the ids
    layout: ShardLayout  # The shards

    def has_shard(self, shard: int) -> bool:
        """Return whether a shard is made."""
        return (self.folder / shard_name(shard)).exists()

    def read_shard(self, shard: int, *, checks_digests: bool = True) -> ShardMeta:
        """Return the metadata of a shard. Raise DamagedStoreError if it is damaged, or of another division or dtype."""
        meta = read_shard(self.folder, shard_name(shard), checks_digests=checks_digests)
        if meta.layout != self.layout.digest:
            raise damaged_store_error(self.folder, f"{shard_name(shard)} is of another division")
        if meta.dtype != self.dtype:
            # Ids as data have the dtype of the model's vocabulary, which is not part of the identity.
            why = f"{shard_name(shard)} has {meta.dtype} ids, not {self.dtype}"
            raise damaged_store_error(self.folder, why)
        return meta

    def writing(self, shard: int) -> AbstractContextManager[ShardWriter]:
        """Write a shard. See `writing_shard`."""
        has_weights = self.builder.has_weights
        layout = self.layout.digest
        return writing_shard(self.folder, shard, self.dtype, has_weights=has_weights, layout=layout)

    def missing_shards(self) -> list[int]:
        """Return the missing shards."""
        return [shard for shard in range(self.layout.n_shards) if not self.has_shard(shard)]

    def share(self, process: int, of: int) -> range:
        """Return the shards of one of several processes. Limits that count over all records leave all to the first."""
        if self.settings.bad_lines:
            process, of = min(process, 1), 1
        return self.layout.share(process, of)


def make_shards(
    job: StoreJob, share: Collection[int], *, progress: TokenizeProgress, note: Note
) -> None:
    """Make the missing ones of some shards, in bounded memory. Report the bytes and tokens of the share.

    Raises:
        PrepError: The data is invalid, the tokenizer fails, or a shard cannot be written.
    """
    if all(map(job.has_shard, share)):
        return
    try:
        _make_missing(job, share, progress=progress, note=note)
    except ChangedFileError:
        # Shards may have parts of the changed file.
        if not is_complete(job.folder):
            discard_folder(job.folder)
        raise
    except BaseException:
        with suppress(OSError):
            # Without a shard, nothing is kept.
            job.folder.rmdir()
        raise


def _make_missing(
    job: StoreJob, share: Collection[int], *, progress: TokenizeProgress, note: Note
) -> None:
    reader = ShardReader(job.files, job.file_type, job.builder, job.settings, job.layout, note)
    done_nbytes = 0
    n_tokens = 0
    for shard in filter(job.has_shard, range(job.layout.n_shards)):
        try:
            meta = job.read_shard(shard, checks_digests=False)
        except DamagedStoreError:
            # Another process, or the last one to finish, makes the others again.
            if shard in share:
                discard_folder(job.folder / shard_name(shard))
            continue
        reader.n_skipped[shard] = meta.n_bad_lines
        if shard in share:
            done_nbytes += job.layout.nbytes[shard]
            n_tokens += meta.n_tokens
    if n_tokens:
        note(f"continuing after {count_text(n_tokens, 'token')} of an interrupted run")
    total_nbytes = sum(job.layout.nbytes[shard] for shard in share)
    progress(done_nbytes, total_nbytes, n_tokens)

    def is_missing(shard: int) -> bool:
        return shard in share and not job.has_shard(shard)

    batches = encode_batches(batch_examples(reader.read(is_missing)), job.tokenizer)
    reported_nbytes = done_nbytes
    for shard, group in groupby(batches, key=lambda item: item[0].shard):
        shard_nbytes = 0
        with job.writing(shard) as writer:
            for batch, whole in group:
                encoded = fit_documents(whole, job.overlong)
                writer.append(encoded.ids, encoded.weights, ends=encoded.ends)
                writer.ignored.update(encoded.ignored)
                job.tokenizer.check_in_vocab(writer.max_id, job.settings.vocab)
                shard_nbytes += sum(example.nbytes for example in batch.examples)
                reported_nbytes = done_nbytes + min(shard_nbytes, job.layout.nbytes[shard])
                progress(reported_nbytes, total_nbytes, n_tokens + writer.n_tokens)
            # The reader is past the shard: the examples of the next one, or the end, have been read.
            writer.n_bad_lines = reader.n_skipped[shard]
        done_nbytes += job.layout.nbytes[shard]
        n_tokens += writer.n_tokens
    # A range without an example, e.g. within a line that is longer than the range.
    for shard in filter(is_missing, share):
        if not reader.is_read.get(shard, True):
            continue
        with job.writing(shard) as writer:
            writer.n_bad_lines = reader.n_skipped[shard]
    if reported_nbytes < total_nbytes:
        progress(total_nbytes, total_nbytes, n_tokens)


def complete_store(job: StoreJob, *, progress: TokenizeProgress, note: Note) -> StoreMeta:
    """Check the digests of all shards, and write the metadata of the store. Damaged shards are made again.

    Raises:
        PrepError: A shard cannot be made, or the metadata cannot be written.
    """
    shards: dict[str, ShardMeta] = {}
    for shard in range(job.layout.n_shards):
        name = shard_name(shard)
        try:
            shards[name] = job.read_shard(shard)
        except DamagedStoreError as error:
            note(f"{error.what} ({error.why}): they are rebuilt")
            discard_folder(job.folder / name)
            make_shards(job, [shard], progress=progress, note=note)
            shards[name] = job.read_shard(shard)
        # A kill after a shard got its name leaves temporary folders.
        remove_leftovers(job.folder / name)
    meta = join_shards(job.folder.name, shards)
    write_meta(job.folder, meta)
    with suppress(OSError):
        remove_abandoned(job.folder.parent, is_complete)
    return meta


def read_valid_meta(
    folder: Path, note: Note = lambda text: None, *, reopens: bool = False
) -> StoreMeta | None:
    """Return the metadata of a complete store with checked digests, or None if it is missing or damaged.

    `reopens` makes a damaged store incomplete, and removes its damaged shards.
    """
    if not is_complete(folder):
        return None
    try:
        return read_meta(folder)
    except DamagedStoreError as error:
        note(f"{error.what} ({error.why}): they are rebuilt")
    if reopens:
        _reopen(folder)
    return None


def _reopen(folder: Path) -> None:
    """Make a damaged store incomplete, and remove its damaged shards."""
    if not (folder / STORE_FILE).exists():
        # An earlier version has made it.
        discard_folder(folder)
        return
    try:
        (folder / STORE_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise io_error(folder, error) from error
    for path in folder.glob("[0-9]" * len(shard_name(0))):
        try:
            read_shard(folder, path.name)
        except DamagedStoreError:
            discard_folder(path)
