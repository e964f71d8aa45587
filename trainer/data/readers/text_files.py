"""Readers of files of text: plain texts, CSV, JSON Lines, and JSON lists."""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonObject, json_type_name
from trainer.data.files import FILE_READ_NBYTES, DataFile, stream_blocks
from trainer.data.readers.reader import (
    BYTE_ORDER_MARK,
    Line,
    Reader,
    ReadOptions,
    Record,
    TextChunk,
    decode_utf8,
    read_lines,
    read_stream,
    split_compression,
    too_large_error,
)

READ_NBYTES = 1 << 20
# Maximum bytes of text that are encoded at once. Tokens may depend on it: raise `TOKENS_VERSION`
# with it.
TEXT_CHUNK_NBYTES = 1 << 18
# Spaces of 3 bytes in UTF-8: U+1680, U+2000 to U+200A, U+2028, U+2029, U+202F, U+205F and U+3000.
# `\s` of a bytes pattern matches only ASCII. U+0085 and U+00A0 have 2 bytes.
WIDE_SPACES = rb"\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
AFTER_VISIBLE = rb"(?<!\s)(?<!\xc2[\x85\xa0])(?<!" + WIDE_SPACES + rb")"
# Matches before a visible character. The four dots make sure that all of its bytes are in the
# buffer.
VISIBLE = rb"(?!\s|\xc2[\x85\xa0]|" + WIDE_SPACES + rb")...."
# Places where a text may be cut, best first.
CUT_PATTERNS = (
    re.compile(AFTER_VISIBLE + rb"\n(?=" + VISIBLE + rb")|\n(?= " + VISIBLE + rb")", re.DOTALL),
    re.compile(rb"\n"),
    re.compile(rb"\S(?= )"),
)


def _read_text(file: DataFile, options: ReadOptions) -> Iterator[TextChunk]:
    def parse(stream: BinaryIO) -> Iterator[TextChunk]:
        return split_text(file.path, iter(partial(stream.read, READ_NBYTES), b""))

    return read_stream(file, parse)


def split_text(path: Path | str, blocks: Iterable[bytes]) -> Iterator[TextChunk]:
    """Yield a text in chunks of at most TEXT_CHUNK_NBYTES.

    Each cut is in the second half of a chunk, in this order of preference:

    1. After a newline between two visible characters, or before one space and a visible character.
       The pre-tokenizers of GPT-2 and Llama 3 also split there, so the tokens equal the tokens of
       the whole text.
    2. After any newline.
    3. Before a space.
    4. Between two characters.

    After cuts 2 to 4 the tokens next to the cut may differ from the tokens of the whole text, but
    decode to the same text. A tokenizer that puts a space before every text (Llama 1 and 2) puts
    one at the start of each chunk.

    Args:
        path: The file, for error messages.
        blocks: Its bytes, in blocks of any length.

    Raises:
        PrepError: The text is not UTF-8. The error names the byte offset.
    """
    buffer = b""
    offset = 0
    for block in blocks:
        buffer += block
        while len(buffer) > TEXT_CHUNK_NBYTES:
            cut = _cut_length(buffer)
            text = decode_utf8(path, buffer[:cut], offset)
            yield TextChunk(text, cut, starts_document=not offset, ends_document=False)
            buffer = buffer[cut:]
            offset = offset + cut
    text = decode_utf8(path, buffer, offset)
    yield TextChunk(text, len(buffer), starts_document=not offset, ends_document=True)


