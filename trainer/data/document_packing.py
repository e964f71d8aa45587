"""Rows of whole documents: a pure function of the lengths of the documents and of the rows.

A row is one training sequence. All rows have the same length.
A document longer than a row is cut into pieces, each as long as a row but the last. Pieces are
packed by best-fit decreasing (Johnson 1974, https://doi.org/10.1137/0203025, and for training Ding
et al. 2024, https://arxiv.org/abs/2404.10830): the longest piece first, each into the fullest row
with enough room for it. Consecutive pieces are packed in groups of fixed size (windows), one group
after the other. Rows therefore keep the order of the data roughly, time is linear, and memory does
not depend on the number of documents.

The index of rows has less than a byte per piece, e.g. 0.11 for chats and 0.2 to 0.4 for web pages.
It has only the row of each piece. The pieces of a window are cut again from the ends of the
documents when a row of it is read, in about a millisecond. The index is two arrays:

- `windows`: a `WINDOW_DTYPE` per window.
- `assignments`: for each window the row of each piece, the longest piece first, as differences in 16 bits,
  compressed by zlib. The numbering is the one of `best_fit`, where pieces of equal length are in consecutive
  rows, so that most differences are equal.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text
from trainer.data.store_files import TokenArray
from trainer.recipe.text_fields import SEGMENTED

Int64Array = npt.NDArray[np.int64]
# Pieces packed together. The number is part of the identity of stored rows.
WINDOW = 1 << 16
# Documents read together: 2 MiB of ends.
BLOCK_DOCUMENTS = 1 << 18
# Windows with pieces in memory, about 0.9 MB each. Data of up to 4 million pieces is cut only once.
CACHED_WINDOWS = 64
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
class Pieces:
    """Consecutive pieces of documents."""

    starts: Int64Array  # First token of each piece in the store
    lengths: npt.NDArray[np.int32]  # Tokens of each piece


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """The pieces of a window."""

    first_row: int
    # In the order of the data.
    pieces: Pieces
    # Row of each piece, counted from the first row of the window.
    rows: npt.NDArray[np.uint16]


class DocumentRows:
    """The pieces of documents in each row.

    Attributes:
        seq_length: Length of a row in tokens.
        n_tokens: Tokens of all pieces.
        n_rows: Number of rows.
        max_length: Tokens of the longest piece.
    """

    def __init__(
        self,
        windows: npt.NDArray[np.void],
        assignments: npt.NDArray[np.uint8],
        packing: str,
        *,
        ends: TokenArray,
        seq_length: int,
        n_tokens: int,
    ) -> None:
        """Read an index of rows. `ends` are the ends of the documents."""
        self._windows = windows
        self._row_ends = np.ascontiguousarray(windows["row_end"])
        self._assignments = assignments
        self._ends = ends
        self._order = ORDERS[packing]
        self.seq_length = seq_length
        self.n_tokens = n_tokens
        self.n_rows = int(self._row_ends.max(initial=0))
        self.max_length = int(windows["max_length"].max(initial=0))
        self._window = lru_cache(CACHED_WINDOWS)(self._read_window)

    @property
    def fraction_with_token(self) -> float:
        """Fraction of the places with a token, of all rows."""
        return self.n_tokens / (self.n_rows * self.seq_length)

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return start and length of each piece of a row, in the order of the data."""
        window = self._window(int(np.searchsorted(self._row_ends, row, side="right")))
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
        try:
            differences = np.frombuffer(zlib.decompress(assignment.tobytes()), ROW_DTYPE)
        except (zlib.error, ValueError) as error:
            raise _damaged_error(str(error)) from error
        ordered_rows = np.cumsum(differences, dtype=np.uint16)
        if len(ordered_rows) != len(pieces.lengths):
            raise _damaged_error(
                f"window {index:,} has {count_text(len(ordered_rows), 'piece')} in them"
            )
        rows = np.empty_like(ordered_rows)
        rows[self._order(pieces.lengths)] = ordered_rows
        return _Window(first_row, pieces, number_rows(rows).astype(np.uint16))


class Appendable(Protocol):
    """A sequentially written file."""

    def write(self, data: bytes, /) -> object:
        """Append bytes."""
        ...


@dataclass(slots=True)
class RowCounts:
    """Sizes of written rows."""

    n_pieces: int = 0  # Number of pieces
    n_rows: int = 0  # Number of rows
    max_length: int = 0  # Tokens of the longest piece


