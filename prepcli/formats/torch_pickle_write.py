"""Pickles of protocol 2, written without torch: plain values, and tensors in the storages of a zip archive.

Each function returns the opcodes of one value. `torch.load(weights_only=True)` reads them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prepcli.algebra.boxes import strides
from prepcli.formats.torch_state import STORAGE_DTYPES
from prepcli.planning.tensors import itemsize

PROTO = b"\x80\x02"
_MARK = b"("
_STORAGE_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
SUPPORTED_DTYPES = frozenset(_STORAGE_NAMES)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A contiguous tensor in a storage of its own.

    Attributes:
        key: Name of the storage in the archive.
        dtype: Its dtype, one of SUPPORTED_DTYPES.
        shape: Its shape.
        content: Its bytes. None for a streamed tensor.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    content: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Size of the storage."""
        return math.prod(self.shape) * itemsize(self.dtype)


# A list becomes a list, a tuple a tuple, a mapping a dict.
PickledValue = (
    None
    | bool
    | int
    | float
    | str
    | StoredTensor
    | Sequence["PickledValue"]
    | Mapping[str, "PickledValue"]
    | Mapping[int, "PickledValue"]
)


def pickle_value(value: PickledValue) -> bytes:
    """Return a plain value or a tensor.

    >>> import pickle
    >>> pickle.loads(PROTO + pickle_value({"lr": 0.5, "params": [0, 1], "betas": (0.9, 1.0)}) + b".")
    {'lr': 0.5, 'params': [0, 1], 'betas': (0.9, 1.0)}
    """
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return pickle_int(value)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return pickle_text(value)
        case StoredTensor():
            return pickle_tensor(value)
        case tuple():
            return pickle_tuple(map(pickle_value, value))
        case Mapping():
            items: list[bytes] = []
            for key, item in value.items():
                items += [pickle_value(key), pickle_value(item)]
            return pickle_mapping(items)
        case _:
            return b"](" + b"".join(map(pickle_value, value)) + b"e"


def pickle_tensor(tensor: StoredTensor) -> bytes:
    """Return a tensor in C order."""
    storage = [
        pickle_text("storage"),
        pickle_global(f"torch {_STORAGE_NAMES[tensor.dtype]}Storage"),
        pickle_text(tensor.key),
        pickle_text("cpu"),
        pickle_int(math.prod(tensor.shape)),
    ]
    hooks = pickle_global("collections OrderedDict") + b")R"
    arguments = [
        pickle_tuple(storage) + b"Q",
        pickle_int(0),
        pickle_tuple(map(pickle_int, tensor.shape)),
        pickle_tuple(map(pickle_int, strides(tensor.shape, 1))),
        b"\x89",
        hooks,
    ]
    return pickle_global("torch._utils _rebuild_tensor_v2") + pickle_tuple(arguments) + b"R"


def pickle_global(name: str) -> bytes:
    """Return the import of a global, given as `MODULE NAME`."""
    module, _, last = name.partition(" ")
    return f"c{module}\n{last}\n".encode()


def pickle_mapping(items: Iterable[bytes]) -> bytes:
    """Return a dict of alternating keys and values."""
    return b"}" + _MARK + b"".join(items) + b"u"


def pickle_tuple(parts: Iterable[bytes]) -> bytes:
    """Return a tuple."""
    return _MARK + b"".join(parts) + b"t"


def pickle_text(value: str) -> bytes:
    """Return a text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def pickle_int(value: int) -> bytes:
    """Return an integer of up to 64 bits."""
    if abs(value) < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)
