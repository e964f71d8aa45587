"""Tensors and leaves: their dtypes and casts, and their names in a training state.

A training state has parameters, optimizer slots and other leaves. A slot is a subtree of the optimizer state with one
leaf per parameter, such as `opt_state.adam.mu`. Its tensors are named `SLOT/TENSOR` after the parameters' tensors. A
leaf that belongs to no parameter is a tensor named `/LEAF`. Tensors of a multimodal model's towers are named
`towers/TENSOR`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
# the values were counted, in the order of the keys. Not a class, because the key `from` is a keyword of Python.
CastEntry = TypedDict(
    "CastEntry",
    {
        "from": str,
        "to": str,
        "update": NotRequired[str],
        "tensors": int,
        "values": int,
        "scale": NotRequired[str],
        "sqrt": NotRequired[int],
        "changed": NotRequired[int],
        "overflowed": NotRequired[int],
        "underflowed": NotRequired[int],
        "nan": NotRequired[int],
        "worst": NotRequired[float],
    },
)
# Algorithm of the digests of tensors in a manifest that names none.
DEFAULT_DIGEST = "xxh3-128"
PARAMS = "params"
OPT_STATE = "opt_state"
# Tree of the tensors of a multimodal model outside of its text part.
TOWERS = "towers"
# Slot of the scales, and first key of their leaves.
QUANTIZATION = "quantization"
# Slot of tensors that are read for a check, and written nowhere: decoded weights, and tensors in their stored order of
# dims whose views in another order are written.
DECODED = "decoded"
# Rules that drop the leaves outside of the parameters.
OPT_STATE_RULE = "optimizer state"
TRAINING_STATE_RULE = "training state"
SEPARATOR = "/"
# Slots of AdamW.
FIRST_MOMENT = f"{OPT_STATE}.adam.mu"
SECOND_MOMENT = f"{OPT_STATE}.adam.nu"
MOMENTS = (FIRST_MOMENT, SECOND_MOMENT)
# Leaves outside of slots: updates of Adam, steps, and steps without an update.
NUM_UPDATES = f"{OPT_STATE}.adam.count"
STEP = "step"
SKIPPED = "skipped"
SKIPPED_IN_ROW = "skipped_in_row"
COUNTERS = (NUM_UPDATES, STEP, SKIPPED, SKIPPED_IN_ROW)
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """A leaf in a checkpoint.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        read_unit: Shape of the boxes that are read as a whole, on a grid that begins at index 0. ()
            if every element can be read alone.
    """

    shape: tuple[int, ...]
    dtype: str
    read_unit: tuple[int, ...] = ()


def array_bits(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bits in an array. Dtypes below 8 bits are packed."""
    return math.prod(shape) * ITEM_BITS[dtype]


def itemsize(dtype: str) -> int:
    """Return the bytes per element of a dtype of at least 8 bits."""
    return ITEM_BITS[dtype] // 8


def cast_dtype(dtype: str, requested_dtype: str | None) -> str:
    """Return the written dtype of a tensor: `requested_dtype` if it is given and the tensor is a float tensor."""
    return requested_dtype if requested_dtype and dtype in FLOAT_DTYPES else dtype


def qualify(slot: str, tensor: str) -> str:
    """Return the qualified name: TENSOR for a parameter, SLOT/TENSOR in an optimizer slot, /LEAF for other leaves."""
    if slot == PARAMS:
        return tensor
    return f"{slot}{SEPARATOR}{tensor}"


def split_name(name: str) -> tuple[str, str]:
    """Split a name that `qualify` returned into slot and tensor."""
    # E.g. `opt_state.mu/wte.weight` -> `opt_state.mu`, `wte.weight`, and `/step` -> empty slot, `step`.
    slot, separator, tensor = name.partition(SEPARATOR)
    if not separator:
        return PARAMS, name
    return slot, tensor


def find_slots(leaves: Shapes, parameters: Shapes) -> tuple[str, ...]:
    """Return the dotted names of the slots (subtrees with one leaf per parameter) in an optimizer state."""
    # Every complete slot has the first parameter, so that its leaves alone give all candidates.
    first_path = next(iter(parameters), "")
    slots: list[str] = []
    for name in leaves:
        slot = name.removesuffix(f".{first_path}")
        if slot == name or slot.split(".")[0] != OPT_STATE:
            continue
        if all(leaves.get(f"{slot}.{path}") == shape for path, shape in parameters.items()):
            slots.append(slot)
    return tuple(sorted(slots))


def is_leaf_path(tensor: str) -> bool:
    """Return whether the name of a tensor in a slot is `/PATH`."""
    return tensor.startswith(SEPARATOR)


def is_quantization_leaf(name: str) -> bool:
    """Return whether a leaf has scales."""
    return name.startswith(f"{QUANTIZATION}.")


def is_quantization_tensor(name: str) -> bool:
    """Return whether the qualified name of a tensor is in the slot of the scales."""
    return split_name(name)[0] == QUANTIZATION


def is_decoded_tensor(name: str) -> bool:
    """Return whether the qualified name of a tensor is in the slot of decoded weights. They are read for a check."""
    return split_name(name)[0] == DECODED
