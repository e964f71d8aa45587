"""Read pickles without running any code, and write pickles of plain values and tensors without torch.

The reader takes the opcodes from `pickletools.genops`, which runs nothing, and builds inert objects. A class or
function becomes a `PickledName` if the caller allows it, and a call of it becomes a `PickledCall`. Nothing is imported,
called or hashed. Time and memory are bounded by limits on opcodes and input bytes. Invalid pickles raise ValueError.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prepcli.algebra.boxes import strides
from prepcli.core.json_values import quote_name
from prepcli.planning.tensors import itemsize
from prepcli.stores.files import CutShortError

# Maximum size of a pickle. A tensor takes 100 to 200 bytes.
MAX_NBYTES = 32 << 20
# Per pickle: a tensor takes about 35. An opcode allocates at most a few hundred bytes.
MAX_OPCODES = 2_000_000
MAX_TEXT_LENGTH = 1 << 20
MAX_INT_BITS = 8 * 255
# Messages of `pickletools` may quote a whole line of the pickle.
MAX_MESSAGE_CHARS = 120
PROTOCOLS = range(6)
MAPPING_TYPES = {
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "builtins.dict",
}
_T = TypeVar("_T")
PROTO = b"\x80\x02"
STORAGE_DTYPES: Mapping[str, str] = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
}  # fmt: skip


class UnexpectedNameError(ValueError):
    """Error for a pickle with a class or function outside of the allowed names."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it refers to {quote_name(name)}")
        self.name = name


@dataclass(frozen=True, slots=True)
class PickledName:
    """A reference to a class or function: module and name, joined by a dot."""

    qualified_name: str


@dataclass(slots=True, eq=False, repr=False)
class PickledMapping:
    """A mapping as a list of items in order, which may contain duplicate keys."""

    items: list[tuple[object, object]] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class PickledCall:
    """A recorded call of `callee` with `args`, and the `state` set on its result."""

    callee: PickledName
    args: tuple[object, ...]
    state: object = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PersistentRef:
    """A reference to an object outside of the pickle (a storage) by its persistent id."""

    persistent_id: object


def interpret_pickle(
    data: bytes, allowed_names: Collection[str], *, max_opcodes: int = MAX_OPCODES
) -> object:
    """Return the root object of a pickle.

    Numbers, text, bytes, lists and tuples become Python objects, a set becomes a list, a mapping a `PickledMapping`.

    Args:
        data: The pickle. Bytes after its end are ignored.
        allowed_names: Qualified names of classes and functions that may occur.
        max_opcodes: Maximum number of opcodes.

    Raises:
        UnexpectedNameError: The pickle refers to another name.
        ValueError: The pickle is invalid or exceeds a limit.
    """
    machine = _PickleMachine(allowed_names)
    for number, (opcode, argument, _) in enumerate(_iter_opcodes(data), 1):
        if number > max_opcodes:
            raise ValueError(f"it has more than {max_opcodes:,} opcodes")
        execute = _OPCODES.get(opcode.name)
        if execute is None:
            raise ValueError(f"it has the opcode {opcode.name}, which PyTorch never writes")
        execute(machine, argument)
    return machine.pop()


def _iter_opcodes(data: bytes) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    """Yield each opcode with its argument and position, up to the end of the pickle."""
    stream = io.BytesIO(data)
    try:
        yield from pickletools.genops(stream)
    except ValueError as error:
        if stream.tell() == len(data):
            raise CutShortError("it is cut short") from error
        raise ValueError(f"its pickle is invalid: {error!s:.{MAX_MESSAGE_CHARS}}") from error


