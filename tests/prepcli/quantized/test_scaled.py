"""Weights with scales in fp8, int8, MXFP4 and NVFP4, compared with transformers and compressed-tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from prepcli.core.errors import DamagedError
from prepcli.planning.arrays import whole_array
from prepcli.quantized.bitsandbytes import Int8Decoder
from prepcli.quantized.float4 import Mxfp4Decoder, Nvfp4Decoder
from prepcli.quantized.scaled import ScaledDecoder, block_of_grid
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.quantized import (
    assert_equal_bits,
    decode_all,
    stored,
    to_numpy,
    to_torch,
)

torch = lazy_module("torch")
fp8 = lazy_module("transformers.integrations.finegrained_fp8")
quantization = lazy_module("compressed_tensors.quantization")
E4M3 = ml_dtypes.float8_e4m3fn
BFLOAT16 = ml_dtypes.bfloat16
Arrays = dict[str, np.ndarray]


def random_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 256, shape, dtype=np.uint8).view(E4M3)


def random_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.exp(rng.normal(-6, 2, shape)).astype(np.float32)


def scaled(arrays: Arrays, block: tuple[int, int], dtype: str = "float32") -> ScaledDecoder:
    tensors = {name: stored(name, array) for name, array in arrays.items()}
    zero_point = tensors.get("zero_point")
    return ScaledDecoder(
        tensors["w"], tensors["scale"], block=block, zero_point=zero_point, dtype=dtype
    )


def transformers_values(arrays: Arrays) -> np.ndarray:
    operation = fp8.Fp8Dequantize(None)
    values = operation._dequantize_one(
        to_torch(arrays["w"]), to_torch(arrays["scale"]), torch.float32
    )
    return to_numpy(values)


@pytest.mark.parametrize("batches", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_fp8_blocks_equal_transformers(batches: int):
    rng = np.random.default_rng(1)
    for _ in range(batches):
        # 100,000 blocks of 8 x 4 values.
        arrays = {"w": random_codes(rng, (1600, 2000)), "scale": random_scales(rng, (200, 500))}
        block = block_of_grid(stored("w", arrays["w"]), stored("scale", arrays["scale"]))
        assert block == (8, 4)
        assert_equal_bits(decode_all(scaled(arrays, block), arrays), transformers_values(arrays))


def test_fp8_of_bfloat16_rounds_once_like_transformers():
    rng = np.random.default_rng(2)
    arrays = {"w": random_codes(rng, (256, 256)), "scale": random_scales(rng, (2, 2))}
    operation = fp8.Fp8Dequantize(None)
    expected = operation._dequantize_one(
        to_torch(arrays["w"]), to_torch(arrays["scale"]), torch.bfloat16
    )
    values = decode_all(scaled(arrays, (128, 128), "bfloat16"), arrays)
    assert_equal_bits(values, to_numpy(expected))


@pytest.mark.parametrize("scale_dtype", ["uint8", "float8_e8m0fnu"])
def test_all_fp8_codes_with_all_exponents_equal_transformers(scale_dtype: str):
    codes = np.ascontiguousarray(np.broadcast_to(np.arange(256, dtype=np.uint8), (256, 256)))
    exponents = np.arange(256, dtype=np.uint8)[:, None].view(ml_dtypes.float8_e8m0fnu)
    arrays = {"w": codes.view(E4M3), "scale": exponents}
    expected = transformers_values(arrays)
    if scale_dtype == "uint8":
        # The same bytes. transformers takes the byte 255 of uint8 as infinity, and the specification as NaN.
        arrays["scale"] = exponents.view(np.uint8)
    values = decode_all(scaled(arrays, (1, 256)), arrays)
    assert_equal_bits(values, expected)


def test_blocks_at_edges_are_smaller():
    # DeepSeek's matrices of 576 rows have blocks of 128 rows: the last scale is of 64 rows.
    rng = np.random.default_rng(3)
    arrays = {"w": random_codes(rng, (2, 300, 270)), "scale": random_scales(rng, (2, 3, 3))}
    padded = np.zeros((2, 384, 384), E4M3)
    padded[:, :300, :270] = arrays["w"]
    expected = transformers_values({"w": padded, "scale": arrays["scale"]})[:, :300, :270]
    decoder = scaled(arrays, (128, 128))
    for rows_per_part in (None, 1, 97, 300):
        values = decode_all(decoder, arrays, rows_per_part)
        assert_equal_bits(values, np.ascontiguousarray(expected))


def compressed_values(arrays: Arrays, **settings: object) -> np.ndarray:
    args = quantization.QuantizationArgs(**settings)
    zero_point = arrays.get("zero_point")
    values = quantization.lifecycle.forward.dequantize(
        to_torch(arrays["w"]),
        to_torch(arrays["scale"]),
        None if zero_point is None else to_torch(zero_point),
        args,
    )
    return to_numpy(values)


@pytest.mark.parametrize("scale_dtype", [BFLOAT16, np.float16, np.float32])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
def test_fp8_equals_compressed_tensors(strategy: str, scale_dtype: type):
    rng = np.random.default_rng(6)
    settings = {
        "tensor": ((64, 256), (1,), {}),
        "channel": ((1, 256), (64, 1), {}),
        "group": ((1, 32), (64, 8), {"group_size": 32}),
        "block": ((16, 64), (4, 4), {"block_structure": [16, 64]}),
    }
    block, scale_shape, extra = settings[strategy]
    scale = random_scales(rng, scale_shape).astype(scale_dtype)
    arrays = {"w": random_codes(rng, (64, 256)), "scale": scale}
    values = decode_all(scaled(arrays, block, scale.dtype.name), arrays)
    expected = compressed_values(arrays, num_bits=8, type="float", strategy=strategy, **extra)
    assert_equal_bits(values, expected)


@pytest.mark.parametrize("rows", [256, pytest.param(1 << 16, marks=pytest.mark.slow)])
def test_fp8_codes_with_bfloat16_scales_equal_the_library(rows: int):
    codes = np.ascontiguousarray(np.broadcast_to(np.arange(256, dtype=np.uint8), (rows, 256)))
    scales = np.arange(0, 1 << 16, (1 << 16) // rows).astype(np.uint16)[:, None]
    arrays = {"w": codes.view(E4M3), "scale": scales.view(BFLOAT16)}
    values = decode_all(scaled(arrays, (1, 256), "bfloat16"), arrays, rows_per_part=1000)
    expected = compressed_values(arrays, num_bits=8, type="float", strategy="channel")
    assert_equal_bits(values, expected)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_int8_equals_compressed_tensors(is_symmetric: bool):
    rng = np.random.default_rng(7)
    arrays = {
        "w": rng.integers(-128, 128, (256, 256), dtype=np.int8),
        "scale": random_scales(rng, (256, 1)).astype(BFLOAT16),
    }
    if not is_symmetric:
        arrays["zero_point"] = rng.integers(-128, 128, (256, 1), dtype=np.int8)
    values = decode_all(scaled(arrays, (1, 256), "bfloat16"), arrays, rows_per_part=100)
    expected = compressed_values(
        arrays, num_bits=8, type="int", strategy="channel", symmetric=is_symmetric
    )
    assert_equal_bits(values, expected)


def test_int8_rows_equal_bitsandbytes():
    functional = lazy_module("bitsandbytes.functional")
    rng = np.random.default_rng(8)
    codes = rng.integers(-128, 128, (1000, 256), dtype=np.int8)
    maxima = np.exp(rng.normal(0, 3, 1000)).astype(np.float32)
    decoder = Int8Decoder(stored("w", codes), stored("SCB", maxima))
    values = decode_all(decoder, {"w": codes, "SCB": maxima}, rows_per_part=300)
    expected = functional.int8_vectorwise_dequant(to_torch(codes), to_torch(maxima))
    assert_equal_bits(values, to_numpy(expected))


def test_scale_of_another_shape_is_named():
    weight = whole_array("layers.0.w", "float8_e4m3fn", (256, 256), (0, 0))
    scale = whole_array("layers.0.w_scale_inv", "float32", (2, 3), (0, 0))
    with pytest.raises(DamagedError, match=r"layers\.0\.w_scale_inv` has shape \[2, 3\]"):
        ScaledDecoder(weight, scale, block=(128, 128))
    with pytest.raises(DamagedError, match="does not divide"):
        block_of_grid(weight, scale)


def test_scale_of_another_dtype_is_named():
    weight = whole_array("w", "float8_e4m3fn", (128, 128), (0, 0))
    scale = whole_array("w_scale_inv", "int32", (1, 1), (0, 0))
    with pytest.raises(DamagedError, match="`w_scale_inv` is int32"):
        ScaledDecoder(weight, scale, block=(128, 128))


torch = lazy_module("torch")
mxfp4 = lazy_module("transformers.integrations.mxfp4")
nvfp4 = lazy_module("compressed_tensors.compressors.nvfp4")
quantization = lazy_module("compressed_tensors.quantization")
E4M3 = ml_dtypes.float8_e4m3fn


def random_experts(seed: int, experts: int, rows: int, groups: int) -> Arrays:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, rows, groups, 16), dtype=np.uint8)
    scales = rng.integers(0, 256, (experts, rows, groups), dtype=np.uint8)
    return {"w_blocks": blocks, "w_scales": scales}


def mxfp4_decoder(arrays: Arrays) -> Mxfp4Decoder:
    blocks, scales = (stored(name, array) for name, array in arrays.items())
    return Mxfp4Decoder("w", blocks, scales)


def mxfp4_values_of_transformers(arrays: Arrays) -> np.ndarray:
    blocks, scales = map(torch.from_numpy, arrays.values())
    values = mxfp4.convert_moe_packed_tensors(blocks, scales)
    return values.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def test_all_mxfp4_codes_and_exponents_equal_transformers():
    codes = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    blocks = np.ascontiguousarray(np.broadcast_to(codes, (256, 16, 16)))[None]
    exponents = np.arange(256, dtype=np.uint8)[None, :, None]
    scales = np.ascontiguousarray(np.broadcast_to(exponents, (1, 256, 16)))
    arrays = {"w_blocks": blocks, "w_scales": scales}
    assert_equal_bits(
        decode_all(mxfp4_decoder(arrays), arrays), mxfp4_values_of_transformers(arrays)
    )


@pytest.mark.parametrize("rows_per_part", [1, 7, 50, 96])
def test_parts_of_mxfp4_equal_whole_tensor(rows_per_part: int):
    arrays = random_experts(3, experts=3, rows=8, groups=2)
    decoder = mxfp4_decoder(arrays)
    assert decoder.shape == (3, 64, 8)
    values = decode_all(decoder, arrays, rows_per_part)
    assert_equal_bits(values, mxfp4_values_of_transformers(arrays))


def test_mxfp4_scales_of_another_shape_are_refused():
    blocks = whole_array("experts.w_blocks", "uint8", (2, 4, 3, 16), (0, 0))
    scales = whole_array("experts.w_scales", "uint8", (2, 4, 2), (0, 0))
    with pytest.raises(DamagedError, match=r"experts\.w_scales` has shape \[2, 4, 2\]"):
        Mxfp4Decoder("experts.w", blocks, scales)


def random_arrays(seed: int, rows: int, columns: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
        "scale": rng.integers(0, 256, (rows, columns // 16), dtype=np.uint8).view(E4M3),
        "tensor_scale": np.exp(rng.normal(0, 4, 1)).astype(np.float32),
    }


def nvfp4_decoder(arrays: Arrays, *, is_divisor: bool) -> Nvfp4Decoder:
    tensors = [stored(name, array) for name, array in arrays.items()]
    return Nvfp4Decoder("w", tensors[0], tensors[1], tensors[2], is_divisor=is_divisor)


def nvfp4_values_of_library(arrays: Arrays) -> np.ndarray:
    weights = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    state = {
        "weight_packed": to_torch(arrays["w"]),
        "weight_scale": to_torch(arrays["scale"]),
        "weight_global_scale": to_torch(arrays["tensor_scale"]),
    }
    return to_numpy(nvfp4.NVFP4PackedCompressor.decompress(state, scheme)["weight"])


def modelopt_values(arrays: Arrays) -> np.ndarray:
    """Return the values of `NVFP4QTensor.dequantize`: nibbles by a table, times the product of both scales."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    octets = to_torch(arrays["w"])
    codes = torch.stack([octets & 15, octets >> 4], dim=-1).reshape(len(octets), -1).long()
    magnitudes = table[codes % 8]
    values = torch.where(codes < 8, magnitudes, -magnitudes)
    scales = to_torch(arrays["scale"]).float() * to_torch(arrays["tensor_scale"])
    products = values.reshape(*scales.shape, 16) * scales[..., None]
    return to_numpy(products.reshape(values.shape))


