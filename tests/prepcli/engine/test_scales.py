"""Scales of layouts: each product is rounded once, and the way back is exact for powers of 4."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from prepcli.engine.casts import StreamDigest, parse_stream_digest
from prepcli.engine.digest import digest
from prepcli.engine.scales import StreamScale, scale_values, unscale_values
from prepcli.planning.libraries import LayoutScale

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def all_bfloat16() -> np.ndarray:
    """Return every finite bfloat16 value that is no subnormal number, and stays one after a division by 16."""
    values = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)
    wide = np.abs(values.astype(np.float32))
    return values[(wide >= 2.0**-120) & np.isfinite(wide)]


@pytest.mark.parametrize("number", [1, 4, 64, 256])
def test_power_of_four_is_exact_for_all_bfloat16_values(number: int):
    values = all_bfloat16()
    scaled = scale_values(values, LayoutScale(number))
    assert np.array_equal(scaled.astype(np.float64) * number**0.5, values.astype(np.float64))
    assert np.array_equal(unscale_values(scaled, LayoutScale(number)), values)


@pytest.mark.parametrize(
    "scale", [LayoutScale(64), LayoutScale(64, power=-1, root_dtype="float32")]
)
def test_scale_keeps_the_sign_of_zero(scale: LayoutScale):
    zeros = np.array([0.0, -0.0], np.float32)
    scaled = scale_values(zeros, scale)
    assert list(np.signbit(scaled)) == [False, True]
    assert list(np.signbit(unscale_values(scaled, scale))) == [False, True]


@pytest.mark.parametrize(
    ("number", "is_exact"), [(1, True), (4, True), (8, False), (64, True), (144, False)]
)
def test_scales_are_exact_if_the_root_is_a_power_of_two_or_float32_is_wider(
    number: int, is_exact: bool
):
    assert LayoutScale(number).is_exact == is_exact
    # Float32 keeps enough digits to compute the bfloat16 value again.
    assert LayoutScale(number, "bfloat16").is_exact


@pytest.mark.parametrize("number", [8, 96, 128])
def test_way_back_from_float32_returns_all_bfloat16_values(number: int):
    values = all_bfloat16().astype(np.float32)
    values = values[np.abs(values) < 2.0**120]
    scaled = scale_values(values, LayoutScale(number))
    assert np.array_equal(unscale_values(scaled, LayoutScale(number, "bfloat16")), values)
    assert not np.array_equal(unscale_values(scaled, LayoutScale(number)), values)


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
    assert np.array_equal(scale_values(values, scale), stored)
    assert np.array_equal(unscale_values(stored, scale), restored)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
def test_offset_is_added_and_subtracted(dtype: np.dtype):
    values = np.random.default_rng(0).normal(size=5000).astype(dtype)
    scale = LayoutScale(1, offset=1)
    stored = scale_values(values, scale)
    assert np.array_equal(stored, (values + 1.0).astype(dtype))
    assert np.array_equal(unscale_values(stored, scale), (stored - 1.0).astype(dtype))
    assert not scale.is_exact


@pytest.mark.parametrize(("dtype", "limit"), [(BFLOAT16, 2.0**-16), (np.dtype("f2"), 2.0**-13)])
def test_way_back_of_an_offset_from_float32_loses_only_tiny_values(dtype: np.dtype, limit: float):
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    values = values[np.isfinite(values)]
    scale = LayoutScale(1, dtype.name, offset=1)
    restored = unscale_values(scale_values(values, scale), scale)
    # A sum with 1 has no place for the digits below 2^-23.
    assert 0 < np.abs(values[restored != values]).max() < limit


def test_moments_of_scaled_parameters_have_the_inverse_scale():
    scale = LayoutScale(64, power=-1, root_dtype="float32")
    first = scale.of_moment(1)
    second = scale.of_moment(2)
    assert first is not None
    assert second is not None
    ones = np.ones(1, np.float32)
    assert scale_values(ones, scale) == 8
    assert scale_values(ones, first) == 1 / 8
    assert scale_values(ones, second) == 1 / 64
    assert LayoutScale(1, offset=1).of_moment(1) is None


def test_stream_scale_digests_the_values_before_and_after():
    values = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    transform = StreamScale("float32", "bfloat16", LayoutScale(128))
    out = np.empty(values.size * 2, np.uint8)
    for start, stop in ((0, 20_000), (20_000, 50_000)):
        part = values[start:stop]
        transform.apply(part.view(np.uint8), out[2 * start : 2 * start + 2 * part.size])
    cast = values.astype(BFLOAT16)
    expected = (cast.astype(np.float32) * np.float32(1 / np.sqrt(128))).astype(BFLOAT16)
    back = (expected.astype(np.float32) * np.float32(np.sqrt(128))).astype(BFLOAT16)
    assert out.tobytes() == expected.tobytes()
    stream_digest = transform.stream_digest("read")
    assert stream_digest.written == digest(expected.tobytes())
    assert stream_digest.unscaled == stream_digest.recorded == digest(cast.tobytes())
    assert stream_digest.lost == np.count_nonzero(back != cast)
    assert transform.counts.changed == np.count_nonzero(back.astype(np.float32) != values)
    assert parse_stream_digest(str(stream_digest)) == stream_digest


def test_digest_without_scale_records_the_written_values():
    assert StreamDigest("read", "written").recorded == "written"
