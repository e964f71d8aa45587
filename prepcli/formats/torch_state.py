"""Find the tensors of a PyTorch checkpoint in its unpickled object: views of storages, and all other values.

No file is read. Functions raise ValueError for invalid objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.algebra.boxes import strides
from prepcli.formats.torch_pickle import (
    MAPPING_TYPES,
    PersistentRef,
    PickledCall,
    PickledMapping,
    PickledName,
    UnpickledObject,
)
from prepcli.formats.untrusted import quote_name
from prepcli.planning.tensors import itemsize

MAX_DIMS = 64
# Contiguous runs of a view: each is read separately.
MAX_RUNS = 1 << 18
INT64_LIMIT = 1 << 63
# Nesting of a tensor in parameters and subclasses. A pickle may repeat the outermost one.
MAX_WRAPS = 8
MAX_FLAGS = 16
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
MAX_SHOWN_CHARS = 40

STORAGE_DTYPES: Mapping[str, str] = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
}  # fmt: skip
UNTYPED_STORAGES = {f"torch.{name}" for name in ("UntypedStorage", "_UntypedStorage", "storage.UntypedStorage",
                                        "storage._UntypedStorage")}  # fmt: skip
TYPED_STORAGES = {
    **{f"torch.{kind}Storage": dtype for kind, dtype in STORAGE_DTYPES.items()},
    **{f"torch.cuda.{kind}Storage": dtype for kind, dtype in STORAGE_DTYPES.items()},
}
DTYPES = {
    f"torch.{name}": name
    for name in (
        *STORAGE_DTYPES.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip
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
ALLOWED_NAMES = frozenset(
    {
        *MAPPING_TYPES,
        *UNTYPED_STORAGES,
        *TYPED_STORAGES,
        *DTYPES,
        *PARAMETER_REBUILDERS,
        *TENSOR_REBUILDERS,
        TYPED_TENSOR_REBUILDER,
        *TENSOR_TYPES,
        SIZE_TYPE,
        *SETTINGS_TYPES,
    }
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


@dataclass(frozen=True, slots=True)
class TorchStorage:
    """A storage that tensors are views of. Its length is counted in elements of `item_nbytes` bytes."""

    key: str
    nbytes: int
    item_nbytes: int


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor in a storage, at `offset` bytes. `byte_strides` is None for C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: TorchStorage
    offset: int
    byte_strides: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class TorchState:
    """Tensors in a model file by name, and descriptions of its other values.

    `key` is the key of the tensors in the file, and `other_keys` are the keys beside it. Both are empty if the file has
    only the tensors.
    """

    views: tuple[StorageView, ...]
    non_tensors: tuple[str, ...]
    key: str = ""
    other_keys: tuple[str, ...] = ()


class StateDictError(ValueError):
    """A complete PyTorch file that holds no state dict, or several ones."""


def read_torch_state(unpickled: UnpickledObject) -> TorchState:
    """Return the tensors of a checkpoint's only state dict: the root, or one of its items."""
    state_key, state_dict = _find_state_dict(unpickled.root)
    non_tensors: list[str] = []
    other_keys: list[str] = []
    for key, value in _iter_outer_items(unpickled.root, state_dict):
        other_keys.append(str(key) if isinstance(key, str | int) else "a key of another type")
        non_tensors.append(f"{_describe_key(key)} is {_describe_value(value)}")
    views: list[StorageView] = []
    names: set[str] = set()
    for key, value in state_dict.items:
        if not is_tensor(value):
            non_tensors.append(f"{_describe_key(key)} is {_describe_value(value)}")
            continue
        if not isinstance(key, str):
            raise ValueError(f"the name of a tensor in it is not text, but {_describe_value(key)}")
        if key in names:
            raise ValueError(f"it has {quote_name(key)} twice")
        names.add(key)
        views.append(_parse_named_view(key, value))
    return TorchState(tuple(views), tuple(non_tensors), state_key, tuple(other_keys))


def read_torch_tensor(unpickled: UnpickledObject) -> StorageView:
    """Return the root of a pickle as a tensor with an empty name."""
    return parse_view(unpickled.root)


