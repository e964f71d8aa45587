"""Read the examples of data files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainer.data.examples import Example
from trainer.data.fields import ExampleBuilder
from trainer.data.files import DataFile
from trainer.data.readers import READERS
from trainer.recipe.text_fields import DataType


def read_examples(files: Iterable[DataFile], data_type: DataType, builder: ExampleBuilder) -> Iterator[Example]:
    """Yield the examples of data files, in order and in bounded memory.

    Args:
        files: The files, with their digests.
        data_type: Type of the files, which selects their reader.
        builder: Builds an example of each record.

    Raises:
        PrepError: A file is invalid, cannot be read, or changed since it was hashed, or a record lacks a column.
    """
    for file in files:
        yield from map(builder.build, READERS[data_type].read(file))
