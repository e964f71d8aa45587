"""Rows of whole documents in a compact form, for hundreds of millions of documents.

`document_rows` stores 12 bytes per piece of a document, and 8 per row. The rows of 10^9 documents would have
12 GB. The compact form has less than a byte per piece, e.g. 0.11 for chats and 0.2 to 0.4 for web pages. It
stores only the rows of the pieces of each window (see `document_packing`). The pieces are cut again from the ends
of the documents.

- `windows.bin`: a `WINDOW_DTYPE` per window.
- `assignments.bin`: for each window the row of each piece, the longest piece first, as differences in 16 bits,
  compressed by zlib. The numbering is the one of `best_fit`, where pieces of equal length are in consecutive
  rows, so that most differences are equal.

A row costs about a millisecond, since the pieces of its window are cut and sorted again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prepcli.core.formatting import count_text
from trainer.data.document_packing import (
    BLOCK_DOCUMENTS,
    WINDOW,
    Int64Array,
    Pieces,
    best_fit,
    cut_documents,
    cut_range,
    longest_first,
    number_rows,
)
from trainer.data.new_folders import HashingFile
from trainer.data.store import DamagedStoreError, MappedTokens, document_end_blocks
from trainer.recipe.text_fields import SEGMENTED

WINDOWS_FILE = "windows.bin"
ASSIGNMENTS_FILE = "assignments.bin"
# Start of the window in the tokens, its first document, the end of its rows, the end of its assignment in
# the file, and its longest piece.
WINDOW_DTYPE = np.dtype(
    [
        ("start", "<i8"),
        ("document", "<i8"),
        ("row_end", "<i8"),
        ("assignment_end", "<i8"),
        ("max_length", "<i8"),
    ]
)
# A window has at most 65,536 rows. Differences wrap around at 16 bits, and so do their sums.
ROW_DTYPE = np.dtype("<u2")
COMPRESSION_LEVEL = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """The pieces of a window.

    Attributes:
        first_row: Number of its first row.
        pieces: Its pieces in the order of the data.
        rows: Row of each piece, counted from the first row of the window.
    """

    first_row: int
    pieces: Pieces
    rows: Int64Array


class WindowRows:
    """The rows of a token store in the compact form.

    Attributes:
        seq_length: Length of a row in tokens.
        n_tokens: Tokens of all rows.
        max_length: Tokens of the longest piece.
    """

    def __init__(
        self, arrays: Mapping[str, npt.NDArray[Any]], tokens: MappedTokens, packing: str
    ) -> None:
        """Map rows.

        Args:
            arrays: The content of the files by name.
            tokens: The token store.
            packing: The recipe's `data.packing`.
        """
        self._windows = arrays[WINDOWS_FILE]
        self._row_ends = np.ascontiguousarray(self._windows["row_end"])
        self._assignments = arrays[ASSIGNMENTS_FILE]
        self._ends = tokens.ends
        self._order = ORDERS[packing]
        self.seq_length = tokens.seq_length
        self.n_tokens = tokens.n_tokens
        self.max_length = int(self._windows["max_length"].max())
        # Unshuffled rows are read one after the other, so the last window serves the next rows too.
        self._last: tuple[int, _Window] | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return int(self._row_ends[-1])

    @property
    def fraction_with_token(self) -> float:
        """Fraction of the places with a token, of all rows."""
        return self.n_tokens / (self.n_rows * self.seq_length)

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return start and length of each piece of a row."""
        index = int(np.searchsorted(self._row_ends, row, side="right"))
        last = self._last
        if last is None or last[0] != index:
            last = index, self._read_window(index)
            self._last = last
        window = last[1]
        pieces = np.flatnonzero(window.rows == row - window.first_row)
        starts = window.pieces.starts[pieces].tolist()
        return list(zip(starts, window.pieces.lengths[pieces].tolist()))

    def _read_window(self, index: int) -> _Window:
        """Cut the pieces of a window, and decode their rows."""
        entry = self._windows[index]
        start = int(entry["start"])
        document = int(entry["document"])
        first_row = assignment_start = 0
        if index:
            first_row = int(self._row_ends[index - 1])
            assignment_start = int(self._windows[index - 1]["assignment_end"])
        # The window ends at the start of the next one, perhaps within a document.
        end_token = self.n_tokens
        last_document = len(self._ends)
        if index + 1 < len(self._windows):
            end_token = int(self._windows[index + 1]["start"])
            last_document = int(self._windows[index + 1]["document"])
        ends = self._ends[document : last_document + 1].astype(np.int64)
        pieces = cut_range(np.minimum(ends, end_token), start, self.seq_length)
        assignment = self._assignments[assignment_start : int(entry["assignment_end"])]
        ordered_rows = _decode_rows(assignment.tobytes())
        if len(ordered_rows) != len(pieces.lengths):
            raise _damaged_error(
                f"window {index:,} has {count_text(len(ordered_rows), 'piece')} in them"
            )
        rows = np.empty_like(ordered_rows)
        rows[self._order(pieces.lengths)] = ordered_rows
        return _Window(first_row, pieces, number_rows(rows))


