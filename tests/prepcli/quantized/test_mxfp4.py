"""MXFP4 of gpt-oss, compared with transformers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from prepcli.core.errors import DamagedError
from prepcli.planning.arrays import whole_array
from prepcli.quantized.mxfp4 import Mxfp4Decoder
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.quantized import assert_equal_bits, decode_all, stored

torch = lazy_module("torch")
mxfp4 = lazy_module("transformers.integrations.mxfp4")
Arrays = dict[str, np.ndarray]


def random_experts(seed: int, experts: int, rows: int, groups: int) -> Arrays:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, rows, groups, 16), dtype=np.uint8)
    scales = rng.integers(0, 256, (experts, rows, groups), dtype=np.uint8)
    return {"w_blocks": blocks, "w_scales": scales}


def decoder_of(arrays: Arrays) -> Mxfp4Decoder:
    blocks, scales = (stored(name, array) for name, array in arrays.items())
    return Mxfp4Decoder("w", blocks, scales)


def reference(arrays: Arrays) -> np.ndarray:
    blocks, scales = map(torch.from_numpy, arrays.values())
    values = mxfp4.convert_moe_packed_tensors(blocks, scales)
    return values.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("batches", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_random_blocks_equal_transformers(batches: int):
    for seed in range(batches):
        arrays = random_experts(seed, experts=4, rows=250, groups=100)
        assert_equal_bits(decode_all(decoder_of(arrays), arrays), reference(arrays))


def test_all_codes_and_exponents_equal_transformers():
    codes = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    blocks = np.ascontiguousarray(np.broadcast_to(codes, (256, 16, 16)))[None]
    exponents = np.arange(256, dtype=np.uint8)[None, :, None]
    scales = np.ascontiguousarray(np.broadcast_to(exponents, (1, 256, 16)))
    arrays = {"w_blocks": blocks, "w_scales": scales}
    assert_equal_bits(decode_all(decoder_of(arrays), arrays), reference(arrays))


@pytest.mark.parametrize("rows_per_part", [1, 7, 50, 96])
def test_parts_equal_whole_tensor(rows_per_part: int):
    arrays = random_experts(3, experts=3, rows=8, groups=2)
    decoder = decoder_of(arrays)
    assert decoder.shape == (3, 64, 8)
    values = decode_all(decoder, arrays, rows_per_part)
    assert_equal_bits(values, reference(arrays))


def test_scales_of_another_shape_are_refused():
    blocks = whole_array("experts.w_blocks", "uint8", (2, 4, 3, 16), (0, 0))
    scales = whole_array("experts.w_scales", "uint8", (2, 4, 2), (0, 0))
    with pytest.raises(DamagedError, match=r"experts\.w_scales` has shape \[2, 4, 2\]"):
        Mxfp4Decoder("experts.w", blocks, scales)
