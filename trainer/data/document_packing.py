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

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
# Pieces packed together. The number is part of the identity of stored rows.
WINDOW = 1 << 16
# Documents read together: 2 MiB of ends.
BLOCK_DOCUMENTS = 1 << 18


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


def _join_pieces(pieces: list[Pieces]) -> Pieces:
    starts = np.concatenate([part.starts for part in pieces])
    return Pieces(starts, np.concatenate([part.lengths for part in pieces]))


def assign_rows(lengths: npt.NDArray[np.int32], seq_length: int) -> Int64Array:
    """Return the row of each piece. Rows are numbered in the order of their first pieces."""
    rows = _best_fit(np.argsort(-lengths, kind="stable").tolist(), lengths.tolist(), seq_length)
    # Best fit numbers rows by the size of their largest piece. Renumber them by their first piece:
    # the outer argsort turns the order of the rows into the rank of each row.
    _, first_pieces = np.unique(rows, return_index=True)
    return np.argsort(np.argsort(first_pieces))[rows]


def _best_fit(order: list[int], lengths: list[int], seq_length: int) -> Int64Array:
    """Put each piece into the fullest row with enough room for it, or into a new row."""
    # E.g. rows of 8 and pieces of 5, 3, 6 and 2 tokens, longest first: 6 opens row 0 (2 free), 5 opens
    # row 1 (3 free), 3 fills row 1, and 2 fills row 0. The rows of the pieces are [1, 1, 0, 0], and
    # numbered by their first pieces [0, 0, 1, 1].
    rows = np.empty(len(order), np.int64)
    n_rows = 0
    shortest = lengths[order[-1]]
    rows_by_room: defaultdict[int, list[int]] = defaultdict(list)
    # `rows_by_room` has the open rows by their free tokens. `rooms` has its nonempty keys,
    # ascending, so that bisection finds the least sufficient room. A room has at most seq_length
    # values, so time is linear in the pieces for a fixed seq_length.
    rooms: list[int] = []
    for piece in order:
        length = lengths[piece]
        best = bisect_left(rooms, length)
        if best == len(rooms):
            row = n_rows
            room = seq_length
            n_rows = n_rows + 1
        else:
            room = rooms[best]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rooms[best]
        rows[piece] = row
        room = room - length
        # A row with less room than the shortest piece stays as it is. Leaving it out keeps `rooms`
        # short.
        if room >= shortest:
            if not rows_by_room[room]:
                insort(rooms, room)
            rows_by_room[room].append(row)
    return rows
