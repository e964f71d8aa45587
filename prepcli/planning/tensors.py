"""Dtypes that prep reads and writes, and casts."""

from __future__ import annotations

import math
from typing import NotRequired, TypedDict

# Bits of a stored element. An int4 of zarr takes a byte.
ITEM_BITS = {
    "int4": 8,
    "bool": 8, "uint8": 8, "int8": 8, "uint16": 16, "int16": 16, "uint32": 32, "int32": 32, "uint64": 64, "int64": 64,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex64": 64,
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e8m0fnu": 8, "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8,
    "float6_e2m3fn": 6, "float6_e3m2fn": 6, "float4_e2m1fn": 4,
}  # fmt: skip
FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")  # dtypes that can be cast


# A cast in a plan or a manifest: the pair of dtypes, the numbers of tensors and values, and the counts of changes if
# the values were counted. Not a class, because the key `from` is a keyword of Python.
CastEntry = TypedDict(
    "CastEntry",
    {
        "from": str,
        "to": str,
        "update": NotRequired[str],
        "sqrt": NotRequired[int],
        "scale": NotRequired[str],
        "tensors": int,
        "values": int,
        "changed": NotRequired[int],
        "overflowed": NotRequired[int],
        "underflowed": NotRequired[int],
        "nan": NotRequired[int],
        "worst": NotRequired[float],
    },
)


def array_bits(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bits in an array. Dtypes below 8 bits are packed."""
    return math.prod(shape) * ITEM_BITS[dtype]


def itemsize(dtype: str) -> int:
    """Return the bytes per element of a dtype of at least 8 bits."""
    return ITEM_BITS[dtype] // 8


def cast_dtype(dtype: str, requested_dtype: str | None) -> str:
    """Return the written dtype of a tensor: `requested_dtype` if it is given and the tensor is a float tensor."""
    return requested_dtype if requested_dtype and dtype in FLOAT_DTYPES else dtype