def all_codes() -> Arrays:
    """Return all bytes of codes with all scales."""
    codes = np.arange(256, dtype=np.uint8)
    return {
        "w": np.tile(codes, (256, 1)),
        "scale": np.repeat(codes[:, None], 32, axis=1).view(E4M3),
        "tensor_scale": np.array([3.7], np.float32),
    }


@pytest.mark.parametrize("is_divisor", [True, False])
def test_all_nvfp4_codes_and_scales_equal_the_reference(is_divisor: bool):
    arrays = all_codes()
    reference = nvfp4_values_of_library if is_divisor else modelopt_values
    values = decode_all(nvfp4_decoder(arrays, is_divisor=is_divisor), arrays)
    assert_equal_bits(values, reference(arrays))


@pytest.mark.parametrize("rows_per_part", [1, 7, 100])
def test_parts_of_nvfp4_equal_whole_tensor(rows_per_part: int):
    arrays = random_arrays(3, 50, 320)
    decoder = nvfp4_decoder(arrays, is_divisor=True)
    assert_equal_bits(decode_all(decoder, arrays, rows_per_part), nvfp4_values_of_library(arrays))


def test_nvfp4_scales_of_another_shape_are_refused():
    weight = whole_array("w", "uint8", (8, 32), (0, 0))
    scales = whole_array("w_scale", "float8_e4m3fn", (8, 3), (0, 0))
    tensor_scale = whole_array("w_global_scale", "float32", (1,), (0, 0))
    with pytest.raises(DamagedError, match=r"w_scale` has shape \[8, 3\]"):
        Nvfp4Decoder("w", weight, scales, tensor_scale, is_divisor=True)
