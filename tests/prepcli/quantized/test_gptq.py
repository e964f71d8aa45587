"""GPTQ against bit fields that NumPy unpacks one bit at a time, and AWQ against nibbles of Python's integers."""

from __future__ import annotations

import numpy as np
import pytest

from prepcli.core.errors import DamagedError, PrepError
from prepcli.planning.arrays import Array, whole_array
from prepcli.quantized.formats import find_weights
from prepcli.quantized.gptq import BITS, AwqDecoder, GptqDecoder
from tests.helpers.quantized import assert_equal_bits, decode_all, stored

Arrays = dict[str, np.ndarray]


def random_weight(bits: int, inputs: int, outputs: int, groups: int, seed: int = 1) -> Arrays:
    rng = np.random.default_rng([seed, bits])
    words = [(inputs * bits // 32, outputs), (groups, outputs * bits // 32)]
    weight, zeros = (rng.integers(-(1 << 31), 1 << 31, s).astype(np.int32) for s in words)
    scales = np.exp(rng.normal(-6, 2, (groups, outputs))).astype(np.float16)
    return {"qweight": weight, "qzeros": zeros, "scales": scales}


def decoder_of(
    arrays: Arrays, bits: int, *, is_version_1: bool = True, group_size: int | None = None
) -> GptqDecoder:
    tensors = {name: stored(name, array) for name, array in arrays.items()}
    return GptqDecoder(
        "w",
        tensors["qweight"],
        tensors["qzeros"],
        tensors["scales"],
        bits=bits,
        is_zero_stored_minus_1=is_version_1,
        input_groups=tensors.get("g_idx"),
        group_size=group_size,
    )


def bit_fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the bit fields of each row of words. A row is one little-endian number."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    digits = np.unpackbits(octets, axis=1, bitorder="little")
    digits = digits.reshape(len(words), -1, bits)
    fields = np.zeros(digits.shape[:2], np.int16)
    for position in range(bits):
        fields += digits[:, :, position].astype(np.int16) << position
    return fields


def reference(arrays: Arrays, bits: int, *, is_version_1: bool = True) -> np.ndarray:
    groups = len(arrays["scales"])
    inputs = arrays["qweight"].shape[0] * 32 // bits
    g_idx = arrays.get("g_idx", np.arange(inputs) // (inputs // groups))
    zeros = bit_fields(arrays["qzeros"], bits)
    if is_version_1:
        zeros += 1
        # AutoGPTQ reduces all but the numbers of 3 bits.
        if bits != 3:
            zeros %= 1 << bits
    codes = bit_fields(arrays["qweight"].T, bits)
    differences = (codes - zeros.T[:, g_idx]).astype(np.float16)
    return differences * arrays["scales"].T[:, g_idx]


@pytest.mark.parametrize("is_version_1", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_random_codes_equal_bit_fields(bits: int, is_version_1: bool):
    arrays = random_weight(bits, inputs=128, outputs=96, groups=4)
    decoder = decoder_of(arrays, bits, is_version_1=is_version_1)
    expected = reference(arrays, bits, is_version_1=is_version_1)
    for rows_per_part in (None, 1, 31):
        assert_equal_bits(decode_all(decoder, arrays, rows_per_part), expected)


@pytest.mark.parametrize("bits", BITS)
def test_activation_order_uses_group_of_each_input(bits: int):
    arrays = random_weight(bits, inputs=64, outputs=32, groups=4)
    arrays["g_idx"] = np.random.default_rng(1).integers(0, 4, 64).astype(np.int32)
    values = decode_all(decoder_of(arrays, bits), arrays, rows_per_part=10)
    assert_equal_bits(values, reference(arrays, bits))


def test_last_group_may_have_fewer_inputs():
    # 160 inputs in groups of 64: 64, 64 and 32.
    arrays = random_weight(4, inputs=160, outputs=32, groups=3)
    expected = reference({**arrays, "g_idx": np.arange(160) // 64}, 4)
    for extra in ({}, {"g_idx": np.full(160, -1, np.int32)}):
        decoder = decoder_of(arrays | extra, 4, group_size=64)
        assert_equal_bits(decode_all(decoder, arrays | extra), expected)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    tensors = [stored(name, array) for name, array in arrays.items()]
    (decoder,) = find_weights(settings, tensors, lambda tensor: b"").decoders
    assert_equal_bits(decode_all(decoder, arrays), expected)


def test_groups_of_unknown_size_are_refused():
    arrays = random_weight(4, inputs=160, outputs=32, groups=3)
    with pytest.raises(PrepError, match="has no group_size"):
        decoder_of(arrays, 4)
    arrays["g_idx"] = np.full(160, -1, np.int32)
    with pytest.raises(PrepError, match="has no group_size"):
        decode_all(decoder_of(arrays, 4), arrays)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qweight", (7,)),
        ("scales", (2, 65)),
        ("qzeros", (2, 7)),
        ("qzeros", (3, 8)),
        ("g_idx", (63,)),
    ],
)
def test_tensor_of_another_shape_is_named(name: str, shape: tuple[int, ...]):
    shapes: dict[str, tuple[int, ...]] = {
        "qweight": (8, 64),
        "qzeros": (2, 8),
        "scales": (2, 64),
        "g_idx": (64,),
        name: shape,
    }
    tensors: dict[str, Array] = {}
    for key in shapes:
        dtype = "float16" if key == "scales" else "int32"
        tensors[key] = whole_array(key, dtype, shapes[key], (0, 0))
    with pytest.raises(DamagedError, match=f"`{name}` has shape"):
        GptqDecoder(
            "w",
            tensors["qweight"],
            tensors["qzeros"],
            tensors["scales"],
            bits=4,
            input_groups=tensors["g_idx"],
        )


# AutoAWQ writes output AWQ_ORDER[p] of 8 to nibble p of a word (awq/modules/linear/gemm.py, `from_linear`).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_random_weight(inputs: int, outputs: int, groups: int, seed: int = 1) -> Arrays:
    rng = np.random.default_rng(seed)
    words = [(inputs, outputs // 8), (groups, outputs // 8)]
    weight, zeros = (rng.integers(-(1 << 31), 1 << 31, s).astype(np.int32) for s in words)
    scales = np.exp(rng.normal(-6, 2, (groups, outputs))).astype(np.float16)
    return {"qweight": weight, "qzeros": zeros, "scales": scales}


def awq_decoder_of(arrays: Arrays) -> AwqDecoder:
    return AwqDecoder("w", *(stored(name, array) for name, array in arrays.items()))


def awq_unpack(words: np.ndarray) -> np.ndarray:
    codes = np.empty((*words.shape, 8), np.int64)
    for nibble, output in enumerate(AWQ_ORDER):
        codes[..., output] = words.astype(np.int64) >> 4 * nibble & 15
    return codes.reshape(len(words), -1)


def awq_reference(arrays: Arrays) -> np.ndarray:
    codes = awq_unpack(arrays["qweight"])
    group_size = len(codes) // len(arrays["scales"])
    zeros = np.repeat(awq_unpack(arrays["qzeros"]), group_size, axis=0)
    scales = np.repeat(arrays["scales"], group_size, axis=0)
    return np.ascontiguousarray(((codes - zeros).astype(np.float16) * scales).T)


def test_parts_of_a_random_awq_weight_decode_like_the_reference():
    arrays = awq_random_weight(inputs=64, outputs=80, groups=4)
    decoder = awq_decoder_of(arrays)
    for rows_per_part in (None, 1, 13):
        assert_equal_bits(decode_all(decoder, arrays, rows_per_part), awq_reference(arrays))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("qweight", (64,)), ("scales", (5, 80)), ("scales", (4, 79)), ("qzeros", (4, 9))],
)
def test_awq_tensor_of_another_shape_is_named(name: str, shape: tuple[int, ...]):
    shapes: dict[str, tuple[int, ...]] = {
        "qweight": (64, 10),
        "qzeros": (4, 10),
        "scales": (4, 80),
        name: shape,
    }
    tensors: list[Array] = []
    for key in shapes:
        dtype = "float16" if key == "scales" else "int32"
        tensors.append(whole_array(key, dtype, shapes[key], (0, 0)))
    with pytest.raises(DamagedError, match=f"`{name}` has shape"):
        AwqDecoder("w", *tensors)
