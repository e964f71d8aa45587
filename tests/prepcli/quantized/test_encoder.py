"""bfloat16 values encode to their original codes, or are refused if several codes have one value."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.quantized.decoder import Decoder
from prepcli.quantized.encoder import InvertibleDecoder
from prepcli.quantized.mxfp4 import Mxfp4Decoder
from prepcli.quantized.scaled import Int8Decoder, ScaledDecoder
from tests.helpers.quantized import decode_all, reader_of, stored

BFLOAT16 = ml_dtypes.bfloat16
CODES = np.arange(256, dtype=np.uint8)
FP8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
Arrays = dict[str, np.ndarray]
# Rows that are encoded together.
ROWS = 1000


def bfloat16_values(decoder: Decoder, arrays: Arrays) -> np.ndarray:
    """Return the decoded values as an init holds them."""
    values = decode_all(decoder, arrays).astype(np.float32)
    with np.errstate(all="ignore"):
        return values.astype(BFLOAT16).reshape(decoder.rows, decoder.columns)


def encode(decoder: InvertibleDecoder, values: np.ndarray, arrays: Arrays) -> np.ndarray:
    return decoder.encode((0, decoder.rows), values.view(np.uint16), reader_of(arrays))


def row_scaled(arrays: Arrays) -> ScaledDecoder:
    return ScaledDecoder(
        stored("w", arrays["w"]), stored("scale", arrays["scale"]), block=(1, arrays["w"].shape[1])
    )


def colliding_rows(values: np.ndarray) -> np.ndarray:
    """Return whether two of the 256 values of each row are equal bit for bit."""
    bits = np.sort(values.view(np.uint16), axis=1)
    return (bits[:, 1:] == bits[:, :-1]).any(axis=1)


def many_scales(count: int, dtype: type) -> np.ndarray:
    """Return scales of all exponents of float32, with random mantissas and the powers of two."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(-149, 128, count)
    mantissas = np.where(rng.random(count) < 0.1, 1, rng.uniform(1, 2, count))
    with np.errstate(all="ignore"):
        return np.ldexp(mantissas, exponents).astype(dtype)[:, None]


