"""Changes of values: casts against a nearest-value search, low-rank updates in any pieces, and scales of layouts.

Casts are compared for every 16-bit pattern, every midpoint and its neighbours, and any bits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import DamagedError, UsageError
from prepcli.engine.budget import make_budget
from prepcli.engine.casts import (
    BLOCK_VALUES,
    Cast,
    ExpertUpdate,
    LowRankUpdate,
    Scale,
    ValueTransform,
    count_changes,
    format_cast,
    report_casts,
    value_operations,
)
from prepcli.engine.digest import CastCounts, StreamDigest, TensorDigest
from prepcli.engine.files import Files
from prepcli.engine.fills import Fill, numpy_dtype
from prepcli.planning.libraries import LayoutScale
from prepcli.planning.plan import Stream, ValueOperation, encode_text
from prepcli.planning.tensors import FLOAT_DTYPES, ITEM_BITS, cast_dtype
from tests.helpers.plans import flat

# The reference computes with NaN, which makes NumPy warn.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
HALVES = ("float16", "bfloat16")
CAST_DTYPES = ("float32", "bfloat16", "float16")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PAIRS = [(source, target) for source in FLOAT_DTYPES for target in CAST_DTYPES if source != target]


def transform(
    source: str, target: str, count: int, scale: LayoutScale | None = None
) -> ValueTransform:
    """Return the change of a stream of values that reads no matrices."""
    operations = value_operations(source, target, scale=scale)
    stream = Stream("w", source, (count,), (0, count), (), (), operations)
    return ValueTransform(stream, Files([]))


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
    cast = transform(source, target, values.size)
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
    cast_bytes = transform(source, target, values.size).apply(data[lead:], out[lead:])
    assert (
        cast_bytes.tobytes()
        == cast_values(values, source, target)[0].tobytes()
        == out[lead:].tobytes()
    )


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
    stream_digest = StreamDigest("ab" * 16, "cd" * 16, CastCounts(9, 8, 7, 6, 5, worst))
    assert StreamDigest.decode(stream_digest.encode()) == stream_digest
    assert len(stream_digest.encode().split()) == 1
    unchanged = StreamDigest("ef" * 16, "ef" * 16)
    assert unchanged.encode() == "ef" * 16
    assert StreamDigest.decode("ef" * 16) == unchanged


def test_cast_dtype_applies_to_floats_only():
    assert {dtype for dtype in ITEM_BITS if cast_dtype(dtype, "bfloat16") != dtype} == {
        *FLOAT_DTYPES
    } - {"bfloat16"}
    assert all(cast_dtype(dtype, None) == dtype for dtype in ITEM_BITS)


def test_report_casts_sums_streams_by_dtype_pair():
    def stream(name: str, dtype: str, cast: str, rows: tuple[int, int] = (0, 6)) -> Stream:
        return Stream(
            name,
            dtype,
            (9, 5),
            rows,
            (flat(dtype, (9, 5)),),
            (flat(cast or dtype, (9, 5)),),
            value_operations(dtype, cast or dtype),
        )

    streams = [
        stream("a", "float32", "bfloat16"),
        stream("a", "float32", "bfloat16", (6, 9)),
        Stream(
            "a", "bfloat16", (12, 5), (9, 12), (), (flat("bfloat16", (12, 5)),), (Fill("zeros"),)
        ),
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
        n: StreamDigest("a", "b", numbers.get(n)) if n in numbers else StreamDigest("a", "a")
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


def test_stream_scale_digests_the_values_before_and_after():
    values = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    change = transform("float32", "bfloat16", values.size, LayoutScale(128))
    out = np.empty(values.size * 2, np.uint8)
    for start, stop in ((0, 20_000), (20_000, 50_000)):
        part = values[start:stop]
        change.apply(part.view(np.uint8), out[2 * start : 2 * start + 2 * part.size])
    cast = values.astype(BFLOAT16)
    expected = (cast.astype(np.float32) * np.float32(1 / np.sqrt(128))).astype(BFLOAT16)
    back = (expected.astype(np.float32) * np.float32(np.sqrt(128))).astype(BFLOAT16)
    assert out.tobytes() == expected.tobytes()
    stream_digest = change.stream_digest("read")
    assert stream_digest.written == TensorDigest(expected.tobytes()).text()
    assert stream_digest.unscaled == stream_digest.recorded == TensorDigest(cast.tobytes()).text()
    assert stream_digest.lost == np.count_nonzero(back != cast)
    assert change.counts.changed == np.count_nonzero(back.astype(np.float32) != values)
    assert StreamDigest.decode(stream_digest.encode()) == stream_digest


def test_digest_without_scale_records_the_written_values():
    assert StreamDigest("read", "written").recorded == "written"


MIB = 1 << 20


def make_stream(
    folder: Path, num_rows: int, num_columns: int, *, is_transposed: bool = False
) -> Stream:
    """Write random matrices of rank 2, and return a stream [rows, columns] with their update."""
    random = np.random.default_rng(0)
    num_outputs, num_inputs = (num_columns, num_rows) if is_transposed else (num_rows, num_columns)
    a, b = (
        random.standard_normal(shape, np.float32) for shape in ((2, num_inputs), (num_outputs, 2))
    )
    (folder / "matrices").write_bytes(a.tobytes() + b.tobytes())
    streams = [
        Stream(
            name,
            "float32",
            matrix.shape,
            (0, len(matrix)),
            (flat("float32", matrix.shape, offset),),
            (),
        )
        for name, matrix, offset in (("a", a, 0), ("b", b, a.nbytes))
    ]
    update = LowRankUpdate(streams[0], streams[1], 0.5, is_transposed)
    return with_update(update, (num_rows, num_columns))


def with_update(update: LowRankUpdate, shape: tuple[int, int]) -> Stream:
    """Return a stream of float32 values with an update."""
    operations = value_operations("float32", "float32", update=update)
    return Stream("w", "float32", shape, (0, shape[0]), (), (), operations)


def update_of(stream: Stream) -> LowRankUpdate:
    """Return the update of a stream."""
    update = stream.operations[0]
    assert isinstance(update, LowRankUpdate)
    return update


def apply_update(
    folder: Path, stream: Stream, values: np.ndarray, num_pieces: int
) -> tuple[np.ndarray, ValueTransform]:
    """Update values in pieces, and return the result and the update."""
    with Files([folder / "matrices"]) as files:
        update = ValueTransform(stream, files)
    pieces = np.array_split(values.reshape(-1), num_pieces)
    results = [
        update.apply(piece.view(np.uint8), np.empty(piece.nbytes, np.uint8)).copy()
        for piece in pieces
    ]
    return np.concatenate(results).view(np.float32).reshape(values.shape), update


@pytest.mark.parametrize("shape", [(37, 53), (3, BLOCK_VALUES + 5), (BLOCK_VALUES + 5, 2)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_update_does_not_depend_on_pieces(
    tmp_path: Path, shape: tuple[int, int], is_transposed: bool
):
    stream = make_stream(tmp_path, *shape, is_transposed=is_transposed)
    values = np.random.default_rng(2).standard_normal(shape, np.float32)
    whole, update = apply_update(tmp_path, stream, values, 1)
    pieces, other = apply_update(tmp_path, stream, values, 7)
    assert np.array_equal(whole, pieces)
    assert (update.counts, update.digest()) == (other.counts, other.digest())


def test_update_equals_the_product_in_double_precision(tmp_path: Path):
    stream = make_stream(tmp_path, 37, 53)
    data = np.frombuffer((tmp_path / "matrices").read_bytes(), np.float32)
    a, b = data[: 2 * 53].reshape(2, 53), data[2 * 53 :].reshape(37, 2)
    values = np.zeros((37, 53), np.float32)
    result, update = apply_update(tmp_path, stream, values, 1)
    np.testing.assert_allclose(
        result, 0.5 * b.astype(np.float64) @ a.astype(np.float64), rtol=1e-6, atol=1e-6
    )
    assert update.counts.changed == values.size


def test_update_with_a_damaged_matrix_is_an_error(tmp_path: Path):
    stream = make_stream(tmp_path, 37, 53)
    content = (tmp_path / "matrices").read_bytes()
    split = update_of(stream).a.nbytes
    digests = xxhash.xxh3_128_hexdigest(content[:split]), xxhash.xxh3_128_hexdigest(content[split:])
    stream = with_update(replace(update_of(stream), digests=digests), (37, 53))
    values = np.zeros((37, 53), np.float32)
    apply_update(tmp_path, stream, values, 1)
    for position in (0, len(content) - 1):
        damaged = bytearray(content)
        damaged[position] ^= 1
        (tmp_path / "matrices").write_bytes(damaged)
        with pytest.raises(DamagedError, match="of the adapter is damaged"):
            apply_update(tmp_path, stream, values, 1)


def test_recorded_digests_do_not_change_the_plan(tmp_path: Path):
    stream = make_stream(tmp_path, 3, 5)
    with_digests = with_update(replace(update_of(stream), digests=("1", "2")), (3, 5))
    assert encode_text(with_digests) == encode_text(stream)


def test_budget_makes_room_for_matrices(tmp_path: Path):
    assert make_stream(tmp_path, 100, 50).kept_nbytes > 4 * 2 * 150
    small, large = make_budget(32 * MIB), make_budget(32 * MIB, kept_nbytes=8 * MIB)
    assert (
        large.slab_nbytes * large.buffer_count <= small.slab_nbytes * small.buffer_count - 5 * MIB
    )
    with pytest.raises(UsageError, match="too small for the adapter"):
        make_budget(32 * MIB, kept_nbytes=30 * MIB)


def all_bfloat16() -> np.ndarray:
    """Return every finite bfloat16 value that is no subnormal number, and stays one after a division by 16."""
    values = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)
    wide = np.abs(values.astype(np.float32))
    return values[(wide >= 2.0**-120) & np.isfinite(wide)]


@pytest.mark.parametrize("number", [1, 4, 64, 256])
def test_power_of_four_is_exact_for_all_bfloat16_values(number: int):
    values = all_bfloat16()
    scaled = Scale(LayoutScale(number)).apply(values)
    assert np.array_equal(scaled.astype(np.float64) * number**0.5, values.astype(np.float64))
    assert np.array_equal(Scale(LayoutScale(number)).undo(scaled), values)


@pytest.mark.parametrize(
    "scale", [LayoutScale(64), LayoutScale(64, power=-1, root_dtype="float32")]
)
def test_scale_keeps_the_sign_of_zero(scale: LayoutScale):
    zeros = np.array([0.0, -0.0], np.float32)
    scaled = Scale(scale).apply(zeros)
    assert list(np.signbit(scaled)) == [False, True]
    assert list(np.signbit(Scale(scale).undo(scaled))) == [False, True]


@pytest.mark.parametrize(
    ("number", "is_exact"), [(1, True), (4, True), (8, False), (64, True), (144, False)]
)
def test_scale_is_exact_for_powers_of_two_and_wider_float32(number: int, is_exact: bool):
    assert LayoutScale(number).is_exact == is_exact
    # Float32 keeps enough digits to compute the bfloat16 value again.
    assert LayoutScale(number, "bfloat16").is_exact


@pytest.mark.parametrize("number", [8, 96, 128])
def test_way_back_from_float32_returns_all_bfloat16_values(number: int):
    values = all_bfloat16().astype(np.float32)
    values = values[np.abs(values) < 2.0**120]
    scaled = Scale(LayoutScale(number)).apply(values)
    assert np.array_equal(Scale(LayoutScale(number, "bfloat16")).undo(scaled), values)
    assert not np.array_equal(Scale(LayoutScale(number)).undo(scaled), values)


def maxtext_embedding(values: np.ndarray, root: np.generic) -> tuple[np.ndarray, np.ndarray]:
    """Return an embedding after the product of MaxText's converter, and after its division."""
    stored = (values * root).astype(values.dtype)
    return stored, (stored / root).astype(values.dtype)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
