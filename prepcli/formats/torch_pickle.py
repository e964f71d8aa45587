"""A pickle, read without running anything: its opcodes are interpreted, and all that they make is inert.

A class or function that a pickle names is let in as a `Name` if the caller expects it, and what it would be called
with is recorded as `Made`; nothing is imported, called or hashed. Any other name ends the reading. Time and memory are
bounded by the opcodes and the bytes that are taken in. All here raises ValueError with the reason.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, TypeVar

from prepcli.formats.untrusted import quote_name

MAX_NBYTES = 32 << 20  # of a pickle: a tensor takes 100 to 200
MAX_OPCODES = 2_000_000  # of a pickle: a tensor takes about 35; an opcode makes at most some hundred bytes
MAX_TEXT_NBYTES = 1 << 20
MAX_INT_NBYTES = 255
MAX_LINE_NBYTES = 1000
PROTOCOLS = range(6)
MAPPING_TYPES = {"collections.OrderedDict", "collections.defaultdict", "collections.Counter", "builtins.dict"}


class UnexpectedNameError(ValueError):
    """A pickle asks for a class or function that is not expected of it; `name` is which."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it asks for {quote_name(name)}")
        self.name = name


@dataclass(frozen=True, slots=True)
class PickledName:
    """A class or function that a pickle names: its module and name, joined by a dot."""

    qualified_name: str


@dataclass(slots=True, eq=False, repr=False)
class PickledMapping:
    """A mapping: its items in order, names that occur twice among them."""

    items: list[tuple[object, object]] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class PickledCall:
    """What would be made by calling `maker` with `args`, and then be given a `state`."""

    callee: PickledName
    args: tuple[object, ...]
    state: object = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PersistentRef:
    """What a pickle refers to by an id: a storage."""

    persistent_id: object


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UnpickledObject:
    """The object that a pickle holds, and all that it refers to outside of it, in order."""

    root: object
    persistent_refs: tuple[PersistentRef, ...]


class BoundedReader:
    """At most so many bytes of a file from where it stands, taken one after another."""

    def __init__(self, file: BinaryIO, max_nbytes: int) -> None:
        self._file, self._left = file, max_nbytes

    @classmethod
    def from_bytes(cls, data: bytes) -> BoundedReader:
        """The bytes that are there already."""
        return cls(io.BytesIO(data), len(data))

    def read(self, nbytes: int) -> bytes:
        """The next bytes; ValueError if there are fewer."""
        if nbytes > self._left:
            raise ValueError(f"it goes on for {nbytes:,} bytes where {self._left:,} are left of it")
        found = self._file.read(nbytes)
        if len(found) < nbytes:
            raise ValueError("it is cut short")
        self._left -= nbytes
        return found

    def read_line(self) -> bytes:
        """The next bytes up to the end of a line, which is left out."""
        found = self._file.readline(min(MAX_LINE_NBYTES, self._left))
        self._left -= len(found)
        if not found.endswith(b"\n"):
            raise ValueError(f"a name in it is cut short, or has over {MAX_LINE_NBYTES} bytes")
        return found[:-1]


def interpret_pickle(reader: BoundedReader, allowed_names: Collection[str]) -> UnpickledObject:
    """The object of the pickle that begins a window, which then stands behind it. `expected`: names that may occur.

    Numbers, texts, bytes, lists and tuples are Python's; a set is a list, a mapping is `Pairs`.
    """
    return _Machine(reader, allowed_names).run()


_MARK = object()
_Kind = TypeVar("_Kind")


