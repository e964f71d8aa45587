"""Read the examples of data files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data.bad_lines import BadLines
from trainer.data.examples import Example, Segment
from trainer.data.fields import ExampleBuilder
from trainer.data.files import DataFile, changed_file_error, hash_file
from trainer.data.read_position import FileStart
from trainer.data.readers import READERS
from trainer.data.readers.reader import DataPiece, IdsChunk, ReadOptions
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import DEFAULT_IDS_DTYPE, DEFAULT_MAX_DOCUMENT_NBYTES, FileType

FIRST_FILE = FileStart()


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Settings of reading records, besides those of their examples.

    Attributes:
        vocab: Size of the model's vocabulary without padding, the limit of ready token ids.
        eos_id: Token that ends a document of ready token ids; None for none.
        bad_lines: Invalid records that are skipped.
        ids_dtype: Dtype of ready token ids in files that do not record it.
        max_document_nbytes: Maximum bytes of a line, a row or a value.
        limit: Documents to read, of a source and a target one; 0 for all.
    """

    vocab: int
    eos_id: int | None = None
    bad_lines: int = 0
    ids_dtype: str = DEFAULT_IDS_DTYPE
    max_document_nbytes: int = DEFAULT_MAX_DOCUMENT_NBYTES
    limit: int = 0


def read_examples(
    files: Sequence[DataFile],
    file_type: FileType,
    builder: ExampleBuilder,
    *,
    settings: RecordSettings,
    note: Callable[[str], None],
    start: FileStart = FIRST_FILE,
    on_file: Callable[[FileStart], None] = lambda start: None,
) -> Iterator[Example]:
    """Yield the examples of data files, in order and in bounded memory.

    Args:
        files: The files, with their digests.
        file_type: Type of the files, which selects their reader.
        builder: Builds an example of each record.
        settings: Settings of reading.
        note: Called with messages about skipped records.
        start: The first file to read, and the counts of those before it.
        on_file: Called with each file before it is read.

    Raises:
        PrepError: A file is invalid, cannot be read, or changed since it was hashed, or more records are invalid than
            `bad_lines`.
    """
    bad_lines = BadLines(settings.bad_lines, note, count=start.n_bad_lines)
    options = ReadOptions(bad_lines, settings.ids_dtype, settings.max_document_nbytes)
    n_examples, n_documents = start.n_examples, start.n_documents
    for index, file in enumerate(files[start.file :], start.file):
        on_file(FileStart(index, n_examples, n_documents, bad_lines.count))
        for piece in READERS[file_type].read(file, options):
            for example in _examples(piece, builder, settings, on_error=bad_lines):
                yield example
                n_examples += 1
                n_documents += example.ends_document
                if settings.limit and n_documents == settings.limit:
                    _check_unchanged(file)
                    bad_lines.report()
                    return
    bad_lines.report()


def _check_unchanged(file: DataFile) -> None:
    """Raise PrepError if a local file that is not read to its end changed since it was hashed."""
    if file.open_remote is None and hash_file(Path(file.path)) != file:
        raise changed_file_error(file.path)


def _examples(
    piece: DataPiece | IdsChunk, builder: ExampleBuilder, settings: RecordSettings, *, on_error: BadLines
) -> Iterable[Example]:
    """Return the examples of a piece of a file; none if a record is invalid and skipped."""
    if isinstance(piece, IdsChunk):
        return _ids_examples(piece, settings)
    try:
        return (builder.build(piece),)
    except PrepError as error:
        on_error(error)
        return ()


def _ids_examples(chunk: IdsChunk, settings: RecordSettings) -> Iterator[Example]:
    """Yield the documents of ready token ids, which end after each end-of-sequence token and at the end of the chunk.

    Raises:
        PrepError: An id is out of range.
    """
    ids = chunk.ids
    is_invalid = (ids < 0) | (ids >= settings.vocab)
    if is_invalid.any():
        position = int(np.argmax(is_invalid))
        what = f"{chunk.file}, token {chunk.first + position:,}: the id {int(ids[position]):,} is out of range"
        why = f"the vocabulary without padding has {settings.vocab:,} tokens"
        raise PrepError(what, why, "`data.ids_dtype` sets the dtype of .bin files")
    ends_here = ids == (-1 if settings.eos_id is None else settings.eos_id)
    bounds = [0, *(np.flatnonzero(ends_here[:-1]) + 1).tolist(), len(ids)]
    for start, end in itertools.pairwise(bounds):
        segment = Segment(ids[start:end].astype(np.uint32))
        ends_document = bool(ends_here[end - 1]) or chunk.ends_document
        yield Example((segment,), (end - start) * ids.itemsize, ends_document=ends_document)
