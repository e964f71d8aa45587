"""The zip archives of `torch.save`: read their tensors, and write them. Payloads stay where they are.

An archive is an uncompressed zip. It has one folder with the pickle of an object and one record per storage. A tensor
is a view of a storage. Invalid archives and objects raise ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from prepcli.algebra.boxes import strides
from prepcli.core.json_values import quote_name
from prepcli.engine.digest import record_digest
from prepcli.formats.torch_pickle import (
    MAPPING_TYPES,
    MAX_NBYTES,
    PROTO,
    STORAGE_DTYPES,
    PersistentRef,
    PickledCall,
    PickledMapping,
    PickledName,
    PickledValue,
    StoredTensor,
    interpret_pickle,
    pickle_value,
)
from prepcli.formats.zip_archive import ArchiveWriter, ZipArchive
from prepcli.planning.arrays import Array, whole_array
from prepcli.planning.tensors import itemsize

# Payloads start at a multiple of this offset in their archive, as PyTorch aligns them.
ALIGNMENT = 64
MAX_DIMS = 64
# Contiguous runs of a view: each is read separately.
MAX_RUNS = 1 << 18
INT64_LIMIT = 1 << 63
# Nesting of a tensor in parameters and subclasses. A pickle may repeat the outermost one.
MAX_WRAPS = 8
MAX_FLAGS = 16
UTILS_MODULE = "torch._utils."
PARAMETER_REBUILDERS = {
    f"{UTILS_MODULE}_rebuild_parameter",
    f"{UTILS_MODULE}_rebuild_parameter_with_state",
}
# Qualified name -> number of arguments.
TENSOR_REBUILDERS = {
    f"{UTILS_MODULE}_rebuild_tensor": 4,
    f"{UTILS_MODULE}_rebuild_tensor_v2": 6,
    f"{UTILS_MODULE}_rebuild_tensor_v3": 7,
}
TYPED_TENSOR_REBUILDER = "torch._tensor._rebuild_from_type_v2"
TENSOR_TYPES = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter"}
_REBUILDERS = frozenset({*TENSOR_REBUILDERS, *PARAMETER_REBUILDERS, TYPED_TENSOR_REBUILDER})
SIZE_TYPE = "torch.Size"
SETTINGS_TYPES = {  # types of settings and counters next to tensors
    "torch.device", "builtins.set", "builtins.frozenset", "builtins.complex", "builtins.bytearray", "builtins.slice",
    "builtins.range", "_codecs.encode", "argparse.Namespace", "pathlib.PosixPath", "numpy.dtype", "numpy.ndarray",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
}  # fmt: skip
_NOT_BUILT = "it is not built as PyTorch builds a tensor"


@dataclass(frozen=True, slots=True)
class ObjectArchive:
    """The archive of an object.

    Attributes:
        constant_ranges: Offset and bytes of everything outside of the streamed tensors.
        offsets: Offset of each tensor, by the key of its storage.
        nbytes: Size of the archive.
    """

    constant_ranges: tuple[tuple[int, bytes], ...]
    offsets: Mapping[str, int]
    nbytes: int


def encode_object(root: PickledValue) -> ObjectArchive:
    """Return the archive of an object with tensors at any depth, without the payloads of streamed tensors."""
    writer = ArchiveWriter()
    for name, data in (
        ("data.pkl", PROTO + pickle_value(root) + b"."),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        writer.add(f"archive/{name}", len(data), data)
    offsets: dict[str, int] = {}
    for tensor in _tensors_in(root):
        name = f"archive/data/{tensor.key}"
        offsets[tensor.key] = writer.add(name, tensor.nbytes, tensor.content, alignment=ALIGNMENT)
    constant_ranges, nbytes = writer.finish()
    return ObjectArchive(constant_ranges, offsets, nbytes)


def _tensors_in(value: PickledValue) -> Iterator[StoredTensor]:
    """Yield the tensors of a value in their order."""
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


# Type of a storage -> dtype of its elements. An untyped storage counts bytes.
STORAGES = {
    **{f"torch.{kind}Storage": dtype for kind, dtype in STORAGE_DTYPES.items()},
    **{f"torch.cuda.{kind}Storage": dtype for kind, dtype in STORAGE_DTYPES.items()},
    **dict.fromkeys(("torch.UntypedStorage", "torch._UntypedStorage", "torch.storage.UntypedStorage",
                     "torch.storage._UntypedStorage"), "uint8"),
}  # fmt: skip
DTYPES = {
    f"torch.{name}": name
    for name in (
        *STORAGE_DTYPES.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip
ALLOWED_NAMES = frozenset(
    {*MAPPING_TYPES, *STORAGES, *DTYPES, *_REBUILDERS, *TENSOR_TYPES, SIZE_TYPE, *SETTINGS_TYPES}
)
# Name -> reason why the file is not supported.
UNSUPPORTED_NAMES: Mapping[str, str] = {
    f"{UTILS_MODULE}_rebuild_qtensor": "it holds quantised tensors",
    f"{UTILS_MODULE}_rebuild_sparse_tensor": "it holds sparse tensors",
    f"{UTILS_MODULE}_rebuild_nested_tensor": "it holds nested tensors",
    f"{UTILS_MODULE}_rebuild_meta_tensor_no_storage": "it holds tensors of the meta device, which have no values",
    f"{UTILS_MODULE}_rebuild_wrapper_subclass": "it holds tensors of a wrapper subclass",
    f"{UTILS_MODULE}_rebuild_device_tensor_from_numpy": "it holds tensors of a device with its own storage format",
    f"{UTILS_MODULE}_rebuild_device_tensor_from_cpu_tensor": "it holds tensors of a device with its own storage format",
    "torch.storage._load_from_bytes": "it holds a pickle within the pickle",
    **dict.fromkeys(("torch.complex32", "torch.complex128", "torch.float4_e2m1fn_x2", "torch.ComplexDoubleStorage"),
                    "it holds tensors of a dtype that is not supported"),
    **{f"torch.{kind}Storage": "it holds quantised tensors" for kind in
       ("QUInt8", "QInt8", "QInt32", "QUInt4x2", "QUInt2x4")},
}  # fmt: skip


def _find_root(names: list[str]) -> str:
    """Return the folder of all records, with a slash. PyTorch names it after the saved file."""
    pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(set(pickles)) != 1:
        raise ValueError(f"it is a zip archive with {len(pickles)} pickles of tensors, not one")
    root = pickles[0].removesuffix("data.pkl")
    if strays := [name for name in names if not name.startswith(root)]:
        raise ValueError(f"{quote_name(strays[0])} in it is not under {quote_name(root)}")
    return root


class TorchArchive:
    """An archive of `torch.save`.

    Attributes:
        root: The pickled object, see `interpret_pickle`.
        digest: XXH3-128 of the metadata.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Read the directory and the pickle."""
        self._zip = ZipArchive(file, _find_root)
        # Older versions of torch.save do not record the byte order. Their files count as little endian.
        if "byteorder" in self._zip.records and self._zip.read("byteorder", 16) != b"little":
            raise ValueError("it was written on a big-endian machine")
        if any(name.startswith("code/") for name in self._zip.records):
            raise ValueError("it is a TorchScript archive; save the model's state_dict() instead")
        pickled = self._zip.read("data.pkl", MAX_NBYTES)
        self.root = interpret_pickle(pickled, ALLOWED_NAMES)
        self.digest = record_digest(pickled + self._zip.directory)
        # Storage key -> offset and size.
        self._storages: dict[str, tuple[int, int]] = {}

    def find_tensor(self, value: object, name: str = "", file: int = 0) -> Array:
        """Return a tensor of the pickle. Raise ValueError if it is invalid."""
        call = _unwrap_parameter(value)
        num_args = TENSOR_REBUILDERS.get(call.callee.qualified_name)
        if num_args is None or call.state is not None:
            raise ValueError(_NOT_BUILT)
        if not num_args <= len(call.args) <= max(num_args, 6) + 1:
            raise ValueError(_NOT_BUILT)
        storage = call.args[0]
        key = storage.persistent_id if isinstance(storage, PersistentRef) else None
        if not isinstance(key, tuple) or len(key) not in (5, 6) or key[0] != "storage":
            raise ValueError("it refers to an object that is not a storage")
        storage_type = key[1]
        dtype = (
            STORAGES.get(storage_type.qualified_name)
            if isinstance(storage_type, PickledName)
            else None
        )
        if dtype is None or not isinstance(key[2], str):
            raise ValueError("it refers to a storage of an unknown type")
        if len(key) == 6 and key[5] is not None:
            what = "it refers to a part of a storage"
            raise ValueError(f"{what} (a format of very old versions of PyTorch)")
        key, dtype, num_elements = (key[2], dtype, _parse_count(key[4]))
        storage_nbytes = num_elements * itemsize(dtype)
        if num_args == 7:
            stored_dtype = call.args[6]
            if (
                not isinstance(stored_dtype, PickledName)
                or stored_dtype.qualified_name not in DTYPES
            ):
                raise ValueError("its dtype is unknown")
            dtype = DTYPES[stored_dtype.qualified_name]
        if any(map(_has_true_flag, call.args[max(num_args, 6) :])):
            raise ValueError("it is a conjugate or negative view, whose values are not stored")
        first = _parse_count(call.args[1])
        shape = parse_counts(call.args[2])
        byte_strides = _byte_strides(
            shape,
            parse_counts(call.args[3]),
            first=first,
            item_nbytes=itemsize(dtype),
            storage_nbytes=storage_nbytes,
        )
        if key not in self._storages:
            self._storages[key] = self._zip.locate(f"data/{key}")
        offset, stored_nbytes = self._storages[key]
        if storage_nbytes > stored_nbytes:
            why = f"its tensors need {storage_nbytes:,}"
            raise ValueError(f"storage {quote_name(key)} has {stored_nbytes:,} bytes, {why}")
        if 0 not in shape:
            offset += first * itemsize(dtype)
        return whole_array(name, dtype, shape, (file, offset), byte_strides)


def is_tensor(value: object) -> bool:
    """Return whether a value of a pickle is a tensor."""
    return isinstance(value, PickledCall) and value.callee.qualified_name in _REBUILDERS


def _has_true_flag(metadata: object) -> bool:
    if not isinstance(metadata, PickledMapping):
        return False
    if len(metadata.items) > MAX_FLAGS:
        raise ValueError(_NOT_BUILT)
    return any(flag is not False for _, flag in metadata.items)


def _unwrap_parameter(value: object) -> PickledCall:
    """Return the call that builds a tensor, without the calls that wrap it in a parameter or subclass."""
    for _ in range(MAX_WRAPS):
        if not isinstance(value, PickledCall):
            break
        name = value.callee.qualified_name
        if name == TYPED_TENSOR_REBUILDER and len(value.args) == 4:
            # The last argument has the Python attributes of the tensor.
            callee, tensor_type, args, _ = value.args
            if not (
                isinstance(callee, PickledName)
                and isinstance(args, tuple)
                and isinstance(tensor_type, PickledName)
                and tensor_type.qualified_name in TENSOR_TYPES
            ):
                raise ValueError("it is a tensor of a custom class")
            value = PickledCall(callee, args)
        elif name in PARAMETER_REBUILDERS and value.args:
            value = value.args[0]
        elif name == TYPED_TENSOR_REBUILDER:
            break
        else:
            return value
    raise ValueError(_NOT_BUILT)


def parse_counts(value: object) -> tuple[int, ...]:
    """Return the numbers of a shape or of strides: of a `torch.Size`, tuple or list."""
    if isinstance(value, PickledCall) and value.callee.qualified_name == SIZE_TYPE:
        value = value.args[0] if len(value.args) == 1 else value
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMS:
        raise ValueError("its shape or its strides are not a list of numbers")
    return tuple(map(_parse_count, value))


def _parse_count(value: object) -> int:
    if type(value) is not int or not 0 <= value < INT64_LIMIT:  # bool is a subclass of int
        raise ValueError("one of its numbers is not a whole number from 0 to 2^63 - 1")
    return value


def _byte_strides(
    shape: Sequence[int],
    element_strides: Sequence[int],
    *,
    first: int,
    item_nbytes: int,
    storage_nbytes: int,
) -> tuple[int, ...] | None:
    """Return the strides of a view in bytes, or None for C order."""
    if len(element_strides) != len(shape):
        raise ValueError(f"it has {len(shape)} dims and {len(element_strides)} strides")
    if math.prod(max(extent, 1) for extent in shape) * item_nbytes >= INT64_LIMIT:
        raise ValueError("it has a shape of 2^63 bytes or more")
    if 0 in shape:
        return None
    # E.g. a [3, 2] tensor that is the transpose of a stored [2, 3]: offset 0, strides (1, 3).
    # Its last element has index 0 + (3 - 1) * 1 + (2 - 1) * 3 = 5, so the storage has 6 or more.
    end = first + 1
    # The stride of an extent of 1 moves no element, and PyTorch leaves any number there.
    steps: list[int] = []
    for extent, step, c_step in zip(shape, element_strides, strides(shape)):
        end += (extent - 1) * step
        steps.append(step if extent > 1 else c_step)
    if end * item_nbytes > storage_nbytes:
        raise ValueError(
            f"it reaches to byte {end * item_nbytes:,} of a storage of {storage_nbytes:,}"
        )
    if tuple(steps) == strides(shape):
        return None
    pairs = zip(steps, shape)
    stride_extents = sorted((stride, extent) for stride, extent in pairs if extent > 1)
    if stride_extents[0][0] == 0:
        why = "it is an expanded view, whose elements share memory"
        raise ValueError(f"{why}: save its `.contiguous()` copy")
    last_offset = 0
    # From the smallest stride on: elements are distinct if each stride steps over all offsets
    # that the dims before it reach. Sufficient, and true for every slice and transpose.
    for stride, extent in stride_extents:
        if stride <= last_offset:
            raise ValueError("it is a view whose elements overlap: save its `.contiguous()` copy")
        last_offset += stride * (extent - 1)
    # Dims that continue the run of the dims before them lengthen it. e.g. [2, 3] with the strides
    # (10, 1): a run of 3 elements, 2 runs.
    run_elements = 1
    for stride, extent in stride_extents:
        if stride == run_elements:
            run_elements *= extent
    if (run_count := math.prod(shape) // run_elements) > MAX_RUNS:
        raise ValueError(f"it is a view in {run_count:,} pieces: save its `.contiguous()` copy")
    return tuple(step * item_nbytes for step in steps)
