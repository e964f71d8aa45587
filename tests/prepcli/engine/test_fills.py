"""New rows: zeros, means in float64 rounded once, and seeded normal values, independent of slab boundaries."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.engine.fills import (
    GROUP_ROWS,
    Fill,
    FillGenerator,
    mean_source_number,
    normal_row,
    numpy_dtype,
    round_to_dtype,
)
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import Slab
from tests.helpers.plans import flat

DTYPES = ["float32", "float16", "bfloat16"]


def nearest(value: float, dtype: str) -> float:
    """Return the value of a 16-bit dtype nearest to a value, ties to even, computed with exact fractions."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    infinity = int(np.array(np.inf, numpy_dtype(dtype)).view(np.uint16))
    patterns = patterns[patterns & 0x7FFF < infinity]
    values = patterns.view(numpy_dtype(dtype)).astype(np.float64)
    candidates = np.argsort(np.abs(values - value), kind="stable")[:4]
    best = min(
        candidates,
        key=lambda i: (abs(Fraction(float(values[i])) - Fraction(value)), int(patterns[i]) & 1),
    )
    return float(values[best])


@given(st.sampled_from(["float16", "bfloat16"]), st.data())
def test_round_to_dtype_rounds_once(dtype: str, data):
    numpy_type = numpy_dtype(dtype)
    low = data.draw(st.integers(0, 0x7000)).to_bytes(2, "little")
    a = float(np.frombuffer(low, numpy_type).astype(np.float64)[0])
    b = float((np.frombuffer(low, np.uint16) + 1).view(numpy_type).astype(np.float64)[0])
    middle = (a + b) / 2  # exact
    offset = data.draw(
        st.sampled_from([0.0, 2.0**-52, -(2.0**-52), 2.0**-30, -(2.0**-30), 0.1, -0.1])
    )
    value = (middle + offset * (b - a)) * data.draw(st.sampled_from([1, -1]))
    assert float(round_to_dtype(np.array([value]), numpy_type).astype(np.float64)[0]) == nearest(
        value, dtype
    )


def test_round_to_dtype_avoids_double_rounding():
    values = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8, 1 + 2**-8 - 2**-40, 1 + 3 * 2**-8 - 2**-40])
    rows = round_to_dtype(values, numpy_dtype("bfloat16")).astype(np.float64)
    assert rows.tolist() == [1 + 2**-7, 1.0, 1.0, 1 + 2**-7]


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_to_dtype_keeps_exact_values(dtype: str):
    values = np.array(
        [0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan, float(np.finfo(np.float32).tiny)]
    )
    exact = values.astype(numpy_dtype(dtype))
    assert round_to_dtype(exact.astype(np.float64), exact.dtype).tobytes() == exact.tobytes()


def padded_streams(
    dtype: str, true_rows: int, rows: int, columns: int, fill: Fill
) -> tuple[Stream, Stream]:
    shape = (rows, columns)
    location = (flat(dtype, shape),)
    return (
        Stream("w", dtype, shape, (0, true_rows), location, location),
        Stream("w", dtype, shape, (true_rows, rows), (), location, (fill,)),
    )


def generate_rows(
    streams: Sequence[Stream], table: np.ndarray, cuts: Sequence[int], out_cuts: Sequence[int] = ()
) -> np.ndarray:
    """Generate the rows of the last stream after adding the first stream in pieces that end at `cuts`."""
    fills, data = FillGenerator(streams), table.reshape(-1).view(np.uint8)
    for low, high in itertools.pairwise([0, *sorted(cuts), data.size]):
        if low < high:
            fills.add_slab(Slab(0, low, high - low, (), ()), data[low:high])
    start, stop = streams[-1].byte_range
    pieces = []
    for low, high in itertools.pairwise([start, *sorted(out_cuts), stop]):
        pieces.append(
            fills.make_rows(
                Slab(len(streams) - 1, low, high - low, (), ()), np.empty(high - low, np.uint8)
            )
        )
    return np.concatenate(pieces).view(table.dtype).reshape(-1, table.shape[1])


