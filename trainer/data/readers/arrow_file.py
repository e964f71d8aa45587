"""Parquet and Arrow files, decoded and checked in a worker process with a memory limit.

pyarrow does not check offsets and lengths of Arrow files when it opens them, and reading a text
outside of its buffer ends the process by a signal. A few bytes of a compressed page can expand to
gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from prepcli.core.errors import PrepError
from trainer.data.files import DataFile
from trainer.data.readers.reader import (
    SIZE_KEY,
    Reader,
    ReadOptions,
    Record,
    read_seekable,
    too_large_error,
)
from trainer.tables.batches import ARROW, PARQUET, InvalidRow
from trainer.tables.process import TableError, read_table
from trainer.tables.row_values import ValueDecoder, value_decoders

if TYPE_CHECKING:
    from pyarrow import RecordBatch

MEMORY_HINT = f"write it again with smaller row groups or batches, or raise `{SIZE_KEY}`"
ROW_HINT = "fix or remove the row, or `data.bad_lines = N` skips up to N of them"


def _read_table(table_format: str, file: DataFile, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per row. `pyarrow` must be installed."""
    return read_seekable(file, partial(_parse_table, file, table_format, options))


def _parse_table(
    file: DataFile, table_format: str, options: ReadOptions, stream: BinaryIO
) -> Iterator[Record]:
    """Yield a record per valid row. Report the invalid rows."""
    _check_installed(file)
    number = 0
    try:
        for part in read_table(stream, table_format, file.nbytes, options.max_document_nbytes):
            if isinstance(part, InvalidRow):
                number = part.number
                options.on_error(_row_error(f"{file.path}, row {number}", part, options))
                continue
            decoders = value_decoders(part.batch.schema)
            for index in range(part.batch.num_rows):
                number = part.first_row + index
                place = f"{file.path}, row {number}"
                row = _Row(part.batch, decoders, index=index, place=place)
                yield Record(row, place, 0 if index else part.nbytes)
    except TableError as error:
        what = f"{file.path} cannot be read as {table_format} after row {number:,}"
        hint = MEMORY_HINT if error.exceeds_memory else "get the file again, or set `data.type`"
        raise PrepError(what, error.why, hint) from error


def _check_installed(file: DataFile) -> None:
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        hint = "`pip install 'prepcli[data]'`"
        raise PrepError(f"cannot read {file.path}", "pyarrow is not installed", hint) from error


def _row_error(place: str, row: InvalidRow, options: ReadOptions) -> PrepError:
    """Return the error for an invalid or too large row."""
    if row.nbytes:
        return too_large_error(f"{place}: too large", row.nbytes, options.max_document_nbytes)
    return PrepError(f"{place}: invalid", row.why, ROW_HINT)


class _Row(Mapping[str, object]):
    """A row of a record batch. A value is converted to a Python object when it is used."""

    __slots__ = ("_batch", "_decoders", "_index", "_place")

    def __init__(
        self, batch: RecordBatch, decoders: Mapping[str, ValueDecoder], *, index: int, place: str
    ) -> None:
        self._batch = batch
        self._decoders = decoders
        self._index = index
        self._place = place

    def __getitem__(self, column: str) -> object:
        position = self._batch.schema.get_field_index(column)
        if position < 0:
            raise KeyError(column)
        try:
            value = self._batch.column(position)[self._index].as_py()
            if value is not None and column in self._decoders:
                return self._decoders[column](value)
            return value
        except Exception as error:
            # Of malformed JSON, and of dates, times and zones that Python does not have. pyarrow names no types.
            what = f"{self._place}: column `{column}` has no value in Python"
            raise PrepError(what, f"{type(error).__name__}: {error}"[:200], ROW_HINT) from error

    def __contains__(self, column: object) -> bool:
        return column in self._batch.schema.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.schema.names)

    def __len__(self) -> int:
        return len(self._batch.schema.names)


PARQUET_READER = Reader((".parquet",), partial(_read_table, PARQUET))
ARROW_READER = Reader((".arrow",), partial(_read_table, ARROW), other_suffixes=(".feather",))
