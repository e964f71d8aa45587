"""The tensors of a PyTorch checkpoint, from the object that its pickle holds: views of storages, and what is beside.

Nothing here touches a file. All raises ValueError with the reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.formats.torch_pickle import (
    MAPPING_TYPES,
    PersistentRef,
    PickledCall,
    PickledMapping,
    PickledName,
    UnpickledObject,
)
from prepcli.formats.untrusted import quote_name
from prepcli.planning.boxes import strides
from prepcli.planning.tensors import itemsize

MAX_DIMS = 64
MAX_RUNS = 1 << 18  # of a view's bytes that do not lie together: each would be read by itself
INT64_LIMIT = 1 << 63
MAX_WRAPS = 8  # of a tensor in a parameter in a subclass …; a pickle may name the outermost very often
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
    f"{module}.{kind}Storage": dtype for kind, dtype in STORAGE_DTYPES.items() for module in ("torch", "torch.cuda")
}
DTYPES = {
    f"torch.{name}": name
    for name in (
        *STORAGE_DTYPES.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip
UTILS_MODULE = "torch._utils."
PARAMETER_REBUILDERS = {f"{UTILS_MODULE}_rebuild_parameter", f"{UTILS_MODULE}_rebuild_parameter_with_state"}
TENSOR_REBUILDERS = {
    f"{UTILS_MODULE}_rebuild_tensor": 4,
    f"{UTILS_MODULE}_rebuild_tensor_v2": 6,
    f"{UTILS_MODULE}_rebuild_tensor_v3": 7,
}  # arguments
TYPED_TENSOR_REBUILDER = "torch._tensor._rebuild_from_type_v2"
TENSOR_TYPES = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter"}
_MAKERS = frozenset({*TENSOR_REBUILDERS, *PARAMETER_REBUILDERS, TYPED_TENSOR_REBUILDER})
SIZE_TYPE = "torch.Size"
SETTINGS_TYPES = {  # beside tensors: what settings and counters are made of
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
UNSUPPORTED_NAMES: Mapping[str, str] = {  # name or its end -> what it means that a file has it
    f"{UTILS_MODULE}_rebuild_qtensor": "it holds quantised tensors",
    f"{UTILS_MODULE}_rebuild_sparse_tensor": "it holds sparse tensors",
    f"{UTILS_MODULE}_rebuild_nested_tensor": "it holds nested tensors",
    f"{UTILS_MODULE}_rebuild_meta_tensor_no_storage": "it holds tensors of the meta device, which have no values",
    f"{UTILS_MODULE}_rebuild_wrapper_subclass": "it holds tensors of a kind of their own",
    f"{UTILS_MODULE}_rebuild_device_tensor_from_numpy": "it holds tensors of a device that stores them in its own way",
    f"{UTILS_MODULE}_rebuild_device_tensor_from_cpu_tensor": "it holds tensors of a device that stores them in its own way",
    "torch.storage._load_from_bytes": "it holds a pickle within the pickle",
    **dict.fromkeys(("torch.complex32", "torch.complex128", "torch.float4_e2m1fn_x2", "torch.ComplexDoubleStorage"),
                    "it holds tensors of a dtype that prep does not carry"),
    **{f"torch.{kind}Storage": "it holds quantised tensors" for kind in
       ("QUInt8", "QInt8", "QInt32", "QUInt4x2", "QUInt2x4")},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TorchStorage:
    """Bytes that tensors are views of; `item` is the size of the elements that its own length is counted in."""

    key: str
    nbytes: int
    item_nbytes: int


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor: `offset` and `steps` are bytes in its storage; no `steps` where it lies in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: TorchStorage
    offset: int
    byte_strides: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class TorchState:
    """The tensors of a model by name, and what a file holds besides, each in a few words."""

    views: tuple[StorageView, ...]
    non_tensors: tuple[str, ...]


def read_torch_state(unpickled: UnpickledObject) -> TorchState:
    """The one mapping of names to tensors that a checkpoint is, or that it has under a name that says so."""
    pairs = _state_dict(unpickled.root)
    asides = [f"{_key(key)} is {_kind(value)}" for key, value in _beside(unpickled.root, pairs)]
    views: list[StorageView] = []
    names: set[str] = set()
    for key, value in pairs.items:
        if not _is_tensor(value):
            asides.append(f"{_key(key)} is {_kind(value)}")
            continue
        if not isinstance(key, str):
            raise ValueError(f"a tensor in it has no text for a name, but {_kind(key)}")
        if key in names:
            raise ValueError(f"it names {quote_name(key)} twice")
        names.add(key)
        views.append(_named(key, value))
    return TorchState(tuple(views), tuple(asides))


def collect_storages(unpickled: UnpickledObject) -> dict[str, TorchStorage]:
    """Every storage that a pickle refers to, by its key: the first that is said of it, which the others agree with."""
    found: dict[str, TorchStorage] = {}
    for outside in unpickled.persistent_refs:
        storage, _ = _storage(outside)
        if found.setdefault(storage.key, storage).nbytes != storage.nbytes:
            raise ValueError(f"it gives storage {quote_name(storage.key)} two lengths")
    return found


# Which of its objects are the model's tensors


def _state_dict(root: object) -> PickledMapping:
    if not isinstance(root, PickledMapping):
        raise ValueError(f"it holds {_kind(root)}, not tensors by name")
    inside = [("", root)] if _is_model(root) else []
    wrappers = [(key, value) for key, value in root.items if isinstance(key, str) and key in WRAPPERS]
    if twice := [key for key, count in Counter(key for key, _ in wrappers).items() if count > 1]:
        raise ValueError(f"it names {quote_name(twice[0])} twice")
    inside += [(key, value) for key, value in wrappers if isinstance(value, PickledMapping) and _is_model(value)]
    if not inside:
        raise ValueError("it holds no tensors by name")
    if len(inside) > 1:
        where = " and ".join(quote_name(key) if key else "itself" for key, _ in inside[:4])
        raise ValueError(f"tensors by name are in {where}: which of them are meant?")
    return inside[0][1]


def _is_model(pairs: PickledMapping) -> bool:
    return any(_is_tensor(value) for _, value in pairs.items)


def _is_tensor(value: object) -> bool:
    return isinstance(value, PickledCall) and value.callee.qualified_name in _MAKERS


def _beside(root: object, taken: PickledMapping) -> Iterator[tuple[object, object]]:
    """What lies around the mapping that was taken."""
    if isinstance(root, PickledMapping) and root is not taken:
        yield from ((key, value) for key, value in root.items if value is not taken)


def _key(key: object) -> str:
    return quote_name(key) if isinstance(key, str) else _kind(key)


def _kind(value: object) -> str:
    """A value in a few words, whatever it is."""
    if value is None or isinstance(value, bool | float):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < INT64_LIMIT else "a large number"
    if isinstance(value, str):
        return f"the text {quote_name(value[:MAX_SHOWN_CHARS])}"
    if isinstance(value, PickledMapping | list | tuple):
        count = len(value.items if isinstance(value, PickledMapping) else value)
        return f"a {'mapping' if isinstance(value, PickledMapping) else type(value).__name__} of {count:,}"
    if isinstance(value, PickledCall):
        return "a tensor" if _is_tensor(value) else f"a {value.callee.qualified_name}"
    return {PickledName: "the name of a class", PersistentRef: "a storage"}.get(type(value), f"{type(value).__name__}")


# One tensor


def _named(name: str, value: object) -> StorageView:
    try:
        return _view(name, value)
    except ValueError as error:
        raise ValueError(f"{quote_name(name)}: {error}") from error


def _view(name: str, value: object) -> StorageView:
    made = _unwrapped(value)
    count = TENSOR_REBUILDERS.get(made.callee.qualified_name)
    if count is None or not count <= len(made.args) <= max(count, 6) + 1 or made.state is not None:
        raise ValueError("it is not made as PyTorch makes a tensor")
    storage, dtype = _storage(made.args[0])
    if count == 7:
        dtype = _dtype(made.args[6])
    if any(map(_is_flagged, made.args[max(count, 6) :])):
        raise ValueError("it is a conjugate or negative view, whose values are not stored")
    offset, shape, steps = _count(made.args[1]), _counts(made.args[2]), _counts(made.args[3])
    return _placed(name, dtype, storage, (offset, shape, steps))


def _is_flagged(metadata: object) -> bool:
    if not isinstance(metadata, PickledMapping):
        return False
    if len(metadata.items) > MAX_FLAGS:
        raise ValueError("it is not made as PyTorch makes a tensor")
    return any(flag is not False for _, flag in metadata.items)


def _unwrapped(value: object) -> PickledCall:
    """The call that makes a tensor, out of those that make a parameter of it."""
    for _ in range(MAX_WRAPS):
        if not isinstance(value, PickledCall):
            break
        if value.callee.qualified_name == TYPED_TENSOR_REBUILDER:
            value = _of_type(value)
        elif value.callee.qualified_name in PARAMETER_REBUILDERS and value.args:
            value = value.args[0]
        else:
            return value
    raise ValueError("it is not made as PyTorch makes a tensor")


def _of_type(made: PickledCall) -> PickledCall:
    """A tensor with attributes of Python, which say nothing of its values."""
    if len(made.args) != 4:
        raise ValueError("it is not made as PyTorch makes a tensor")
    maker, kind, args, _ = made.args
    if not (
        isinstance(maker, PickledName)
        and isinstance(args, tuple)
        and isinstance(kind, PickledName)
        and kind.qualified_name in TENSOR_TYPES
    ):
        raise ValueError("it is a tensor of a class of its own")
    return PickledCall(maker, args)


def _storage(value: object) -> tuple[TorchStorage, str]:
    """A storage, and the dtype of the tensors in it, by the id that a pickle refers to it by."""
    found = value.persistent_id if isinstance(value, PersistentRef) else None
    if not isinstance(found, tuple) or len(found) not in (5, 6) or found[0] != "storage":
        raise ValueError("it refers to something other than a storage")
    kind, key = found[1], found[2]
    if (
        not isinstance(kind, PickledName)
        or kind.qualified_name not in {*TYPED_STORAGES, *UNTYPED_STORAGES}
        or not isinstance(key, str)
    ):
        raise ValueError("it refers to a storage of no known kind")
    if len(found) == 6 and found[5] is not None:
        raise ValueError("it refers to a part of a storage, as very old versions of PyTorch did")
    dtype = TYPED_STORAGES.get(kind.qualified_name, "uint8")
    nbytes = _count(found[4]) * itemsize(dtype)
    return TorchStorage(key, nbytes, itemsize(dtype)), dtype


def _dtype(value: object) -> str:
    if not isinstance(value, PickledName) or value.qualified_name not in DTYPES:
        raise ValueError("it has no known dtype")
    return DTYPES[value.qualified_name]


def _counts(value: object) -> tuple[int, ...]:
    if isinstance(value, PickledCall) and value.callee.qualified_name == SIZE_TYPE and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMS:
        raise ValueError("its shape or its strides are no list of numbers")
    return tuple(map(_count, value))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < INT64_LIMIT:  # True is an int, but no count
        raise ValueError("a number of it is no whole number from 0 to 2^63 - 1")
    return value


_Lies = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape and strides, in elements


def _placed(name: str, dtype: str, storage: TorchStorage, lies: _Lies) -> StorageView:
    """A view whose elements are all within its storage, each of them once."""
    offset, shape, steps = lies
    item = itemsize(dtype)
    if len(steps) != len(shape):
        raise ValueError(f"it has {len(shape)} dims and {len(steps)} strides")
    if math.prod(max(extent, 1) for extent in shape) * item >= INT64_LIMIT:
        raise ValueError("it has a shape of 2^63 bytes or more")
    if 0 in shape:
        return StorageView(name, dtype, shape, storage, 0, None)
    last = offset + sum((extent - 1) * step for extent, step in zip(shape, steps))
    if (last + 1) * item > storage.nbytes:
        raise ValueError(f"it reaches to byte {(last + 1) * item:,} of a storage of {storage.nbytes:,}")
    plain = strides(shape)
    if all(extent == 1 or step == usual for extent, step, usual in zip(shape, steps, plain)):
        return StorageView(name, dtype, shape, storage, offset * item, None)
    steps = tuple(step if extent > 1 else usual for extent, step, usual in zip(shape, steps, plain))
    _check_apart(shape, steps)
    return StorageView(name, dtype, shape, storage, offset * item, tuple(step * item for step in steps))


def _check_apart(shape: Sequence[int], steps: Sequence[int]) -> None:
    """Each element has bytes of its own, and not each of very many lies by itself."""
    dims = sorted((step, extent) for step, extent in zip(steps, shape) if extent > 1)
    if dims[0][0] == 0:
        raise ValueError("it is an expanded view, many elements of which are one: `.contiguous()` before it is saved")
    reached = 0
    for step, extent in dims:
        if step <= reached:
            raise ValueError("it is a view whose elements overlap: `.contiguous()` before it is saved")
        reached += step * (extent - 1)
    run = 1
    for step, extent in dims:
        run *= extent if step == run else 1
    if (runs := math.prod(shape) // run) > MAX_RUNS:
        raise ValueError(f"it is a view in {runs:,} pieces: `.contiguous()` before it is saved")
