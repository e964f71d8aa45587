"""Flax msgpack and EasyLM streams, read: which arrays a file holds and where their bytes are; no payload passes here.

A Flax file is a map of maps whose leaves are arrays: extension 1 around [shape, dtype, bytes], or above 1 GiB a map of
such pieces. An EasyLM stream is records [path, bytes], the bytes being a Flax file of one leaf. Files come from
strangers: depth, number and length of all that is kept are bounded before it is read.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import xxhash

from prepcli.errors import PrepError
from prepcli.formats.shard_index import download_again_hint
from prepcli.formats.untrusted import quote_name, stat_file, unreadable_error
from prepcli.planning.tensors import ITEM_BITS

EXT_ARRAY, EXT_SCALAR = 1, 3  # codes of extensions: an array, and a scalar of NumPy, which is stored as one
CHUNKED_MARKER = "__msgpack_chunked_array__"
SUFFIX = "msgpack"
MAX_DEPTH = 32  # of maps in maps, and parts of a record's path
MAX_ENTRIES = 1 << 17  # of maps, leaves and numbers in a file
MAX_DIMS = 64
MAX_KEY_NBYTES = 1 << 10
MAX_PATHS_NBYTES = 16 << 20  # of all paths together
WINDOW_NBYTES = 16 << 10

MsgpackKind = Literal["flax", "easylm"]
KeyPath = tuple[str, ...]  # a path in a tree


@dataclass(frozen=True, slots=True)
class MsgpackArray:
    """An array by its path in the tree: C order, little endian, in runs (offset, nbytes) of its file."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MsgpackNonArray:
    """A leaf that is no array."""

    path: KeyPath
    value: object  # an int, a float, a bool, None, or what else it is in words

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} is {self.value if isinstance(self.value, str) else repr(self.value)}"


@dataclass(frozen=True, slots=True)
class MsgpackHeader:
    """What a file holds, in the order in which it lies; `digest`: XXH3-128 of all that is not payload."""

    path: Path
    arrays: tuple[MsgpackArray, ...]
    non_arrays: tuple[MsgpackNonArray, ...]
    size: int
    mtime_ns: int
    digest: str


def sniff_msgpack_kind(path: Path) -> MsgpackKind | None:
    """What the first bytes of a regular file say that it is; None for anything else."""
    try:
        stat_file(path)
        with path.open("rb") as file:
            first = file.read(3)
    except (PrepError, OSError):
        return None
    if first[:1] == b"\x92" and len(first) > 1 and 0x90 < first[1] < 0xA0:
        return "easylm"
    is_map, key = first[:1] in _MAPS, first[{0xDE: 3, 0xDF: 5}.get(first[0], 1) :] if first else b""
    return "flax" if is_map and (not key or _is_text(key[0])) else None


def read_msgpack_header(path: Path, kind: MsgpackKind) -> MsgpackHeader:
    """Headers of a Flax file or an EasyLM stream. PrepError, and nothing else, whatever is under that name."""
    found = stat_file(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable_error(path, error) from error
    try:
        walk = _Walk(_Cursor(fd, found.st_size))
        _records(walk) if kind == "easylm" else _whole(walk)
    except OSError as error:
        raise unreadable_error(path, error) from error
    except ValueError as error:
        what = "EasyLM stream" if kind == "easylm" else "Flax msgpack file"
        raise PrepError(f"{path.name} is not a usable {what}", str(error), download_again_hint(path)) from error
    finally:
        os.close(fd)
    digest = walk.cursor.state.hexdigest()
    return MsgpackHeader(path, tuple(walk.arrays), tuple(walk.asides), found.st_size, found.st_mtime_ns, digest)


# Bytes


class _Cursor:
    """Where a file is read: headers through a small window, payloads skipped. ValueError where it ends too early."""

    def __init__(self, fd: int, size: int) -> None:
        self.at, self.size = 0, size
        self.state = xxhash.xxh3_128()
        self._fd, self._window, self._start = fd, b"", 0

    def take(self, count: int) -> bytes:
        """The next bytes; few, as everything that is taken is kept."""
        low = self.at - self._start
        if low < 0 or low + count > len(self._window):
            self._window, self._start = os.pread(self._fd, max(count, WINDOW_NBYTES), self.at), self.at
            low = 0
        found = self._window[low : low + count]
        if len(found) < count:
            raise ValueError(f"it is cut short: it ends at byte {self.size:,}, within a header")
        self.at += count
        self.state.update(found)
        return found

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "big")

    def skip(self, count: int) -> int:
        """Pass over a payload; where it began."""
        if self.at + count > self.size:
            raise ValueError(
                f"it is cut short: it ends at byte {self.size:,}, {self.at + count - self.size:,} are missing"
            )
        self.at += count
        return self.at - count


@dataclass(frozen=True, slots=True)
class _Item:
    """A header: `count` is a length in bytes, or items of a map or array; `value` of what is a value itself."""

    kind: Literal["value", "map", "array", "text", "bytes", "extension"]
    count: int = 0
    code: int = 0
    value: object = None


