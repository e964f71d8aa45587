"""Read the examples of data files, and skip a limited number of invalid records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prepcli.core.errors import Key, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonObject
from trainer.data.examples import Example, FileStart, RecordLimitError, Segment
from trainer.data.fields import ExampleBuilder
from trainer.data.files import DataFile, Note, changed_file_error, hash_file
from trainer.data.readers import READERS
from trainer.data.readers.reader import DataPiece, IdsChunk, ReadOptions
from trainer.data.token_changes import IdentityChange
from trainer.recipe.text_fields import (
    DEFAULT_IDS_DTYPE,
    DEFAULT_MAX_DOCUMENT_NBYTES,
    DataType,
    FileType,
)

# Skipped lines that are reported, with file and line.
SHOWN = 3
# Types of files that may be one list, since `IdentityChange.JSON_LISTS`.
LIST_TYPES = ("json",)


class BadLines:
    """Handler of invalid records. It reports the first ones, and raises an error above a limit.

    Attributes:
        count: Invalid records so far.
    """

    def __init__(self, limit: int, note: Note, *, count: int = 0) -> None:
        """Create a handler.

        Args:
            limit: Maximum number of invalid records.
            note: Called with messages for the user.
            count: Invalid records of an earlier run.
        """
        self._limit = limit
        self._note = note
        self.count = count

    def __call__(self, error: PrepError) -> None:
        """Count an invalid record. Raise PrepError if it is one more than the limit, or has reached a limit."""
        if isinstance(error, RecordLimitError):
            raise error
        self.count += 1
        if self.count <= self._limit:
            if self.count <= SHOWN:
                self._note(f"skipped {error.what} ({error.why})")
        elif self._limit:
            what = text("{}, after {}", error.what, count_text(self._limit, "invalid line"))
            why = text("{}, and {} allows {:,}", error.why, Key("data.bad_lines"), self._limit)
            raise PrepError(what, why, error.hint) from error
        else:
            raise error

    def report(self) -> None:
        """Report the number of skipped records, if there are any."""
        if self.count:
            self._note(f"{count_text(self.count, 'invalid line')} skipped")


FIRST_FILE = FileStart()


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Settings of reading records, except the settings of their examples.

    Attributes:
        vocab: Size of the model's vocabulary without padding. Token ids in the data must be below
            it.
        eos_id: Last token of a document in data of token ids, or None.
        bad_lines: Maximum number of invalid records to skip.
        ids_dtype: Dtype of token ids in files without a recorded dtype.
        max_document_nbytes: Maximum bytes of a line, a row or a value.
        limit: Documents to read, counting a source and its target as one. 0 for all.
    """

    vocab: int
    eos_id: int | None = None
    bad_lines: int = 0
    ids_dtype: str = DEFAULT_IDS_DTYPE
    max_document_nbytes: int = DEFAULT_MAX_DOCUMENT_NBYTES
    limit: int = 0

    def identity_inputs(
        self, data_type: DataType, without: Collection[IdentityChange]
    ) -> JsonObject:
        """Return the inputs of the identity of a store of the records.

        Args:
            data_type: Type of the data files.
            without: Changes that an earlier version did not have.
        """
        inputs: JsonObject = {}
        if self.limit:
            inputs["max_examples"] = self.limit
        if self.bad_lines:
            inputs["bad_lines"] = self.bad_lines
            # Without `bad_lines`, earlier versions made no store of a file that is one list.
            if data_type in LIST_TYPES and IdentityChange.JSON_LISTS not in without:
                inputs["json_lists"] = True
        # The size limit decides which lines are skipped. If no line may be skipped, a line above the
        # limit is an error and no store is made, so the limit has no effect on the tokens.
        if self.bad_lines and self.max_document_nbytes != DEFAULT_MAX_DOCUMENT_NBYTES:
            inputs["max_document_bytes"] = self.max_document_nbytes
        if self.ids_dtype != DEFAULT_IDS_DTYPE:
            inputs["ids_dtype"] = self.ids_dtype
        return inputs


