"""Casts compared with a nearest-value search: every 16-bit pattern, every midpoint and its neighbours, any bits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.engine.casts import (
    BLOCK_VALUES,
    CastCounts,
    StreamCast,
    StreamDigest,
    count_changes,
    format_cast,
    max_finite,
    parse_stream_digest,
    report_casts,
)
from prepcli.engine.fills import numpy_dtype
from prepcli.planning.plan import Fill, Stream
from prepcli.planning.tensors import FLOAT_DTYPES, ITEM_BITS, cast_dtype
from tests.helpers.plans import flat

# The reference computes with NaN, which makes NumPy warn.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
HALVES = ("float16", "bfloat16")
CAST_DTYPES = ("float32", "bfloat16", "float16")
PAIRS = [(source, target) for source in FLOAT_DTYPES for target in CAST_DTYPES if source != target]


def patterns(dtype: str) -> np.ndarray:
    """Return all values of a 16-bit dtype."""
    return np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(dtype))


def midpoints(dtype: str) -> np.ndarray:
    """Return the midpoints, in float64, between neighbouring nonnegative values of a 16-bit dtype.

    The last midpoint is the one above the largest finite value, from which on values overflow.
    """
    values = np.arange(1 << 15, dtype=np.uint16).view(numpy_dtype(dtype)).astype(np.float64)
    values = values[np.isfinite(values)]
    beyond = 2 * values[-1] - values[-2]
    return (values + np.append(values[1:], beyond)) / 2


def nearest(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the bits of the nearest value of a 16-bit dtype, ties to even, by comparison alone. NaN is not allowed."""
    boundaries, size = midpoints(dtype), np.abs(values.astype(np.float64))
    result = np.searchsorted(boundaries, size, side="left")
    tie = (result < boundaries.size) & (boundaries[np.minimum(result, boundaries.size - 1)] == size)
    result += tie & (result % 2 == 1)
    return (result | np.signbit(values).astype(np.int64) << 15).astype(np.uint16)


def cast_values(
    values: np.ndarray, source: str, target: str, pieces: int = 1
) -> tuple[np.ndarray, CastCounts]:
    """Cast values in several pieces, and return the result and the counts."""
    cast = StreamCast(source, target)
    out = [
        cast.apply(part.view(np.uint8), np.empty(part.size * 4, np.uint8))
        for part in np.array_split(values, pieces)
    ]
    joined = np.concatenate(out)
    assert cast.digest() == xxhash.xxh3_128_hexdigest(joined.tobytes())
    return joined.view(numpy_dtype(target)), cast.counts


def check_cast(values: np.ndarray, source: str, target: str) -> None:
    """Check that each number becomes the nearest one, NaN stays NaN, and the counts are right."""
    result, counts = cast_values(values, source, target)
    wide, after = values.astype(np.float64), result.astype(np.float64)
    number = ~np.isnan(wide)
    assert np.array_equal(np.isnan(after), ~number)
    if ITEM_BITS[target] == 16:
        assert np.array_equal(result.view(np.uint16)[number], nearest(values[number], target))
    else:
        assert np.array_equal(np.signbit(after), np.signbit(wide)) or not number.all()
        for step in (np.inf, -np.inf):  # neither neighbour is nearer
            with np.errstate(over="ignore"):
                beside = np.nextafter(result, np.float32(step)).astype(np.float64)
            kept = number & np.isfinite(after) & np.isfinite(beside)
            assert (np.abs(after - wide)[kept] <= np.abs(beside - wide)[kept]).all()
    expected = expected_counts(wide, after)
    assert counts == replace(expected, worst=counts.worst)
    assert counts.worst == pytest.approx(expected.worst, rel=1e-6, abs=1e-12)


def expected_counts(before: np.ndarray, after: np.ndarray) -> CastCounts:
    """Return the counts, computed with masks in float64."""
    number = ~np.isnan(before)
    changed = number & (before != after)
    kept = changed & np.isfinite(after) & (after != 0)
    with np.errstate(over="ignore"):
        errors = np.abs(after[kept] - before[kept]) / np.abs(before[kept])
    return CastCounts(
        before.size,
        int(changed.sum()),
        int((np.isinf(after) & np.isfinite(before)).sum()),
        int(((after == 0) & (before != 0)).sum()),
        int((~number).sum()),
        float(errors.max(initial=0.0)),
    )


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[0] in HALVES])
def test_cast_rounds_every_16_bit_pattern_to_nearest(source: str, target: str):
    check_cast(patterns(source), source, target)