def _item(cursor: _Cursor) -> _Item:
    first = cursor.number(1)
    if first < 0x80 or first >= 0xE0:
        return _Item("value", value=first if first < 0x80 else first - 256)
    if first < 0xC0:
        kind, mask = _SHORT[first >> 4]
        return _Item(kind, first & mask)
    if first in _VALUES:
        return _Item("value", value=_VALUES[first])
    if first in _NUMBERS:
        form = _NUMBERS[first]
        return _Item("value", value=struct.unpack(form, cursor.take(struct.calcsize(form)))[0])
    if first in _LONG:
        kind, width = _LONG[first]
        count = cursor.number(width) if width else 1 << (first - 0xD4)
        return _Item(kind, count, cursor.number(1) if kind == "extension" else 0)
    raise ValueError(f"byte {cursor.at - 1:,} is {first:#x}, which msgpack does not know")


_SHORT: dict[int, tuple[Literal["map", "array", "text"], int]] = {
    0x8: ("map", 15),
    0x9: ("array", 15),
    0xA: ("text", 31),
    0xB: ("text", 31),
}
_LONG: dict[int, tuple[Literal["map", "array", "text", "bytes", "extension"], int]] = {
    **{0xC4 + i: ("bytes", 1 << i) for i in range(3)},
    **{0xC7 + i: ("extension", 1 << i) for i in range(3)},
    **{0xD4 + i: ("extension", 0) for i in range(5)},  # of 1, 2, 4, 8 or 16 bytes
    **{0xD9 + i: ("text", 1 << i) for i in range(3)},
    **{0xDC + i: ("array", 2 << i) for i in range(2)},
    **{0xDE + i: ("map", 2 << i) for i in range(2)},
}
_VALUES = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {0xCA: ">f", 0xCB: ">d", **{0xCC + i: form for i, form in enumerate((">B", ">H", ">I", ">Q"))}} | {
    0xD0 + i: form for i, form in enumerate((">b", ">h", ">i", ">q"))
}
_MAPS = {bytes([first]) for first in (*range(0x81, 0x90), 0xDE, 0xDF)}


def _is_text(first: int) -> bool:
    return 0xA0 <= first < 0xC0 or 0xD9 <= first <= 0xDB


# Trees


@dataclass(slots=True)
class _Walk:
    """A tree on its way: what was found so far, and how much of the bounds is used."""

    cursor: _Cursor
    arrays: list[MsgpackArray] = field(default_factory=list)
    asides: list[MsgpackNonArray] = field(default_factory=list)
    entries: int = 0
    paths_nbytes: int = 0

    def count(self, path: KeyPath) -> None:
        self.entries += 1
        self.paths_nbytes += sum(map(len, path)) + len(path)
        if self.entries > MAX_ENTRIES or self.paths_nbytes > MAX_PATHS_NBYTES:
            raise ValueError(
                f"it has more than {MAX_ENTRIES:,} entries, or more than {MAX_PATHS_NBYTES >> 20} MiB of names"
            )
        if len(path) > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep, at {_shown(path)}")


def _whole(walk: _Walk) -> None:
    """A Flax file."""
    _value(walk, ())
    if walk.cursor.at != walk.cursor.size:
        raise ValueError(
            f"it goes on after its end: {walk.cursor.size - walk.cursor.at:,} bytes from {walk.cursor.at:,}"
        )


def _records(walk: _Walk) -> None:
    """An EasyLM stream; no path may be there twice."""
    seen: set[KeyPath] = set()
    while walk.cursor.at < walk.cursor.size:
        path = _record_path(walk)
        if path in seen:
            raise ValueError(f"it has {_shown(path)} twice")
        seen.add(path)
        value = _item(walk.cursor)
        if value.kind != "bytes":
            raise ValueError(f"the record {_shown(path)} has no bytes")
        end = walk.cursor.at + value.count
        if end > walk.cursor.size:
            raise ValueError(
                f"it is cut short: the record {_shown(path)} ends at byte {end:,}, it at {walk.cursor.size:,}"
            )
        _value(walk, path)
        if walk.cursor.at != end:
            raise ValueError(f"the record {_shown(path)} ends at byte {end:,}, its value at {walk.cursor.at:,}")


def _record_path(walk: _Walk) -> KeyPath:
    at, record = walk.cursor.at, _item(walk.cursor)
    key = _item(walk.cursor) if (record.kind, record.count) == ("array", 2) else record
    if key is record or key.kind != "array" or key.count > MAX_DEPTH:
        raise ValueError(f"byte {at:,} begins no record [path, bytes]")
    return tuple(_key(walk.cursor, numbers=True) for _ in range(key.count))


def _key(cursor: _Cursor, numbers: bool = False) -> str:
    found = _item(cursor)
    if numbers and type(found.value) is int:
        return str(found.value)
    if found.kind != "text":
        raise ValueError(f"a key before byte {cursor.at:,} is no text")
    return _text(cursor, found.count)