def read_examples(
    files: Sequence[DataFile],
    file_type: FileType,
    builder: ExampleBuilder,
    *,
    settings: RecordSettings,
    note: Note,
    start: FileStart = FIRST_FILE,
    on_file: Callable[[FileStart], None] = lambda start: None,
) -> Iterator[Example]:
    """Yield the examples of data files, in order and in bounded memory.

    Args:
        files: The files, with their digests.
        file_type: Type of the files. It selects their reader.
        builder: Builds an example of each record.
        settings: Settings of reading.
        note: Called with messages about skipped records.
        start: The first file to read, and the counts of the files before it.
        on_file: Called with each file before it is read.

    Raises:
        PrepError: A file is invalid, cannot be read, or changed since it was hashed, or more
            records are invalid than `bad_lines`.
    """
    bad_lines = BadLines(settings.bad_lines, note, count=start.n_bad_lines)
    options = ReadOptions(bad_lines, settings.ids_dtype, settings.max_document_nbytes)
    # The counts go on from an earlier run, so that limits hold for the whole dataset.
    n_examples = start.n_examples
    n_documents = start.n_documents
    for index, file in enumerate(files[start.file :], start.file):
        on_file(FileStart(index, n_examples, n_documents, bad_lines.count))
        for piece in READERS[file_type].read(file, options):
            for example in _piece_examples(piece, builder, settings, on_error=bad_lines):
                yield example
                n_examples += 1
                n_documents += example.ends_document
                if settings.limit and n_documents == settings.limit:
                    _check_unchanged(file)
                    bad_lines.report()
                    return
    bad_lines.report()


def _check_unchanged(file: DataFile) -> None:
    """Raise PrepError if a local, partly read file changed since it was hashed."""
    if file.open_remote is None and hash_file(Path(file.path)) != file:
        raise changed_file_error(file.path)


def _piece_examples(
    piece: DataPiece | IdsChunk,
    builder: ExampleBuilder,
    settings: RecordSettings,
    *,
    on_error: BadLines,
) -> Iterable[Example]:
    """Return the examples of a record, text chunk or id chunk. A skipped invalid record has no example."""
    if isinstance(piece, IdsChunk):
        return _ids_examples(piece, settings)
    try:
        return (builder.build(piece),)
    except PrepError as error:
        on_error(error)
        return ()


def _ids_examples(chunk: IdsChunk, settings: RecordSettings) -> Iterator[Example]:
    """Yield the documents in a chunk of token ids.

    A document ends after each end-of-sequence token, unless the chunk says otherwise, and where the
    chunk says so. E.g. with eos 2, ids [5, 2, 7, 8] -> [5, 2] and [7, 8].

    Raises:
        PrepError: An id is out of range.
    """
    ids = chunk.ids
    is_invalid = (ids < 0) | (ids >= settings.vocab)
    if is_invalid.any():
        position = int(np.argmax(is_invalid))
        what = f"{chunk.file}, token {chunk.first + position:,}: the id {int(ids[position]):,} is out of range"
        why = f"the vocabulary without padding has {settings.vocab:,} tokens"
        hint = text("{} sets the dtype of .bin files", Key("data.ids_dtype"))
        raise PrepError(what, why, hint)
    # -1 is no id: without an end token, only the end of the chunk ends a document.
    eos_id = -1
    if settings.eos_id is not None and chunk.ends_at_eos:
        eos_id = settings.eos_id
    ends_here = ids == eos_id
    bounds = [0, *(np.flatnonzero(ends_here[:-1]) + 1).tolist(), len(ids)]
    for start, end in itertools.pairwise(bounds):
        segment = Segment(ids[start:end].astype(np.uint32))
        # An empty chunk has no last id, and always ends a document.
        ends_document = chunk.ends_document or bool(ends_here[end - 1])
        yield Example((segment,), (end - start) * ids.itemsize, ends_document=ends_document)
