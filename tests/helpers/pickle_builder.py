"""Build pickles opcode by opcode, including ones that no library writes, and PyTorch files that contain them."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

START, STOP, MARK = b"\x80\x02", b".", b"("


def encode_name(text: str) -> bytes:
    """Encode a reference to a class or function, `module.name`."""
    module, _, last = text.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def encode_text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def encode_int(value: int) -> bytes:
    """Return the opcode of an integer."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    nbytes = (value.bit_length() + 8) // 8
    return b"\x8a" + bytes([nbytes]) + value.to_bytes(nbytes, "little", signed=True)


def encode_tuple(*parts: bytes) -> bytes:
    """Encode a tuple."""
    return MARK + b"".join(parts) + b"t"


def encode_ints(values: Sequence[int]) -> bytes:
    return encode_tuple(*map(encode_int, values))


def encode_call(maker: str, *args: bytes) -> bytes:
    return encode_name(maker) + encode_tuple(*args) + b"R"


def encode_mapping(items: Mapping[str, bytes] | Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the opcodes of a dict."""
    pairs = (
        [(encode_text(key), value) for key, value in items.items()]
        if isinstance(items, Mapping)
        else items
    )
    return b"}" + MARK + b"".join(key + value for key, value in pairs) + b"u"


def encode_storage(
    key: str = "0", kind: str = "torch.FloatStorage", numel: int = 6, *more: bytes
) -> bytes:
    """Return the opcodes of torch's reference to a storage in another file."""
    return (
        encode_tuple(
            encode_text("storage"),
            encode_name(kind),
            encode_text(key),
            encode_text("cpu"),
            encode_int(numel),
            *more,
        )
        + b"Q"
    )


def encode_tensor(
    shape: Sequence[int] = (2, 3),
    stride: Sequence[int] = (3, 1),
    offset: int = 0,
    storage: bytes | None = None,
) -> bytes:
    """Encode a tensor as PyTorch 0.4 and later do, by default all of a storage of six floats."""
    where = encode_storage() if storage is None else storage
    rebuild = "torch._utils._rebuild_tensor_v2"
    hooks = encode_call("collections.OrderedDict")
    return encode_call(
        rebuild, where, encode_int(offset), encode_ints(shape), encode_ints(stride), b"\x89", hooks
    )


def make_pickle(*body: bytes) -> bytes:
    return START + b"".join(body) + STOP


SIX_FLOATS = struct.pack("<6f", *range(6))
# A pickle of one tensor with these floats.
ONE_TENSOR = make_pickle(encode_mapping({"w": encode_tensor()}))


def make_zip_file(
    pickled: bytes, records: Mapping[str, bytes] | None = None, root: str = "archive"
) -> bytes:
    """Return a zip archive like PyTorch's, except for the alignment of its records."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(_entry(f"{root}/data.pkl"), pickled)
        for key, value in ({"data/0": SIX_FLOATS} if records is None else records).items():
            archive.writestr(_entry(f"{root}/{key}"), value)
    return out.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    """Return an entry with the date 1980-01-01, so that equal records make equal files."""
    return zipfile.ZipInfo(name)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Flip, delete, repeat or replace random bytes."""
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(mutated) + 1)
        kind = rng.randrange(5)
        if kind == 0 and position < len(mutated):
            mutated[position] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del mutated[position : position + rng.randint(1, 9)]
        elif kind == 2:
            mutated[position:position] = mutated[rng.randrange(len(mutated) + 1) :][
                : rng.randint(1, 30)
            ]
        elif kind == 3:
            number = rng.choice(
                [b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x00" * 4, bytes(rng.randbytes(4))]
            )
            mutated[position : position + 4] = number
        else:
            del mutated[position:]
    return bytes(mutated)


KINDS = {
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "bool": "Bool",
    "float64": "Double",
    "uint8": "Byte",
}


def make_torch_file(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return a PyTorch file with these tensors, each in its own storage."""
    return make_checkpoint_file(arrays)


def make_checkpoint_file(values: Mapping[str, Any]) -> bytes:
    """Return a PyTorch file with a mapping of numbers, tensors (each in its own storage) and further mappings."""
    records: dict[str, bytes] = {}
    return make_zip_file(make_pickle(_encode_value(values, records)), records)


def _encode_value(value: Any, records: dict[str, bytes]) -> bytes:
    """Encode a value, and add the bytes of its storages to the records."""
    if isinstance(value, int):
        return encode_int(value)
    if isinstance(value, Mapping):
        return encode_mapping({key: _encode_value(item, records) for key, item in value.items()})
    array = np.asarray(value)
    number = str(len(records))
    records[f"data/{number}"] = array.tobytes()
    element_strides = [
        step // array.itemsize for step in np.empty(array.shape, array.dtype).strides
    ]
    storage = encode_storage(number, f"torch.{KINDS[array.dtype.name]}Storage", array.size)
    return encode_tensor(array.shape, element_strides, storage=storage)
