"""Weights of a quantisation config and stored tensors, compared with compressed-tensors and with NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from prepcli.quantized.find_weights import find_weights
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.quantized import assert_equal_bits, decode_all, stored, to_numpy, to_torch

torch = lazy_module("torch")
quantization = lazy_module("compressed_tensors.quantization")
mxfp8 = lazy_module("compressed_tensors.compressors.mxfp8")
E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
Arrays = dict[str, np.ndarray]


def decode_weights(settings: dict[str, Any], arrays: Arrays) -> Arrays:
    """Return the values of all weights by name."""
    tensors = [stored(name, array) for name, array in arrays.items()]
    weights = find_weights(settings, tensors, lambda tensor: arrays[tensor.name].tobytes())
    return {decoder.name: decode_all(decoder, arrays) for decoder in weights.decoders}


def compressed(*schemes: dict[str, Any], file_format: str = "mixed-precision") -> dict[str, Any]:
    """Return the settings of compressed-tensors with a group of modules for each scheme."""
    groups = {f"group_{number}": {"weights": scheme} for number, scheme in enumerate(schemes)}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": groups,
    }


MXFP8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}


def mxfp8_weight(exponents: np.ndarray, scale_dtype: type) -> Arrays:
    """Return all fp8 codes with each exponent."""
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8), (exponents.size, 256)).copy()
    scales = np.repeat(exponents[:, None], 8, axis=1)
    return {"w.weight": codes.view(E4M3), "w.weight_scale": scales.view(scale_dtype)}


@pytest.mark.parametrize("scale_dtype", [np.uint8, E8M0])
def test_mxfp8_equals_compressed_tensors(scale_dtype: type):
    exponents = np.arange(255, dtype=np.uint8)
    arrays = mxfp8_weight(exponents, scale_dtype)
    values = decode_weights(compressed(MXFP8, file_format="mxfp8-quantized"), arrays)["w.weight"]
    scheme = quantization.QuantizationScheme(
        targets=["Linear"],
        weights=quantization.QuantizationArgs(**MXFP8, scale_dtype=torch.uint8),
    )
    state = {
        "weight": to_torch(arrays["w.weight"]),
        "weight_scale": to_torch(arrays["w.weight_scale"].view(np.uint8)),
    }
    decompressed = mxfp8.MXFP8QuantizationCompressor.decompress(state, scheme)
    assert_equal_bits(values, to_numpy(decompressed["weight"]))


@pytest.mark.parametrize("scale_dtype", [np.uint8, E8M0])
def test_exponent_255_is_nan(scale_dtype: type):
    arrays = mxfp8_weight(np.array([255], np.uint8), scale_dtype)
    values = decode_weights(compressed(MXFP8), arrays)["w.weight"]
    assert np.isnan(values.astype(np.float32)).all()