@pytest.mark.parametrize("source", HALVES)
def test_cast_round_trips_16_bit_through_float32(source: str):
    wide, counts = cast_values(patterns(source), source, "float32")
    assert (counts.changed, counts.nan) == (0, int(np.isnan(wide).sum()))
    back, again = cast_values(wide, "float32", source)
    number = ~np.isnan(wide)
    assert np.array_equal(back.view(np.uint16)[number], patterns(source).view(np.uint16)[number])
    assert again.changed == again.overflowed == again.underflowed == 0


@pytest.mark.parametrize("target", HALVES)
@pytest.mark.parametrize("source", ["float32", "float64"])
def test_cast_rounds_values_near_midpoints_to_nearest(source: str, target: str):
    """Double rounding and wrong tie breaking would show at midpoints."""
    numpy_type = np.dtype(source)
    with np.errstate(over="ignore", under="ignore"):
        boundaries = midpoints(target).astype(numpy_type)
        values_near = [
            boundaries,
            np.nextafter(boundaries, numpy_type.type(0)),
            np.nextafter(boundaries, numpy_type.type(np.inf)),
        ]
        if source == "float64":  # values that round to the midpoint in float32
            values_near += [
                boundaries * (1 + sign * 2.0**-power)
                for power in (24, 25, 26, 40)
                for sign in (1, -1)
            ]
    values = np.concatenate(values_near)
    check_cast(np.concatenate([values, -values]), source, target)


EDGES = [
    0.0,
    5e-324,
    1e-310,
    1e-46,
    7.0e-46,
    1.4e-45,
    2.1e-45,
    1.17e-38,
    6e-8,
    2.98e-8,
    2.9802322387695312e-08,
    65504.0,
]
EDGES += [
    65519.99,
    65520.0,
    65536.0,
    3.3895313892515355e38,
    3.3961775292304601e38,
    3.4028234663852886e38,
]
EDGES += [3.4028235677973366e38, 3.4028235677973362e38, 1e300, math.inf, math.nan]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_cast_rounds_limits_of_dtypes_to_nearest(source: str, target: str):
    with np.errstate(all="ignore"):
        values = np.array([sign * edge for edge in EDGES for sign in (1, -1)]).astype(
            numpy_dtype(source)
        )
    check_cast(values, source, target)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PAIRS), st.binary(min_size=8, max_size=800), st.integers(1, 5))
