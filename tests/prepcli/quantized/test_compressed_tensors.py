"""Packed integers of compressed-tensors, compared with that package."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from prepcli.core.errors import DamagedError
from prepcli.planning.arrays import whole_array
from prepcli.quantized.compressed_tensors import PackedIntDecoder
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.quantized import (
    assert_equal_bits,
    decode_all,
    stored,
    to_numpy,
    to_torch,
)

torch = lazy_module("torch")
quantization = lazy_module("compressed_tensors.quantization")
packing = lazy_module("compressed_tensors.compressors.pack_quantized.helpers")
Arrays = dict[str, np.ndarray]


def random_words(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)


def random_weight(
    bits: int,
    shape: tuple[int, int],
    groups: int,
    *,
    dtype: type,
    is_symmetric: bool = True,
    seed: int = 1,
) -> Arrays:
    rng = np.random.default_rng([seed, bits])
    rows, columns = shape
    arrays = {
        "packed": random_words(rng, (rows, -(-columns * bits // 32))),
        "scale": np.exp(rng.normal(-6, 2, (rows, groups))).astype(dtype),
    }
    if not is_symmetric:
        arrays["zero_point"] = random_words(rng, (-(-rows * bits // 32), groups))
    return arrays


def decoder_of(arrays: Arrays, bits: int, columns: int) -> PackedIntDecoder:
    tensors = {name: stored(name, array) for name, array in arrays.items()}
    return PackedIntDecoder(
        "w",
        tensors["packed"],
        tensors["scale"],
        bits=bits,
        columns=columns,
        zero_point=tensors.get("zero_point"),
        column_groups=tensors.get("g_idx"),
    )


def reference(arrays: Arrays, bits: int, shape: tuple[int, int]) -> np.ndarray:
    rows, columns = shape
    groups = arrays["scale"].shape[1]
    codes = packing.unpack_from_int32(to_torch(arrays["packed"]), bits, shape)
    zero_point = None
    if "zero_point" in arrays:
        zero_point = packing.unpack_from_int32(
            to_torch(arrays["zero_point"]), bits, (rows, groups), packed_dim=0
        )
    args = quantization.QuantizationArgs(
        num_bits=bits,
        type="int",
        strategy="group",
        group_size=columns // groups,
        symmetric=zero_point is None,
    )
    return to_numpy(
        quantization.lifecycle.forward.dequantize(
            codes, to_torch(arrays["scale"]), zero_point, args
        )
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("bits", range(1, 9))
def test_random_codes_equal_compressed_tensors(bits: int, is_symmetric: bool, dtype: type):
    shape = (100, 224)
    arrays = random_weight(bits, shape, groups=7, dtype=dtype, is_symmetric=is_symmetric)
    decoder = decoder_of(arrays, bits, columns=224)
    expected = reference(arrays, bits, shape)
    for rows_per_part in (None, 1, 33):
        assert_equal_bits(decode_all(decoder, arrays, rows_per_part), expected)


@pytest.mark.parametrize("batches", [1, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bits", [4, 8])
def test_many_groups_equal_compressed_tensors(bits: int, batches: int):
    # 100 groups of 32 columns in each of 1000 rows: 100,000 groups.
    shape = (1000, 3200)
    for seed in range(batches):
        arrays = random_weight(
            bits, shape, 100, dtype=ml_dtypes.bfloat16, is_symmetric=False, seed=seed
        )
        values = decode_all(decoder_of(arrays, bits, columns=3200), arrays)
        assert_equal_bits(values, reference(arrays, bits, shape))


def test_scales_per_tensor_and_per_row_are_decoded():
    arrays = random_weight(4, (8, 64), groups=1, dtype=np.float32)
    by_row = decode_all(decoder_of(arrays, 4, columns=64), arrays)
    assert_equal_bits(by_row, reference(arrays, 4, (8, 64)))
    flat = {**arrays, "scale": arrays["scale"][:, 0]}
    assert_equal_bits(decode_all(decoder_of(flat, 4, columns=64), flat, rows_per_part=3), by_row)
    one = {**arrays, "scale": arrays["scale"][0]}
    equal_rows = {**arrays, "scale": np.repeat(arrays["scale"][:1], 8, axis=0)}
    values = decode_all(decoder_of(one, 4, columns=64), one, rows_per_part=3)
    assert_equal_bits(values, reference(equal_rows, 4, (8, 64)))


def test_activation_order_equals_permuted_columns():
    # A permutation of the columns that sorts their groups gives consecutive groups, which is the definition of g_idx.
    arrays = random_weight(8, (6, 64), groups=4, dtype=np.float32, is_symmetric=False)
    order = np.random.default_rng(1).permutation(64)
    codes = arrays["packed"].view(np.uint8)
    shuffled = np.empty_like(codes)
    shuffled[:, order] = codes
    g_idx = np.empty(64, np.int32)
    g_idx[order] = np.arange(64) // 16
    permuted = {**arrays, "packed": shuffled.view(np.int32), "g_idx": g_idx}
    values = decode_all(decoder_of(permuted, 8, columns=64), permuted)
    expected = reference(arrays, 8, (6, 64))
    assert_equal_bits(np.ascontiguousarray(values[:, order]), expected)
    unordered = {**arrays, "g_idx": np.full(64, -1, np.int32)}
    assert_equal_bits(decode_all(decoder_of(unordered, 8, columns=64), unordered), expected)


def test_group_beyond_scales_is_refused():
    arrays = random_weight(4, (2, 64), groups=2, dtype=np.float32)
    arrays["g_idx"] = np.full(64, 2, np.int32)
    with pytest.raises(DamagedError, match="`g_idx` refers to group 2"):
        decode_all(decoder_of(arrays, 4, columns=64), arrays)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("packed", (4, 9)), ("scale", (4, 3)), ("scale", (5, 2)), ("zero_point", (4, 2))],
)
def test_tensor_of_another_shape_is_named(name: str, shape: tuple[int, ...]):
    shapes: dict[str, tuple[int, ...]] = {
        "packed": (4, 8),
        "scale": (4, 2),
        "zero_point": (1, 2),
        name: shape,
    }
    dtypes = {"packed": "int32", "scale": "bfloat16", "zero_point": "int32"}
    tensors = {key: whole_array(key, dtypes[key], shapes[key], (0, 0)) for key in shapes}
    with pytest.raises(DamagedError, match=f"`{name}` has shape"):
        PackedIntDecoder(
            "w",
            tensors["packed"],
            tensors["scale"],
            bits=4,
            columns=64,
            zero_point=tensors["zero_point"],
        )
