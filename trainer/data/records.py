"""Read the examples of data files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from trainer.data.bad_lines import BadLines
from trainer.data.examples import Example, Segment
from trainer.data.fields import ExampleBuilder
from trainer.data.files import DataFile
from trainer.data.readers import READERS
from trainer.data.readers.reader import DataPiece, IdsChunk, ReadOptions
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import DEFAULT_IDS_DTYPE, FileType


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Settings of reading records, besides those of their examples.

    Attributes:
        vocab: Size of the model's vocabulary without padding, the limit of ready token ids.
        eos_id: Token that ends a document of ready token ids; None for none.
        bad_lines: Invalid records that are skipped.
        ids_dtype: Dtype of ready token ids in files that do not record it.
    """

    vocab: int
    eos_id: int | None = None
    bad_lines: int = 0
    ids_dtype: str = DEFAULT_IDS_DTYPE


def read_examples(
    files: Iterable[DataFile],
    file_type: FileType,
    builder: ExampleBuilder,
    *,
    settings: RecordSettings,
    note: Callable[[str], None],
) -> Iterator[Example]:
    """Yield the examples of data files, in order and in bounded memory.

    Args:
        files: The files, with their digests.
        file_type: Type of the files, which selects their reader.
        builder: Builds an example of each record.
        settings: Settings of reading.
        note: Called with messages about skipped records.

    Raises:
        PrepError: A file is invalid, cannot be read, or changed since it was hashed, or more records are invalid than
            `bad_lines`.
    """
    bad_lines = BadLines(settings.bad_lines, note)
    options = ReadOptions(bad_lines, settings.ids_dtype)
    for file in files:
        for piece in READERS[file_type].read(file, options):
            if isinstance(piece, IdsChunk):
                yield from _ids_examples(piece, settings)
            elif (example := _build(piece, builder, bad_lines)) is not None:
                yield example
    bad_lines.report()


def _build(piece: DataPiece, builder: ExampleBuilder, bad_lines: BadLines) -> Example | None:
    """Return the example of a record or a text; None if it is invalid and skipped."""
    try:
        return builder.build(piece)
    except PrepError as error:
        bad_lines(error)
        return None


def _ids_examples(chunk: IdsChunk, settings: RecordSettings) -> Iterator[Example]:
    """Yield the documents of ready token ids, which end after each end-of-sequence token and at the end of the chunk.

    Raises:
        PrepError: An id is out of range.
    """
    ids = chunk.ids
    is_invalid = (ids < 0) | (ids >= settings.vocab)
    if is_invalid.any():
        what = f"{chunk.place} or later: the token id {int(ids[is_invalid][0]):,} is out of range"
        why = f"the vocabulary without padding has {settings.vocab:,} tokens"
        raise PrepError(what, why, "`data.ids_dtype` sets the dtype of .bin files")
    ends_here = ids == (-1 if settings.eos_id is None else settings.eos_id)
    bounds = [0, *(np.flatnonzero(ends_here[:-1]) + 1).tolist(), len(ids)]
    for start, end in itertools.pairwise(bounds):
        segment = Segment(ids[start:end].astype(np.uint32))
        ends_document = bool(ends_here[end - 1]) or chunk.ends_document
        yield Example((segment,), (end - start) * ids.itemsize, ends_document=ends_document)
