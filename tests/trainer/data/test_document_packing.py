"""Tests of rows of whole documents: each token is in one row, and rows are those of best-fit decreasing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import document_packing
from trainer.data.document_packing import (
    PackedRows,
    assign_rows,
    collect_rows,
    pack_documents,
    pad_documents,
)

LENGTHS = st.lists(st.integers(0, 25), max_size=30)
SEQ_LENGTH, WINDOW = st.integers(1, 9), st.integers(1, 12)


def pack(lengths: list[int], seq_length: int, window: int) -> PackedRows:
    """Pack documents of these lengths."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return collect_rows(pack_documents([ends], seq_length, window=window), seq_length)


def pieces_of(lengths: list[int], seq_length: int) -> list[tuple[int, int]]:
    """Return start and length of each piece of documents, cut one after another."""
    pieces, low = [], 0
    for length in lengths:
        pieces += [(low + i, min(seq_length, length - i)) for i in range(0, length, seq_length)]
        low += length
    return pieces


def reference_rows(
    pieces: list[tuple[int, int]], seq_length: int, window: int
) -> list[list[tuple[int, int]]]:
    """Return the pieces of each row: of a window the longest first, each into the fullest row with room for it."""
    all_rows: list[list[tuple[int, int]]] = []
    for low in range(0, len(pieces), window):
        rows: list[list[tuple[int, int]]] = []
        for piece in sorted(pieces[low : low + window], key=lambda piece: -piece[1]):
            fitting = [row for row in rows if room(row, seq_length) >= piece[1]]
            if fitting:
                min(fitting, key=lambda row: room(row, seq_length)).append(piece)
            else:
                rows.append([piece])
        all_rows += rows
    return all_rows


def room(row: list[tuple[int, int]], seq_length: int) -> int:
    """Return the places of a row without a token."""
    return seq_length - sum(length for _, length in row)


@given(LENGTHS, SEQ_LENGTH, WINDOW)
def test_each_token_is_in_one_row(lengths: list[int], seq_length: int, window: int):
    rows = pack(lengths, seq_length, window)
    pieces = [rows.pieces(row) for row in range(rows.n_rows)]
    assert sorted(piece for row in pieces for piece in row) == pieces_of(lengths, seq_length)
    assert all(row == sorted(row) and row and room(row, seq_length) >= 0 for row in pieces)


@given(LENGTHS, SEQ_LENGTH, WINDOW)
def test_rows_equal_best_fit_decreasing(lengths: list[int], seq_length: int, window: int):
    rows = pack(lengths, seq_length, window)
    expected = reference_rows(pieces_of(lengths, seq_length), seq_length, window)
    rooms = [sorted(room(rows.pieces(row), seq_length) for row in range(rows.n_rows))]
    assert rooms == [sorted(room(row, seq_length) for row in expected)]


@given(LENGTHS, SEQ_LENGTH, WINDOW)
def test_rows_keep_the_order_of_windows(lengths: list[int], seq_length: int, window: int):
    rows = pack(lengths, seq_length, window)
    numbers = {start: number for number, (start, _) in enumerate(pieces_of(lengths, seq_length))}
    windows = [
        {numbers[start] // window for start, _ in rows.pieces(row)} for row in range(rows.n_rows)
    ]
    assert all(len(window_numbers) == 1 for window_numbers in windows)
    firsts = [rows.pieces(row)[0][0] for row in range(rows.n_rows)]
    assert firsts == sorted(firsts) or len({*map(min, windows)}) > 1
    assert [*map(min, windows)] == sorted(map(min, windows))


@given(LENGTHS, SEQ_LENGTH)
def test_pad_documents_puts_each_piece_into_its_own_row(lengths: list[int], seq_length: int):
    rows = collect_rows(pad_documents([np.cumsum(lengths, dtype=np.int64)], seq_length), seq_length)
    assert [rows.pieces(row) for row in range(rows.n_rows)] == [
        [piece] for piece in pieces_of(lengths, seq_length)
    ]


def test_documents_of_many_lengths_fill_almost_all_places():
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 20_000).astype(np.int64) + 1
    rows = collect_rows(pack_documents([np.cumsum(lengths)], 512), 512)
    assert rows.fraction_with_token > 0.995
    assert rows.fraction_with_token * rows.n_rows * 512 == lengths.sum()


def test_rows_equal_the_rows_of_earlier_versions():
    """The order of a run depends on them. The digest is of the first version, which placed one piece at a time."""
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 20_000).astype(np.int64) + 1
    rows = assign_rows(np.minimum(lengths, 512).astype(np.int32), 512)
    digest = xxhash.xxh3_128_hexdigest(rows.astype("<i8").tobytes())
    assert digest == "7164f689e1ebb2d29b87a0adeacb2775"


def rows_at_once(
    ends: npt.NDArray[np.int64], seq_length: int, window: int, *, is_padded: bool
) -> list[list[Any]]:
    """Return starts, lengths and row ends, computed from arrays of all documents, as in earlier versions."""
    document_lengths = np.diff(ends, prepend=0)
    counts = -(-document_lengths // seq_length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(ends - document_lengths, counts) + number * seq_length
    lengths = np.minimum(seq_length, np.repeat(ends, counts) - starts)
    if is_padded:
        return [starts.tolist(), lengths.tolist(), list(range(1, len(starts) + 1))]
    order, row_ends = np.empty(len(starts), np.int64), [np.empty(0, np.int64)]
    for low in range(0, len(starts), window):
        rows = assign_rows(lengths[low : low + window].astype(np.int32), seq_length)
        order[low : low + window] = low + np.argsort(rows, kind="stable")
        row_ends.append(low + np.cumsum(np.bincount(rows)))
    return [starts[order].tolist(), lengths[order].tolist(), np.concatenate(row_ends).tolist()]


@given(LENGTHS, SEQ_LENGTH, WINDOW, st.lists(st.integers(0, 30), max_size=5), st.booleans())
def test_blocks_of_documents_give_the_rows_of_all_at_once(
    lengths: list[int], seq_length: int, window: int, cuts: list[int], is_padded: bool
):
    """Rows do not depend on how many documents are read together."""
    ends = np.cumsum(lengths, dtype=np.int64)
    make = pad_documents if is_padded else pack_documents
    rows = collect_rows(make(np.split(ends, sorted(cuts)), seq_length, window=window), seq_length)
    found = [rows.starts.tolist(), rows.lengths.tolist(), rows.ends.tolist()]
    assert found == rows_at_once(ends, seq_length, window, is_padded=is_padded)
    assert (rows.n_tokens, rows.max_length) == (sum(lengths), max(rows.lengths, default=0))
    assert (rows.starts.dtype, rows.lengths.dtype, rows.ends.dtype) == (
        np.int64,
        np.int32,
        np.int64,
    )


def test_one_document_of_many_pieces_needs_little_memory():
    """The document has 10^12 pieces. Only the pieces of the first rows are made."""
    blocks = pack_documents([np.array([10**12])], 1)
    assert next(blocks).ends.tolist() == list(range(1, document_packing.WINDOW + 1))
