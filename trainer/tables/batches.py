"""Cut the record batches of a Parquet or Arrow file into small valid ones.

Arrow files have the file format or the stream format of Arrow IPC; `datasets` writes the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from trainer.tables.value_sizes import is_view, row_nbytes

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema
    from pyarrow.parquet import FileMetaData

PARQUET, ARROW = "Parquet", "Arrow"
MAX_BATCH_ROWS = 256  # of a Parquet file
READ_BUFFER_NBYTES = 1 << 20  # per column of a Parquet file
PART_NBYTES = 4 << 20  # of the values of a part with several rows
MAX_TYPE_DEPTH = 32
FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Valid rows of a file.

    Attributes:
        batch: The rows.
        first_row: Number of the first row, from 1.
        nbytes: Their share of the bytes of the file.
    """

    batch: RecordBatch
    first_row: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class InvalidRow:
    """A row that cannot be used.

    Attributes:
        number: Its number, from 1.
        why: Its fault.
        nbytes: Bytes of its values if they exceed the limit, else 0.
    """

    number: int
    why: str
    nbytes: int = 0


def read_parts(stream: BinaryIO, table_format: str, nbytes: int, max_row_nbytes: int) -> Iterator[Part | InvalidRow]:
    """Yield the rows of a file in order, in parts of about PART_NBYTES, and its invalid rows.

    Args:
        stream: The file.
        table_format: PARQUET or ARROW.
        nbytes: Size of the file.
        max_row_nbytes: Maximum bytes of the values of a row.

    Raises:
        pyarrow.ArrowException: The file is malformed.
        ValueError: The schema is not supported.
    """
    batches = _parquet_batches(stream, nbytes) if table_format == PARQUET else _arrow_batches(stream, nbytes)
    first_row = 1
    for batch, share in batches:
        if first_row == 1:
            check_schema(batch.schema)
        for piece in _valid_pieces(batch, first_row, max_row_nbytes):
            if isinstance(piece, InvalidRow):
                yield piece
            else:
                yield Part(_without_references(piece[0]), piece[1], share)
                share = 0
        first_row += batch.num_rows


def check_schema(schema: Schema) -> None:
    """Raise ValueError if two columns have one name, or a type is nested too deep."""
    names: set[str] = set()
    for field in schema:
        if field.name in names:
            raise ValueError(f"two columns are named `{field.name:.60}`")
        names.add(field.name)
        _check_depth(field.type, MAX_TYPE_DEPTH)


def _check_depth(kind: Any, depth: int) -> None:
    from pyarrow import types

    if not depth:
        raise ValueError(f"a column has a type that is nested more than {MAX_TYPE_DEPTH} levels deep")
    for attribute in ("value_type", "key_type", "item_type", "storage_type"):
        if hasattr(kind, attribute):
            _check_depth(getattr(kind, attribute), depth - 1)
    if types.is_struct(kind) or types.is_union(kind):
        for index in range(kind.num_fields):
            _check_depth(kind.field(index).type, depth - 1)


def _valid_pieces(
    batch: RecordBatch, first_row: int, max_row_nbytes: int
) -> Iterator[tuple[RecordBatch, int] | InvalidRow]:
    """Halve a batch until each piece is valid and small, or one row; yield the pieces with their first rows."""
    part_nbytes = min(PART_NBYTES, max_row_nbytes)
    pending = [(batch, first_row, False)]
    while pending:
        piece, row, is_valid = pending.pop()
        why = "" if is_valid else _fault(piece)
        nbytes = 0 if why else row_nbytes(piece)
        if not why and nbytes <= part_nbytes:
            yield piece, row
        elif piece.num_rows > 1:
            half = piece.num_rows // 2
            pending.append((piece.slice(half), row + half, not why))
            pending.append((piece.slice(0, half), row, not why))
        elif why:
            yield InvalidRow(row, why)
        elif nbytes > max_row_nbytes:
            yield InvalidRow(row, "it is too large", nbytes)
        else:
            yield piece, row


def _fault(batch: RecordBatch) -> str:
    """Return the fault of a batch, e.g. an offset outside of its buffer, or an empty text for a valid batch.

    The full validation also checks that texts are UTF-8, and that indices of dictionaries are in range.
    """
    from pyarrow import ArrowException

    try:
        batch.validate(full=True)
    except MemoryError:
        raise
    except ArrowException as error:
        return str(error).partition("\n")[0] or "it is invalid"
    return ""


def _without_references(batch: RecordBatch) -> RecordBatch:
    """Return rows without references to a dictionary or to the text buffers of a large batch."""
    from pyarrow import RecordBatch, types

    columns = [*batch.columns]
    for index, column in enumerate(columns):
        if types.is_dictionary(column.type):
            columns[index] = column.dictionary_decode()
        elif is_view(column.type):
            columns[index] = column.cast("large_string" if types.is_string_view(column.type) else "large_binary")
    return RecordBatch.from_arrays(columns, names=batch.schema.names)


def _parquet_batches(stream: BinaryIO, nbytes: int) -> Iterable[tuple[RecordBatch, int]]:
    from pyarrow.parquet import ParquetFile

    parquet = ParquetFile(stream, buffer_size=READ_BUFFER_NBYTES, pre_buffer=False)
    check_schema(parquet.schema_arrow)
    if not parquet.schema_arrow.names:  # the number of rows is then any number
        raise ValueError("it has no columns")
    n_rows, end = max(parquet.metadata.num_rows, 1), 0
    for batch in parquet.iter_batches(_batch_rows(parquet.metadata), use_threads=False):
        start, end = end, end + batch.num_rows
        yield batch, nbytes * end // n_rows - nbytes * start // n_rows


def _batch_rows(metadata: FileMetaData) -> int:
    """Return the rows to decode at once: fewer if the metadata says that rows are large."""
    groups = range(metadata.num_row_groups)
    largest = max((metadata.row_group(index).total_byte_size for index in groups), default=0)
    n_rows = max((metadata.row_group(index).num_rows for index in groups), default=1)
    row_size = max(1, largest // max(1, n_rows))
    return min(MAX_BATCH_ROWS, max(1, PART_NBYTES // row_size))


def _arrow_batches(stream: BinaryIO, nbytes: int) -> Iterable[tuple[RecordBatch, int]]:
    is_file = stream.read(len(FILE_MAGIC)) == FILE_MAGIC
    stream.seek(0)
    return _ipc_file_batches(stream, nbytes) if is_file else _ipc_stream_batches(stream)


def _ipc_file_batches(stream: BinaryIO, nbytes: int) -> Iterator[tuple[RecordBatch, int]]:
    from pyarrow import ipc

    reader = ipc.open_file(stream)
    count = reader.num_record_batches
    for index in range(count):
        yield reader.get_batch(index), nbytes * (index + 1) // count - nbytes * index // count


def _ipc_stream_batches(stream: BinaryIO) -> Iterator[tuple[RecordBatch, int]]:
    from pyarrow import ipc

    position = 0
    for batch in ipc.open_stream(stream):
        yield batch, stream.tell() - position
        position = stream.tell()