def _cut_length(data: bytes) -> int:
    """Return the bytes of the next chunk, more than half of TEXT_CHUNK_NBYTES."""
    for pattern in CUT_PATTERNS:
        ends = [
            match.end()
            for match in pattern.finditer(data, TEXT_CHUNK_NBYTES // 2, TEXT_CHUNK_NBYTES)
        ]
        if ends:
            return ends[-1]
    candidates = range(TEXT_CHUNK_NBYTES, TEXT_CHUNK_NBYTES - 4, -1)
    # 0b10xxxxxx is a continuation byte, and a character has at most 4 bytes.
    character_starts = (i for i in candidates if data[i] & 0xC0 != 0x80)
    # Without one the text is not UTF-8, and decoding fails.
    return next(character_starts, TEXT_CHUNK_NBYTES)


TEXT_READER = Reader((".txt",), _read_text, is_compressible=True, is_divisible=True)

# --- CSV and TSV: the first row has the names of the columns
LINE_END = "\r\n"
# Message of Python's csv module for a carriage return, which has no error type of its own.
CARRIAGE_RETURN_ERROR = "new-line character seen in unquoted field"
CSV_HINT = "fix or remove the line, or `data.bad_lines = N` skips up to N of them"


def _read_rows(file: DataFile, options: ReadOptions) -> Iterator[Record]:
    """Yield a record per row."""
    # The module has one limit for the process.
    csv.field_size_limit(options.max_document_nbytes)
    return read_stream(file, lambda stream: _parse_rows(file, stream, options))


def _parse_rows(file: DataFile, stream: BinaryIO, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per valid row. Report each line of an invalid row."""
    # The bytes of the header, of blank and of invalid rows count for the next valid row, so that
    # `nbytes` of all records adds up to the size of the file.
    lines = _Lines(file, stream, options.max_document_nbytes)
    is_tsv = split_compression(str(file.path))[0].endswith(".tsv")
    rows = csv.reader(lines, delimiter="\t" if is_tsv else ",", strict=True)
    header: Sequence[str] = ()
    done_nbytes = 0
    while True:
        first = lines.start_row()
        place = f"{file.path}:{first}"
        values = None
        try:
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise _csv_error(place, str(error)) from error
            if row is None:
                return
            _check_encoding(place, row)
            if not header:
                _check_header(place, row)
                header = row
            elif row:
                if len(row) != len(header):
                    what = f"{place}: {count_text(len(row), 'field')}"
                    raise PrepError(what, f"the header has {len(header)}", CSV_HINT)
                values = dict(zip(header, row))
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
    """Lines of a stream as text. An iterator and no generator: iteration continues after the error of a row."""

    def __init__(self, file: DataFile, stream: BinaryIO, max_row_nbytes: int) -> None:
        self._file = file
        self._lines = read_lines(stream, max_row_nbytes)
        self._max_row_nbytes = max_row_nbytes
        # Bytes and number of the lines so far.
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


def _csv_error(place: str, why: str) -> PrepError:
    """Return the error for a row rejected by the csv module."""
    what = f"{place}: not CSV"
    if not why.startswith(CARRIAGE_RETURN_ERROR):
        return PrepError(what, why, CSV_HINT)
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


def _check_header(place: str, row: Sequence[str]) -> None:
    """Raise PrepError if two columns have one name."""
    names: set[str] = set()
    for name in row:
        if name in names:
            what = f"{place}: two columns are named `{name:.60}`"
            raise PrepError(what, "the first row has the names", "rename one of them")
        names.add(name)


CSV_READER = Reader((".csv", ".tsv"), _read_rows, is_compressible=True, is_divisible=True)

# --- JSON lists: their bytes are split into those of the elements, in bounded memory. Only strings and brackets are
# scanned. The parser of JSON checks each element afterwards.

# White space of JSON (RFC 8259, section 2).
BLANKS = b" \t\r\n"
# The rest of a string, up to its closing quote. An escaped quote does not close it. Possessive
# quantifiers (`++`) keep no positions to go back to.
STRING = rb'(?:[^"\\]++|\\.)*+'
STRING_REST = re.compile(STRING, re.DOTALL)
# A whole string, a bracket, a comma, or the quote of a string that does not end in the block.
TOKEN = re.compile(rb'"' + STRING + rb'"|["\[\]{},]', re.DOTALL)


def starts_list(head: bytes) -> bool:
    """Return whether a file with this start is a list: its first visible character is `[`."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip(BLANKS).startswith(b"[")


def read_elements(path: Path | str, blocks: Iterable[bytes], max_nbytes: int) -> Iterator[Line]:
    """Yield the text of each element of a list.

    E.g. `[{"a": 1}, {"b": [2, 3]}]` -> `{"a": 1}` and `{"b": [2, 3]}`, and `[1,]` -> `1` and an
    empty text. The bytes of a comma or bracket count for the element before it, and the bytes at the
    start of the file for the first element.

    Args:
        path: The file, for error messages.
        blocks: Its bytes, in blocks of any length above 0. `starts_list` is True for the first one.
        max_nbytes: Maximum bytes of an element, with the white space around it.

    Raises:
        PrepError: The file ends before the list, or continues after it. The number of lost
            elements is unknown, so `data.bad_lines` cannot skip them.
    """
    remaining = iter(blocks)
    first = next(remaining)
    offset = first.index(b"[") + 1
    scanner = _Scanner()
    element = _Element(offset, max_nbytes)
    done_nbytes = 0
    number = 0
    for block in itertools.chain((first[offset:],), remaining):
        start = 0
        for position in scanner.element_ends(block):
            element.add(block[start:position])
            start = position + 1
            end = offset + start
            is_empty_list = scanner.is_at_end and not number and element.is_blank()
            if not is_empty_list:
                number += 1
                yield element.line(end - done_nbytes)
                done_nbytes = end
            element = _Element(end, max_nbytes)
        if scanner.is_at_end:
            rest = itertools.chain((block[start:],), remaining)
            _check_rest(path, rest, element.start, number)
            return
        element.add(block[start:])
        offset += len(block)
    what = f"{path}: the list is cut off"
    why = f"the file ends in record {number + 1:,}, without `]` after the last one"
    raise PrepError(what, why, "get the file again, or end the list")


def _check_rest(path: Path | str, blocks: Iterable[bytes], offset: int, number: int) -> None:
    """Raise PrepError if visible text follows the list: bytes at an offset, after the last of `number` elements."""
    for block in blocks:
        visible = block.lstrip(BLANKS)
        if visible:
            position = offset + len(block) - len(visible)
            what = f"{path}: the file continues after its list"
            why = f"the list ends with record {number:,}, and text follows at byte {position:,}"
            hint = (
                "write one list, or one object per line; `[` at the start of a file begins a list"
            )
            raise PrepError(what, why, hint)
        offset += len(block)


class _Scanner:
    """Finds where the elements of a list end, in consecutive blocks after its opening bracket."""

    def __init__(self) -> None:
        self.is_at_end = False
        self._depth = 0
        self._in_string = False
        # Bytes at the start of the next block whose backslash is at the end of this one.
        self._n_escaped = 0

    def element_ends(self, block: bytes) -> Iterator[int]:
        """Yield the position of each comma between elements, and of the closing bracket."""
        start = 0
        if self._in_string:
            start = self._skip_string(block, self._n_escaped)
        for match in TOKEN.finditer(block, start):
            token = match[0]
            if token in (b"[", b"{"):
                self._depth += 1
            elif token == b'"':
                self._skip_string(block, match.end())
                return
            elif self._depth:
                if token in (b"]", b"}"):
                    self._depth -= 1
            # A brace that closes nothing is left to the parser, as a part of the element.
            elif token in (b",", b"]"):
                self.is_at_end = token == b"]"
                yield match.start()
                if self.is_at_end:
                    return

    def _skip_string(self, block: bytes, start: int) -> int:
        """Return the position after a string, or the end of the block if the string goes on there."""
        match = STRING_REST.match(block, start)
        assert match is not None
        end = match.end()
        self._in_string = block[end : end + 1] != b'"'
        # Only a backslash at the end of the block has no byte after it.
        self._n_escaped = len(block) - end if self._in_string else 0
        return end + 1


class _Element:
    """The text of an element so far, from its start in the file. A text above the limit is not held."""

    def __init__(self, start: int, max_nbytes: int) -> None:
        self.start = start
        self._max_nbytes = max_nbytes
        self._content = bytearray()
        self._is_too_long = False

    def is_blank(self) -> bool:
        """Return whether the text has no visible character."""
        return not self._is_too_long and not self._content.strip(BLANKS)

    def add(self, data: bytes) -> None:
        """Append bytes to the text."""
        self._is_too_long |= len(self._content) + len(data) > self._max_nbytes
        if self._is_too_long:
            self._content.clear()
        else:
            self._content += data

    def line(self, nbytes: int) -> Line:
        """Return the element. `nbytes` is its size with the separators."""
        content = bytes(self._content.lstrip(BLANKS))
        n_blanks = len(self._content) - len(content)
        return Line(content, self.start + n_blanks, nbytes, is_too_long=self._is_too_long)


# --- JSON Lines, where each non-blank line is an object, and files that are one list of objects

# Bytes in which the first visible character of a file must be, if it begins a list.
HEAD_NBYTES = 64 << 10
JSON_LINES_HINT = "one object per line: `jq -c .` writes an object on one line"
ELEMENT_HINT = "fix or remove the record, or `data.bad_lines = N` skips up to N of them"


def _read_json(file: DataFile, options: ReadOptions) -> Iterator[Record]:
    """Yield one record per valid line, or per valid element of a list."""

    def parse(stream: BinaryIO) -> Iterator[Record]:
        head = stream.read(HEAD_NBYTES)
        blocks = itertools.chain((head,), iter(partial(stream.read, FILE_READ_NBYTES), b""))
        if starts_list(head):
            elements = read_elements(file.path, blocks, options.max_document_nbytes)
            return _parse_texts(f"{file.path}, record ", elements, options, is_list=True)
        lines = read_lines(stream_blocks(blocks), options.max_document_nbytes)
        return _parse_texts(f"{file.path}:", lines, options, is_list=False)

    return read_stream(file, parse)


def _parse_texts(
    place_prefix: str, texts: Iterator[Line], options: ReadOptions, *, is_list: bool
) -> Iterator[Record]:
    """Yield one record per valid text. The bytes of blank and of invalid ones count for the next valid one."""
    hint = ELEMENT_HINT if is_list else JSON_LINES_HINT
    done_nbytes = 0
    skipped_nbytes = 0
    for number, line in enumerate(texts, start=1):
        done_nbytes += line.nbytes
        if done_nbytes <= options.start:
            skipped_nbytes += line.nbytes
            continue
        values = None
        place = f"{place_prefix}{number}"
        try:
            if line.is_too_long:
                raise too_large_error(
                    f"{place}: too long", line.nbytes, options.max_document_nbytes
                )
            text = decode_utf8(place, line.content, line.start).rstrip()
            if text or is_list:
                values = _parse_object(place, text, hint)
        except PrepError as error:
            options.on_error(error)
        skipped_nbytes += line.nbytes
        if values is not None:
            yield Record(values, place, skipped_nbytes)
            skipped_nbytes = 0


def _parse_object(place: str, text: str, hint: str) -> JsonObject:
    """Return a JSON object. Raise PrepError for another value, or for invalid JSON."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Python refuses a number of more than 4,300 digits (`sys.set_int_max_str_digits`).
        why = str(error)
        if isinstance(error, RecursionError):
            why = "it is nested too deep"
        elif isinstance(error, json.JSONDecodeError):
            why = f"{error.msg} at character {error.pos + 1}"
        # Blank lines are skipped, so this is an element of a list.
        if not text:
            why = "there is no value between two commas, or after the last comma"
        raise PrepError(f"{place}: not JSON", why, hint) from None
    if not isinstance(values, dict):
        what = f"{place}: not an object but {json_type_name(values)}"
        why = "type `json` needs one object per line, or one list of objects"
        raise PrepError(what, why, ELEMENT_HINT)
    return values


JSON_READER = Reader(
    (".jsonl",),
    _read_json,
    other_suffixes=(".json", ".ndjson"),
    is_compressible=True,
    is_divisible=True,
)