def parse_view(value: object) -> StorageView:
    """Return a tensor of a pickle, with an empty name. Raise ValueError if it is invalid."""
    return _parse_view("", value)


def collect_storages(unpickled: UnpickledObject) -> dict[str, TorchStorage]:
    """Return every storage that a pickle refers to, by key. Raise ValueError if references disagree."""
    storages: dict[str, TorchStorage] = {}
    for reference in unpickled.persistent_refs:
        storage, _ = _parse_storage(reference)
        if storages.setdefault(storage.key, storage).nbytes != storage.nbytes:
            raise ValueError(f"storage {quote_name(storage.key)} has two lengths")
    return storages


# The state dict


def _find_state_dict(root: object) -> tuple[str, PickledMapping]:
    """Return the only state dict: the root with an empty key, or one of its values with its key.

    E.g. nanoGPT saves `{"model": {...}, "optimizer": {...}, "iter_num": 5, "best_val_loss": tensor}`.
    """
    if not isinstance(root, PickledMapping):
        raise StateDictError(f"it holds {_describe_value(root)}, not tensors by name")
    named, others = _nested_state_dicts(root)
    # Of other names, only the ones of a model's state dict count, e.g. no `{"cpu": tensor}` of random states.
    candidates = named or [(key, value) for key, value in others if _has_parameters(value)]
    # Beside a state dict, tensors such as a loss or the state of a random generator are no parameters.
    if _has_parameters(root) or (_has_tensors(root) and not candidates):
        candidates = [("", root), *candidates]
    if not candidates:
        raise StateDictError("it holds no tensors by name")
    # A name in WRAPPERS comes before others, e.g. `model` beside an average under `ema`. Of two such names, or of two
    # other ones, which one is meant is not guessed.
    if len(candidates) > 1:
        locations = [quote_name(key) for key, _ in candidates[:4]]
        if not candidates[0][0]:
            locations[0] = "itself"
        raise StateDictError(
            f"it has tensors by name in {' and '.join(locations)}, which is ambiguous"
        )
    return candidates[0]


def _nested_state_dicts(
    root: PickledMapping,
) -> tuple[list[tuple[str, PickledMapping]], list[tuple[str, PickledMapping]]]:
    """Return the values of a mapping with tensors by name: under the names of WRAPPERS, and under other names."""
    named: list[tuple[str, PickledMapping]] = []
    others: list[tuple[str, PickledMapping]] = []
    # A pickle may set a key twice, and PyTorch then keeps the last value. Which one is meant is not guessed.
    keys: set[str] = set()
    # A pickle may repeat one large mapping without tensors. It is searched once.
    searched: dict[int, bool] = {}
    for key, value in root.items:
        if not isinstance(key, str):
            continue
        has_tensors = False
        if isinstance(value, PickledMapping):
            if id(value) not in searched:
                searched[id(value)] = _has_tensors(value)
            has_tensors = searched[id(value)]
        if not has_tensors and key not in WRAPPERS:
            continue
        if key in keys:
            raise StateDictError(f"it has {quote_name(key)} twice")
        keys.add(key)
        if has_tensors and isinstance(value, PickledMapping):
            (named if key in WRAPPERS else others).append((key, value))
    return named, others


def _has_parameters(mapping: PickledMapping) -> bool:
    """Return whether a mapping has a tensor with the name of a parameter, e.g. `wte.weight`, or a matrix."""
    for key, value in mapping.items:
        if not is_tensor(value) or not isinstance(key, str):
            continue
        if "." in key or len(parse_view(value).shape) > 1:
            return True
    return False


def _has_tensors(mapping: PickledMapping) -> bool:
    return any(is_tensor(value) for _, value in mapping.items)


def is_tensor(value: object) -> bool:
    """Return whether a value of a pickle is a tensor."""
    return isinstance(value, PickledCall) and value.callee.qualified_name in _REBUILDERS


def _iter_outer_items(root: object, state_dict: PickledMapping) -> Iterator[tuple[object, object]]:
    """Yield the items of the root outside of the state dict."""
    if isinstance(root, PickledMapping) and root is not state_dict:
        yield from ((key, value) for key, value in root.items if value is not state_dict)


