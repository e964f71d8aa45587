"""Quantised formats: codes of a weight are drawn at random, packed here, and multiplied with NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]
# Stored tensors by the end of their name, and the values of the weight.
Quantized = tuple[Arrays, np.ndarray]
BFLOAT16 = ml_dtypes.bfloat16
E2M1_MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def scales_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.exp(rng.normal(-4, 0.5, shape)).astype(dtype)


def pack_words(codes: np.ndarray) -> np.ndarray:
    """Pack codes of 4 bits along the last axis into int32 words, the first code in the lowest bits."""
    nibbles = codes.astype(np.int64).reshape(*codes.shape[:-1], -1, 8)
    words = (nibbles << np.arange(0, 32, 4)).sum(axis=-1)
    return words.astype(np.uint32).view(np.int32)


def fp8(rng: np.random.Generator, shape: tuple[int, int]) -> Quantized:
    """Return a weight in float8 with a scale per block of 16 x 16, and its values."""
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scales = scales_of(rng, (-(-shape[0] // 16), -(-shape[1] // 16)), np.float32)
    spread = np.repeat(np.repeat(scales, 16, axis=0), 16, axis=1)[: shape[0], : shape[1]]
    return {"weight": codes, "weight_scale_inv": scales}, codes.astype(np.float32) * spread


def compressed_fp8(rng: np.random.Generator, shape: tuple[int, int]) -> Quantized:
    """Return a weight in float8 of compressed-tensors with a scale per row, and its values."""
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scales = scales_of(rng, (shape[0], 1), BFLOAT16)
    stored: Arrays = {"weight": codes, "weight_scale": scales}
    stored["input_scale"] = np.ones(1, np.float32)
    return stored, codes.astype(BFLOAT16) * scales


def compressed_int4(rng: np.random.Generator, shape: tuple[int, int]) -> Quantized:
    """Return a weight in 4 bits of compressed-tensors, and its values."""
    rows, columns = shape
    codes = rng.integers(0, 16, shape)
    zeros = rng.integers(0, 16, (rows, columns // 16))
    scales = scales_of(rng, zeros.shape, BFLOAT16)
    differences = codes - np.repeat(zeros, 16, axis=1)
    stored: Arrays = {
        "weight_packed": pack_words(codes),
        "weight_scale": scales,
        "weight_shape": np.array(shape, np.int64),
        "weight_zero_point": np.ascontiguousarray(pack_words(zeros.T).T),
    }
    return stored, differences.astype(BFLOAT16) * np.repeat(scales, 16, axis=1)


def gptq(rng: np.random.Generator, shape: tuple[int, int]) -> Quantized:
    """Return a weight in 4 bits of GPTQ, and its values."""
    outputs, inputs = shape
    codes = rng.integers(0, 16, shape)
    zeros = rng.integers(1, 16, (inputs // 16, outputs))
    scales = scales_of(rng, zeros.shape, np.float16)
    g_idx = rng.permutation(np.arange(inputs) // 16).astype(np.int32)
    differences = codes - zeros[g_idx].T
    stored: Arrays = {
        "qweight": np.ascontiguousarray(pack_words(codes).T),
        "qzeros": pack_words(zeros - 1),
        "scales": scales,
        "g_idx": g_idx,
    }
    return stored, differences.astype(np.float16) * scales[g_idx].T


def awq(rng: np.random.Generator, shape: tuple[int, int]) -> Quantized:
    """Return a weight in 4 bits of AWQ, and its values."""
    outputs, inputs = shape
    codes = rng.integers(0, 16, (inputs, outputs))
    zeros = rng.integers(0, 16, (inputs // 16, outputs))
    scales = scales_of(rng, zeros.shape, np.float16)
    differences = codes - np.repeat(zeros, 16, axis=0)
    stored: Arrays = {"scales": scales}
    for name, values in (("qweight", codes), ("qzeros", zeros)):
        words = values.reshape(len(values), -1, 8)[..., AWQ_ORDER]
        stored[name] = pack_words(words.reshape(len(values), -1))
    return stored, (differences.astype(np.float16) * np.repeat(scales, 16, axis=0)).T


def bits8(rng: np.random.Generator, shape: tuple[int, int]) -> Quantized:
    """Return a weight in int8 of bitsandbytes, and its values."""
    codes = rng.integers(-127, 128, shape).astype(np.int8)
    maxima = scales_of(rng, shape[:1], np.float32)
    values = codes.astype(np.float32) * maxima[:, None] * np.float32(7.874015718698502e-3)
    stored: Arrays = {"weight": codes, "SCB": maxima, "weight_format": np.zeros((), np.uint8)}
    return stored, values


def nf4(rng: np.random.Generator, shape: tuple[int, int]) -> Quantized:
    """Return a weight in NF4 of bitsandbytes, and its values."""
    codes = rng.integers(0, 16, shape[0] * shape[1]).astype(np.uint8)
    table = np.linspace(-1, 1, 16, dtype=np.float32)
    maxima = scales_of(rng, (-(-codes.size // 64),), np.float32)
    values = table[codes] * np.repeat(maxima, 64)[: codes.size]
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape}
    stored: Arrays = {
        "weight": (codes[0::2] << 4 | codes[1::2])[:, None],
        "weight.absmax": maxima,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    return stored, values.reshape(shape).astype(BFLOAT16)


def nvfp4_parts(
    rng: np.random.Generator, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bytes of codes, the scales of groups and the E2M1 values of the codes."""
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    values = np.array(E2M1_MAGNITUDES, np.float32)[codes % 8]
    scales = rng.uniform(16, 448, (shape[0], shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, np.where(codes < 8, values, -values)


def compressed_nvfp4(rng: np.random.Generator, shape: tuple[int, int]) -> Quantized:
    """Return a weight in NVFP4 of compressed-tensors, and its values."""
    packed, scales, values = nvfp4_parts(rng, shape)
    divisor = np.array([rng.uniform(1000, 9000)], np.float32)
    stored: Arrays = {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_global_scale": divisor,
        "input_global_scale": divisor,
    }
    products = values * np.repeat(scales.astype(np.float32) / divisor, 16, axis=1)
    return stored, products.astype(BFLOAT16)


def modelopt_nvfp4(rng: np.random.Generator, shape: tuple[int, int]) -> Quantized:
    """Return a weight in NVFP4 of ModelOpt, and its values."""
    packed, scales, values = nvfp4_parts(rng, shape)
    factor = np.array(rng.uniform(0.0001, 0.001), np.float32)
    stored: Arrays = {
        "weight": packed,
        "weight_scale": scales,
        "weight_scale_2": factor,
        "input_scale": factor,
    }
    return stored, values * np.repeat(scales.astype(np.float32) * factor, 16, axis=1)


def compressed(weights: dict[str, Any], file_format: str) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class QuantizedFormat:
    """A format: the quantisation config of config.json, and the function that makes a weight."""

    settings: Mapping[str, Any]
    quantize: Callable[[np.random.Generator, tuple[int, int]], Quantized]


INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
FORMATS: dict[str, QuantizedFormat] = {
    "fp8": QuantizedFormat({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8),
    "compressed-fp8": QuantizedFormat(compressed(FP8_WEIGHTS, "float-quantized"), compressed_fp8),
    "compressed-int4": QuantizedFormat(compressed(INT4_WEIGHTS, "pack-quantized"), compressed_int4),
    "compressed-nvfp4": QuantizedFormat(
        compressed(NVFP4_WEIGHTS, "nvfp4-pack-quantized"), compressed_nvfp4
    ),
    "modelopt-nvfp4": QuantizedFormat(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, modelopt_nvfp4
    ),
    "gptq": QuantizedFormat(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}, gptq
    ),
    "awq": QuantizedFormat(
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, awq
    ),
    "int8": QuantizedFormat({"quant_method": "bitsandbytes", "load_in_8bit": True}, bits8),
    "nf4": QuantizedFormat({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
}
