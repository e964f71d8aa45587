"""NF4 and FP4, compared with bitsandbytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from prepcli.core.errors import DamagedError
from prepcli.planning.arrays import whole_array
from prepcli.quantized.bitsandbytes import Bits4Decoder, QuantState, parse_quant_state
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.quantized import assert_equal_bits, decode_all, stored, to_numpy

torch = lazy_module("torch")
functional = lazy_module("bitsandbytes.functional")
Arrays = dict[str, np.ndarray]
DOCUMENT = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 32]}


def quantize(
    shape: tuple[int, ...],
    quant_type: str,
    *,
    block_size: int,
    is_nested: bool,
    dtype: Any,
    seed: int = 1,
) -> tuple[Arrays, QuantState, np.ndarray]:
    """Quantise random weights, and return the tensors of a file, the facts, and the values of bitsandbytes."""
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    packed, state = functional.quantize_4bit(
        weights, blocksize=block_size, quant_type=quant_type, compress_statistics=is_nested
    )
    # The kernel of bitsandbytes 0.50 for CPUs takes other scales if a block contains the end of a row, so the tensor
    # becomes one row.
    state.shape = torch.Size((1, weights.numel()))
    # The table of fp4 has 0 for code 8. The kernels of some processors compute -0 for it, so zeros lose their sign.
    values = to_numpy(functional.dequantize_4bit(packed, state) + 0.0).reshape(shape)
    state.shape = weights.shape
    arrays: Arrays = {"weight": packed.numpy()}
    document: dict[str, Any] = {}
    for name, tensor in state.as_dict(packed=True).items():
        if name.startswith("quant_state"):
            document = json.loads(bytes(tensor.tolist()))
        else:
            arrays[name] = tensor.numpy()
    return arrays, parse_quant_state(document), values


def decoder_of(arrays: Arrays, state: QuantState) -> Bits4Decoder:
    tensors = {name: stored(name, array) for name, array in arrays.items()}
    return Bits4Decoder(
        "w",
        tensors["weight"],
        tensors["absmax"],
        tensors["quant_map"],
        state=state,
        nested_absmax=tensors.get("nested_absmax"),
        nested_quant_map=tensors.get("nested_quant_map"),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_values_equal_bitsandbytes(quant_type: str, is_nested: bool, dtype: str):
    arrays, state, expected = quantize(
        (250, 96), quant_type, block_size=64, is_nested=is_nested, dtype=getattr(torch, dtype)
    )
    decoder = decoder_of(arrays, state)
    assert decoder.dtype == dtype
    for rows_per_part in (None, 1, 33):
        assert_equal_bits(decode_all(decoder, arrays, rows_per_part), expected)


@pytest.mark.parametrize("storage", ["int8", "bfloat16", "float16", "float32"])
def test_codes_may_be_stored_in_another_dtype(storage: str):
    """FSDP needs codes in the dtype of the other weights (`bnb_4bit_quant_storage`)."""
    arrays, state, expected = quantize(
        (50, 96), "nf4", block_size=64, is_nested=False, dtype=torch.bfloat16
    )
    weights = torch.randn((50, 96), generator=torch.Generator().manual_seed(1)).bfloat16()
    packed, _ = functional.quantize_4bit(
        weights, blocksize=64, quant_type="nf4", quant_storage=getattr(torch, storage)
    )
    codes = to_numpy(packed)
    assert codes.tobytes() == arrays["weight"].tobytes()
    arrays["weight"] = codes
    decoder = decoder_of(arrays, state)
    for rows_per_part in (None, 1, 7):
        assert_equal_bits(decode_all(decoder, arrays, rows_per_part), expected)


def test_last_block_may_be_shorter():
    arrays, state, expected = quantize(
        (7, 30), "nf4", block_size=64, is_nested=True, dtype=torch.float32
    )
    assert_equal_bits(decode_all(decoder_of(arrays, state), arrays, rows_per_part=2), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"quant_type": "int3"},
        {"blocksize": 0},
        {"blocksize": 1 << 40},
        {"dtype": "float64"},
        {"shape": []},
        {"shape": [-1, 5]},
        {"shape": None},
        {"nested_blocksize": 256, "nested_offset": "x"},
        {"nested_blocksize": 256, "nested_offset": float("nan")},
    ],
)
def test_parse_quant_state_refuses_invalid_values(change: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(change)) if len(change) == 1 else "offset"):
        parse_quant_state({**DOCUMENT, **change})
    with pytest.raises(ValueError, match="JSON object"):
        parse_quant_state([])


def test_tensor_of_another_shape_is_named():
    state = parse_quant_state(DOCUMENT)
    weight = whole_array("w", "uint8", (64, 1), (0, 0))
    absmax = whole_array("w.absmax", "float32", (3,), (0, 0))
    quant_map = whole_array("w.quant_map", "float32", (16,), (0, 0))
    with pytest.raises(DamagedError, match=r"`w\.absmax` has shape \[3\]"):
        Bits4Decoder("w", weight, absmax, quant_map, state=state)


def test_nested_state_without_nested_tensors_is_refused():
    state = parse_quant_state({**DOCUMENT, "nested_blocksize": 256, "nested_offset": 0.5})
    weight = whole_array("w", "uint8", (64, 1), (0, 0))
    absmax = whole_array("w.absmax", "float32", (2,), (0, 0))
    quant_map = whole_array("w.quant_map", "float32", (16,), (0, 0))
    with pytest.raises(DamagedError, match="scales of `w` are incomplete"):
        Bits4Decoder("w", weight, absmax, quant_map, state=state)