class _Machine:
    def __init__(self, window: BoundedReader, expected: Collection[str]) -> None:
        self.window, self.expected = window, expected
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self.outside: list[PersistentRef] = []
        self.left = MAX_OPCODES

    def run(self) -> UnpickledObject:
        take = self.window.read
        while True:
            self.spend(1)
            code = take(1)
            if code == b".":
                return UnpickledObject(self.pop(), tuple(self.outside))
            work = _WORK.get(code)
            if work is None:
                raise ValueError(
                    f"it has the opcode {_OTHERS.get(code, f'0x{code.hex()}')}, which PyTorch never writes"
                )
            work(self)

    def spend(self, steps: int) -> None:
        """Count work; ValueError once it is more than any checkpoint takes."""
        self.left -= steps
        if self.left < 0:
            raise ValueError(f"it has more than {MAX_OPCODES:,} opcodes")

    # The stack

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> object:
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("it takes from an empty stack")
        return self.stack.pop()

    def top(self) -> object:
        value = self.pop()
        self.stack.append(value)
        return value

    def pop_to_mark(self) -> list[object]:
        """All above the last mark, which is taken off as well."""
        for at in reversed(range(len(self.stack))):
            if self.stack[at] is _MARK:
                found = self.stack[at + 1 :]
                del self.stack[at:]
                return found
        raise ValueError("it looks for a mark that is not there")

    def pop_a(self, kind: type[_Kind]) -> _Kind:
        value = self.pop()
        if not isinstance(value, kind):
            raise ValueError(f"it has a {type(value).__name__} where a {kind.__name__} should be")
        return value

    def drop(self) -> None:
        if not self.stack:
            raise ValueError("it takes from an empty stack")
        self.stack.pop()

    # What opcodes are followed by

    def number(self, form: str) -> int:
        (found,) = struct.unpack(form, self.window.read(struct.calcsize(form)))
        return found

    def counted(self, form: str, most: int = MAX_TEXT_NBYTES) -> bytes:
        """Bytes behind their own number."""
        nbytes = self.number(form)
        if not 0 <= nbytes <= most:
            raise ValueError(f"a text or number in it has {nbytes:,} bytes, allowed are {most:,}")
        return self.window.read(nbytes)

    # What opcodes do

    def long(self, form: str) -> None:
        self.push(int.from_bytes(self.counted(form, MAX_INT_NBYTES), "little", signed=True))

    def text(self, form: str) -> None:
        self.push(_decoded(self.counted(form)))

    def old_text(self, form: str) -> None:
        """A text of Python 2, which may be bytes."""
        found = self.counted(form)
        try:
            self.push(found.decode())
        except UnicodeDecodeError:
            self.push(found)

    def tuple_of(self, count: int) -> None:
        self.push(tuple([self.pop() for _ in range(count)][::-1]))

    def append(self, values: list[object]) -> None:
        target = self.pop_a(list)
        target += values
        self.push(target)

    def put(self, values: list[object]) -> None:
        """Keys and values, in turn, into a mapping."""
        target = self.pop_a(PickledMapping)
        if len(values) % 2:
            raise ValueError("a mapping in it has a key without a value")
        target.items += zip(values[::2], values[1::2])
        self.push(target)

    def put_one(self) -> None:
        value, key = self.pop(), self.pop()
        self.put([key, value])

    def append_one(self) -> None:
        value = self.pop()
        self.append([value])

    def mapping(self) -> None:
        values = self.pop_to_mark()
        self.push(PickledMapping())
        self.put(values)

    def recall(self, form: str) -> None:
        number = self.number(form)
        if number not in self.memo:
            raise ValueError(f"it recalls object {number:,}, which was not kept")
        self.push(self.memo[number])

    def name(self, module: str, name: str) -> None:
        text = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if text not in self.expected:
            raise UnexpectedNameError(text)
        self.push(PickledName(text))

    def name_on_stack(self) -> None:
        name, module = self.pop_a(str), self.pop_a(str)
        self.name(module, name)

    def name_in_lines(self) -> None:
        module, name = self.window.read_line(), self.window.read_line()
        self.name(_decoded(module), _decoded(name))

    def make(self) -> None:
        args, maker = self.pop_a(tuple), self.pop_a(PickledName)
        self.push(self.mapping_of(args) if maker.qualified_name in MAPPING_TYPES else PickledCall(maker, args))

    def mapping_of(self, args: tuple[object, ...]) -> PickledMapping:
        """A mapping made of a list of pairs, as Python 2 wrote it, of another mapping, or of nothing."""
        first = args[-1] if args else None
        if isinstance(first, PickledMapping):
            return first
        pairs = first if isinstance(first, list | tuple) else ()
        self.spend(len(pairs))
        found = PickledMapping()
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError("a mapping in it is made of something other than pairs")
            found.items.append((pair[0], pair[1]))
        return found

    def make_with_names(self) -> None:
        self.pop_a(PickledMapping)
        self.make()

    def build(self) -> None:
        """A mapping's attributes (`_metadata` of modules) say nothing of tensors; a state is kept."""
        state, target = self.pop(), self.top()
        if isinstance(target, PickledCall):
            target.state = state
        elif not isinstance(target, PickledMapping):
            raise ValueError(f"it gives a state to a {type(target).__name__}")

    def refer(self) -> None:
        found = PersistentRef(self.pop())
        self.outside.append(found)
        self.push(found)

    def protocol(self) -> None:
        if (found := self.number("B")) not in PROTOCOLS:
            raise ValueError(f"it is of protocol {found}, known are 0 to {PROTOCOLS[-1]}")


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError("a text in it is not UTF-8") from error