@pytest.mark.parametrize(
    ("root_dtype", "root_type"), [("float32", np.float32), ("bfloat16", BFLOAT16.type)]
)
def test_rounded_root_is_that_of_maxtext(dtype: np.dtype, root_dtype: str, root_type: type):
    values = np.random.default_rng(0).normal(size=5000).astype(dtype)
    stored, restored = maxtext_embedding(values, root_type(2560**0.5))
    scale = LayoutScale(2560, power=-1, root_dtype=root_dtype)
    assert np.array_equal(Scale(scale).apply(values), stored)
    assert np.array_equal(Scale(scale).undo(stored), restored)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
def test_offset_is_added_and_subtracted(dtype: np.dtype):
    values = np.random.default_rng(0).normal(size=5000).astype(dtype)
    scale = LayoutScale(1, offset=1)
    stored = Scale(scale).apply(values)
    assert np.array_equal(stored, (values + 1.0).astype(dtype))
    assert np.array_equal(Scale(scale).undo(stored), (stored - 1.0).astype(dtype))
    assert not scale.is_exact


@pytest.mark.parametrize(("dtype", "limit"), [(BFLOAT16, 2.0**-16), (np.dtype("f2"), 2.0**-13)])
def test_offset_from_float32_and_back_loses_only_tiny_values(dtype: np.dtype, limit: float):
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    values = values[np.isfinite(values)]
    scale = LayoutScale(1, dtype.name, offset=1)
    restored = Scale(scale).undo(Scale(scale).apply(values))
    # A sum with 1 has no place for the digits below 2^-23.
    assert 0 < np.abs(values[restored != values]).max() < limit


