"""Flax msgpack files and EasyLM streams: find them in a folder, and read their headers.

A Flax file is a nested map with arrays as leaves. An array is extension 1 with [shape, dtype, bytes]. An array above
1 GiB is a map of such pieces. An EasyLM stream is a sequence of records [path, bytes], where the bytes are a Flax file
of one leaf. Payloads are skipped. Files are untrusted: nesting depth, number of entries and length of names are
bounded before they are read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Literal

import xxhash

from prepcli.algebra.grids import run_parts
from prepcli.core.errors import DamagedError, PrepError
from prepcli.core.formatting import count_text
from prepcli.core.json_values import quote_name
from prepcli.formats.model_files import (
    FileHeader,
    ModelFiles,
    damage_hint,
    list_weight_files,
    read_model_files,
)
from prepcli.planning.arrays import Array, parted_array, whole_array
from prepcli.planning.tensors import ITEM_BITS, itemsize
from prepcli.stores.files import (
    CutShortError,
    list_folder,
    open_regular_file,
    stat_file,
    unreadable_error,
)
from prepcli.stores.paths import AnyPath

# Extension codes of flax.serialization: array and NumPy scalar.
EXT_ARRAY = 1
EXT_SCALAR = 3
CHUNKED_MARKER = "__msgpack_chunked_array__"
SUFFIX = "msgpack"
# Limits on untrusted input. They are far above any model, and bound time and memory: a file of a
# few bytes may claim 2^32 entries.
MAX_DEPTH = 32  # limit of nested maps, and of the parts of a record's path
MAX_ENTRIES = 1 << 17  # maps, leaves and numbers in a file
MAX_DIMS = 64
MAX_KEY_NBYTES = 1 << 10
MAX_PATHS_NBYTES = 16 << 20  # total length of all paths
WINDOW_NBYTES = 16 << 10
SNIFFED_NBYTES = 16

STEM = "flax_model"
SINGLE_FILE = f"{STEM}.{SUFFIX}"
INDEX_FILE = f"{SINGLE_FILE}.index.json"
# In order of precedence: the names of transformers come before names that training scripts choose.
FLAX_FILES = (SINGLE_FILE, INDEX_FILE, "params.msgpack", "train_state.msgpack")
STREAM_FILE = "streaming_params"
STREAM_FILES = (STREAM_FILE, "streaming_train_state")
# EasyLM appends the step to the names of milestones, e.g. `streaming_params_1000`.
_NUMBERED_STREAM = re.compile(rf"({'|'.join(STREAM_FILES)})_\d+")

MsgpackKind = Literal["flax", "easylm"]
KeyPath = tuple[str, ...]  # keys from the root of a tree to a leaf
# First bytes with a count in their low bits: 0x8N map, 0x9N array, 0xa0 to 0xbf text.
_FIX_TYPES: dict[int, tuple[Literal["map", "array", "text"], int]] = {
    0x8: ("map", 15),
    0x9: ("array", 15),
    0xA: ("text", 31),
    0xB: ("text", 31),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


@dataclass(frozen=True, slots=True)
class MsgpackNonArray:
    """A leaf other than an array."""

    path: KeyPath
    # A number, bool or None as it is, any other value as a description.
    value: object

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} is {self.value if isinstance(self.value, str) else repr(self.value)}"


def sniff_msgpack_kind(path: AnyPath) -> MsgpackKind | None:
    """Return the kind of a regular file by its first bytes. None for any other file."""
    try:
        stat_file(path)
        with open_regular_file(path, buffering=SNIFFED_NBYTES) as file:
            first_bytes = file.read(3)
    except (PrepError, OSError):
        return None
    if first_bytes[:1] == b"\x92" and len(first_bytes) > 1 and 0x90 < first_bytes[1] < 0xA0:
        return "easylm"
    is_map = first_bytes[:1] in _MAP_FIRST_BYTES
    key = first_bytes[{0xDE: 3, 0xDF: 5}.get(first_bytes[0], 1) :] if first_bytes else b""
    # A text begins with these bytes.
    if is_map and (not key or 0xA0 <= key[0] < 0xC0 or 0xD9 <= key[0] <= 0xDB):
        return "flax"
    return None


def read_msgpack_header(path: AnyPath, kind: MsgpackKind, file_number: int = 0) -> FileHeader:
    """Read the headers of a Flax file or an EasyLM stream. Values other than arrays are `MsgpackNonArray`s.

    Raises:
        PrepError: The file is unreadable or invalid. No other exception is raised, whatever the file holds.
    """
    stat = stat_file(path)
    try:
        with open_regular_file(path, buffering=0) as file:
            state = _ParseState(_Cursor(file, stat.st_size), file_number)
            if kind == "easylm":
                _parse_stream(state)
            else:
                _parse_value(state, ())
                extra_nbytes = state.cursor.size - state.cursor.offset
                # Bytes after the tree would be in no digest, and a longer file that was overwritten by a
                # shorter one looks like this.
                if extra_nbytes:
                    count = count_text(extra_nbytes, "byte follows", "bytes follow")
                    raise ValueError(f"{count} its end at byte {state.cursor.offset:,}")
    except OSError as error:
        raise unreadable_error(path, error) from error
    except ValueError as error:
        title = "EasyLM stream" if kind == "easylm" else "Flax msgpack file"
        what = f"{path.name} is not a usable {title}"
        raise DamagedError(what, str(error), damage_hint(path, error)) from error
    digest = state.cursor.digest_state.hexdigest()
    arrays = tuple(state.arrays)
    return FileHeader(path, stat.st_size, stat.st_mtime_ns, digest, arrays, tuple(state.non_arrays))


def select_other_flax_files(names: Collection[str]) -> list[str]:
    """Return the msgpack files of a folder without a file of a known name."""
    return [name for name in names if name.endswith(f".{SUFFIX}") and not name.startswith(".")]


def select_named_flax_files(names: Sequence[str]) -> list[str]:
    """Return the Flax files of a known name, in the order of precedence."""
    return [name for name in FLAX_FILES if name in names]


def select_streams(names: Sequence[str]) -> list[str]:
    """Return the EasyLM streams: the file of a known name, else all numbered ones."""
    named = [name for name in STREAM_FILES if name in names][:1]
    return named or list(filter(_NUMBERED_STREAM.fullmatch, names))


def select_flax_downloads(names: Sequence[str]) -> list[str]:
    """Return the files of a model in a repository. With an index, these are all files that it may name."""
    if SINGLE_FILE in names:
        return [SINGLE_FILE]
    files = select_other_flax_files(names)
    if INDEX_FILE in names:
        return [INDEX_FILE, *files]
    return select_named_flax_files(names)[:1] or files


def read_flax_files(path: AnyPath, kind: MsgpackKind) -> ModelFiles:
    """Read the headers of a checkpoint: of a file, or of the files that a folder holds.

    Raises:
        PrepError: A file is broken, a file or an array of the index is missing, or the folder holds several EasyLM
            streams.
    """

    def read_header(file: AnyPath, number: int) -> FileHeader:
        return read_msgpack_header(file, kind, number)

    if not path.is_dir():
        return read_model_files(path, (path,), read_header)
    names = list_folder(path)
    if kind == "easylm":
        files = select_streams(names)
        if len(files) > 1:
            what = f"{path} holds {len(files)} EasyLM streams"
            hint = f"one of them: `params::{path / files[-1]}`"
            raise PrepError(what, ", ".join(files), hint)
    else:
        files = select_named_flax_files(names)[:1]
    if not files:
        files = select_other_flax_files(names)
        if len(files) != 1:
            what = f"{path} holds {len(files)} msgpack files"
            raise PrepError(what, ", ".join(files[:4]), f"name one of them: `{path / files[0]}`")
    listed, weight_map = list_weight_files(path, files)
    return read_model_files(path, [path / name for name in listed], read_header, weight_map)


# Format: https://github.com/msgpack/msgpack/blob/master/spec.md, and the extension types of
# flax.serialization. The file of {"w": float32 [2]} has these bytes:
#   81                       map of 1 entry
#   a1 77                    text of 1 byte: "w"
#   c7 15 01                 extension of 0x15 = 21 bytes, code 1: an array of Flax
#     93                     array of 3 items: shape, dtype, bytes
#     91 02                  shape [2]
#     a7 66 6c 6f 61 74 33 32  dtype "float32"
#     c4 08 <8 bytes>        payload, at offset 19
# An EasyLM record is 92 (2 items), the path as an array of texts, and bytes (c4 to c6) that are
# such a file of one leaf.


class _Cursor:
    """Read position in a file: headers are read through a small window, payloads are skipped."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.offset = 0
        self.size = size
        self.digest_state = xxhash.xxh3_128()
        self._file = file
        self._window = b""
        self._start = 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes. Raise ValueError if the file is truncated."""
        low = self.offset - self._start
        if low < 0 or low + count > len(self._window):
            # A header is a few bytes, so a file of 1,000 leaves is read in about 1,000 windows. The
            # payload between two headers is never in memory.
            self._file.seek(self.offset)
            self._window = self._file.read(max(count, WINDOW_NBYTES))
            self._start = self.offset
            low = 0
        data = self._window[low : low + count]
        if len(data) < count:
            raise CutShortError(f"it is cut short: it ends at byte {self.size:,}, within a header")
        self.offset += count
        self.digest_state.update(data)
        return data

    def take_uint(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "big")

    def skip(self, count: int) -> int:
        """Skip a payload of `count` bytes and return its offset."""
        if self.offset + count > self.size:
            missing = count_text(self.offset + count - self.size, "byte is", "bytes are")
            raise CutShortError(
                f"it is cut short: it ends at byte {self.size:,}, {missing} missing"
            )
        self.offset += count
        return self.offset - count


@dataclass(frozen=True, slots=True)
class _MsgpackHeader:
    """A msgpack header: `count` is a length in bytes or a number of items, `value` the value of a scalar."""

    kind: Literal["value", "map", "array", "text", "bytes", "extension"]
    count: int = 0
    ext_code: int = 0
    value: object = None


def _read_token(cursor: _Cursor) -> _MsgpackHeader:
    """Read a value, or the type and length of text, bytes, a container or an extension."""
    first_byte = cursor.take_uint(1)
    if first_byte < 0x80 or first_byte >= 0xE0:
        return _MsgpackHeader("value", value=first_byte if first_byte < 0x80 else first_byte - 256)
    if first_byte < 0xC0:
        kind, mask = _FIX_TYPES[first_byte >> 4]
        return _MsgpackHeader(kind, first_byte & mask)
    if first_byte in _CONSTANTS:
        return _MsgpackHeader("value", value=_CONSTANTS[first_byte])
    if first_byte in _NUMBER_FORMATS:
        struct_format = _NUMBER_FORMATS[first_byte]
        return _MsgpackHeader(
            "value",
            value=struct.unpack(struct_format, cursor.take(struct.calcsize(struct_format)))[0],
        )
    if first_byte in _SIZED_TYPES:
        kind, width = _SIZED_TYPES[first_byte]
        count = cursor.take_uint(width) if width else 1 << (first_byte - 0xD4)
        return _MsgpackHeader(kind, count, cursor.take_uint(1) if kind == "extension" else 0)
    raise ValueError(
        f"byte {cursor.offset - 1:,} is {first_byte:#x}, which msgpack does not define"
    )


_SIZED_TYPES: dict[int, tuple[Literal["map", "array", "text", "bytes", "extension"], int]] = {
    **{0xC4 + i: ("bytes", 1 << i) for i in range(3)},
    **{0xC7 + i: ("extension", 1 << i) for i in range(3)},
    **{0xD4 + i: ("extension", 0) for i in range(5)},  # extensions of 1, 2, 4, 8 or 16 bytes
    **{0xD9 + i: ("text", 1 << i) for i in range(3)},
    **{0xDC + i: ("array", 2 << i) for i in range(2)},
    **{0xDE + i: ("map", 2 << i) for i in range(2)},
}
_NUMBER_FORMATS = {
    0xCA: ">f",
    0xCB: ">d",
    **{0xCC + i: form for i, form in enumerate((">B", ">H", ">I", ">Q"))},
} | {0xD0 + i: form for i, form in enumerate((">b", ">h", ">i", ">q"))}
_MAP_FIRST_BYTES = {bytes([first]) for first in (*range(0x81, 0x90), 0xDE, 0xDF)}


# Trees


@dataclass(slots=True)
class _ParseState:
    """State of parsing a tree: the leaves read so far and counters for the limits."""

    cursor: _Cursor
    file_number: int
    arrays: list[Array] = field(default_factory=list)
    non_arrays: list[MsgpackNonArray] = field(default_factory=list)
    entries: int = 0
    paths_nbytes: int = 0

    def array_at(self, path: KeyPath, dtype: str, shape: tuple[int, ...], offset: int) -> Array:
        array = whole_array(".".join(path), dtype, shape, (self.file_number, offset))
        return replace(array, path=path)


def _parse_stream(state: _ParseState) -> None:
    """Parse an EasyLM stream. Raise ValueError for a path that occurs twice."""
    seen: set[KeyPath] = set()
    while state.cursor.offset < state.cursor.size:
        offset = state.cursor.offset
        record = _read_token(state.cursor)
        is_pair = (record.kind, record.count) == ("array", 2)
        key = _read_token(state.cursor) if is_pair else record
        if not is_pair or key.kind != "array" or key.count > MAX_DEPTH:
            raise ValueError(f"byte {offset:,} does not start a record [path, bytes]")
        path = tuple(_read_key(state.cursor, allow_int=True) for _ in range(key.count))
        if path in seen:
            raise ValueError(f"it has {_quote_path(path)} twice")
        seen.add(path)
        value = _read_token(state.cursor)
        if value.kind != "bytes":
            raise ValueError(f"the record {_quote_path(path)} has no bytes")
        end = state.cursor.offset + value.count
        if end > state.cursor.size:
            why = f"the record {_quote_path(path)} ends at byte {end:,}, the file at {state.cursor.size:,}"
            raise CutShortError(f"it is cut short: {why}")
        _parse_value(state, path)
        value_end = state.cursor.offset
        # The record states its length twice: as bytes, and by the value in these bytes. A reader
        # of EasyLM uses the first one, so both must agree.
        if value_end != end:
            raise ValueError(
                f"the record {_quote_path(path)} ends at byte {end:,}, its value at {value_end:,}"
            )


def _read_key(cursor: _Cursor, allow_int: bool = False) -> str:
    token = _read_token(cursor)
    if allow_int and type(token.value) is int:
        return str(token.value)
    if token.kind != "text":
        raise ValueError(f"a key before byte {cursor.offset:,} is not text")
    if token.count > MAX_KEY_NBYTES:
        raise ValueError(
            f"a name at byte {cursor.offset:,} has {token.count:,} bytes, the limit is {MAX_KEY_NBYTES:,}"
        )
    try:
        return cursor.take(token.count).decode()
    except UnicodeError as error:
        raise ValueError(f"a name before byte {cursor.offset:,} is not UTF-8") from error


def _parse_value(state: _ParseState, path: KeyPath) -> None:
    """Parse the next value with everything nested in it."""
    state.entries += 1
    state.paths_nbytes += sum(map(len, path)) + len(path)
    if state.entries > MAX_ENTRIES or state.paths_nbytes > MAX_PATHS_NBYTES:
        raise ValueError(
            f"it has more than {MAX_ENTRIES:,} entries or {MAX_PATHS_NBYTES >> 20} MiB of names"
        )
    if len(path) > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep, at {_quote_path(path)}")
    token = _read_token(state.cursor)
    if token.kind == "map":
        keys: set[str] = set()
        first_array = len(state.arrays)
        first_non_array = len(state.non_arrays)
        for _ in range(token.count):
            key = _read_key(state.cursor)
            if key in keys:
                raise ValueError(f"it has {_quote_path((*path, key))} twice")
            keys.add(key)
            _parse_value(state, (*path, key))
        # msgpack limits an extension to 2^32 - 1 bytes, so flax.serialization stores an array above
        # 1 GiB as {"__msgpack_chunked_array__": True, "shape": {"0": ...}, "chunks": {"0": ...}}.
        if CHUNKED_MARKER in keys:
            joined = _join_pieces(
                state, path, state.arrays[first_array:], state.non_arrays[first_non_array:]
            )
            del state.arrays[first_array:], state.non_arrays[first_non_array:]
            state.arrays.append(joined)
    elif token.kind == "array":
        for index in range(token.count):
            _parse_value(state, (*path, str(index)))
    elif token.kind == "extension" and token.ext_code in (EXT_ARRAY, EXT_SCALAR):
        state.arrays.append(_read_array(state, path, token.count))
    elif token.kind == "value":
        state.non_arrays.append(MsgpackNonArray(path, token.value))
    else:
        state.cursor.skip(token.count)
        state.non_arrays.append(
            MsgpackNonArray(path, f"{count_text(token.count, 'byte')} that are not an array")
        )


def _join_pieces(
    state: _ParseState, path: KeyPath, pieces: list[Array], non_arrays: list[MsgpackNonArray]
) -> Array:
    """Join the pieces of a chunked array: 1-d arrays under `chunks`, extents under `shape`."""

    def number_of(leaf_path: Sequence[str | int], key: str) -> str | int:
        """Return the key of a leaf in `chunks` or `shape`, or an empty text for another leaf."""
        is_child = len(leaf_path) == len(path) + 2 and leaf_path[-2] == key
        return leaf_path[-1] if is_child else ""

    chunks = {number_of(piece.path, "chunks"): piece for piece in pieces}
    extents = {number_of(leaf.path, "shape"): leaf.value for leaf in non_arrays}
    # The entry of CHUNKED_MARKER is the only other one.
    extents.pop("", None)
    flat_pieces = [chunks[key] for key in map(str, range(len(chunks))) if key in chunks]
    if (
        not flat_pieces
        or len(flat_pieces) != len(pieces)
        or len(extents) != len(non_arrays) - 1
        or {(piece.dtype, len(piece.shape)) for piece in flat_pieces} != {(flat_pieces[0].dtype, 1)}
    ):
        raise ValueError(f"the pieces of {_quote_path(path)} do not form an array")
    shape = [extents.get(str(i)) for i in range(len(extents))]
    counts = tuple(extent for extent in shape[:MAX_DIMS] if type(extent) is int and extent >= 0)
    num_elements = sum(piece.shape[0] for piece in flat_pieces)
    if len(counts) != len(shape) or math.prod(counts) != num_elements:
        raise ValueError(
            f"the pieces of {_quote_path(path)} do not form an array of shape {str(shape)[:100]}"
        )
    dtype = flat_pieces[0].dtype
    runs = [(piece.offset, piece.nbytes) for piece in flat_pieces]
    if len(runs) == 1:
        return state.array_at(path, dtype, counts, runs[0][0])
    parts = run_parts(counts, itemsize(dtype), runs, file=state.file_number)
    return replace(parted_array(".".join(path), dtype, counts, parts), path=path)


def _read_array(state: _ParseState, path: KeyPath, nbytes: int) -> Array:
    """Read an array [shape, dtype, bytes] that takes `nbytes` bytes."""
    cursor = state.cursor
    end = cursor.offset + nbytes
    if (header := _read_token(cursor)).kind != "array" or header.count != 3:
        raise ValueError(f"{_quote_path(path)} is not an array of Flax")
    dims = _read_token(cursor)
    is_valid = dims.kind == "array" and dims.count <= MAX_DIMS
    extents: list[int] = []
    while is_valid and len(extents) < dims.count:
        extent = _read_token(cursor).value
        is_valid = type(extent) is int and 0 <= extent < 1 << 63
        extents += [extent] if type(extent) is int else []
    if not is_valid:
        raise ValueError(f"{_quote_path(path)} has no valid shape")
    shape = tuple(extents)
    dtype = _read_key(cursor)
    if ITEM_BITS.get(dtype, 0) % 8 or dtype not in ITEM_BITS:
        raise ValueError(
            f"{_quote_path(path)} is {quote_name(dtype)}, a dtype that is not supported"
        )
    data = _read_token(cursor)
    payload_nbytes = math.prod(shape) * ITEM_BITS[dtype] // 8
    if data.kind != "bytes" or cursor.offset + data.count != end or data.count != payload_nbytes:
        array = f"{_quote_path(path)}, {dtype} {str(list(shape))[:100]},"
        raise ValueError(
            f"{array} takes {count_text(payload_nbytes, 'byte')}, its payload has another size"
        )
    return state.array_at(path, dtype, shape, cursor.skip(payload_nbytes))


def _quote_path(path: KeyPath) -> str:
    return quote_name(".".join(path)) if path else "its root"
