"""Read the examples of data files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainer.data.examples import Example
from trainer.data.fields import ExampleBuilder
from trainer.data.files import DataFile, changed_file_error, hash_file
from trainer.data.readers import READERS
from trainer.recipe.text_fields import DataType


def read_examples(
    files: Iterable[DataFile], data_type: DataType, builder: ExampleBuilder, *, limit: int = 0
) -> Iterator[Example]:
    """Yield the examples of data files, in order and in bounded memory.

    Args:
        files: The files, with their digests.
        data_type: Type of the files, which selects their reader.
        builder: Builds an example of each record.
        limit: Documents to read, of a source and a target one; 0 for all.

    Raises:
        PrepError: A file is invalid, cannot be read, or changed since it was hashed, or a record lacks a column.
    """
    n_documents = 0
    for file in files:
        for example in map(builder.build, READERS[data_type].read(file)):
            yield example
            n_documents += example.ends_document
            if limit and n_documents == limit:
                _check_unchanged(file)
                return


def _check_unchanged(file: DataFile) -> None:
    """Raise PrepError if a file that is not read to its end changed since it was hashed."""
    if hash_file(file.path) != file:
        raise changed_file_error(file.path)
