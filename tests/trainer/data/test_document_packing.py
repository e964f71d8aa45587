"""Tests of rows of whole documents: each token is in one row, and rows are those of best-fit decreasing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.document_packing import PackedRows, pack_documents, pad_documents

LENGTHS = st.lists(st.integers(0, 25), max_size=30)
SEQ_LENGTH, WINDOW = st.integers(1, 9), st.integers(1, 12)


def pack(lengths: list[int], seq_length: int, window: int) -> PackedRows:
    """Pack documents of these lengths."""
    return pack_documents(np.cumsum(lengths, dtype=np.uint64), seq_length, window=window)


def pieces_of(lengths: list[int], seq_length: int) -> list[tuple[int, int]]:
    """Return start and length of each piece of documents, cut one after another."""
    pieces, low = [], 0
    for length in lengths:
        pieces += [(low + i, min(seq_length, length - i)) for i in range(0, length, seq_length)]
        low += length
    return pieces


def reference_rows(pieces: list[tuple[int, int]], seq_length: int, window: int) -> list[list[tuple[int, int]]]:
    """Return the pieces of each row: the longest of a window first, each into the row with the least room for it."""
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
def test_rows_are_those_of_best_fit_decreasing(lengths: list[int], seq_length: int, window: int):
    rows = pack(lengths, seq_length, window)
    expected = reference_rows(pieces_of(lengths, seq_length), seq_length, window)
    rooms = [sorted(room(rows.pieces(row), seq_length) for row in range(rows.n_rows))]
    assert rooms == [sorted(room(row, seq_length) for row in expected)]


@given(LENGTHS, SEQ_LENGTH, WINDOW)
def test_rows_keep_the_order_of_windows(lengths: list[int], seq_length: int, window: int):
    rows = pack(lengths, seq_length, window)
    numbers = {start: number for number, (start, _) in enumerate(pieces_of(lengths, seq_length))}
    windows = [{numbers[start] // window for start, _ in rows.pieces(row)} for row in range(rows.n_rows)]
    assert all(len(window_numbers) == 1 for window_numbers in windows)
    firsts = [rows.pieces(row)[0][0] for row in range(rows.n_rows)]
    assert firsts == sorted(firsts) or len({*map(min, windows)}) > 1
    assert [*map(min, windows)] == sorted(map(min, windows))


@given(LENGTHS, SEQ_LENGTH)
def test_rows_of_a_document_each_have_all_tokens_in_order(lengths: list[int], seq_length: int):
    rows = pad_documents(np.cumsum(lengths, dtype=np.uint64), seq_length)
    assert [rows.pieces(row) for row in range(rows.n_rows)] == [[piece] for piece in pieces_of(lengths, seq_length)]


def test_documents_of_many_lengths_fill_almost_all_places():
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 20_000).astype(np.int64) + 1
    rows = pack_documents(np.cumsum(lengths).astype(np.uint64), 512)
    assert rows.efficiency > 0.995
    assert rows.efficiency * rows.n_rows * 512 == lengths.sum()
