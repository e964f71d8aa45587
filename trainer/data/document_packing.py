"""Rows of whole documents: a pure function of the lengths of the documents and of the rows.

A row is one training sequence. All rows have the same length.
A document longer than a row is cut into pieces, each as long as a row but the last. Pieces are
packed by best-fit decreasing (Johnson 1974, https://doi.org/10.1137/0203025, and for training Ding
et al. 2024, https://arxiv.org/abs/2404.10830): the longest piece first, each into the fullest row
with enough room for it. Consecutive pieces are packed in groups of fixed size (windows), one group
after the other. Rows therefore keep the order of the data roughly, time is linear, and memory does
not depend on the number of documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
# Pieces packed together. The number is part of the identity of stored rows.
WINDOW = 1 << 16
# Documents read together: 2 MiB of ends.
BLOCK_DOCUMENTS = 1 << 18


class DocumentRows(Protocol):
    """The pieces of documents in each row."""

    @property
    def seq_length(self) -> int:
        """Length of a row in tokens."""
        ...

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        ...

    @property
    def n_tokens(self) -> int:
        """Tokens of all pieces."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens of the longest piece."""
        ...

    @property
    def fraction_with_token(self) -> float:
        """Fraction of the places with a token, of all rows."""
        ...

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return start and length of each piece of a row, in the order of the data."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """The pieces of each row, 20 bytes per piece.

    Attributes:
        starts: First token of each piece in the store, int64. The pieces of a row keep the order of
            the data.
        lengths: Tokens of each piece, int32, at least 1.
        ends: End of each row in `starts` and `lengths`, int64.
        seq_length: Length of a row in tokens.
        n_tokens: Tokens of all pieces.
        max_length: Tokens of the longest piece.
    """

    starts: Int64Array
    lengths: npt.NDArray[np.int32]
    ends: Int64Array
    seq_length: int
    n_tokens: int
    max_length: int

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.ends)

    @property
    def fraction_with_token(self) -> float:
        """Fraction of the places with a token, of all rows."""
        return self.n_tokens / (self.n_rows * self.seq_length)

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return start and length of each piece of a row."""
        low = 0
        if row:
            low = int(self.ends[row - 1])
        row_slice = slice(low, int(self.ends[row]))
        return list(zip(self.starts[row_slice].tolist(), self.lengths[row_slice].tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Consecutive pieces of documents.

    Attributes:
        starts: First token of each piece in the store.
        lengths: Tokens of each piece.
    """

    starts: Int64Array
    lengths: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Consecutive rows.

    Attributes:
        pieces: The pieces of the rows, row after row.
        ends: Number of pieces from the first row of the store to the end of each row.
    """

    pieces: Pieces
    ends: Int64Array


# A function from blocks of document ends, and the length of a row, to all rows.
MakeRows = Callable[[Iterable[Int64Array], int], Iterator[RowBlock]]


def pack_documents(
    ends: Iterable[Int64Array], seq_length: int, *, window: int = WINDOW
) -> Iterator[RowBlock]:
    """Pack documents into rows of `seq_length` tokens. Each token is in one row.

    Args:
        ends: Ends of the documents, in tokens, in blocks of any size.
        seq_length: Length of a row in tokens.
        window: Number of consecutive pieces to pack together.

    Yields:
        The rows of each window.
    """
    n_pieces = 0
    for pieces in cut_documents(ends, seq_length, window):
        rows = assign_rows(pieces.lengths, seq_length)
        order = np.argsort(rows, kind="stable")
        # The stable sort puts the pieces of row 0 first, then the pieces of row 1, and so on, each
        # row in the order of the data. E.g. rows [0, 1, 0] -> order [0, 2, 1] and ends [2, 3].
        row_ends = n_pieces + np.cumsum(np.bincount(rows))
        yield RowBlock(Pieces(pieces.starts[order], pieces.lengths[order]), row_ends)
        n_pieces += len(order)


def pad_documents(
    ends: Iterable[Int64Array], seq_length: int, *, window: int = WINDOW
) -> Iterator[RowBlock]:
    """Yield rows with one document each. A document longer than a row is cut into pieces."""
    n_pieces = 0
    for pieces in cut_documents(ends, seq_length, window):
        yield RowBlock(pieces, n_pieces + 1 + np.arange(len(pieces.starts)))
        n_pieces += len(pieces.starts)


def collect_rows(blocks: Iterable[RowBlock], seq_length: int) -> PackedRows:
    """Return all rows in memory."""
    # The empty arrays are for data without a token.
    starts = [np.empty(0, np.int64)]
    lengths = [np.empty(0, np.int32)]
    ends = [np.empty(0, np.int64)]
    for block in blocks:
        starts.append(block.pieces.starts)
        lengths.append(block.pieces.lengths)
        ends.append(block.ends)
    all_lengths = np.concatenate(lengths)
    n_tokens = int(all_lengths.sum(dtype=np.int64))
    max_length = int(all_lengths.max(initial=0))
    return PackedRows(
        np.concatenate(starts),
        all_lengths,
        np.concatenate(ends),
        seq_length,
        n_tokens=n_tokens,
        max_length=max_length,
    )


def cut_documents(ends: Iterable[Int64Array], seq_length: int, window: int) -> Iterator[Pieces]:
    """Cut documents into pieces of at most `seq_length` tokens.

    Yields `window` pieces at a time, then the rest.
    """
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
    """Yield the pieces of documents, at most `max_pieces` at a time.

    The bound is on pieces and not on documents because one document may have billions of tokens.
    """
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
    """Cut the documents of a range of tokens into pieces.

    Args:
        ends: Ends of the documents in the range.
        start: Start of the range, and of a piece.
        seq_length: Length of a row in tokens.
    """
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


def assign_rows(lengths: npt.NDArray[np.int32], seq_length: int) -> Int64Array:
    """Return the row of each piece. Rows are numbered in the order of their first pieces."""
    order = longest_first(lengths)
    rows = np.empty(len(lengths), np.int64)
    rows[order] = _best_fit(lengths[order], seq_length)
    # Best fit numbers rows by their longest piece. Renumber them by their first piece. Of several
    # assignments to one place NumPy keeps the last one, so the pieces are assigned in reverse order.
    pieces = np.arange(len(rows))
    first_pieces = np.empty(int(rows.max()) + 1, np.int64)
    first_pieces[rows[::-1]] = pieces[::-1]
    numbers = np.empty_like(first_pieces)
    numbers[np.argsort(first_pieces)] = np.arange(len(first_pieces))
    return numbers[rows]


def _best_fit(lengths: npt.NDArray[np.int32], seq_length: int) -> Int64Array:
    """Put each piece into the fullest row with enough room for it, or into a new row.

    Args:
        lengths: Lengths of the pieces, the longest first.
        seq_length: Length of a row in tokens.
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
    placed: list[Int64Array] = []
    for length, group_count in zip(lengths[group_starts].tolist(), counts.tolist()):
        count = group_count
        while count:
            room, rows = open_rows.take(length, count, seq_length)
            fitting = room // length
            placed.append(np.repeat(rows, fitting)[:count])
            n_missing = len(rows) * fitting - count
            if n_missing > 0:
                # The pieces of this length end before the last row is full.
                last = rows.pop()
                open_rows.add(room - (fitting - n_missing) * length, [last])
            open_rows.add(room - fitting * length, rows)
            count -= len(placed[-1])
    return np.concatenate(placed)


class _OpenRows:
    """Rows with room for another piece."""

    def __init__(self, shortest: int) -> None:
        """Start without rows.

        Args:
            shortest: Length of the shortest piece. A row with less room is full.
        """
        # `_rows` has the open rows by their free tokens. `_rooms` has its nonempty keys, ascending, so
        # that bisection finds the least sufficient room.
        self._shortest = shortest
        self._rows: defaultdict[int, list[int]] = defaultdict(list)
        self._rooms: list[int] = []
        self._n_rows = 0

    def take(self, length: int, count: int, seq_length: int) -> tuple[int, list[int]]:
        """Remove the rows for the next pieces of a length. New rows if none has enough room.

        Args:
            length: Length of the pieces.
            count: Maximum number of pieces.
            seq_length: Length of a row in tokens.

        Returns:
            The free tokens of each of the rows, and the rows in the order of their pieces.
        """
        best = bisect_left(self._rooms, length)
        if best == len(self._rooms):
            first_row = self._n_rows
            self._n_rows += _ceil_div(count, seq_length // length)
            return seq_length, list(range(first_row, self._n_rows))
        room = self._rooms[best]
        rows = self._rows[room]
        # The row that was added last is taken first.
        taken = rows[-_ceil_div(count, room // length) :]
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


def _ceil_div(dividend: int, divisor: int) -> int:
    """Return a quotient of positive numbers, rounded up."""
    return -(-dividend // divisor)
