"""Rows of whole documents: a pure function of the lengths of the documents and of the rows.

A document that is longer than a row is cut into pieces, each as long as a row but the last. Pieces are packed by
best-fit decreasing (Johnson 1974, https://doi.org/10.1137/0203025; for training, Ding et al. 2024,
https://arxiv.org/abs/2404.10830): the longest first, each into the row with the least room for it. Windows of
consecutive pieces are packed one by one, so that rows keep the order of the data roughly, and time is linear.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
WINDOW = 1 << 16  # pieces packed together


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """The pieces of each row, 20 bytes per piece.

    Attributes:
        starts: First token of each piece in the store, int64; the pieces of a row are in the order of the data.
        lengths: Tokens of each piece, int32, at least 1.
        ends: End of each row in `starts` and `lengths`, int64.
        seq_length: Length of a row in tokens.
    """

    starts: Int64Array
    lengths: npt.NDArray[np.int32]
    ends: Int64Array
    seq_length: int

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.ends)

    @property
    def efficiency(self) -> float:
        """Fraction of the places with a token, of all rows."""
        return int(self.lengths.sum(dtype=np.int64)) / (self.n_rows * self.seq_length)

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return start and length of each piece of a row."""
        low = int(self.ends[row - 1]) if row else 0
        row_slice = slice(low, int(self.ends[row]))
        return list(zip(self.starts[row_slice].tolist(), self.lengths[row_slice].tolist()))


def pack_documents(ends: npt.NDArray[np.uint64], seq_length: int, *, window: int = WINDOW) -> PackedRows:
    """Pack documents into rows of `seq_length` tokens; each token is in one row.

    Args:
        ends: End of each document, in tokens.
        seq_length: Length of a row in tokens.
        window: Number of consecutive pieces to pack together.
    """
    starts, lengths = cut_documents(ends, seq_length)
    order, row_ends = np.empty(len(starts), np.int64), [np.empty(0, np.int64)]
    for low in range(0, len(starts), window):
        rows = assign_rows(lengths[low : low + window], seq_length)
        order[low : low + window] = low + np.argsort(rows, kind="stable")
        row_ends.append(low + np.cumsum(np.bincount(rows)))
    return PackedRows(starts[order], lengths[order], np.concatenate(row_ends), seq_length)


def pad_documents(ends: npt.NDArray[np.uint64], seq_length: int) -> PackedRows:
    """Return rows of one document each, or of one piece of a document that is longer than a row."""
    starts, lengths = cut_documents(ends, seq_length)
    return PackedRows(starts, lengths, np.arange(1, len(starts) + 1), seq_length)


def cut_documents(ends: npt.NDArray[np.uint64], seq_length: int) -> tuple[Int64Array, npt.NDArray[np.int32]]:
    """Cut documents into pieces of at most `seq_length` tokens; return the start and the length of each piece."""
    document_ends = ends.astype(np.int64)
    document_lengths = np.diff(document_ends, prepend=0)
    counts = -(-document_lengths // seq_length)
    first_pieces = np.cumsum(counts) - counts
    number = np.arange(counts.sum()) - np.repeat(first_pieces, counts)  # of a piece in its document
    starts = np.repeat(document_ends - document_lengths, counts) + number * seq_length
    lengths = np.minimum(seq_length, np.repeat(document_ends, counts) - starts)
    return starts, lengths.astype(np.int32)


def assign_rows(lengths: npt.NDArray[np.int32], seq_length: int) -> Int64Array:
    """Return the row of each piece; rows are in the order of their first pieces."""
    rows = _best_fit(np.argsort(-lengths, kind="stable").tolist(), lengths.tolist(), seq_length)
    _, first_pieces = np.unique(rows, return_index=True)
    return np.argsort(np.argsort(first_pieces))[rows]


def _best_fit(order: list[int], lengths: list[int], seq_length: int) -> Int64Array:
    """Put pieces in this order into the row with the least room for each, or else into a new row."""
    rows, n_rows, shortest = np.empty(len(order), np.int64), 0, lengths[order[-1]]
    rows_by_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # the keys of `rows_by_room` that have rows, ascending
    for piece in order:
        length = lengths[piece]
        best = bisect_left(rooms, length)
        if best == len(rooms):
            row, room, n_rows = n_rows, seq_length, n_rows + 1
        else:
            room = rooms[best]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rooms[best]
        rows[piece], room = row, room - length
        if room >= shortest:
            if not rows_by_room[room]:
                insort(rooms, room)
            rows_by_room[room].append(row)
    return rows
