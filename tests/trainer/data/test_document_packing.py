"""Tests of rows of whole documents: each token is in one row, and rows are those of best-fit decreasing."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from trainer.data import document_packing
from trainer.data.document_packing import WINDOW_DTYPE, DocumentRows, cut_documents, write_rows

LENGTHS = st.lists(st.integers(0, 25), max_size=30)
SEQ_LENGTH, WINDOW = st.integers(1, 9), st.integers(1, 12)


def index_of(
    blocks: list[npt.NDArray[np.int64]], seq_length: int, packing: str, window: int
) -> tuple[bytes, bytes]:
    """Return the two arrays of an index of rows."""
    windows, assignments = io.BytesIO(), io.BytesIO()
    write_rows(windows, assignments, lambda: blocks, seq_length, packing, window=window)
    return windows.getvalue(), assignments.getvalue()


def read_index(
    index: tuple[bytes, bytes], ends: npt.NDArray[np.int64], seq_length: int, packing: str
) -> DocumentRows:
    return DocumentRows(
        np.frombuffer(index[0], WINDOW_DTYPE),
        np.frombuffer(index[1], np.uint8),
        packing,
        ends=ends.astype(np.uint64),
        seq_length=seq_length,
        n_tokens=int(ends.max(initial=0)),
    )


def pack(
    lengths: npt.ArrayLike, seq_length: int, window: int, packing: str = "documents"
) -> DocumentRows:
    """Pack documents of these lengths."""
    ends = np.cumsum(lengths, dtype=np.int64)
    index = index_of([ends], seq_length, packing, window)
    return read_index(index, ends, seq_length, packing)


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
def test_padding_puts_each_piece_into_its_own_row(lengths: list[int], seq_length: int):
    rows = pack(lengths, seq_length, 5, "none")
    assert [rows.pieces(row) for row in range(rows.n_rows)] == [
        [piece] for piece in pieces_of(lengths, seq_length)
    ]


def test_documents_of_many_lengths_fill_almost_all_places():
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 20_000).astype(np.int64) + 1
    rows = pack(lengths, 512, document_packing.WINDOW)
    assert rows.fraction_with_token > 0.995
    assert rows.fraction_with_token * rows.n_rows * 512 == lengths.sum()


def test_rows_equal_the_rows_of_earlier_versions():
    """The order of a run depends on them. The digest is of the first version, which placed one piece at a time."""
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 20_000).astype(np.int64) + 1
    lengths = np.minimum(lengths, 512)
    packed = pack(lengths, 512, document_packing.WINDOW)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
    row_of = {start: row for row in range(packed.n_rows) for start, _ in packed.pieces(row)}
    rows = np.array([row_of[start] for start in starts])
    digest = xxhash.xxh3_128_hexdigest(rows.astype("<i8").tobytes())
    assert digest == "7164f689e1ebb2d29b87a0adeacb2775"


@given(LENGTHS, SEQ_LENGTH, WINDOW, st.lists(st.integers(0, 30), max_size=5), st.booleans())
def test_blocks_of_documents_give_the_rows_of_all_at_once(
    lengths: list[int], seq_length: int, window: int, cuts: list[int], is_padded: bool
):
    """Rows do not depend on how many documents are read together."""
    ends = np.cumsum(lengths, dtype=np.int64)
    packing = "none" if is_padded else "documents"
    index = index_of(np.split(ends, sorted(cuts)), seq_length, packing, window)
    assert index == index_of([ends], seq_length, packing, window)
    rows = read_index(index, ends, seq_length, packing)
    longest = min(max(lengths, default=0), seq_length)
    assert (rows.n_tokens, rows.max_length) == (sum(lengths), longest)


def test_cached_windows_give_the_same_rows(monkeypatch: pytest.MonkeyPatch):
    lengths = np.random.default_rng(0).integers(0, 9, 300)
    rows = pack(lengths, 8, 10)
    expected = [rows.pieces(row) for row in range(rows.n_rows)]
    monkeypatch.setattr(document_packing, "CACHED_WINDOWS", 1)
    uncached = pack(lengths, 8, 10)
    for row in np.random.default_rng(0).permutation(rows.n_rows).tolist():
        assert uncached.pieces(row) == expected[row]


def test_index_needs_an_eighth_byte_per_document():
    lengths = np.random.default_rng(0).lognormal(4.4, 0.8, 200_000).astype(np.int64) + 4
    index = index_of([np.cumsum(lengths)], 2048, "documents", document_packing.WINDOW)
    assert sum(map(len, index)) < len(lengths) / 8


def test_damaged_assignment_is_an_error():
    ends = np.cumsum([3, 4, 5])
    windows, assignments = index_of([ends], 6, "documents", 8)
    damaged = bytes(byte ^ 1 for byte in assignments)
    with pytest.raises(PrepError, match="the stored rows of the documents are damaged"):
        read_index((windows, damaged), ends, 6, "documents").pieces(0)


def test_one_document_of_many_pieces_needs_little_memory():
    """The document has 10^12 pieces. Only the pieces of the first window are made."""
    pieces = cut_documents([np.array([10**12])], 1, document_packing.WINDOW)
    assert next(pieces).starts.tolist() == list(range(document_packing.WINDOW))
