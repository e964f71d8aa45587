"""Read documents from data files, and check that the files are those that were hashed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from trainer.data.files import DataFile, io_error
from trainer.data.readers import READERS
from trainer.data.readers.reader import TextChunk
from trainer.models.errors import RERUN_HINT, PrepError
from trainer.recipe.text_fields import DataType, TextFields


def read_text_chunks(
    file: DataFile, data_type: DataType, *, fields: TextFields, prefix: str = ""
) -> Iterator[TextChunk]:
    """Yield the text of a data file, in order.

    Args:
        file: The file, with its digest.
        data_type: Type of the file, which selects its reader.
        fields: Columns that form the text, for types that have columns.
        prefix: Text that is put before each source.

    Raises:
        PrepError: The file is invalid, cannot be read, or changed since it was hashed.
    """
    reader, state = READERS[data_type], xxhash.xxh3_128()
    try:
        with file.path.open("rb") as handle:
            blocks = _hash_while_reading(reader.split(handle), state)
            yield from reader.read(file.path, blocks, fields=fields, prefix=prefix)
    except OSError as error:
        raise io_error(file.path, error) from error
    if state.hexdigest() != file.digest:
        why = "its digest differs from the one taken before, so its tokens could not be identified"
        raise PrepError(f"{file.path} changed while it was read", why, f"{RERUN_HINT} once it is complete")


def _hash_while_reading(blocks: Iterable[bytes], state: xxhash.xxh3_128) -> Iterator[bytes]:
    for block in blocks:
        state.update(block)
        yield block