def _text(cursor: _Cursor, count: int) -> str:
    if count > MAX_KEY_NBYTES:
        raise ValueError(f"a name at byte {cursor.at:,} has {count:,} bytes, allowed are {MAX_KEY_NBYTES:,}")
    try:
        return cursor.take(count).decode()
    except UnicodeError as error:
        raise ValueError(f"a name before byte {cursor.at:,} is not UTF-8") from error


def _value(walk: _Walk, path: KeyPath) -> None:
    """Whatever comes next, and all that is in it."""
    walk.count(path)
    found = _item(walk.cursor)
    if found.kind == "map":
        _map(walk, path, found.count)
    elif found.kind == "array":
        for number in range(found.count):
            _value(walk, (*path, str(number)))
    elif found.kind == "extension" and found.code in (EXT_ARRAY, EXT_SCALAR):
        walk.arrays.append(_array(walk.cursor, path, found.count))
    elif found.kind == "value":
        walk.asides.append(MsgpackNonArray(path, found.value))
    else:
        walk.cursor.skip(found.count)
        walk.asides.append(MsgpackNonArray(path, f"{found.count:,} bytes that are no array"))


def _map(walk: _Walk, path: KeyPath, count: int) -> None:
    keys: set[str] = set()
    arrays, asides = len(walk.arrays), len(walk.asides)
    for _ in range(count):
        key = _key(walk.cursor)
        if key in keys:
            raise ValueError(f"it has {_shown((*path, key))} twice")
        keys.add(key)
        _value(walk, (*path, key))
    if CHUNKED_MARKER in keys:
        whole = _joined(path, walk.arrays[arrays:], walk.asides[asides:])
        del walk.arrays[arrays:], walk.asides[asides:]
        walk.arrays.append(whole)


def _joined(path: KeyPath, pieces: list[MsgpackArray], facts: list[MsgpackNonArray]) -> MsgpackArray:
    """An array of its pieces, which are of its flat form; what else the map says is the shape."""
    depth = len(path)
    chunks = {each.path[depth + 1]: each for each in pieces if _is_in(each.path, depth, "chunks")}
    extents = {each.path[depth + 1]: each.value for each in facts if _is_in(each.path, depth, "shape")}
    ordered = [chunks.get(str(i)) for i in range(len(chunks))]
    shape = [extents.get(str(i)) for i in range(len(extents))]
    parts = [part for part in ordered if part is not None and len(part.shape) == 1]
    extra = len(pieces) - len(chunks) + len(facts) - len(extents) - 1  # the marker itself
    if not parts or len(parts) != len(ordered) or extra or {part.dtype for part in parts} != {parts[0].dtype}:
        raise ValueError(f"the pieces of {_shown(path)} make no array")
    counts = tuple(each for each in shape[:MAX_DIMS] if type(each) is int and each >= 0)
    if len(counts) != len(shape) or math.prod(counts) != sum(part.shape[0] for part in parts):
        raise ValueError(f"the pieces of {_shown(path)} make no array of the shape {str(shape)[:100]}")
    return MsgpackArray(path, parts[0].dtype, counts, tuple(run for part in parts for run in part.runs))


def _is_in(path: KeyPath, depth: int, key: str) -> bool:
    return len(path) == depth + 2 and path[depth] == key


def _array(cursor: _Cursor, path: KeyPath, nbytes: int) -> MsgpackArray:
    """[shape, dtype, bytes] in so many bytes."""
    end = cursor.at + nbytes
    if (start := _item(cursor)).kind != "array" or start.count != 3:
        raise ValueError(f"{_shown(path)} is no array of Flax's")
    shape, dtype = tuple(_extents(cursor, path)), _key(cursor)
    if ITEM_BITS.get(dtype, 0) % 8 or dtype not in ITEM_BITS:
        raise ValueError(f"{_shown(path)} is {quote_name(dtype)}, a dtype that prep does not carry")
    data = _item(cursor)
    wanted = math.prod(shape) * ITEM_BITS[dtype] // 8
    if data.kind != "bytes" or cursor.at + data.count != end or data.count != wanted:
        raise ValueError(f"{_shown(path)}, {dtype} {str(list(shape))[:100]}, takes {wanted:,} bytes and has others")
    return MsgpackArray(path, dtype, shape, ((cursor.skip(wanted), wanted),))


def _extents(cursor: _Cursor, path: KeyPath) -> Iterator[int]:
    dims = _item(cursor)
    if dims.kind != "array" or dims.count > MAX_DIMS:
        raise ValueError(f"{_shown(path)} has no shape")
    for found in itertools.starmap(_item, [(cursor,)] * dims.count):
        if type(found.value) is not int or not 0 <= found.value < 1 << 63:
            raise ValueError(f"{_shown(path)} has no shape")
        yield found.value


def _shown(path: KeyPath) -> str:
    return quote_name(".".join(path)) if path else "its root"