def test_cast_of_any_bits_does_not_depend_on_pieces(
    pair: tuple[str, str], data: bytes, pieces: int
):
    source, target = pair
    values = np.frombuffer(data[: len(data) // 8 * 8], numpy_dtype(source))
    check_cast(values, source, target)
    whole, parts = cast_values(values, source, target), cast_values(values, source, target, pieces)
    assert whole[0].tobytes() == parts[0].tobytes()
    assert whole[1] == parts[1]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_cast_accepts_several_blocks_at_unaligned_offset(source: str, target: str):
    values = (np.random.default_rng(0).standard_normal(2 * BLOCK_VALUES + 77) * 1e-3).astype(
        numpy_dtype(source)
    )
    check_cast(values, source, target)
    lead, size = 3, numpy_dtype(target).itemsize
    data = np.concatenate([np.zeros(lead, np.uint8), values.view(np.uint8)])
    out = np.zeros(values.size * size + lead, np.uint8)
    cast_bytes = StreamCast(source, target).apply(data[lead:], out[lead:])
    assert (
        cast_bytes.tobytes()
        == cast_values(values, source, target)[0].tobytes()
        == out[lead:].tobytes()
    )


def test_cast_counts_changed_values():
    values = np.array(
        [1.0, 1.0001, 70000, -70000, 1e-9, -1e-9, 0, math.nan, math.inf, 0.5], np.float32
    )
    result, counts = cast_values(values, "float32", "float16")
    assert (counts.values, counts.changed, counts.overflowed, counts.underflowed, counts.nan) == (
        10,
        5,
        2,
        2,
        1,
    )
    assert counts.worst == pytest.approx(1e-4, rel=0.01)
    assert [float(v) for v in result[2:7]] == [math.inf, -math.inf, 0, 0, 0]
    assert np.signbit(result[5])
    assert counts + counts == CastCounts(20, 10, 4, 4, 2, counts.worst)


def test_count_changes_compares_values_before_and_after():
    before = np.array([0.0, 0.0, 1.0, 1.0, 1.0, 2.0, math.inf, math.nan], np.float32)
    after = np.array([3.0, 0.0, 0.0, math.nan, -math.inf, 3.0, math.nan, math.nan], np.float32)
    counts = count_changes(before, after)
    assert (counts.changed, counts.overflowed, counts.underflowed, counts.nan) == (6, 2, 1, 3)
    assert counts.worst == 0.5


def test_largest_change_of_a_tiny_value_is_finite():
    tiny, one = np.full(2, 1e-44, np.float32), np.ones(2, np.float32)
    worst = count_changes(tiny, one).worst
    assert 1e30 < worst < math.inf


@pytest.mark.parametrize("worst", [0.0, 0.1, 2.0**-9, 5e-324])
def test_stream_digest_round_trips_as_text(worst: float):
    digest = StreamDigest("ab" * 16, "cd" * 16, CastCounts(9, 8, 7, 6, 5, worst))
    assert parse_stream_digest(str(digest)) == digest
    assert len(str(digest).split()) == 1
    assert parse_stream_digest(str(StreamDigest("ef" * 16, "ef" * 16))) == StreamDigest(
        "ef" * 16, "ef" * 16
    )
    assert str(StreamDigest("ef" * 16, "ef" * 16)) == "ef" * 16


def test_cast_dtype_applies_to_floats_only():
    assert {dtype for dtype in ITEM_BITS if cast_dtype(dtype, "bfloat16") != dtype} == {
        *FLOAT_DTYPES
    } - {"bfloat16"}
    assert all(cast_dtype(dtype, None) == dtype for dtype in ITEM_BITS)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float16", 65504), ("bfloat16", 3.38953139e38), ("float32", 3.40282347e38)],
)
def test_max_finite_returns_largest_value_of_dtype(dtype: str, value: float):
    assert max_finite(dtype) == pytest.approx(value)


def test_report_casts_sums_streams_by_dtype_pair():
    def stream(name: str, dtype: str, cast: str, rows: tuple[int, int] = (0, 6)) -> Stream:
        return Stream(
            name,
            dtype,
            (9, 5),
            rows,
            (flat(dtype, (9, 5)),),
            (flat(cast or dtype, (9, 5)),),
            cast_to=cast,
        )

    streams = [
        stream("a", "float32", "bfloat16"),
        stream("a", "float32", "bfloat16", (6, 9)),
        Stream("a", "bfloat16", (12, 5), (9, 12), (), (flat("bfloat16", (12, 5)),), Fill("zeros")),
        stream("b", "float32", "bfloat16"),
        stream("c", "float64", "bfloat16"),
        stream("mask", "bool", ""),
    ]
    numbers = {
        0: CastCounts(30, 1, 2, 3, 4, 0.5),
        1: CastCounts(15, 5, 0, 0, 0, 0.1),
        3: CastCounts(30),
        4: CastCounts(30, nan=9),
    }
    digests = {
        n: str(StreamDigest("a", "b", numbers.get(n)) if n in numbers else StreamDigest("a", "a"))
        for n in range(len(streams))
    }
    first, second = report_casts(streams, digests)
    assert first == {
        "from": "float32", "to": "bfloat16", "tensors": 2, "values": 75,
        "changed": 6, "overflowed": 2, "underflowed": 3, "nan": 4, "worst": 0.5,
    }  # fmt: skip
    assert (second["from"], second["tensors"], second["values"], second.get("nan")) == (
        "float64",
        1,
        30,
        9,
    )
    assert report_casts(streams) == [
        {k: e[k] for k in ("from", "to", "tensors", "values")} for e in (first, second)
    ]
    assert format_cast(first) == (
        "float32 -> bfloat16: 2 tensors, 75 values: 6 changed, 2 overflowed, 3 became 0, 4 are nan;"
        " largest relative error 0.5"
    )