def _keep(machine: _Machine, number: int) -> None:
    machine.memo[number] = machine.top()


def _pushing(value: object) -> Callable[[_Machine], object]:
    return lambda m: m.push(value)


_WORK: Mapping[bytes, Callable[[_Machine], object]] = {
    b"(": _pushing(_MARK), b"0": _Machine.drop, b"1": _Machine.pop_to_mark, b"2": lambda m: m.push(m.top()),
    b"N": _pushing(None), b"\x88": _pushing(True), b"\x89": _pushing(False), b")": _pushing(()),
    b"J": lambda m: m.push(m.number("<i")), b"K": lambda m: m.push(m.number("B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"G": lambda m: m.push(struct.unpack(">d", m.window.read(8))[0]),
    b"\x8a": lambda m: m.long("B"), b"\x8b": lambda m: m.long("<i"),
    b"X": lambda m: m.text("<I"), b"\x8c": lambda m: m.text("B"), b"\x8d": lambda m: m.text("<Q"),
    b"U": lambda m: m.old_text("B"), b"T": lambda m: m.old_text("<i"),
    b"C": lambda m: m.push(m.counted("B")), b"B": lambda m: m.push(m.counted("<I")),
    b"\x8e": lambda m: m.push(m.counted("<Q")), b"\x96": lambda m: m.push(m.counted("<Q")),
    b"]": lambda m: m.push([]), b"\x8f": lambda m: m.push([]), b"l": lambda m: m.push(m.pop_to_mark()),
    b"\x91": lambda m: m.push(m.pop_to_mark()), b"a": _Machine.append_one,
    b"e": lambda m: m.append(m.pop_to_mark()), b"\x90": lambda m: m.append(m.pop_to_mark()),
    b"t": lambda m: m.push(tuple(m.pop_to_mark())), b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2), b"\x87": lambda m: m.tuple_of(3),
    b"}": lambda m: m.push(PickledMapping()), b"d": _Machine.mapping, b"s": _Machine.put_one,
    b"u": lambda m: m.put(m.pop_to_mark()),
    b"q": lambda m: _keep(m, m.number("B")), b"r": lambda m: _keep(m, m.number("<I")),
    b"\x94": lambda m: _keep(m, len(m.memo)), b"h": lambda m: m.recall("B"), b"j": lambda m: m.recall("<I"),
    b"c": _Machine.name_in_lines, b"\x93": _Machine.name_on_stack,
    b"R": _Machine.make, b"\x81": _Machine.make, b"\x92": _Machine.make_with_names, b"b": _Machine.build,
    b"Q": _Machine.refer, b"\x80": _Machine.protocol, b"\x95": lambda m: m.window.read(8),
}  # fmt: skip
_OTHERS = {
    b"i": "INST", b"o": "OBJ", b"P": "PERSID", b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4", b"I": "INT",
    b"L": "LONG", b"F": "FLOAT", b"S": "STRING", b"V": "UNICODE", b"g": "GET", b"p": "PUT",
    b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER",
}  # fmt: skip