def write_rows(
    windows: Appendable,
    assignments: Appendable,
    blocks: Callable[[], Iterable[Int64Array]],
    seq_length: int,
    packing: str,
    *,
    window: int = WINDOW,
) -> RowCounts:
    """Write the index of all rows. Each token is in one row.

    `blocks` returns the ends of the documents, in blocks of any size. It is called twice. `window` is the number of
    consecutive pieces to pack together.
    """
    counts = RowCounts()
    entries: list[npt.NDArray[np.void]] = []
    assignment_end = 0
    for pieces in cut_documents(blocks(), seq_length, window):
        rows = ASSIGN[packing](pieces.lengths[ORDERS[packing](pieces.lengths)], seq_length)
        differences = np.diff(rows.astype(np.uint16), prepend=np.uint16(0))
        assignment = zlib.compress(differences.astype(ROW_DTYPE).tobytes(), COMPRESSION_LEVEL)
        assignments.write(assignment)
        assignment_end += len(assignment)
        counts.n_pieces += len(rows)
        counts.n_rows += int(rows.max()) + 1
        entry = np.zeros(1, WINDOW_DTYPE)
        entry["start"] = pieces.starts[0]
        entry["row_end"] = counts.n_rows
        entry["assignment_end"] = assignment_end
        entry["max_length"] = pieces.lengths.max()
        counts.max_length = max(counts.max_length, int(pieces.lengths.max()))
        entries.append(entry)
    index = np.concatenate([np.zeros(0, WINDOW_DTYPE), *entries])
    # The first document of a window is the first one that ends after its start.
    for ends in blocks():
        index["document"] += np.searchsorted(ends, index["start"], side="right")
    windows.write(index.tobytes())
    return counts


def _damaged_error(why: str) -> PrepError:
    hint = "start again: process 0 compares them with their digest, and rebuilds them"
    return PrepError("the stored rows of the documents are damaged", why, hint)


def cut_documents(ends: Iterable[Int64Array], seq_length: int, window: int) -> Iterator[Pieces]:
    """Cut documents into pieces of at most `seq_length` tokens. Yields `window` pieces at a time, then the rest."""
    waiting: list[Pieces] = []
    n_waiting = 0
    for pieces in _cut_blocks(ends, seq_length, window):
        low = 0
        while n_waiting + len(pieces.starts) - low >= window:
            high = low + window - n_waiting
            yield _join_pieces(
                [*waiting, Pieces(pieces.starts[low:high], pieces.lengths[low:high])]
            )
            waiting = []
            n_waiting = 0
            low = high
        if low < len(pieces.starts):
            waiting.append(Pieces(pieces.starts[low:], pieces.lengths[low:]))
            n_waiting += len(pieces.starts) - low
    if waiting:
        yield _join_pieces(waiting)


