"""AWQ, compared with nibbles of Python's integers."""

from __future__ import annotations

import numpy as np
import pytest

from prepcli.core.errors import DamagedError
from prepcli.planning.arrays import Array, whole_array
from prepcli.quantized.awq import AwqDecoder
from tests.helpers.quantized import assert_equal_bits, decode_all, stored

Arrays = dict[str, np.ndarray]
# AutoAWQ writes output AWQ_ORDER[p] of 8 to nibble p of a word (awq/modules/linear/gemm.py, `from_linear`).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def random_weight(inputs: int, outputs: int, groups: int, seed: int = 1) -> Arrays:
    rng = np.random.default_rng(seed)
    words = [(inputs, outputs // 8), (groups, outputs // 8)]
    weight, zeros = (rng.integers(-(1 << 31), 1 << 31, s).astype(np.int32) for s in words)
    scales = np.exp(rng.normal(-6, 2, (groups, outputs))).astype(np.float16)
    return {"qweight": weight, "qzeros": zeros, "scales": scales}


def decoder_of(arrays: Arrays) -> AwqDecoder:
    return AwqDecoder("w", *(stored(name, array) for name, array in arrays.items()))


def unpack(words: np.ndarray) -> np.ndarray:
    codes = np.empty((*words.shape, 8), np.int64)
    for nibble, output in enumerate(AWQ_ORDER):
        codes[..., output] = words.astype(np.int64) >> 4 * nibble & 15
    return codes.reshape(len(words), -1)


def reference(arrays: Arrays) -> np.ndarray:
    codes = unpack(arrays["qweight"])
    group_size = len(codes) // len(arrays["scales"])
    zeros = np.repeat(unpack(arrays["qzeros"]), group_size, axis=0)
    scales = np.repeat(arrays["scales"], group_size, axis=0)
    return np.ascontiguousarray(((codes - zeros).astype(np.float16) * scales).T)


def test_random_weight_decodes_like_the_reference_in_parts_of_any_size():
    arrays = random_weight(inputs=64, outputs=80, groups=4)
    decoder = decoder_of(arrays)
    for rows_per_part in (None, 1, 13):
        assert_equal_bits(decode_all(decoder, arrays, rows_per_part), reference(arrays))


@pytest.mark.parametrize("batches", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_many_groups_decode_like_the_reference(batches: int):
    for seed in range(batches):
        # 1000 outputs with 100 groups of 32 inputs each: 100,000 groups.
        arrays = random_weight(inputs=3200, outputs=1000, groups=100, seed=seed)
        values = decode_all(decoder_of(arrays), arrays, rows_per_part=500)
        assert_equal_bits(values, reference(arrays))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("qweight", (64,)), ("scales", (5, 80)), ("scales", (4, 79)), ("qzeros", (4, 9))],
)
def test_tensor_of_another_shape_is_named(name: str, shape: tuple[int, ...]):
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
