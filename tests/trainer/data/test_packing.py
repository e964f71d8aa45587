"""Datasets of blocks, documents and windows: each token is in one row, and no target crosses a document."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from trainer.data import document_packing
from trainer.data.document_packing import WINDOW_DTYPE, DocumentRows, cut_documents, write_rows
from trainer.data.packing import (
    Arrays,
    ColumnSpecs,
    ConcatenatedDataset,
    DocumentDataset,
    PackedDataset,
    RowIndices,
    document_dataset,
    split_holdout,
    with_stride,
)
from trainer.data.store import MappedTokens

# Packed datasets: compare with concatenating and cutting token by token.


def make_tokens(documents: list[list[int]], seq_length: int, dtype: str = "<u2") -> MappedTokens:
    """Return documents as a token store."""
    ids = np.array([token for document in documents for token in document], dtype)
    ends = np.cumsum([len(document) for document in documents]).astype("<u8")
    return MappedTokens(ids=ids, ends=ends, identity="x", seq_length=seq_length)


def make_blocks(documents: list[list[int]], seq_length: int) -> PackedDataset:
    """Return all blocks of documents."""
    tokens = make_tokens(documents, seq_length)
    return PackedDataset(tokens, first_row=0, n_rows=tokens.n_blocks)


def reference_blocks(documents: list[list[int]], seq_length: int) -> list[list[int]]:
    """Return the blocks of documents, filled token by token."""
    blocks, block = [], []
    for document in documents:
        for token in document:
            block.append(token)
            if len(block) == seq_length:
                blocks.append(block)
                block = []
    return blocks


DOCUMENTS = st.lists(st.lists(st.integers(0, 60000), max_size=9), min_size=1, max_size=20)


@given(DOCUMENTS, st.integers(2, 7))
def test_packed_dataset_matches_reference_blocks(documents: list[list[int]], seq_length: int):
    blocks, evaluation = split_holdout(make_blocks(documents, seq_length), 0)
    expected = reference_blocks(documents, seq_length)
    assert evaluation is None
    assert blocks.n_rows == len(expected)
    assert blocks.get_batch(range(blocks.n_rows))["tokens"].tolist() == expected


WEIGHTED = st.lists(st.tuples(st.integers(0, 60000), st.integers(0, 1)), min_size=7, max_size=60)


@given(WEIGHTED, st.integers(2, 7), st.data())
def test_position_has_the_loss_weight_of_its_target(
    stored: list[tuple[int, int]], seq_length: int, data: st.DataObject
):
    ids, weights = zip(*stored)
    tokens = replace(make_tokens([[*ids]], seq_length), weight_codes=np.array(weights, np.uint8))
    rows = data.draw(st.lists(st.integers(-1, tokens.n_blocks - 1), max_size=5))
    batch = PackedDataset(tokens, first_row=0, n_rows=tokens.n_blocks).get_batch(rows)
    assert batch["weights"].dtype == np.float32
    for i, row in enumerate(rows):
        start = row * seq_length
        expected = [0] * seq_length if row < 0 else [*weights[start + 1 : start + seq_length], 0]
        assert batch["weights"][i].tolist() == expected


@given(DOCUMENTS, st.integers(2, 7))
def test_first_input_replaces_the_first_token_of_blocks(
    documents: list[list[int]], seq_length: int
):
    plain = make_blocks(documents, seq_length)
    rows = [-1, *range(plain.n_rows)]
    expected, batch = plain.get_batch(rows), replace(plain, first_input=9).get_batch(rows)
    expected["tokens"][1:, 0] = 9
    assert all((batch[name] == expected[name]).all() for name in expected)


@given(st.integers(2, 200), st.floats(0.01, 0.99))
def test_split_holdout_keeps_blocks_in_order(n: int, holdout: float):
    blocks = make_blocks([list(range(n * 3 + 1))], 3)
    if not 0 < round(n * holdout) < n:
        with pytest.raises(PrepError):
            split_holdout(blocks, holdout)
        return
    train, evaluation = split_holdout(blocks, holdout)
    assert evaluation is not None
    assert evaluation.n_rows == round(n * holdout)
    rows = [
        row
        for part in (train, evaluation)
        for row in part.get_batch(range(part.n_rows))["tokens"].tolist()
    ]
    assert rows == reference_blocks([list(range(n * 3))], 3)


@pytest.mark.parametrize(
    ("holdout", "what", "why"),
    [
        (0.1, "no sequence is left to evaluate on", "holdout 0.1 of 4 sequences is 0"),
        (0.9, "no sequence is left to train on", "holdout 0.9 of 4 sequences is 4"),
    ],
)
def test_split_holdout_rejects_empty_part(holdout: float, what: str, why: str):
    with pytest.raises(PrepError) as caught:
        split_holdout(make_blocks([[1] * 8], 2), holdout)
    assert (caught.value.what, caught.value.why) == (what, why)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_packed_dataset_returns_int32_tokens(dtype: str):
    blocks = PackedDataset(
        make_tokens([[*range(65526, 65536), 9]], 2, dtype), first_row=1, n_rows=4
    )
    tokens = blocks.get_batch([3, 0, 3])["tokens"]
    assert tokens.dtype == np.int32
    assert type(tokens) is np.ndarray
    assert tokens.tolist() == [[65534, 65535], [65528, 65529], [65534, 65535]]


@pytest.mark.parametrize("row", [-2, 2])
def test_packed_dataset_rejects_rows_out_of_range(row: int):
    with pytest.raises(IndexError):
        PackedDataset(make_tokens([[1] * 8], 2), first_row=1, n_rows=2).get_batch([0, row])


def test_packed_dataset_shifts_targets_and_weights_them():
    blocks = make_blocks([[1, 2, 3, 4, 5, 6]], 3)
    batch = blocks.get_batch([1, -1, 0])
    assert {name: (array.dtype.name, array.tolist()) for name, array in batch.items()} == {
        "tokens": ("int32", [[4, 5, 6], [0, 0, 0], [1, 2, 3]]),
        "targets": ("int32", [[5, 6, 0], [0, 0, 0], [2, 3, 0]]),
        "weights": ("float32", [[1, 1, 0], [0, 0, 0], [1, 1, 0]]),
    }


class Numbers:
    """A dataset whose rows are consecutive numbers."""

    first_row, seq_length = 0, 1

    def __init__(self, first: int, n_rows: int) -> None:
        self.first, self.n_rows = first, n_rows

    @property
    def columns(self) -> ColumnSpecs:
        return {"tokens": (1, np.dtype(np.int32))}

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        return {"tokens": np.array([[self.first + row] for row in rows], np.int32)}


def test_concatenated_dataset_has_the_rows_of_its_parts():
    dataset = ConcatenatedDataset({"a": Numbers(100, 3), "b": Numbers(200, 2)})
    assert dataset.n_rows == 5
    assert dataset.get_batch([4, 0, -1, 2, 3])["tokens"].ravel().tolist() == [201, 100, 0, 102, 200]
    with pytest.raises(IndexError):
        dataset.get_batch([5])


# Tests of rows of whole documents: each token is in one row, and rows are those of best-fit decreasing.

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


# Tests of batches of whole documents: no target, segment or position crosses a document.

DOCUMENTS_WITH_TOKENS = st.lists(
    st.lists(st.integers(1, 60000), max_size=15), min_size=1, max_size=15
).filter(any)

PACKINGS = st.sampled_from(["documents", "none"])


def make_dataset(
    documents: list[list[int]], seq_length: int, packing: str, seed: int = 0
) -> DocumentDataset:
    """Return all rows of documents, with random loss weights."""
    tokens = make_tokens(documents, seq_length)
    weights = np.random.default_rng(seed).integers(0, 2, tokens.n_tokens).astype(np.uint8)
    return document_dataset(replace(tokens, weight_codes=weights), packing)


def expected_pieces(dataset: DocumentDataset) -> list[list[tuple[int, int, int]]]:
    """Return token, target and weight of the tokens of each piece of a document, from the store."""
    tokens, pieces, low = dataset.tokens, [], 0
    assert tokens.weight_codes is not None
    for end in tokens.ends[:].tolist():
        for start in range(low, end, dataset.seq_length):
            stop = min(end, start + dataset.seq_length)
            ids, weights = tokens.ids[start:stop].tolist(), tokens.weight_codes[start:stop].tolist()
            pieces.append([*zip(ids, [*ids[1:], 0], [*weights[1:], 0])])
        low = end
    return pieces


@given(DOCUMENTS_WITH_TOKENS, st.integers(2, 9), PACKINGS)
def test_batches_have_each_piece_once(documents: list[list[int]], seq_length: int, packing: str):
    dataset = make_dataset(documents, seq_length, packing)
    batch = dataset.get_batch(range(dataset.n_rows))
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        name: ((dataset.n_rows, length), dtype) for name, (length, dtype) in dataset.columns.items()
    }
    segment_ids = batch.get("segment_ids", (batch["tokens"] > 0).astype(np.int32))
    pieces = []
    for row in range(dataset.n_rows):
        for segment in range(1, segment_ids[row].max() + 1):
            (columns,) = np.nonzero(segment_ids[row] == segment)
            assert (np.diff(columns) == 1).all()
            if "positions" in batch:
                assert batch["positions"][row, columns].tolist() == [*range(len(columns))]
            pieces.append(
                [
                    *zip(
                        *(
                            batch[name][row, columns].tolist()
                            for name in ("tokens", "targets", "weights")
                        )
                    )
                ]
            )
    assert sorted(pieces) == sorted(expected_pieces(dataset))
    assert not any(array[segment_ids == 0].any() for array in batch.values())


@given(DOCUMENTS_WITH_TOKENS, st.integers(2, 9), PACKINGS, st.data())
def test_rows_do_not_depend_on_the_batch(
    documents: list[list[int]], seq_length: int, packing: str, data: st.DataObject
):
    dataset, again = (make_dataset(documents, seq_length, packing) for _ in range(2))
    rows = data.draw(st.lists(st.integers(-1, dataset.n_rows - 1), max_size=5))
    batch = dataset.get_batch(rows)
    for i, row in enumerate(rows):
        for name, array in again.get_batch([row]).items():
            np.testing.assert_array_equal(batch[name][i], array[0])
    with pytest.raises(IndexError):
        dataset.get_batch([dataset.n_rows])


def test_first_input_replaces_the_first_token_of_each_piece():
    tokens = make_tokens([[1, 2, 3, 4, 5], [6], [7, 8]], 3)
    batch = document_dataset(tokens, "documents", first_input=9).get_batch(range(3))
    assert batch["tokens"].tolist() == [[9, 2, 3], [9, 5, 0], [9, 9, 8]]
    assert batch["targets"].tolist() == [[2, 3, 0], [5, 0, 0], [0, 8, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 2, 2]]
    assert batch["weights"].tolist() == [[1, 1, 0], [1, 0, 0], [0, 1, 0]]


def test_split_holdout_takes_the_last_rows():
    dataset = document_dataset(make_tokens([[n] * 3 for n in range(1, 21)], 3), "documents")
    train, evaluation = split_holdout(dataset, 0.2)
    assert evaluation is not None
    assert (train.n_rows, evaluation.n_rows) == (16, 4)
    assert evaluation.get_batch([0])["tokens"].tolist() == [[17, 17, 17]]


# Windows with a stride: each token is a target once, as in the perplexity of transformers' documentation.


def make_one_document(count: int, length: int, weights: np.ndarray | None = None) -> MappedTokens:
    ids = np.arange(100, 100 + count).astype("<u2")
    return MappedTokens(ids, np.array([count], "<u8"), "identity", length, weights)


def documented_targets(count: int, length: int, stride: int) -> list[list[int]]:
    """Return the targets of each window by the loop of transformers' page "Perplexity of fixed-length models"."""
    windows: list[list[int]] = []
    previous_end = 0
    for begin in range(0, count, stride):
        end = min(begin + length, count)
        # The first token of a window has no token before it: the model shifts labels by one.
        windows.append(list(range(max(previous_end, begin + 1), end)))
        previous_end = end
        if end == count:
            break
    return windows


