"""Cut the record batches of a Parquet or Arrow file into small valid ones, in a child process.

Arrow files have the file format or the stream format of Arrow IPC. `datasets` writes streams. pyarrow does not check
offsets and lengths of Arrow files when it opens them, and reading a text outside of its buffer ends the process. A few
bytes of a compressed page can expand to gigabytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow
from pyarrow import ArrowException, BufferOutputStream, RecordBatch, compute, ipc, types
from pyarrow.parquet import ParquetFile

from prepcli.core.sandbox import ParentFile

if TYPE_CHECKING:
    from pyarrow import Array, Schema

# Rows that are decoded at once from a Parquet file.
MAX_BATCH_ROWS = 256
# Bytes read at once for each column of a Parquet file.
READ_BUFFER_NBYTES = 1 << 20
# Bytes read at once from the parent.
BUFFER_NBYTES = 64 << 10
# Maximum bytes of the values of a part with several rows.
PART_NBYTES = 4 << 20
MAX_TYPE_DEPTH = 32
FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True, slots=True)
class InvalidRow:
    """A row that cannot be used."""

    number: int  # Its number, from 1
    why: str  # Its fault
    nbytes: int = 0  # Bytes of its values if they exceed the limit, else 0


class TableReader:
    """Reads the file that the parent process passes to its calls, in a child process."""

    def __init__(self, table_format: str, nbytes: int, max_row_nbytes: int) -> None:
        """Start before the first row of a file of `nbytes`, in a format of `BATCH_READERS`."""
        # A second thread for decoding or reading would have buffers of its own.
        pyarrow.set_cpu_count(1)
        pyarrow.set_io_thread_count(1)
        self._parts = _read_parts(table_format, nbytes, max_row_nbytes)
        self._num_parts = 0

    def read_part(self, index: int) -> tuple[Any, ...]:
        """Return the next rows, in parts of about PART_NBYTES, or the next invalid row.

        Args:
            index: Number of the parts before it.

        Returns:
            Number of the first row, bytes of the file that the rows account for, and the rows as an Arrow stream. Of
            an invalid row, the values of its `InvalidRow`. Empty after the last row.

        Raises:
            pyarrow.ArrowException: The file is malformed.
            ValueError: The schema is not supported, or this is not the process that read the parts before.
        """
        # Another process would return the first rows again.
        if index != self._num_parts:
            raise ValueError("the process that decodes it was ended")
        self._num_parts += 1
        for piece, share in self._parts:
            if isinstance(piece, InvalidRow):
                return piece.number, piece.why, piece.nbytes
            batch, first_row = piece
            sink = BufferOutputStream()
            with ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            return first_row, share, memoryview(sink.getvalue())
        return ()


def _read_parts(
    table_format: str, nbytes: int, max_row_nbytes: int
) -> Iterator[tuple[tuple[RecordBatch, int] | InvalidRow, int]]:
    """Yield rows with the number of the first one, and invalid rows, each with its share of the file's bytes."""
    # pyarrow reads a few bytes at a time. Each read of the buffer is a message to the parent.
    stream = cast(BinaryIO, io.BufferedReader(ParentFile(nbytes), BUFFER_NBYTES))
    first_row = 1
    for batch, share in BATCH_READERS[table_format](stream, nbytes):
        if first_row == 1:
            check_schema(batch.schema)
        for piece in _valid_pieces(batch, first_row, max_row_nbytes):
            if isinstance(piece, InvalidRow):
                yield piece, 0
            else:
                yield (_without_references(piece[0]), piece[1]), share
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
    """Raise ValueError if a type is nested more than `depth` levels deep."""
    if not depth:
        raise ValueError(
            f"a column has a type that is nested more than {MAX_TYPE_DEPTH} levels deep"
        )
    for attribute in ("value_type", "key_type", "item_type", "storage_type"):
        if hasattr(kind, attribute):
            _check_depth(getattr(kind, attribute), depth - 1)
    if types.is_struct(kind) or types.is_union(kind):
        for index in range(kind.num_fields):
            _check_depth(kind.field(index).type, depth - 1)


def _valid_pieces(
    batch: RecordBatch, first_row: int, max_row_nbytes: int
) -> Iterator[tuple[RecordBatch, int] | InvalidRow]:
    """Yield valid, small pieces of a batch with their first rows, and invalid rows."""
    # A batch is halved until each piece is valid and small, or a single row. One bad row of 1,024
    # therefore costs about 10 validations, and all other rows are kept.
    part_nbytes = min(PART_NBYTES, max_row_nbytes)
    pending = [(batch, first_row, False)]
    while pending:
        piece, row, is_valid = pending.pop()
        why = ""
        if not is_valid:
            why = _batch_fault(piece)
        # The offsets of an invalid piece may point anywhere, so its size is not computed.
        nbytes = 0
        if not why:
            nbytes = sum(map(values_nbytes, piece.columns))
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


def _batch_fault(batch: RecordBatch) -> str:
    """Return the fault of a batch, e.g. an offset outside of its buffer. Empty if it is valid."""
    try:
        # It also checks that texts are UTF-8, and that indices of dictionaries are in range.
        batch.validate(full=True)
    except MemoryError:
        raise
    except ArrowException as error:
        return str(error).partition("\n")[0] or "it is invalid"
    return ""


