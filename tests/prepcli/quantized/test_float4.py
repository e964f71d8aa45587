"""MXFP4 against transformers. NVFP4 against compressed-tensors, and against the formula of ModelOpt in torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from prepcli.core.errors import DamagedError
from prepcli.planning.arrays import whole_array
from prepcli.quantized.float4 import Mxfp4Decoder, Nvfp4Decoder
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.quantized import (
    assert_equal_bits,
    decode_all,
    stored,
    to_numpy,
    to_torch,
)

torch = lazy_module("torch")
mxfp4 = lazy_module("transformers.integrations.mxfp4")
nvfp4 = lazy_module("compressed_tensors.compressors.nvfp4")
quantization = lazy_module("compressed_tensors.quantization")
E4M3 = ml_dtypes.float8_e4m3fn
Arrays = dict[str, np.ndarray]


def random_experts(seed: int, experts: int, rows: int, groups: int) -> Arrays:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, rows, groups, 16), dtype=np.uint8)
    scales = rng.integers(0, 256, (experts, rows, groups), dtype=np.uint8)
    return {"w_blocks": blocks, "w_scales": scales}


def mxfp4_decoder(arrays: Arrays) -> Mxfp4Decoder:
    blocks, scales = (stored(name, array) for name, array in arrays.items())
    return Mxfp4Decoder("w", blocks, scales)


def transformers_values(arrays: Arrays) -> np.ndarray:
    blocks, scales = map(torch.from_numpy, arrays.values())
    values = mxfp4.convert_moe_packed_tensors(blocks, scales)
    return values.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("batches", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_random_mxfp4_blocks_equal_transformers(batches: int):
    for seed in range(batches):
        arrays = random_experts(seed, experts=4, rows=250, groups=100)
        assert_equal_bits(decode_all(mxfp4_decoder(arrays), arrays), transformers_values(arrays))


def test_all_mxfp4_codes_and_exponents_equal_transformers():
    codes = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    blocks = np.ascontiguousarray(np.broadcast_to(codes, (256, 16, 16)))[None]
    exponents = np.arange(256, dtype=np.uint8)[None, :, None]
    scales = np.ascontiguousarray(np.broadcast_to(exponents, (1, 256, 16)))
    arrays = {"w_blocks": blocks, "w_scales": scales}
    assert_equal_bits(decode_all(mxfp4_decoder(arrays), arrays), transformers_values(arrays))


@pytest.mark.parametrize("rows_per_part", [1, 7, 50, 96])
def test_parts_of_mxfp4_equal_whole_tensor(rows_per_part: int):
    arrays = random_experts(3, experts=3, rows=8, groups=2)
    decoder = mxfp4_decoder(arrays)
    assert decoder.shape == (3, 64, 8)
    values = decode_all(decoder, arrays, rows_per_part)
    assert_equal_bits(values, transformers_values(arrays))


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


def compressed_values(arrays: Arrays) -> np.ndarray:
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


@pytest.mark.parametrize("batches", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_random_nvfp4_groups_equal_compressed_tensors(batches: int):
    for seed in range(batches):
        arrays = random_arrays(seed, 1000, 24_000 if batches > 1 else 2400)
        decoder = nvfp4_decoder(arrays, is_divisor=True)
        assert_equal_bits(decode_all(decoder, arrays), compressed_values(arrays))


def test_random_nvfp4_groups_equal_modelopt():
    arrays = random_arrays(1, 500, 4800)
    values = decode_all(nvfp4_decoder(arrays, is_divisor=False), arrays)
    assert_equal_bits(values, modelopt_values(arrays))


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
    reference = compressed_values if is_divisor else modelopt_values
    values = decode_all(nvfp4_decoder(arrays, is_divisor=is_divisor), arrays)
    assert_equal_bits(values, reference(arrays))


@pytest.mark.parametrize("rows_per_part", [1, 7, 100])
def test_parts_of_nvfp4_equal_whole_tensor(rows_per_part: int):
    arrays = random_arrays(3, 50, 320)
    decoder = nvfp4_decoder(arrays, is_divisor=True)
    assert_equal_bits(decode_all(decoder, arrays, rows_per_part), compressed_values(arrays))


def test_nvfp4_scales_of_another_shape_are_refused():
    weight = whole_array("w", "uint8", (8, 32), (0, 0))
    scales = whole_array("w_scale", "float8_e4m3fn", (8, 3), (0, 0))
    tensor_scale = whole_array("w_global_scale", "float32", (1,), (0, 0))
    with pytest.raises(DamagedError, match=r"w_scale` has shape \[8, 3\]"):
        Nvfp4Decoder("w", weight, scales, tensor_scale, is_divisor=True)