@given(
    st.sampled_from(DTYPES),
    st.sampled_from([1, 5, GROUP_ROWS - 1, GROUP_ROWS, GROUP_ROWS + 1, 3 * GROUP_ROWS + 7]),
    st.data(),
)
def test_mean_is_exact_for_any_slab_boundaries(dtype: str, true_rows: int, data):
    numpy_type, columns = numpy_dtype(dtype), 3
    # These values are multiples of a power of two, so their sums are exact.
    table = (np.random.default_rng(true_rows).integers(-64, 64, (true_rows, columns)) / 32).astype(
        numpy_type
    )
    streams = padded_streams(dtype, true_rows, true_rows + 4, columns, Fill("mean"))
    low, high = streams[1].byte_range
    cuts = data.draw(st.lists(st.integers(0, table.nbytes), max_size=6))
    out_cuts = data.draw(st.lists(st.integers(low, high), max_size=3, unique=True))
    rows = generate_rows(streams, table, cuts, [cut for cut in out_cuts if low < cut < high])
    mean = table.astype(np.float64).sum(axis=0) / true_rows
    expected = (
        round_to_dtype(mean, numpy_type)
        if dtype == "float32"
        else [nearest(value, dtype) for value in mean]
    )
    assert np.array_equal(
        rows.astype(np.float64), np.tile(np.asarray(expected, np.float64), (4, 1))
    )


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 200 * 14), max_size=8))
def test_mean_does_not_depend_on_slab_boundaries(dtype: str, cuts: list[int]):
    table = (np.random.default_rng(3).standard_normal((200, 7)) * 1e3).astype(numpy_dtype(dtype))
    streams = padded_streams(dtype, 200, 203, 7, Fill("mean"))
    whole = generate_rows(streams, table, [])
    assert generate_rows(streams, table, cuts).tobytes() == whole.tobytes()
    np.testing.assert_allclose(
        whole[0].astype(np.float64),
        table.astype(np.float64).mean(0),
        rtol=2**-8 if dtype == "bfloat16" else 2**-10,
    )


def test_mean_is_summed_in_groups_of_64_rows():
    """Another size of groups would change the bits of outputs, and half-done outputs could not be resumed."""
    table = np.zeros((66, 1))
    table[0] = 2.0**53
    # Added to 2^53 one by one, both are rounded away. As a group of their own they add 2.
    table[64:] = 1
    streams = padded_streams("float64", 66, 67, 1, Fill("mean"))
    assert generate_rows(streams, table, []).tolist() == [[(2.0**53 + 2) / 66]]


def test_mean_of_float16_does_not_overflow():
    table = np.full((70, 2), 60_000, np.float16)
    assert (
        generate_rows(padded_streams("float16", 70, 72, 2, Fill("mean")), table, [101]).tolist()
        == [[60_000, 60_000]] * 2
    )


def test_mean_is_computed_per_tensor():
    streams = [
        *padded_streams("float32", 2, 3, 2, Fill("mean")),
        *padded_streams("float32", 2, 3, 2, Fill("mean")),
    ]
    fills, size = FillGenerator(streams), 16
    for number, value in ((0, 1.0), (2, 5.0)):
        fills.add_slab(
            Slab(number, 0, size, (), ()),
            np.full((2, 2), value, np.float32).reshape(-1).view(np.uint8),
        )
        row = fills.make_rows(Slab(number + 1, size, 8, (), ()), np.empty(8, np.uint8))
        assert row.view(np.float32).tolist() == [value, value]


def test_mean_source_skips_stored_padding():
    true_rows, padding = padded_streams("float32", 4, 9, 2, Fill("mean"))
    location = (flat("float32", (9, 2)),)
    stored_padding = Stream("w", "float32", (9, 2), (4, 6), location, location)
    new_padding = Stream("w", "float32", (9, 2), (6, 9), (), location, (Fill("mean"),))
    assert mean_source_number([true_rows, stored_padding, new_padding], 2) == 0
    assert mean_source_number([true_rows, padding, true_rows, padding], 3) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_rows_depend_on_seed_and_row_only(dtype: str):
    def rows(true_rows: int, seed: int, out_cuts: Sequence[int] = ()) -> np.ndarray:
        table = np.zeros((true_rows, 8), numpy_dtype(dtype))
        return generate_rows(
            padded_streams(dtype, true_rows, 20, 8, Fill("normal", seed, 0.5)), table, [], out_cuts
        )

    first = rows(10, 7)
    row_nbytes = 8 * first.itemsize
    assert rows(10, 7, [13 * row_nbytes + 3, 13 * row_nbytes + 5]).tobytes() == first.tobytes()
    assert rows(14, 7).tobytes() == first[4:].tobytes()
    assert rows(10, 8).tobytes() != first.tobytes()
    assert len({row.tobytes() for row in first}) == 10
    assert 0.3 < first.astype(np.float64).std() < 0.7