def test_moments_of_scaled_parameters_have_the_inverse_scale():
    scale = LayoutScale(64, power=-1, root_dtype="float32")
    first = scale.of_moment(1)
    second = scale.of_moment(2)
    assert first is not None
    assert second is not None
    ones = np.ones(1, np.float32)
    assert Scale(scale).apply(ones) == 8
    assert Scale(first).apply(ones) == 1 / 8
    assert Scale(second).apply(ones) == 1 / 64
    assert LayoutScale(1, offset=1).of_moment(1) is None


def test_scale_follows_the_update(tmp_path: Path):
    stream = make_stream(tmp_path, 37, 53)
    values = np.random.default_rng(0).standard_normal((37, 53), np.float32)
    updated, _ = apply_update(tmp_path, stream, values, 1)
    scale = Scale(LayoutScale(16))
    stream = replace(stream, operations=(*stream.operations, scale))
    scaled, _ = apply_update(tmp_path, stream, values, 7)
    assert np.array_equal(scaled, updated / 4)


A = Stream("a", "float32", (2, 3), (0, 2), (flat("float32", (2, 3)),), ())
B = Stream("b", "float32", (4, 2), (0, 4), (flat("float32", (4, 2), 24),), ())
A_TEXT = (
    "Stream(name='a', dtype='float32', shape=(2, 3), rows=(0, 2), left=(Flat(file=0, offset=0),), right=(), "
    "fill=None, cast='')"
)
B_TEXT = (
    "Stream(name='b', dtype='float32', shape=(4, 2), rows=(0, 4), left=(Flat(file=0, offset=24),), right=(), "
    "fill=None, cast='')"
)
UPDATE = LowRankUpdate(A, B, 0.5, is_transposed=True, digests=("x", "y"))
UPDATE_TEXT = f"update=Update(a={A_TEXT}, b={B_TEXT}, scale=0.5, is_transposed=True)"
# What updates of experts have recorded since their first release.
EXPERT_TEXT = (
    "update=ExpertUpdate("
    "a=Stream(name='a', dtype='float32', shape=(2, 3), rows=(0, 2), reads=(Array(name='flat', dtype='float32', "
    "shape=(2, 3), chunk_shape=(2, 3), chunks=StridedChunks(file=0, offset=0, first=(0, 0), strides=(0, 0)), "
    "strides=None, path=(), codecs=()),), writes=(), fill=None, cast_to='', update=None, scale=None), "
    "b=Stream(name='b', dtype='float32', shape=(4, 2), rows=(0, 4), reads=(Array(name='flat', dtype='float32', "
    "shape=(4, 2), chunk_shape=(4, 2), chunks=StridedChunks(file=0, offset=24, first=(0, 0), strides=(0, 0)), "
    "strides=None, path=(), codecs=()),), writes=(), fill=None, cast_to='', update=None, scale=None), "
    "scale=0.5, is_transposed=False, num_experts=2, expert=1, outputs=(0, 4))"
)
ROOT = LayoutScale(64, "bfloat16", power=-1, root_dtype="float32")