@pytest.mark.parametrize("scale_dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("dtype", [*FP8, "int8"])
@pytest.mark.parametrize("count", [3000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_all_codes_encode_exactly_or_are_refused(dtype: str, scale_dtype: type, count: int):
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    scales = many_scales(count, scale_dtype)
    codes = np.broadcast_to(CODES, (count, 256)).copy().view(numpy_dtype)
    values = bfloat16_values(
        row_scaled({"w": codes, "scale": scales}), {"w": codes, "scale": scales}
    )
    collides = colliding_rows(values)
    for number in np.flatnonzero(collides):
        arrays = {"w": codes[number : number + 1], "scale": scales[number : number + 1]}
        with pytest.raises(PrepError, match="several of its codes"):
            encode(row_scaled(arrays), values[number : number + 1], arrays)
    numbers = np.flatnonzero(~collides)
    for first in range(0, numbers.size, ROWS):
        part = numbers[first : first + ROWS]
        arrays = {"w": codes[part], "scale": scales[part]}
        encoded = encode(row_scaled(arrays), values[part], arrays)
        assert (encoded == CODES).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_codes_of_usual_scales_are_all_distinct(dtype: str):
    """No pair of finite codes has one bfloat16 value with any mantissa of a scale of usual size."""
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    # The values of two codes differ by the same factors for all exponents, so that one exponent shows all.
    scales = ((1 + np.arange(1 << 14) / (1 << 14)) / 1024).astype(np.float32)[:, None]
    codes = np.broadcast_to(CODES, (scales.size, 256)).copy().view(numpy_dtype)
    arrays = {"w": codes, "scale": scales}
    assert not colliding_rows(bfloat16_values(row_scaled(arrays), arrays)).any()


@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (3, 130, 100)])
def test_blocks_of_fp8_encode_to_their_codes(shape: tuple[int, ...]):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    arrays = {
        "w": codes.view(ml_dtypes.float8_e4m3fn),
        "scale": np.exp(rng.normal(-6, 2, grid)).astype(np.float32),
    }
    decoder = ScaledDecoder(
        stored("w", arrays["w"]), stored("scale", arrays["scale"]), block=(128, 128)
    )
    values = bfloat16_values(decoder, arrays)
    read = reader_of(arrays)
    for first in range(0, decoder.rows, 77):
        rows = (first, min(first + 77, decoder.rows))
        encoded = decoder.encode(rows, values[slice(*rows)].view(np.uint16), read)
        assert np.array_equal(encoded, codes.reshape(decoder.rows, -1)[slice(*rows)])


def test_int8_with_zero_points_encodes_to_its_codes():
    rng = np.random.default_rng(2)
    arrays = {
        # Differences up to 128 are distinct in bfloat16.
        "w": rng.integers(-108, 108, (64, 96), dtype=np.int8),
        "scale": np.exp(rng.normal(-6, 1, (64, 3))).astype(BFLOAT16),
        "zero_point": rng.integers(-20, 20, (64, 3), dtype=np.int8),
    }
    tensors = {name: stored(name, array) for name, array in arrays.items()}
    decoder = ScaledDecoder(
        tensors["w"],
        tensors["scale"],
        block=(1, 32),
        zero_point=tensors["zero_point"],
        dtype="bfloat16",
    )
    values = bfloat16_values(decoder, arrays)
    assert np.array_equal(encode(decoder, values, arrays).view(np.int8), arrays["w"])


def test_int8_of_bitsandbytes_encodes_to_its_codes():
    rng = np.random.default_rng(3)
    arrays = {
        "w": rng.integers(-127, 128, (200, 300), dtype=np.int8),
        "scale": np.exp(rng.normal(-3, 2, 200)).astype(np.float32),
    }
    decoder = Int8Decoder(stored("w", arrays["w"]), stored("scale", arrays["scale"]))
    encoded = encode(decoder, bfloat16_values(decoder, arrays), arrays)
    assert np.array_equal(encoded.view(np.int8), arrays["w"])


def mxfp4(arrays: Arrays) -> Mxfp4Decoder:
    return Mxfp4Decoder("w", stored("blocks", arrays["blocks"]), stored("scales", arrays["scales"]))


def mxfp4_blocks(exponent: int) -> Arrays:
    """Return all codes of MXFP4 with one scale."""
    scales = np.full((4, 4), exponent, np.uint8)
    return {"blocks": CODES.reshape(4, 4, 16), "scales": scales}


# 4 and 6 times 2^(exponent - 127) are beyond bfloat16 from this exponent on.
FIRST_INFINITE = 253


def test_all_codes_of_mxfp4_encode_exactly():
    for exponent in range(FIRST_INFINITE):
        arrays = mxfp4_blocks(exponent)
        decoder = mxfp4(arrays)
        encoded = encode(decoder, bfloat16_values(decoder, arrays), arrays)
        assert np.array_equal(encoded, CODES.reshape(4, -1)), exponent


@pytest.mark.parametrize("exponent", range(FIRST_INFINITE, 256))
def test_infinite_codes_of_mxfp4_are_refused(exponent: int):
    arrays = mxfp4_blocks(exponent)
    decoder = mxfp4(arrays)
    with pytest.raises(PrepError, match="several of its codes are infinite"):
        encode(decoder, bfloat16_values(decoder, arrays), arrays)


def test_random_blocks_of_mxfp4_encode_to_their_codes():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        arrays = {
            "blocks": rng.integers(0, 256, (2, 1000, 50, 16), dtype=np.uint8),
            "scales": rng.integers(0, 253, (2, 1000, 50), dtype=np.uint8),
        }
        decoder = mxfp4(arrays)
        values = bfloat16_values(decoder, arrays).view(np.uint16)
        codes = arrays["blocks"].reshape(2, 1000, -1)
        for matrix in range(2):
            for first in (0, 640):
                rows = (matrix * 1600 + first, matrix * 1600 + first + 640)
                encoded = decoder.encode(rows, values[slice(*rows)], reader_of(arrays))
                assert np.array_equal(encoded, codes[matrix][:, first // 2 : first // 2 + 320])


@pytest.mark.parametrize("format_name", ["fp8", "mxfp4"])
def test_value_of_no_code_is_refused(format_name: str):
    if format_name == "fp8":
        arrays = {"w": CODES[None].view(ml_dtypes.float8_e4m3fn), "scale": np.ones(1, np.float32)}
        decoder = row_scaled(arrays)
    else:
        arrays = {"blocks": CODES.reshape(4, 4, 16), "scales": np.full((4, 4), 127, np.uint8)}
        decoder = mxfp4(arrays)
    values = bfloat16_values(decoder, arrays)
    values[0, 0] = 1.0078125
    with pytest.raises(PrepError, match="no code decodes to one of its values"):
        encode(decoder, values, arrays)