def test_normal_rows_use_philox():
    fill = Fill("normal", 5, 0.02)
    (_, padding) = padded_streams("float32", 2, 4, 3, fill)
    generator = np.random.Generator(np.random.Philox(key=[5, 3]))
    assert (
        normal_row(padding, fill, 3).tolist()
        == (generator.standard_normal(3) * 0.02).astype(np.float32).tolist()
    )


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_normal_rows_differ_for_64_bit_seeds(seed: int):
    fill = Fill("normal", seed, 1.0)
    other = Fill("normal", seed ^ 1, 1.0)
    (_, padding) = padded_streams("float32", 2, 4, 3, fill)
    assert normal_row(padding, fill, 3).tolist() != normal_row(padding, other, 3).tolist()


def test_make_rows_rejects_missing_fill_or_mean():
    streams = padded_streams("float32", 2, 4, 2, Fill("mean"))
    with pytest.raises(ValueError, match="before its rows were added"):
        FillGenerator(streams).make_rows(Slab(1, 16, 8, (), ()), np.empty(8, np.uint8))
    with pytest.raises(ValueError, match="neither read nor filled"):
        FillGenerator(streams).make_rows(Slab(0, 0, 8, (), ()), np.empty(8, np.uint8))


@given(st.sampled_from(DTYPES), st.data())
def test_pieces_are_averaged_for_any_slab_boundaries(dtype: str, data):
    numpy_type, true_rows, columns = numpy_dtype(dtype), 9, 3
    table = np.random.default_rng(0).standard_normal((true_rows, columns)).astype(numpy_type)
    piece = st.integers(0, true_rows - 1)
    pieces = data.draw(st.lists(st.lists(piece, min_size=1, max_size=4), min_size=1, max_size=5))
    fill = Fill("pieces", pieces=tuple(map(tuple, pieces)))
    streams = padded_streams(dtype, true_rows, true_rows + len(pieces), columns, fill)
    low, high = streams[1].byte_range
    cuts = data.draw(st.lists(st.integers(0, table.nbytes), max_size=6))
    out_cuts = data.draw(st.lists(st.integers(low + 1, high - 1), max_size=3, unique=True))
    rows = generate_rows(streams, table, cuts, out_cuts)
    expected = [table[list(ids)].astype(np.float64).mean(axis=0) for ids in pieces]
    assert rows.tobytes() == round_to_dtype(np.stack(expected), numpy_type).tobytes()


def test_pieces_need_their_true_rows():
    streams = padded_streams("float32", 2, 3, 2, Fill("pieces", pieces=((0, 1),)))
    slab = Slab(1, 16, 8, (), ())
    with pytest.raises(ValueError, match="is needed before its rows were added"):
        FillGenerator(streams).make_rows(slab, np.empty(8, np.uint8))


def test_kept_nbytes_counts_each_piece_once():
    streams = padded_streams("float32", 9, 12, 4, Fill("pieces", pieces=((1, 2), (2,), (8, 1, 1))))
    assert streams[1].kept_nbytes == 3 * 4 * 4
    assert streams[0].kept_nbytes == 0


def test_mean_of_repeated_pieces_takes_little_memory():
    num_columns = 1024
    fill = Fill("pieces", pieces=((1,) * 20_000,))
    streams = padded_streams("float32", 2, 3, num_columns, fill)
    table = np.full((2, num_columns), 0.5, np.float32)
    tracemalloc.start()
    try:
        rows = generate_rows(streams, table, [])
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (rows == 0.5).all()
    assert peak_nbytes < 1 << 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [1, 3])
def test_mean_adds_the_pieces_in_order(dtype: str, num_columns: int):
    numpy_type = numpy_dtype(dtype)
    table = np.random.default_rng(0).standard_normal((40, num_columns)).astype(numpy_type)
    fill = Fill("pieces", pieces=(tuple(range(40)),))
    rows = generate_rows(padded_streams(dtype, 40, 41, num_columns, fill), table, [])
    total = np.zeros(num_columns)
    for row in table:
        total += row.astype(np.float64)
    assert rows.tobytes() == round_to_dtype(total / 40, numpy_type).tobytes()


def test_mean_of_one_piece_keeps_its_bits():
    table = np.array([[-0.0, 0.0, 3e-40]], np.float32)
    streams = padded_streams("float32", 1, 2, 3, Fill("pieces", pieces=((0,),)))
    assert generate_rows(streams, table, []).tobytes() == table.tobytes()