@pytest.mark.parametrize(
    ("operations", "text"),
    [
        ((), "fill=None, cast=''"),
        ((Cast("bfloat16"),), "fill=None, cast='bfloat16'"),
        ((UPDATE, Cast("float32")), f"fill=None, cast='', {UPDATE_TEXT}"),
        ((UPDATE, Cast("bfloat16")), f"fill=None, cast='bfloat16', {UPDATE_TEXT}"),
        (
            (ExpertUpdate(A, B, 0.5, num_experts=2, expert=1, outputs=(0, 4)), Cast("float32")),
            f"fill=None, cast='', {EXPERT_TEXT}",
        ),
        (
            (Cast("bfloat16"), Scale(ROOT)),
            "fill=None, cast='bfloat16', scale=RootScale(number=64, significant='bfloat16')",
        ),
        (
            (UPDATE, Cast("float32"), Scale(LayoutScale(4))),
            f"fill=None, cast='', {UPDATE_TEXT}, scale=RootScale(number=4, significant='')",
        ),
        ((Fill("normal", 3, 0.02),), "fill=Fill(kind='normal', seed=3, std=0.02), cast=''"),
        (
            (Fill("pieces", pieces=((1, 2), (0,))),),
            "fill=Fill(kind='pieces', seed=0, std=0.0, pieces=((1, 2), (0,))), cast=''",
        ),
    ],
)
def test_texts_of_operations_never_change(operations: tuple[ValueOperation, ...], text: str):
    """Outputs record digests of such texts."""
    stream = Stream("w", "float32", (4, 3), (0, 4), (), (), operations)
    head = "Stream(name='w', dtype='float32', shape=(4, 3), rows=(0, 4), left=(), right=(), "
    assert encode_text(stream) == f"{head}{text})"


def test_unchanged_values_have_no_operations():
    assert value_operations("float32", "float32") == ()
    assert value_operations("float32", "float16") == (Cast("float16"),)