class _PickleMachine:
    """Stack machine that executes the opcodes of a pickle.

    Attributes:
        stack: Values above the last mark.
        stacks_below: Values below each mark.
        memo: Objects by number.
    """

    def __init__(self, allowed_names: Collection[str]) -> None:
        self.allowed_names = allowed_names
        self.stack: list[object] = []
        self.stacks_below: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def push(self, value: object) -> None:
        self.stack.append(value)

    def push_mark(self) -> None:
        self.stacks_below.append(self.stack)
        self.stack = []

    def top(self, expected_type: type[_T] = object) -> _T:
        """Return the top value above the last mark. Raise ValueError for another type."""
        if not self.stack:
            raise ValueError("it pops from an empty stack")
        value = self.stack[-1]
        if not isinstance(value, expected_type):
            raise ValueError(
                f"it has a {type(value).__name__} where a {expected_type.__name__} should be"
            )
        return value

    def pop(self, expected_type: type[_T] = object) -> _T:
        """Pop the top value above the last mark. Raise ValueError for another type."""
        value = self.top(expected_type)
        self.stack.pop()
        return value

    def pop_values(self, count: int) -> list[object]:
        """Pop values, in the order in which they were pushed."""
        if len(self.stack) < count:
            raise ValueError("it pops from an empty stack")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def pop_to_mark(self) -> list[object]:
        """Pop the last mark and return the values above it."""
        if not self.stacks_below:
            raise ValueError("it pops to a mark that does not exist")
        values = self.stack
        self.stack = self.stacks_below.pop()
        return values

    def drop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_to_mark()

    def push_int(self, value: int) -> None:
        if value.bit_length() > MAX_INT_BITS:
            raise ValueError(f"a number in it has more than {MAX_INT_BITS:,} bits")
        self.push(value)

    def push_text(self, value: str | bytes) -> None:
        """Push a text or bytes (BINUNICODE, BINBYTES)."""
        if len(value) > MAX_TEXT_LENGTH:
            raise ValueError(
                f"a text in it has {len(value):,} bytes, the limit is {MAX_TEXT_LENGTH:,}"
            )
        # `pickletools` accepts halves of surrogate pairs, which UTF-8 does not have.
        if isinstance(value, str) and not value.isascii():
            value.encode()
        self.push(value)

    def push_from_memo(self, number: int) -> None:
        if number not in self.memo:
            raise ValueError(f"it refers to object {number:,}, which is not in the memo")
        self.push(self.memo[number])

    def memoize(self, number: int) -> None:
        self.memo[number] = self.top()

    def push_name(self, module: str, name: str) -> None:
        """Push a reference to a class or function. Raise UnexpectedNameError if it is not allowed."""
        qualified_name = f"{'builtins' if module == '__builtin__' else module}.{name}"
        # The names are compared as text. Nothing is imported: even the import of a module runs
        # its code.
        if qualified_name not in self.allowed_names:
            raise UnexpectedNameError(qualified_name)
        self.push(PickledName(qualified_name))

    def push_name_from_stack(self) -> None:
        """Push the name given by module and name on the stack (STACK_GLOBAL)."""
        name = self.pop(str)
        module = self.pop(str)
        self.push_name(module, name)

    def push_call(self) -> None:
        """Record a call without making it. Calls of mapping types become mappings (REDUCE, NEWOBJ)."""
        args = self.pop(tuple)
        callee = self.pop(PickledName)
        if callee.qualified_name not in MAPPING_TYPES:
            self.push(PickledCall(callee, args))
        # E.g. a `Counter` is built from a dict. Other mappings are empty first.
        elif args and isinstance(args[-1], PickledMapping):
            self.push(args[-1])
        elif args and isinstance(args[-1], list | tuple):
            raise ValueError("a mapping in it is built from a list, which PyTorch never does")
        else:
            self.push(PickledMapping())

    def extend_list(self, values: list[object]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[object]) -> None:
        """Add alternating keys and values to the mapping on the stack (SETITEMS)."""
        if len(values) % 2:
            raise ValueError("a mapping in it has a key without a value")
        self.top(PickledMapping).items += zip(values[::2], values[1::2])

    def push_mapping(self) -> None:
        """Push a mapping of the keys and values above the last mark (DICT)."""
        values = self.pop_to_mark()
        self.push(PickledMapping())
        self.set_items(values)

    def set_state(self) -> None:
        """Keep the state of a recorded call. Ignore attributes of a mapping, such as `_metadata` (BUILD)."""
        state = self.pop()
        target = self.top()
        if isinstance(target, PickledCall):
            target.state = state
        elif not isinstance(target, PickledMapping):
            raise ValueError(f"it sets the state of a {type(target).__name__}")

    def check_protocol(self, protocol: int) -> None:
        if protocol not in PROTOCOLS:
            raise ValueError(f"it has protocol {protocol}, supported: 0 to {PROTOCOLS[-1]}")


