"""Interpret a pickle without running any code: opcodes build inert objects only.

A class or function becomes a `PickledName` if the caller allows it, and a call of it becomes a `PickledCall`. Nothing
is imported, called or hashed. Any other name raises `UnexpectedNameError`. Time and memory are bounded by limits on
opcodes and input bytes. Invalid pickles raise ValueError.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, TypeVar

from prepcli.formats.untrusted import CutShortError, quote_name

# Maximum size of a pickle. A tensor takes 100 to 200 bytes.
MAX_NBYTES = 32 << 20
# Per pickle: a tensor takes about 35. An opcode allocates at most a few hundred bytes.
MAX_OPCODES = 2_000_000
MAX_TEXT_NBYTES = 1 << 20
MAX_INT_NBYTES = 255
MAX_LINE_NBYTES = 1000
PROTOCOLS = range(6)
MAPPING_TYPES = {
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "builtins.dict",
}


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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UnpickledObject:
    """Root object of a pickle, and its persistent references in order."""

    root: object
    persistent_refs: tuple[PersistentRef, ...]


class BoundedReader:
    """Sequential reader of at most `max_nbytes` bytes of a file from its current position."""

    def __init__(self, file: BinaryIO, max_nbytes: int) -> None:
        self._file = file
        self._left = max_nbytes

    @classmethod
    def from_bytes(cls, data: bytes) -> BoundedReader:
        """Return a reader of bytes in memory."""
        return cls(io.BytesIO(data), len(data))

    def read(self, nbytes: int) -> bytes:
        """Return the next `nbytes` bytes. Raise ValueError if there are fewer."""
        if nbytes > self._left:
            raise ValueError(f"it continues for {nbytes:,} bytes, {self._left:,} are left")
        data = self._file.read(nbytes)
        if len(data) < nbytes:
            raise CutShortError("it is cut short")
        self._left -= nbytes
        return data

    def read_line(self) -> bytes:
        """Return the next line without its line break."""
        line = self._file.readline(min(MAX_LINE_NBYTES, self._left))
        self._left -= len(line)
        if not line.endswith(b"\n"):
            raise ValueError(f"a name in it is cut short, or has more than {MAX_LINE_NBYTES} bytes")
        return line[:-1]


def interpret_pickle(
    reader: BoundedReader, allowed_names: Collection[str], *, max_opcodes: int = MAX_OPCODES
) -> UnpickledObject:
    """Interpret the next pickle of a reader.

    Numbers, text, bytes, lists and tuples become Python objects, a set becomes a list, a mapping a `PickledMapping`.

    Args:
        reader: Reader at the start of the pickle. Afterwards it is at its end.
        allowed_names: Qualified names of classes and functions that may occur.
        max_opcodes: Maximum number of opcodes.

    Raises:
        UnexpectedNameError: The pickle refers to another name.
        ValueError: The pickle is invalid or exceeds a limit.
    """
    return _PickleMachine(reader, allowed_names, max_opcodes).run()


_MARK = object()
_T = TypeVar("_T")


class _PickleMachine:
    """Stack machine that interprets the opcodes of a pickle."""

    def __init__(
        self, reader: BoundedReader, allowed_names: Collection[str], max_opcodes: int
    ) -> None:
        self.reader = reader
        self.allowed_names = allowed_names
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self.persistent_refs: list[PersistentRef] = []
        self.max_opcodes = max_opcodes
        self.steps_left = max_opcodes

    def run(self) -> UnpickledObject:
        """Interpret all opcodes and return the root object."""
        read = self.reader.read
        while True:
            self.count_steps(1)
            code = read(1)
            if code == b".":
                return UnpickledObject(self.pop(), tuple(self.persistent_refs))
            execute = _OPCODES.get(code)
            if execute is None:
                opcode_name = _REFUSED_OPCODES.get(code, f"0x{code.hex()}")
                raise ValueError(f"it has the opcode {opcode_name}, which PyTorch never writes")
            execute(self)

    def count_steps(self, steps: int) -> None:
        """Count steps. Raise ValueError if there are more than `max_opcodes`."""
        self.steps_left -= steps
        if self.steps_left < 0:
            raise ValueError(f"it has more than {self.max_opcodes:,} opcodes")

    # Stack operations

    def push(self, value: object) -> None:
        """Push a value."""
        self.stack.append(value)

    def pop(self) -> object:
        """Pop the top value. Raise ValueError if there is none above the last mark."""
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("it pops from an empty stack")
        return self.stack.pop()

    def top(self) -> object:
        """Return the top value without popping it."""
        value = self.pop()
        self.stack.append(value)
        return value

    def pop_to_mark(self) -> list[object]:
        """Pop the last mark and return the values above it."""
        for index in reversed(range(len(self.stack))):
            if self.stack[index] is _MARK:
                values = self.stack[index + 1 :]
                del self.stack[index:]
                return values
        raise ValueError("it pops to a mark that does not exist")

    def pop_type(self, expected_type: type[_T]) -> _T:
        """Pop a value of a type. Raise ValueError for another type."""
        value = self.pop()
        if not isinstance(value, expected_type):
            raise ValueError(
                f"it has a {type(value).__name__} where a {expected_type.__name__} should be"
            )
        return value

    def drop(self) -> None:
        """Pop the top value or mark (POP)."""
        if not self.stack:
            raise ValueError("it pops from an empty stack")
        self.stack.pop()

    # Operands of opcodes

    def read_number(self, struct_format: str) -> int:
        """Read a number of a struct format."""
        (number,) = struct.unpack(struct_format, self.reader.read(struct.calcsize(struct_format)))
        return number

    def read_sized_bytes(self, struct_format: str, max_nbytes: int = MAX_TEXT_NBYTES) -> bytes:
        """Read bytes that follow their own length."""
        nbytes = self.read_number(struct_format)
        if not 0 <= nbytes <= max_nbytes:
            raise ValueError(
                f"a text or number in it has {nbytes:,} bytes, the limit is {max_nbytes:,}"
            )
        return self.reader.read(nbytes)

    # Opcodes

    def push_long(self, struct_format: str) -> None:
        """Push an integer of any size (LONG1, LONG4)."""
        self.push(
            int.from_bytes(
                self.read_sized_bytes(struct_format, MAX_INT_NBYTES), "little", signed=True
            )
        )

    def push_text(self, struct_format: str) -> None:
        """Push a UTF-8 text (BINUNICODE)."""
        self.push(_decode_text(self.read_sized_bytes(struct_format)))

    def push_python2_text(self, struct_format: str) -> None:
        """Push a string of Python 2 as text, or as bytes if it is not UTF-8 (BINSTRING)."""
        data = self.read_sized_bytes(struct_format)
        try:
            self.push(data.decode())
        except UnicodeDecodeError:
            self.push(data)

    def push_tuple(self, count: int) -> None:
        """Pop `count` values and push them as a tuple."""
        self.push(tuple([self.pop() for _ in range(count)][::-1]))

    def extend_list(self, values: list[object]) -> None:
        """Append values to the list on the stack (APPENDS)."""
        target = self.pop_type(list)
        target += values
        self.push(target)

    def set_items(self, values: list[object]) -> None:
        """Add alternating keys and values to the mapping on the stack (SETITEMS)."""
        target = self.pop_type(PickledMapping)
        if len(values) % 2:
            raise ValueError("a mapping in it has a key without a value")
        target.items += zip(values[::2], values[1::2])
        self.push(target)

    def set_item(self) -> None:
        """Pop a key and a value into the mapping below them (SETITEM)."""
        value = self.pop()
        key = self.pop()
        self.set_items([key, value])

    def append_item(self) -> None:
        """Pop a value into the list below it (APPEND)."""
        value = self.pop()
        self.extend_list([value])

    def push_mapping(self) -> None:
        """Push a mapping of the keys and values above the last mark (DICT)."""
        values = self.pop_to_mark()
        self.push(PickledMapping())
        self.set_items(values)

    def push_from_memo(self, struct_format: str) -> None:
        """Push an object of the memo (BINGET)."""
        number = self.read_number(struct_format)
        if number not in self.memo:
            raise ValueError(f"it refers to object {number:,}, which is not in the memo")
        self.push(self.memo[number])

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
        name = self.pop_type(str)
        module = self.pop_type(str)
        self.push_name(module, name)

    def push_name_from_lines(self) -> None:
        """Push the name given by module and name in the next two lines (GLOBAL)."""
        module = self.reader.read_line()
        name = self.reader.read_line()
        self.push_name(_decode_text(module), _decode_text(name))

    def push_call(self) -> None:
        """Record a call without making it. Calls of mapping types become mappings (REDUCE, NEWOBJ)."""
        args = self.pop_type(tuple)
        callee = self.pop_type(PickledName)
        self.push(
            self.build_mapping(args)
            if callee.qualified_name in MAPPING_TYPES
            else PickledCall(callee, args)
        )

    def build_mapping(self, args: tuple[object, ...]) -> PickledMapping:
        """Return the mapping of a list of pairs (written by Python 2), of another mapping, or an empty one."""
        if args:
            last_arg = args[-1]
        else:
            last_arg = None
        if isinstance(last_arg, PickledMapping):
            return last_arg
        if isinstance(last_arg, list | tuple):
            pairs = last_arg
        else:
            pairs = ()
        # One opcode can build a mapping of a list in the memo, again and again.
        self.count_steps(len(pairs))
        mapping = PickledMapping()
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError("a mapping in it is not built from pairs")
            mapping.items.append((pair[0], pair[1]))
        return mapping

    def push_call_with_kwargs(self) -> None:
        """Record a call. Its keyword arguments are ignored (NEWOBJ_EX)."""
        self.pop_type(PickledMapping)
        self.push_call()

    def set_state(self) -> None:
        """Keep the state of a recorded call. Ignore attributes of a mapping, such as `_metadata` (BUILD)."""
        state = self.pop()
        target = self.top()
        if isinstance(target, PickledCall):
            target.state = state
        elif not isinstance(target, PickledMapping):
            raise ValueError(f"it sets the state of a {type(target).__name__}")

    def push_persistent_ref(self) -> None:
        """Push a persistent reference and record it (BINPERSID)."""
        reference = PersistentRef(self.pop())
        self.persistent_refs.append(reference)
        self.push(reference)

    def check_protocol(self) -> None:
        """Raise ValueError for an unknown protocol (PROTO)."""
        if (protocol := self.read_number("B")) not in PROTOCOLS:
            raise ValueError(f"it has protocol {protocol}, supported: 0 to {PROTOCOLS[-1]}")


def _decode_text(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError("a text in it is not UTF-8") from error


def _memoize(machine: _PickleMachine, number: int) -> None:
    machine.memo[number] = machine.top()


def _push_constant(value: object) -> Callable[[_PickleMachine], object]:
    return lambda m: m.push(value)


# Opcodes: https://github.com/python/cpython/blob/main/Lib/pickletools.py. A tensor in a state
# dict of PyTorch is pickled as
#   c torch._utils _rebuild_tensor_v2     the function, as a name
#   ( ( "storage" <class> "0" "cpu" 6 t Q   persistent id: a storage of 6 elements
#     K 0  K 2 K 3 \x86  K 3 K 1 \x86 ...  t   offset 0, shape (2, 3), strides (3, 1)
#   R                                     the call, which is recorded and never made
_OPCODES: Mapping[bytes, Callable[[_PickleMachine], object]] = {
    b"(": _push_constant(_MARK), b"0": _PickleMachine.drop, b"1": _PickleMachine.pop_to_mark,
    b"2": lambda m: m.push(m.top()),
    b"N": _push_constant(None), b"\x88": _push_constant(True), b"\x89": _push_constant(False), b")": _push_constant(()),
    b"J": lambda m: m.push(m.read_number("<i")), b"K": lambda m: m.push(m.read_number("B")),
    b"M": lambda m: m.push(m.read_number("<H")),
    b"G": lambda m: m.push(struct.unpack(">d", m.reader.read(8))[0]),
    b"\x8a": lambda m: m.push_long("B"), b"\x8b": lambda m: m.push_long("<i"),
    b"X": lambda m: m.push_text("<I"), b"\x8c": lambda m: m.push_text("B"), b"\x8d": lambda m: m.push_text("<Q"),
    b"U": lambda m: m.push_python2_text("B"), b"T": lambda m: m.push_python2_text("<i"),
    b"C": lambda m: m.push(m.read_sized_bytes("B")), b"B": lambda m: m.push(m.read_sized_bytes("<I")),
    b"\x8e": lambda m: m.push(m.read_sized_bytes("<Q")), b"\x96": lambda m: m.push(m.read_sized_bytes("<Q")),
    b"]": lambda m: m.push([]), b"\x8f": lambda m: m.push([]), b"l": lambda m: m.push(m.pop_to_mark()),
    b"\x91": lambda m: m.push(m.pop_to_mark()), b"a": _PickleMachine.append_item,
    b"e": lambda m: m.extend_list(m.pop_to_mark()), b"\x90": lambda m: m.extend_list(m.pop_to_mark()),
    b"t": lambda m: m.push(tuple(m.pop_to_mark())), b"\x85": lambda m: m.push_tuple(1),
    b"\x86": lambda m: m.push_tuple(2), b"\x87": lambda m: m.push_tuple(3),
    b"}": lambda m: m.push(PickledMapping()), b"d": _PickleMachine.push_mapping, b"s": _PickleMachine.set_item,
    b"u": lambda m: m.set_items(m.pop_to_mark()),
    b"q": lambda m: _memoize(m, m.read_number("B")), b"r": lambda m: _memoize(m, m.read_number("<I")),
    b"\x94": lambda m: _memoize(m, len(m.memo)), b"h": lambda m: m.push_from_memo("B"),
    b"j": lambda m: m.push_from_memo("<I"),
    b"c": _PickleMachine.push_name_from_lines, b"\x93": _PickleMachine.push_name_from_stack,
    b"R": _PickleMachine.push_call, b"\x81": _PickleMachine.push_call,
    b"\x92": _PickleMachine.push_call_with_kwargs, b"b": _PickleMachine.set_state,
    b"Q": _PickleMachine.push_persistent_ref, b"\x80": _PickleMachine.check_protocol,
    b"\x95": lambda m: m.reader.read(8),
}  # fmt: skip
_REFUSED_OPCODES = {
    b"i": "INST", b"o": "OBJ", b"P": "PERSID", b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4", b"I": "INT",
    b"L": "LONG", b"F": "FLOAT", b"S": "STRING", b"V": "UNICODE", b"g": "GET", b"p": "PUT",
    b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER",
}  # fmt: skip
