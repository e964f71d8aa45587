"""GPTQ, compared with bit fields of Python's integers."""

from __future__ import annotations

import numpy as np
import pytest

from prepcli.errors import DamagedError, PrepError
from prepcli.planning.tensors import FileTensor
from prepcli.quantized.find_weights import find_weights
from prepcli.quantized.gptq import BITS, GptqDecoder
from tests.helpers.quantized import assert_equal_bits, decode_all, stored

Arrays = dict[str, np.ndarray]


def random_weight(bits: int, inputs: int, outputs: int, groups: int) -> Arrays:
    rng = np.random.default_rng(bits)
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


def bit_fields(words: np.ndarray, bits: int) -> list[int]:
    """Return the bit fields of a row of words, which are one little-endian number."""
    number = int.from_bytes(words.astype("<i4").tobytes(), "little")
    count = words.size * 32 // bits
    return [number >> bits * i & (1 << bits) - 1 for i in range(count)]


def reference(arrays: Arrays, bits: int, *, is_version_1: bool = True) -> np.ndarray:
    groups, outputs = arrays["scales"].shape
    inputs = arrays["qweight"].shape[0] * 32 // bits
    g_idx = arrays.get("g_idx", np.arange(inputs) // (inputs // groups))
    zeros = np.array([bit_fields(row, bits) for row in arrays["qzeros"]])
    if is_version_1:
        zeros = zeros + 1
        # AutoGPTQ reduces all but the numbers of 3 bits.
        if bits != 3:
            zeros %= 1 << bits
    values = np.empty((outputs, inputs), np.float16)
    for output in range(outputs):
        codes = np.array(bit_fields(arrays["qweight"][:, output], bits))
        differences = (codes - zeros[g_idx, output]).astype(np.float16)
        values[output] = differences * arrays["scales"][g_idx, output]
    return values


@pytest.mark.parametrize("is_version_1", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_random_codes_equal_bit_fields(bits: int, is_version_1: bool):
    arrays = random_weight(bits, inputs=128, outputs=96, groups=4)
    decoder = decoder_of(arrays, bits, is_version_1=is_version_1)
    expected = reference(arrays, bits, is_version_1=is_version_1)
    for rows_per_part in (None, 1, 31):
        assert_equal_bits(decode_all(decoder, arrays, rows_per_part), expected)


@pytest.mark.parametrize("outputs", [1024, pytest.param(102_400, marks=pytest.mark.slow)])
def test_many_groups_decode_like_the_reference(outputs: int):
    # 100 groups of 32 inputs for each output: about 100,000 or 10,000,000 groups.
    arrays = random_weight(4, inputs=3200, outputs=outputs, groups=100)
    values = decode_all(decoder_of(arrays, 4), arrays, rows_per_part=500)
    assert_equal_bits(values, reference(arrays, 4))


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
    tensors: dict[str, FileTensor] = {}
    for key in shapes:
        dtype = "float16" if key == "scales" else "int32"
        tensors[key] = FileTensor(key, dtype, shapes[key], 0, 0, 0)
    with pytest.raises(DamagedError, match=f"`{name}` has shape"):
        GptqDecoder(
            "w",
            tensors["qweight"],
            tensors["qzeros"],
            tensors["scales"],
            bits=4,
            input_groups=tensors["g_idx"],
        )
