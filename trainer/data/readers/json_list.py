"""JSON lists: split the bytes of a list into those of its elements, in bounded memory.

Only strings and brackets are scanned. The parser of JSON checks each element afterwards.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from prepcli.core.errors import PrepError
from trainer.data.readers.reader import Line

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
            is_empty_list = scanner.is_at_end and not number and element.is_blank
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
    """Raise PrepError if visible text follows the list.

    Args:
        path: The file, for error messages.
        blocks: Its bytes after the list.
        offset: Offset of these bytes in the file.
        number: Number of the last element.
    """
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
    """Finds where the elements of a list end, in consecutive blocks after its opening bracket.

    Attributes:
        is_at_end: Whether the list has ended.
    """

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
    """The text of an element so far. A text above the limit is not held.

    Attributes:
        start: Offset of the text in the file.
    """

    def __init__(self, start: int, max_nbytes: int) -> None:
        self.start = start
        self._max_nbytes = max_nbytes
        self._content = bytearray()
        self._is_too_long = False

    @property
    def is_blank(self) -> bool:
        """Whether the text has no visible character."""
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