_Execute = Callable[[_PickleMachine, Any], object]


# Opcodes: https://github.com/python/cpython/blob/main/Lib/pickletools.py. A tensor in a state
# dict of PyTorch is pickled as
#   c torch._utils _rebuild_tensor_v2     the function, as a name
#   ( ( "storage" <class> "0" "cpu" 6 t Q   persistent id: a storage of 6 elements
#     K 0  K 2 K 3 \x86  K 3 K 1 \x86 ...  t   offset 0, shape (2, 3), strides (3, 1)
#   R                                     the call, which is recorded and never made
_OPCODES: Mapping[str, _Execute] = {
    "PROTO": lambda m, number: m.check_protocol(number),
    **dict.fromkeys(("FRAME", "STOP"), lambda m, _: None),
    "MARK": lambda m, _: m.push_mark(),
    "POP": lambda m, _: m.drop(),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.push(m.top()),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT"), lambda m, value: m.push(value)),
    **dict.fromkeys(("LONG1", "LONG4"), lambda m, value: m.push_int(value)),
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), lambda m, value: m.push_text(value)
    ),
    **dict.fromkeys(
        ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), lambda m, value: m.push_text(value)
    ),
    "BYTEARRAY8": lambda m, value: m.push_text(value),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.push(tuple(m.pop_values(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.pop_values(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.pop_values(3))),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), lambda m, _: m.push([])),
    **dict.fromkeys(("LIST", "FROZENSET"), lambda m, _: m.push(m.pop_to_mark())),
    "APPEND": lambda m, _: m.extend_list(m.pop_values(1)),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda m, _: m.extend_list(m.pop_to_mark())),
    "EMPTY_DICT": lambda m, _: m.push(PickledMapping()),
    "DICT": lambda m, _: m.push_mapping(),
    "SETITEM": lambda m, _: m.set_items(m.pop_values(2)),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda m, number: m.memoize(number)),
    "MEMOIZE": lambda m, _: m.memoize(len(m.memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, number: m.push_from_memo(number)),
    "GLOBAL": lambda m, name: m.push_name(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.push_name_from_stack(),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda m, _: m.push_call()),
    "BUILD": lambda m, _: m.set_state(),
    "BINPERSID": lambda m, _: m.push(PersistentRef(m.pop())),
}


# Writing. Each function returns the opcodes of one value in protocol 2. `torch.load(weights_only=True)` reads them.

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
        case int() if abs(value) < 1 << 31:
            return b"J" + struct.pack("<i", value)
        case int():
            return b"\x8a\x08" + struct.pack("<q", value)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return b"X" + struct.pack("<I", len(data)) + data
        case StoredTensor():
            storage = [
                pickle_value("storage"),
                pickle_global(f"torch {_STORAGE_NAMES[value.dtype]}Storage"),
                *map(pickle_value, (value.key, "cpu", math.prod(value.shape))),
            ]
            arguments = [
                pickle_tuple(storage) + b"Q",
                *map(pickle_value, (0, value.shape, strides(value.shape, 1), False)),
                pickle_global("collections OrderedDict") + b")R",
            ]
            return pickle_call("torch._utils _rebuild_tensor_v2", arguments)
        case tuple():
            return pickle_tuple(map(pickle_value, value))
        case Mapping():
            items: list[bytes] = []
            for key, item in value.items():
                items += [pickle_value(key), pickle_value(item)]
            return pickle_mapping(items)
        case _:
            return b"](" + b"".join(map(pickle_value, value)) + b"e"


def pickle_global(name: str) -> bytes:
    """Return the import of a global, given as `MODULE NAME`."""
    module, _, last = name.partition(" ")
    return f"c{module}\n{last}\n".encode()


def pickle_call(name: str, arguments: Iterable[bytes]) -> bytes:
    """Return the call of a global, given as `MODULE NAME`."""
    return pickle_global(name) + pickle_tuple(arguments) + b"R"


def pickle_mapping(items: Iterable[bytes]) -> bytes:
    """Return a dict of alternating keys and values."""
    return b"}(" + b"".join(items) + b"u"


def pickle_tuple(parts: Iterable[bytes]) -> bytes:
    """Return a tuple."""
    return b"(" + b"".join(parts) + b"t"
