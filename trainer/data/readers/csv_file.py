"""CSV and TSV files: the first row has the names of the columns."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from trainer.data.compression import split_compression
from trainer.data.files import DataFile
from trainer.data.readers.reader import (
    BYTE_ORDER_MARK,
    DEFAULT_OPTIONS,
    Reader,
    ReadOptions,
    Record,
    read_stream,
)
from trainer.models.errors import PrepError

MAX_FIELD_CHARS = 64 << 20  # of one field; a file with an unclosed quote fails there
CARRIAGE_RETURN_ERROR = "new-line character seen in unquoted field"  # of the csv module
LINE_HINT = "fix or remove the line, or `data.bad_lines = N` skips up to N of them"


def _read_rows(file: DataFile, options: ReadOptions = DEFAULT_OPTIONS, /) -> Iterator[Record]:
    csv.field_size_limit(MAX_FIELD_CHARS)  # the module has one limit for the process
    return read_stream(file, lambda stream: _parse_rows(file, stream, options))


def _parse_rows(file: DataFile, stream: BinaryIO, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per valid row; the bytes of the header, of blank and of invalid rows count for the next one.

    Each line of an invalid row is reported.
    """
    lines = _Lines(stream)
    rows = csv.reader(lines, delimiter=_delimiter(file), strict=True)
    header: Sequence[str] = ()
    done_nbytes = 0
    while True:
        first = rows.line_num + 1
        place, values = f"{file.path}:{first}", None
        try:
            row = _next_row(place, rows)
            if row is None:
                return
            values = _values(place, header, row) if header and row else None
            header = header or _check_header(place, row)
        except PrepError as error:
            if not header:
                raise
            options.on_error(error)
            for number in range(first + 1, rows.line_num + 1):  # a quote without an end takes many lines
                what = f"{file.path}:{number}: a line of the invalid row at line {first}"
                options.on_error(PrepError(what, error.why, error.hint))
        if values is not None:
            yield Record(values, place, lines.nbytes - done_nbytes)
            done_nbytes = lines.nbytes


class _Lines:
    """Lines of a stream as text; bytes that are not UTF-8 become surrogates.

    Attributes:
        nbytes: Bytes of the lines so far.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.nbytes = stream, 0

    def __iter__(self) -> Iterator[str]:
        for line in self._stream:
            text = line.decode(errors="surrogateescape")
            text = text if self.nbytes else text.removeprefix(BYTE_ORDER_MARK)
            self.nbytes += len(line)
            yield text


def _delimiter(file: DataFile) -> str:
    return "\t" if split_compression(str(file.path))[0].endswith(".tsv") else ","


def _next_row(place: str, rows: Iterator[list[str]]) -> list[str] | None:
    """Return the next row, empty for a blank line; None at the end."""
    try:
        row = next(rows, None)
    except csv.Error as error:
        raise _row_error(place, str(error)) from error
    _check_encoding(place, row or ())
    return row


def _row_error(place: str, why: str) -> PrepError:
    """Return the error for a row that the csv module refuses."""
    what = f"{place}: not CSV"
    if not why.startswith(CARRIAGE_RETURN_ERROR):
        return PrepError(what, why, LINE_HINT)
    path, _, _ = place.rpartition(":")
    why = "it has a carriage return outside of quotes; lines end with a line feed"
    return PrepError(what, why, rf"`tr '\r' '\n' < {shlex.quote(path)} > NEW` converts such line ends")


def _check_encoding(place: str, row: Sequence[str]) -> None:
    for number, value in enumerate(row, start=1):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            why = f"field {number} has the byte 0x{ord(value[error.start]) - 0xDC00:02x}"
            raise PrepError(f"{place}: not UTF-8", why, "`iconv -f ENCODING -t UTF-8` converts it") from None


def _check_header(place: str, row: Sequence[str]) -> Sequence[str]:
    if len({*row}) < len(row):
        twice = next(name for name in row if row.count(name) > 1)
        raise PrepError(f"{place}: two columns are named `{twice}`", "the first row has the names", "rename one")
    return row


def _values(place: str, header: Sequence[str], row: Sequence[str]) -> dict[str, Any]:
    if len(row) != len(header):
        raise PrepError(f"{place}: {len(row)} fields", f"the header has {len(header)}", LINE_HINT)
    return dict(zip(header, row))


CSV_READER = Reader((".csv", ".tsv"), _read_rows, is_compressible=True)