def _without_references(batch: RecordBatch) -> RecordBatch:
    """Return rows without references to a dictionary or to the text buffers of a large batch."""
    columns = [*batch.columns]
    for index, column in enumerate(columns):
        if types.is_dictionary(column.type):
            columns[index] = column.dictionary_decode()
        elif is_view(column.type):
            columns[index] = column.cast(
                "large_string" if types.is_string_view(column.type) else "large_binary"
            )
    # The metadata of the schema and of its fields tells which texts are JSON.
    fields = [
        field.with_type(column.type) for field, column in zip(batch.schema, columns, strict=True)
    ]
    return RecordBatch.from_arrays(columns, schema=pyarrow.schema(fields, batch.schema.metadata))


def _parquet_batches(stream: BinaryIO, nbytes: int) -> Iterable[tuple[RecordBatch, int]]:
    """Yield record batches, each with its share of the file's bytes."""
    parquet = ParquetFile(stream, buffer_size=READ_BUFFER_NBYTES, pre_buffer=False)
    check_schema(parquet.schema_arrow)
    if not parquet.schema_arrow.names:
        # The number of rows is then whatever the file claims, e.g. 2^62.
        raise ValueError("it has no columns")
    n_rows = max(parquet.metadata.num_rows, 1)
    end = 0
    # Fewer rows are decoded at once if the metadata says that rows are large.
    groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
    largest = max((group.total_byte_size for group in groups), default=0)
    row_nbytes = max(1, largest // max(1, *(group.num_rows for group in groups), 1))
    batch_rows = min(MAX_BATCH_ROWS, max(1, PART_NBYTES // row_nbytes))
    for batch in parquet.iter_batches(batch_rows, use_threads=False):
        start = end
        end = end + batch.num_rows
        yield batch, nbytes * end // n_rows - nbytes * start // n_rows


def _arrow_batches(stream: BinaryIO, nbytes: int) -> Iterator[tuple[RecordBatch, int]]:
    """Yield record batches, each with its share of the file's bytes, or with the bytes read of a stream."""
    is_file = stream.read(len(FILE_MAGIC)) == FILE_MAGIC
    stream.seek(0)
    if is_file:
        reader = ipc.open_file(stream)
        count = reader.num_record_batches
        for index in range(count):
            yield reader.get_batch(index), nbytes * (index + 1) // count - nbytes * index // count
        return
    position = 0
    for batch in ipc.open_stream(stream):
        yield batch, stream.tell() - position
        position = stream.tell()


# Name of the format in messages -> the function that yields its record batches.
BATCH_READERS = {"Parquet": _parquet_batches, "Arrow": _arrow_batches}

# A few bytes of a file can encode a large value: a list of 2^31 nulls has no bytes at all, and each
# element of a list can refer to the same long text of a dictionary. Rows are therefore measured by
# the Python objects that they become. A list has a pointer of this size to each element.
ELEMENT_NBYTES = 8


class UnsupportedTypeError(ValueError):
    """A column has values of an unsupported type."""


def values_nbytes(array: Array[Any]) -> int:
    """Return the estimated bytes of a valid array's values, at least 8 per element at any depth.

    Raises:
        UnsupportedTypeError: The array has an unsupported type.
    """
    kind = array.type
    pointers = len(array) * ELEMENT_NBYTES
    if hasattr(kind, "storage_type"):
        # An extension type.
        return values_nbytes(array.storage)
    if types.is_dictionary(kind):
        # Each element can refer to the largest value.
        dictionary = array.dictionary
        if _is_text_or_bytes(dictionary.type):
            return pointers + len(array) * int(_text_lengths(dictionary).max(initial=0))
        return pointers + len(array) * values_nbytes(dictionary)
    if _is_text_or_bytes(kind):
        return pointers + int(_text_lengths(array).sum())
    if types.is_struct(kind):
        return pointers + sum(values_nbytes(child) for child in array.flatten())
    if types.is_map(kind):
        # The entries as structs, without those outside of its slice.
        entry = pyarrow.struct([kind.key_field, kind.item_field])
        return pointers + values_nbytes(array.cast(pyarrow.list_(entry)).flatten())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pointers + values_nbytes(array.flatten())
    if types.is_nested(kind) or types.is_run_end_encoded(kind):
        raise UnsupportedTypeError(f"values of the Arrow type {kind!s:.60} are not supported")
    return max(pointers, array.nbytes)


def is_view(kind: Any) -> bool:
    """Return whether an Arrow type stores each text as a view: a reference to a part of a shared buffer."""
    return types.is_string_view(kind) or types.is_binary_view(kind)


def _is_text_or_bytes(kind: Any) -> bool:
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return is_text or types.is_binary(kind) or types.is_large_binary(kind) or is_view(kind)


def _text_lengths(array: Array[Any]) -> npt.NDArray[np.int64]:
    """Return the bytes of each text of an array, 0 for nulls. Shared bytes count once for each text."""
    if not is_view(array.type):
        return (
            compute.fill_null(compute.call_function("binary_length", [array]), 0)
            .to_numpy(zero_copy_only=False)
            .astype(np.int64)
        )
    # pyarrow has no function for the lengths of views. A view has 16 bytes, the first 4 are the
    # length of its text.
    views = np.frombuffer(array.buffers()[1] or b"", "<i4").reshape(-1, 4)
    lengths = views[array.offset : array.offset + len(array), 0].astype(np.int64)
    return np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