@given(st.integers(2, 60), st.integers(2, 12), st.data())
def test_windows_have_the_documented_targets(count: int, length: int, data: st.DataObject):
    stride = data.draw(st.integers(1, length))
    tokens = make_one_document(count, length)
    dataset = with_stride(PackedDataset(tokens, 0, tokens.n_blocks), stride)
    expected = documented_targets(count, length, stride)
    assert dataset.n_rows == len(expected)
    batch = dataset.get_batch(range(dataset.n_rows))
    for row, targets in enumerate(expected):
        mask = batch["weights"][row] > 0
        assert (batch["targets"][row][mask] - 100).tolist() == targets
        begin = row * stride
        end = min(begin + length, count)
        assert (batch["tokens"][row][: end - begin] - 100).tolist() == [*range(begin, end)]


def test_windows_of_the_last_blocks_start_at_their_first_token():
    tokens = make_one_document(23, 4)
    dataset = with_stride(PackedDataset(tokens, first_row=3, n_rows=2), 3)
    batch = dataset.get_batch([0, dataset.n_rows - 1, -1])
    assert batch["tokens"][0].tolist() == [112, 113, 114, 115]
    assert batch["targets"][1][batch["weights"][1] > 0].tolist()[-1] == 122
    assert not batch["tokens"][2].any()


def test_windows_keep_the_weights_of_the_store():
    weights = (np.arange(11) % 2).astype(np.uint8)
    tokens = make_one_document(11, 4, weights)
    dataset = with_stride(PackedDataset(tokens, 0, tokens.n_blocks), 2)
    batch = dataset.get_batch(range(dataset.n_rows))
    targets = np.sort(batch["targets"][batch["weights"] > 0] - 100)
    assert targets.tolist() == [1, 3, 5, 7, 9]