def _describe_key(key: object) -> str:
    if isinstance(key, str):
        return quote_name(key)
    return _describe_value(key)


def _describe_value(value: object) -> str:
    """Describe any value in a few words."""
    if value is None or isinstance(value, bool | float):
        return str(value)
    if isinstance(value, int):
        if abs(value) < INT64_LIMIT:
            return str(value)
        return "a large number"
    if isinstance(value, str):
        return f"the text {quote_name(value[:MAX_SHOWN_CHARS])}"
    if isinstance(value, PickledMapping | list | tuple):
        count = len(value.items if isinstance(value, PickledMapping) else value)
        return f"a {'mapping' if isinstance(value, PickledMapping) else type(value).__name__} of {count:,}"
    if isinstance(value, PickledCall):
        if is_tensor(value):
            return "a tensor"
        return f"a {value.callee.qualified_name}"
    return {PickledName: "the name of a class", PersistentRef: "a storage"}.get(
        type(value), f"{type(value).__name__}"
    )


# One tensor


def _parse_named_view(name: str, value: object) -> StorageView:
    try:
        return _parse_view(name, value)
    except ValueError as error:
        raise ValueError(f"{quote_name(name)}: {error}") from error


def _parse_view(name: str, value: object) -> StorageView:
    call = _unwrap_parameter(value)
    arg_count = TENSOR_REBUILDERS.get(call.callee.qualified_name)
    if (
        arg_count is None
        or not arg_count <= len(call.args) <= max(arg_count, 6) + 1
        or call.state is not None
    ):
        raise ValueError("it is not built as PyTorch builds a tensor")
    storage, dtype = _parse_storage(call.args[0])
    if arg_count == 7:
        dtype = _parse_dtype(call.args[6])
    if any(map(_has_true_flag, call.args[max(arg_count, 6) :])):
        raise ValueError("it is a conjugate or negative view, whose values are not stored")
    offset = _parse_count(call.args[1])
    shape = _parse_counts(call.args[2])
    element_strides = _parse_counts(call.args[3])
    return _make_view(name, dtype, storage, (offset, shape, element_strides))


def _has_true_flag(metadata: object) -> bool:
    if not isinstance(metadata, PickledMapping):
        return False
    if len(metadata.items) > MAX_FLAGS:
        raise ValueError("it is not built as PyTorch builds a tensor")
    return any(flag is not False for _, flag in metadata.items)


def _unwrap_parameter(value: object) -> PickledCall:
    """Return the call that builds a tensor, without the calls that wrap it in a parameter or subclass."""
    for _ in range(MAX_WRAPS):
        if not isinstance(value, PickledCall):
            break
        if value.callee.qualified_name == TYPED_TENSOR_REBUILDER:
            value = _unwrap_typed_tensor(value)
        elif value.callee.qualified_name in PARAMETER_REBUILDERS and value.args:
            value = value.args[0]
        else:
            return value
    raise ValueError("it is not built as PyTorch builds a tensor")


def _unwrap_typed_tensor(call: PickledCall) -> PickledCall:
    """Return the call that builds a tensor, without the Python attributes of the tensor."""
    if len(call.args) != 4:
        raise ValueError("it is not built as PyTorch builds a tensor")
    callee, tensor_type, args, _ = call.args
    if not (
        isinstance(callee, PickledName)
        and isinstance(args, tuple)
        and isinstance(tensor_type, PickledName)
        and tensor_type.qualified_name in TENSOR_TYPES
    ):
        raise ValueError("it is a tensor of a custom class")
    return PickledCall(callee, args)