def _cut_blocks(ends: Iterable[Int64Array], seq_length: int, max_pieces: int) -> Iterator[Pieces]:
    """Yield the pieces of documents, at most `max_pieces` at a time: one document may have billions of tokens."""
    block_start = 0
    for document_ends in ends:
        if not len(document_ends):
            continue
        # E.g. ends [3, 10] and seq_length 4: the documents have 1 and 2 pieces, piece_ends is [1,
        # 3] and first_pieces [0, 1]. Piece 2 is in document 1 and starts at 3 + (2 - 1) * 4 = 7,
        # with length 3.
        document_starts = np.concatenate([[block_start], document_ends[:-1]])
        piece_ends = np.cumsum(-(-(document_ends - document_starts) // seq_length))
        first_pieces = np.concatenate([[0], piece_ends[:-1]])
        n_pieces = int(piece_ends[-1])
        for low in range(0, n_pieces, max_pieces):
            pieces = np.arange(low, min(low + max_pieces, n_pieces))
            documents = np.searchsorted(piece_ends, pieces, side="right")
            starts = document_starts[documents] + (pieces - first_pieces[documents]) * seq_length
            lengths = np.minimum(seq_length, document_ends[documents] - starts)
            yield Pieces(starts, lengths.astype(np.int32))
        block_start = int(document_ends[-1])


def cut_range(ends: Int64Array, start: int, seq_length: int) -> Pieces:
    """Cut the documents with some ends into pieces. The range begins with a piece, perhaps within a document."""
    starts = np.concatenate([[start], ends[:-1]])
    counts = -(-(ends - starts) // seq_length)
    # Number of each piece in its document, e.g. counts [1, 2] -> [0, 0, 1].
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    piece_starts = np.repeat(starts, counts) + numbers * seq_length
    lengths = np.minimum(seq_length, np.repeat(ends, counts) - piece_starts)
    return Pieces(piece_starts, lengths.astype(np.int32))


def _join_pieces(pieces: list[Pieces]) -> Pieces:
    starts = np.concatenate([part.starts for part in pieces])
    return Pieces(starts, np.concatenate([part.lengths for part in pieces]))


def longest_first(lengths: npt.NDArray[np.int32]) -> Int64Array:
    """Return the order of pieces from the longest to the shortest. Equal lengths keep their order."""
    keys: npt.NDArray[np.signedinteger[Any]] = -lengths
    if lengths.max(initial=0) <= np.iinfo(np.int16).max:
        # NumPy sorts 16-bit integers by radix, in about a seventh of the time.
        keys = keys.astype(np.int16)
    return np.argsort(keys, kind="stable")


def number_rows(rows: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Return the rows of pieces in another numbering: in the order of their first pieces.

    E.g. the rows [2, 0, 2, 1] of four pieces become [0, 1, 0, 2].
    """
    # Of several assignments to one place NumPy keeps the last one, so the pieces are assigned in reverse
    # order.
    pieces = np.arange(len(rows))
    first_pieces = np.empty(int(rows.max()) + 1, np.int64)
    first_pieces[rows[::-1]] = pieces[::-1]
    numbers = np.empty_like(first_pieces)
    numbers[np.argsort(first_pieces)] = np.arange(len(first_pieces))
    return numbers[rows]


def best_fit(lengths: npt.NDArray[np.int32], seq_length: int) -> Int64Array:
    """Put each piece, the longest first, into the fullest row with enough room for it, or into a new row.

    Returns:
        The row of each piece. Rows are numbered by their longest pieces.
    """
    # E.g. rows of 8 and pieces of 6, 5, 3 and 2 tokens: 6 opens row 0 (2 free), 5 opens row 1 (3 free),
    # 3 fills row 1, and 2 fills row 0. The result is [0, 1, 1, 0].
    #
    # Pieces of equal length are placed together. The fullest row with room for one of them takes as
    # many as fit: after each piece it is still the fullest row with enough room. E.g. a row with 7
    # free tokens takes three pieces of 2.
    open_rows = _OpenRows(int(lengths[-1]))
    group_starts = np.flatnonzero(np.diff(lengths, prepend=0))
    counts = np.diff(group_starts, append=len(lengths))
    placed: list[int] = []
    for length, group_count in zip(lengths[group_starts].tolist(), counts.tolist()):
        count = group_count
        while count:
            room, rows = open_rows.take(length, count, seq_length)
            fitting = room // length
            n_placed = min(count, len(rows) * fitting)
            # E.g. rows 5 and 6 with room for two pieces each: 5, 5, 6, 6.
            repeated = chain.from_iterable(repeat(row, fitting) for row in rows)
            placed += islice(repeated, n_placed)
            n_missing = len(rows) * fitting - n_placed
            if n_missing:
                # The pieces of this length end before the last row is full.
                last = rows.pop()
                open_rows.add(room - (fitting - n_missing) * length, [last])
            open_rows.add(room - fitting * length, rows)
            count -= n_placed
    return np.array(placed, np.int64)


class _OpenRows:
    """Rows with room for another piece."""

    def __init__(self, shortest: int) -> None:
        """Start without rows. One with less room than the shortest piece is full."""
        # `_rows` has the open rows by their free tokens. `_rooms` has its nonempty keys, ascending, so
        # that bisection finds the least sufficient room.
        self._shortest = shortest
        self._rows: defaultdict[int, list[int]] = defaultdict(list)
        self._rooms: list[int] = []
        self._n_rows = 0

    def take(self, length: int, count: int, seq_length: int) -> tuple[int, list[int]]:
        """Remove the rows for at most `count` pieces of a length. New rows if none has enough room.

        Returns:
            The free tokens of each of the rows, and the rows in the order of their pieces.
        """
        best = bisect_left(self._rooms, length)
        if best == len(self._rooms):
            first_row = self._n_rows
            self._n_rows += -(-count // (seq_length // length))
            return seq_length, list(range(first_row, self._n_rows))
        room = self._rooms[best]
        rows = self._rows[room]
        # The row that was added last is taken first.
        n_rows = -(-count // (room // length))
        taken = rows[-n_rows:]
        del rows[-len(taken) :]
        if not rows:
            del self._rooms[best]
        return room, taken[::-1]

    def add(self, room: int, rows: list[int]) -> None:
        """Add rows with some free tokens."""
        if room < self._shortest or not rows:
            return
        if not self._rows[room]:
            insort(self._rooms, room)
        self._rows[room] += rows


# By `data.packing`: the order in which the rows of pieces are stored, and the rows of pieces in this order.
ORDERS: Mapping[str, Callable[[npt.NDArray[np.int32]], Int64Array]] = {
    SEGMENTED: longest_first,
    "none": lambda lengths: np.arange(len(lengths)),
}
ASSIGN: Mapping[str, Callable[[npt.NDArray[np.int32], int], Int64Array]] = {
    SEGMENTED: best_fit,
    "none": lambda lengths, seq_length: np.arange(len(lengths)),
}
