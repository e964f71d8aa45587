"""CSV and TSV files: the first row has the names of the columns."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text
from trainer.data.compression import split_compression
from trainer.data.files import DataFile
from trainer.data.readers.reader import (
    BYTE_ORDER_MARK,
    Reader,
    ReadOptions,
    Record,
    read_lines,
    read_stream,
    too_large_error,
)

LINE_END = "\r\n"
# Message of Python's csv module for a carriage return, which has no error type of its own.
CARRIAGE_RETURN_ERROR = "new-line character seen in unquoted field"
LINE_HINT = "fix or remove the line, or `data.bad_lines = N` skips up to N of them"


def _read_rows(file: DataFile, options: ReadOptions) -> Iterator[Record]:
    """Yield a record per row."""
    # The module has one limit for the process.
    csv.field_size_limit(options.max_document_nbytes)
    return read_stream(file, lambda stream: _parse_rows(file, stream, options))


def _parse_rows(file: DataFile, stream: BinaryIO, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per valid row.

    The bytes of the header, of blank and of invalid rows count for the next valid row, so that
    `nbytes` of all records adds up to the size of the file.

    Each line of an invalid row is reported.
    """
    lines = _Lines(file, stream, options.max_document_nbytes)
    rows = csv.reader(lines, delimiter=_delimiter(file), strict=True)
    header: Sequence[str] = ()
    done_nbytes = 0
    while True:
        first = lines.start_row()
        place = f"{file.path}:{first}"
        values = None
        try:
            row = _next_row(place, rows)
            if row is None:
                return
            values = _row_values(place, header, row) if header and row else None
            header = header or _check_header(place, row)
        except PrepError as error:
            if not header:
                raise
            options.on_error(error)
            for number in range(first + 1, lines.number + 1):
                # A quote without an end swallows many lines. Each of them counts as an invalid
                # line.
                what = f"{file.path}:{number}: a line of the invalid row at line {first}"
                options.on_error(PrepError(what, error.why, error.hint))
        if values is not None:
            yield Record(values, place, lines.nbytes - done_nbytes)
            done_nbytes = lines.nbytes


class _Lines:
    """Lines of a stream as text. Invalid UTF-8 becomes surrogates.

    It is an iterator and not a generator, because iteration continues after the error of a row.

    Attributes:
        nbytes: Bytes of the lines so far.
        number: Number of the lines so far.
    """

    def __init__(self, file: DataFile, stream: BinaryIO, max_row_nbytes: int) -> None:
        self._file = file
        self._lines = read_lines(stream, max_row_nbytes)
        self._max_row_nbytes = max_row_nbytes
        self.nbytes = 0
        self.number = 0
        self._row_start = 0
        self._row_number = 1

    def start_row(self) -> int:
        """Start a new row at the next line, and return the number of that line."""
        self._row_start = self.nbytes
        self._row_number = self.number + 1
        return self._row_number

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        is_first = not self.nbytes
        self.nbytes += line.nbytes
        self.number += 1
        row_nbytes = self.nbytes - self._row_start
        if line.is_too_long or row_nbytes > self._max_row_nbytes + len(LINE_END):
            raise too_large_error(
                f"{self._file.path}:{self._row_number}: too large", row_nbytes, self._max_row_nbytes
            )
        # The csv module splits the row first. Bytes that are not UTF-8 are reported afterwards,
        # with the number of their field (see `_check_encoding`).
        text = line.content.decode(errors="surrogateescape")
        if is_first:
            return text.removeprefix(BYTE_ORDER_MARK)
        return text


def _delimiter(file: DataFile) -> str:
    return "\t" if split_compression(str(file.path))[0].endswith(".tsv") else ","


def _next_row(place: str, rows: Iterator[list[str]]) -> list[str] | None:
    """Return the next row, empty for a blank line. Return None at the end."""
    try:
        row = next(rows, None)
    except csv.Error as error:
        raise _row_error(place, str(error)) from error
    _check_encoding(place, row or ())
    return row


def _row_error(place: str, why: str) -> PrepError:
    """Return the error for a row rejected by the csv module."""
    what = f"{place}: not CSV"
    if not why.startswith(CARRIAGE_RETURN_ERROR):
        return PrepError(what, why, LINE_HINT)
    path, _, _ = place.rpartition(":")
    why = "it has a carriage return outside of quotes; lines end with a line feed"
    return PrepError(
        what, why, rf"`tr '\r' '\n' < {shlex.quote(path)} > NEW` converts such line ends"
    )


def _check_encoding(place: str, row: Sequence[str]) -> None:
    """Raise PrepError if a field has bytes other than UTF-8."""
    for number, value in enumerate(row, start=1):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            why = f"field {number} has the byte 0x{ord(value[error.start]) - 0xDC00:02x}"
            raise PrepError(
                f"{place}: not UTF-8", why, "`iconv -f ENCODING -t UTF-8` converts it"
            ) from None


def _check_header(place: str, row: Sequence[str]) -> Sequence[str]:
    """Return the names of the columns. Raise PrepError if two are equal."""
    names: set[str] = set()
    for name in row:
        if name in names:
            what = f"{place}: two columns are named `{name:.60}`"
            raise PrepError(what, "the first row has the names", "rename one of them")
        names.add(name)
    return row


def _row_values(place: str, header: Sequence[str], row: Sequence[str]) -> dict[str, str]:
    """Return the fields of a row by column. Raise PrepError if their number is wrong."""
    if len(row) != len(header):
        raise PrepError(
            f"{place}: {count_text(len(row), 'field')}", f"the header has {len(header)}", LINE_HINT
        )
    return dict(zip(header, row))


CSV_READER = Reader((".csv", ".tsv"), _read_rows, is_compressible=True, is_divisible=True)