def _parse_storage(value: object) -> tuple[TorchStorage, str]:
    """Return the storage that a persistent id names, and its dtype (`uint8` for an untyped storage)."""
    if isinstance(value, PersistentRef):
        persistent_id = value.persistent_id
    else:
        persistent_id = None
    if (
        not isinstance(persistent_id, tuple)
        or len(persistent_id) not in (5, 6)
        or persistent_id[0] != "storage"
    ):
        raise ValueError("it refers to an object that is not a storage")
    storage_type = persistent_id[1]
    key = persistent_id[2]
    if (
        not isinstance(storage_type, PickledName)
        or storage_type.qualified_name not in {*TYPED_STORAGES, *UNTYPED_STORAGES}
        or not isinstance(key, str)
    ):
        raise ValueError("it refers to a storage of an unknown type")
    if len(persistent_id) == 6 and persistent_id[5] is not None:
        raise ValueError(
            "it refers to a part of a storage (a format of very old versions of PyTorch)"
        )
    dtype = TYPED_STORAGES.get(storage_type.qualified_name, "uint8")
    nbytes = _parse_count(persistent_id[4]) * itemsize(dtype)
    return TorchStorage(key, nbytes, itemsize(dtype)), dtype


def _parse_dtype(value: object) -> str:
    if not isinstance(value, PickledName) or value.qualified_name not in DTYPES:
        raise ValueError("its dtype is unknown")
    return DTYPES[value.qualified_name]


def _parse_counts(value: object) -> tuple[int, ...]:
    if (
        isinstance(value, PickledCall)
        and value.callee.qualified_name == SIZE_TYPE
        and len(value.args) == 1
    ):
        value = value.args[0]
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMS:
        raise ValueError("its shape or its strides are not a list of numbers")
    return tuple(map(_parse_count, value))


def _parse_count(value: object) -> int:
    if type(value) is not int or not 0 <= value < INT64_LIMIT:  # bool is a subclass of int
        raise ValueError("one of its numbers is not a whole number from 0 to 2^63 - 1")
    return value


# Offset, shape and strides, in elements.
_ElementLayout = tuple[int, tuple[int, ...], tuple[int, ...]]


def _make_view(name: str, dtype: str, storage: TorchStorage, layout: _ElementLayout) -> StorageView:
    """Return a view. Raise ValueError unless all its elements are in the storage and do not overlap."""
    offset, shape, element_strides = layout
    item_nbytes = itemsize(dtype)
    if len(element_strides) != len(shape):
        raise ValueError(f"it has {len(shape)} dims and {len(element_strides)} strides")
    if math.prod(max(extent, 1) for extent in shape) * item_nbytes >= INT64_LIMIT:
        raise ValueError("it has a shape of 2^63 bytes or more")
    # E.g. a [3, 2] tensor that is the transpose of a stored [2, 3]: offset 0, strides (1, 3).
    # Its last element has index 0 + (3 - 1) * 1 + (2 - 1) * 3 = 5, so the storage has 6 or more.
    if 0 in shape:
        return StorageView(name, dtype, shape, storage, 0, None)
    last_index = offset
    for extent, stride in zip(shape, element_strides):
        last_index += (extent - 1) * stride
    if (last_index + 1) * item_nbytes > storage.nbytes:
        raise ValueError(
            f"it reaches to byte {(last_index + 1) * item_nbytes:,} of a storage of {storage.nbytes:,}"
        )
    # The stride of an extent of 1 moves no element, and PyTorch leaves any number there.
    c_strides = strides(shape)
    used_strides: list[int] = []
    for extent, stride, c_stride in zip(shape, element_strides, c_strides):
        used_strides.append(stride if extent > 1 else c_stride)
    byte_strides: tuple[int, ...] | None = None
    if tuple(used_strides) != c_strides:
        _check_no_overlap(shape, used_strides)
        byte_strides = tuple(stride * item_nbytes for stride in used_strides)
    return StorageView(name, dtype, shape, storage, offset * item_nbytes, byte_strides)


def _check_no_overlap(shape: Sequence[int], element_strides: Sequence[int]) -> None:
    """Raise ValueError if elements overlap, or the view has more than `MAX_RUNS` contiguous runs."""
    stride_extents = sorted(
        (stride, extent) for stride, extent in zip(element_strides, shape) if extent > 1
    )
    if stride_extents[0][0] == 0:
        raise ValueError(
            "it is an expanded view, whose elements share memory: save its `.contiguous()` copy"
        )
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