def _decode_rows(data: bytes) -> npt.NDArray[np.uint16]:
    """Return the rows of pieces."""
    try:
        differences = np.frombuffer(zlib.decompress(data), ROW_DTYPE)
    except (zlib.error, ValueError) as error:
        raise _damaged_error(str(error)) from error
    return np.cumsum(differences, dtype=np.uint16)


def _damaged_error(why: str) -> DamagedStoreError:
    hint = "start again: process 0 compares them with their digest, and rebuilds them"
    return DamagedStoreError("the stored rows of the documents are damaged", why, hint)


def _encode_rows(rows: npt.NDArray[np.integer]) -> bytes:
    """Return the compressed rows of pieces."""
    differences = np.diff(rows.astype(np.uint16), prepend=np.uint16(0))
    return zlib.compress(differences.astype(ROW_DTYPE).tobytes(), COMPRESSION_LEVEL)


def _one_per_row(lengths: npt.NDArray[np.int32], seq_length: int) -> Int64Array:
    return np.arange(len(lengths))


def _in_data_order(lengths: npt.NDArray[np.int32]) -> Int64Array:
    return np.arange(len(lengths))


# By `data.packing`: the order in which the rows of pieces are stored, and the rows of pieces in this order.
ORDERS: Mapping[str, Callable[[npt.NDArray[np.int32]], Int64Array]] = {
    SEGMENTED: longest_first,
    "none": _in_data_order,
}
ASSIGN: Mapping[str, Callable[[npt.NDArray[np.int32], int], Int64Array]] = {
    SEGMENTED: best_fit,
    "none": _one_per_row,
}


@dataclass(slots=True)
class RowCounts:
    """Sizes of written rows.

    Attributes:
        n_pieces: Number of pieces.
        n_rows: Number of rows.
        max_length: Tokens of the longest piece.
    """

    n_pieces: int = 0
    n_rows: int = 0
    max_length: int = 0


def write_windows(
    files: Mapping[str, HashingFile], tokens: MappedTokens, packing: str, *, window: int = WINDOW
) -> RowCounts:
    """Write the rows of a token store in the compact form.

    Args:
        files: The open files by name.
        tokens: The token store.
        packing: The recipe's `data.packing`.
        window: Number of consecutive pieces packed together.
    """
    counts = RowCounts()
    entries: list[npt.NDArray[np.void]] = []
    assignment_end = 0
    ends = document_end_blocks(tokens, BLOCK_DOCUMENTS)
    for pieces in cut_documents(ends, tokens.seq_length, window):
        order = ORDERS[packing](pieces.lengths)
        rows = ASSIGN[packing](pieces.lengths[order], tokens.seq_length)
        assignment = _encode_rows(rows)
        files[ASSIGNMENTS_FILE].write(assignment)
        assignment_end += len(assignment)
        entry = np.zeros(1, WINDOW_DTYPE)
        entry["start"] = pieces.starts[0]
        entry["row_end"] = counts.n_rows + int(rows.max()) + 1
        entry["assignment_end"] = assignment_end
        entry["max_length"] = pieces.lengths.max()
        entries.append(entry)
        counts.n_pieces += len(rows)
        counts.n_rows = int(entry["row_end"][0])
        counts.max_length = max(counts.max_length, int(entry["max_length"][0]))
    windows = np.concatenate([np.zeros(0, WINDOW_DTYPE), *entries])
    windows["document"] = _documents_at(tokens, windows["start"])
    files[WINDOWS_FILE].write(windows.tobytes())
    return counts


def _documents_at(tokens: MappedTokens, starts: Int64Array) -> Int64Array:
    """Return the document of each of some tokens, in ascending order: the first one that ends after the token."""
    documents = np.zeros(len(starts), np.int64)
    for ends in document_end_blocks(tokens, BLOCK_DOCUMENTS):
        documents += np.searchsorted(ends, starts, side="right")
    return documents
