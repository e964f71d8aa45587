"""Weights of quantisation configs, and packed codes, compared with compressed-tensors and with NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from prepcli.core.errors import DamagedError, PrepError
from prepcli.planning.arrays import whole_array
from prepcli.quantized.compressed_tensors import PackedIntDecoder
from prepcli.quantized.formats import find_weights
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.quantized import assert_equal_bits, decode_all, stored, to_numpy, to_torch

torch = lazy_module("torch")
quantization = lazy_module("compressed_tensors.quantization")
mxfp8 = lazy_module("compressed_tensors.compressors.mxfp8")
packing = lazy_module("compressed_tensors.compressors.pack_quantized.helpers")
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


def int_scheme(num_bits: int, group_size: int) -> dict[str, Any]:
    return {
        "num_bits": num_bits,
        "type": "int",
        "strategy": "group",
        "group_size": group_size,
        "symmetric": True,
    }


def packed_weight(name: str, num_bits: int, shape: tuple[int, int], group_size: int) -> Arrays:
    rng = np.random.default_rng(num_bits)
    rows, columns = shape
    words = rng.integers(-(1 << 31), 1 << 31, (rows, -(-columns * num_bits // 32)))
    return {
        f"{name}.weight_packed": words.astype(np.int32),
        f"{name}.weight_scale": np.exp(rng.normal(-6, 2, (rows, columns // group_size))).astype(
            ml_dtypes.bfloat16
        ),
        f"{name}.weight_shape": np.array(shape, np.int64),
    }


def library_values(arrays: Arrays, name: str, scheme: dict[str, Any]) -> np.ndarray:
    """Return the values of a packed or dense weight as compressed-tensors decodes it."""
    if f"{name}.weight" in arrays:
        codes = to_torch(arrays[f"{name}.weight"])
    else:
        words = to_torch(arrays[f"{name}.weight_packed"])
        shape = arrays[f"{name}.weight_shape"].tolist()
        codes = packing.unpack_from_int32(words, scheme["num_bits"], shape)
    args = quantization.QuantizationArgs(**scheme)
    scale = to_torch(arrays[f"{name}.weight_scale"])
    return to_numpy(quantization.lifecycle.forward.dequantize(codes, scale, None, args))


def test_packed_weights_have_the_scheme_of_their_scales():
    schemes = {"a": int_scheme(4, 16), "b": int_scheme(4, 32), "c": int_scheme(8, 32)}
    arrays: Arrays = {}
    for name, scheme in schemes.items():
        arrays |= packed_weight(name, scheme["num_bits"], (4, 64), scheme["group_size"])
    values = decode_weights(compressed(*schemes.values()), arrays)
    for name, scheme in schemes.items():
        assert_equal_bits(values[f"{name}.weight"], library_values(arrays, name, scheme))


def test_packed_weight_of_no_scheme_is_refused():
    arrays = packed_weight("a", 4, (4, 64), 8)
    with pytest.raises(DamagedError, match=r"`a\.weight_scale` has shape \[4, 8\]"):
        decode_weights(compressed(int_scheme(4, 16), int_scheme(4, 32)), arrays)


def test_group_of_fewer_columns_is_refused():
    codes = np.ones((1, 100), np.int8)
    scale = np.array([[1, 2, 3, 4]], np.float32)
    dense = {"a.weight": codes, "a.weight_scale": scale}
    packed = {
        "a.weight_packed": (codes.view(np.uint8) + 128).view(np.int32),
        "a.weight_scale": scale,
        "a.weight_shape": np.array([1, 100], np.int64),
    }
    scheme = int_scheme(8, 32)
    for arrays in (dense, packed):
        with pytest.raises(ValueError, match="divisble"):
            library_values(arrays, "a", scheme)
        with pytest.raises(DamagedError, match=r"`a\.weight_scale` has shape") as caught:
            decode_weights(compressed(scheme), arrays)
        assert "group_size must divide the columns" in caught.value.why
        divisor = int_scheme(8, 25)
        values = decode_weights(compressed(divisor), arrays)["a.weight"]
        assert_equal_bits(values, library_values(arrays, "a", divisor))


def test_packed_weight_of_unknown_bits_is_refused():
    # 8 values of 3 or 4 bits are one word.
    arrays = packed_weight("a", 4, (4, 8), 8)
    with pytest.raises(PrepError, match="3 or 4 bits"):
        decode_weights(compressed(int_scheme(3, 8), int_scheme(4, 8)), arrays)


BLOCKS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "block",
    "block_structure": [128, 128],
}
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel"}


def dense_weight(name: str, shape: tuple[int, int], scale_shape: tuple[int, ...]) -> Arrays:
    rng = np.random.default_rng(1)
    return {
        f"{name}.weight": rng.integers(0, 256, shape, dtype=np.uint8).view(E4M3),
        f"{name}.weight_scale": np.exp(rng.normal(-6, 2, scale_shape)).astype(np.float32),
    }


def test_dense_weights_have_the_scheme_of_their_scales():
    arrays = dense_weight("a", (300, 384), (3, 3)) | dense_weight("b", (256, 384), (256, 1))
    unnamed = {"num_bits": 8, "type": "float"}
    values = decode_weights(compressed(BLOCKS, unnamed, CHANNELS), arrays)
    assert_equal_bits(values["a.weight"], library_values(arrays, "a", BLOCKS))
    assert_equal_bits(values["b.weight"], library_values(arrays, "b", CHANNELS))


def test_dense_weight_of_no_scheme_is_refused():
    arrays = dense_weight("a", (256, 384), (4, 6))
    with pytest.raises(DamagedError, match=r"`a\.weight_scale` has shape \[4, 6\]"):
        decode_weights(compressed(BLOCKS, CHANNELS), arrays)


def test_dense_weight_of_unknown_blocks_is_refused():
    arrays = dense_weight("a", (200, 128), (2, 1))
    with pytest.raises(PrepError, match=r"blocks of \[100, 128\] or \[128, 128\]"):
        decode_weights(compressed(BLOCKS, {**BLOCKS, "block_structure": [100, 128]}), arrays)


TENSOR = {**CHANNELS, "strategy": "tensor"}


@pytest.mark.parametrize("scheme", [CHANNELS, TENSOR, BLOCKS])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_dense_weight_without_elements_is_refused(shape: tuple[int, int], scheme: dict[str, Any]):
    arrays = dense_weight("a", shape, (8, 1))
    with pytest.raises(DamagedError, match=r"`a\.weight` has shape \[.*0.*\]"):
        decode_weights(compressed(scheme), arrays)


@pytest.mark.parametrize("shape", [(0, 32), (4, 0)])
def test_packed_weight_without_elements_is_refused(shape: tuple[int, int]):
    arrays = packed_weight("a", 8, shape, 32)
    with pytest.raises(DamagedError, match=r"`a\.weight_packed` has shape"):
        decode_weights(compressed({**int_scheme(8, 32), "strategy": "tensor"}), arrays)


def test_int8_weight_without_elements_is_refused():
    arrays = {"a.weight": np.zeros((8, 0), np.int8), "a.SCB": np.ones(8, np.float32)}
    with pytest.raises(DamagedError, match=r"`a\.weight` has shape \[8, 0\]"):
        decode_weights({"quant_method": "bitsandbytes"}, arrays)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_weight_of_words_without_elements_is_refused(method: str):
    arrays = {
        "a.qweight": np.zeros((0, 32), np.int32),
        "a.qzeros": np.zeros((1, 4), np.int32),
        "a.scales": np.ones((1, 32), np.float16),
    }
    with pytest.raises(DamagedError, match=r"`a\.qweight` has shape \[0, 32\]"):
        decode_weights({"quant_method": method, "bits": 4}, arrays)


@pytest.mark.parametrize(
    ("changes", "outputs", "meanings"),
    [
        # 8 outputs have one word of zero points, whether of 2 or of 4 bits.
        ({"bits": 2, "group_size": 64}, 8, "4 bits in groups of 32 or 2 bits in groups of 64"),
        ({"group_size": 48}, 32, "4 bits in groups of 32 or 4 bits in groups of 48"),
    ],
)
def test_gptq_rules_that_shapes_do_not_tell_apart(
    changes: dict[str, int], outputs: int, meanings: str
):
    arrays = {
        "a.qweight": np.zeros((8, outputs), np.int32),
        "a.qzeros": np.zeros((2, -(-outputs * 4 // 32)), np.int32),
        "a.scales": np.ones((2, outputs), np.float16),
    }
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:a": changes}}
    with pytest.raises(PrepError, match=r"the settings of `a\.weight` are unknown") as caught:
        decode_weights(settings, arrays)
    assert caught.value.why == f"its tensors fit {meanings}"


def test_missing_group_size_names_the_settings_file():
    # 64 inputs are not 3 groups of equal sizes.
    arrays = {
        "a.qweight": np.zeros((8, 32), np.int32),
        "a.qzeros": np.zeros((3, 4), np.int32),
        "a.scales": np.ones((3, 32), np.float16),
    }
    tensors = [stored(name, array) for name, array in arrays.items()]
    with pytest.raises(PrepError, match=r"the groups of `a\.weight` are unknown") as caught:
        find_weights(
            {"quant_method": "gptq", "bits": 4},
            tensors,
            lambda tensor: arrays[tensor.name].tobytes(),
            settings_file="quantize_config.json",
        )
    expected = "add group_size to the quantisation settings in quantize_config.json"
    assert caught.value.hint == expected


torch = lazy_module("torch")
quantization = lazy_module("compressed_tensors.quantization")
packing = lazy_module("compressed_tensors.compressors.pack_quantized.helpers")


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
