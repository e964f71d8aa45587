"""Lay out Flax msgpack files and EasyLM streams: compute the headers and the offsets of the payloads.

The functions are pure. The engine writes the payloads. The bytes equal the ones that `flax.serialization` writes for
a tree in the order of JAX: the keys of every dict are sorted as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prepcli.core.errors import Option, PrepError, text
from prepcli.formats.msgpack import CHUNKED_MARKER, EXT_ARRAY, KeyPath
from prepcli.planning.tensors import ITEM_BITS, itemsize

MAX_PIECE_NBYTES = 1 << 30  # Flax splits larger arrays into pieces
MAX_RECORD_NBYTES = (1 << 32) - 1  # the length of a stream's record has 32 bits


@dataclass(frozen=True, slots=True)
class MsgpackLeaf:
    """An array to write."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the payload in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class MsgpackLayout:
    """Layout of a file to write: fixed bytes at offsets, and the runs (offset, nbytes) of each leaf, in file order."""

    size: int
    fixed_bytes: tuple[tuple[int, bytes], ...]
    runs: Mapping[KeyPath, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class _Payload:
    """Part of a leaf's payload, written by the engine."""

    path: KeyPath
    nbytes: int


_Segment = bytes | _Payload


def lay_out_flax(leaves: Iterable[MsgpackLeaf]) -> MsgpackLayout:
    """Lay out a Flax file of a tree with these leaves. Raise PrepError for a sub-byte dtype."""
    return _place_segments(_encode_tree(_build_tree(leaves)))


def lay_out_stream(leaves: Iterable[MsgpackLeaf]) -> MsgpackLayout:
    """Lay out an EasyLM stream of these leaves. Raise PrepError for a sub-byte dtype or a leaf above 4 GiB."""
    segments: list[_Segment] = []
    for leaf in _iter_sorted_leaves(_build_tree(leaves)):
        value = list(_encode_leaf(leaf))
        nbytes = 0
        for segment in value:
            if isinstance(segment, _Payload):
                nbytes += segment.nbytes
            else:
                nbytes += len(segment)
        if nbytes > MAX_RECORD_NBYTES:
            why = f"it takes {nbytes:,} bytes, a record holds {MAX_RECORD_NBYTES:,}"
            raise PrepError(
                f"{'.'.join(leaf.path)} is too large for an EasyLM stream",
                why,
                text("pass {}", Option("layout", "hf-flax")),
            )
        segments.append(
            _container_header(0x90, 0xDC, 2)
            + _container_header(0x90, 0xDC, len(leaf.path))
            + b"".join(map(_encode_text, leaf.path))
        )
        segments.append(_bytes_header(0xC4, nbytes))
        segments += value
    return _place_segments(segments)


def sort_paths(paths: Iterable[KeyPath]) -> list[KeyPath]:
    """Return the paths in the order in which JAX flattens a tree."""
    tree = _build_tree(MsgpackLeaf(path, "bool", ()) for path in paths)
    return [leaf.path for leaf in _iter_sorted_leaves(tree)]


def _place_segments(segments: Iterable[_Segment]) -> MsgpackLayout:
    offset = 0
    fixed = []
    runs: dict[KeyPath, list[tuple[int, int]]] = {}
    pending = bytearray()
    for segment in segments:
        if isinstance(segment, bytes):
            pending += segment
        elif segment.nbytes:
            fixed.append((offset, bytes(pending)))
            offset += len(pending)
            pending.clear()
            runs.setdefault(segment.path, []).append((offset, segment.nbytes))
            offset += segment.nbytes
    if pending:
        fixed.append((offset, bytes(pending)))
    return MsgpackLayout(
        offset + len(pending), tuple(fixed), {path: tuple(ranges) for path, ranges in runs.items()}
    )


_Tree = dict[str, "MsgpackLeaf | _Tree"]


def _build_tree(leaves: Iterable[MsgpackLeaf]) -> _Tree:
    root: _Tree = {}
    for leaf in leaves:
        node = root
        for key in leaf.path[:-1]:
            child = node.setdefault(key, {})
            if isinstance(child, MsgpackLeaf):
                raise ValueError(f"{child.path} is a leaf and has leaves under it")
            node = child
        if leaf.path[-1] in node:
            raise ValueError(f"{leaf.path} occurs twice")
        node[leaf.path[-1]] = leaf
    return root


def _iter_sorted_leaves(tree: _Tree) -> Iterator[MsgpackLeaf]:
    for _, value in sorted(tree.items()):
        if isinstance(value, MsgpackLeaf):
            yield value
        else:
            yield from _iter_sorted_leaves(value)


def _encode_tree(tree: _Tree) -> Iterator[_Segment]:
    yield _container_header(0x80, 0xDE, len(tree))
    for key, value in sorted(tree.items()):
        yield _encode_text(key)
        yield from _encode_leaf(value) if isinstance(value, MsgpackLeaf) else _encode_tree(value)


def _encode_leaf(leaf: MsgpackLeaf) -> Iterator[_Segment]:
    """Yield the segments of a leaf's array or arrays."""
    # An array above 1 GiB becomes the map {CHUNKED_MARKER: true, "shape": {"0": 70000, "1": 8192},
    # "chunks": {"0": ..., "1": ...}} of flat arrays, as `flax.serialization._chunk` makes it.
    if ITEM_BITS[leaf.dtype] % 8:
        raise PrepError(
            f"{'.'.join(leaf.path)} is {leaf.dtype}",
            "dtypes smaller than a byte are not supported",
            text("{}", Option("format", "safetensors")),
        )
    if leaf.nbytes <= MAX_PIECE_NBYTES:
        yield from _encode_array(leaf, leaf.shape)
        return
    yield (
        _container_header(0x80, 0xDE, 3)
        + _encode_text(CHUNKED_MARKER)
        + b"\xc3"
        + _encode_text("shape")
        + _container_header(0x80, 0xDE, len(leaf.shape))
    )
    yield b"".join(
        _encode_text(str(dim)) + _encode_uint(extent) for dim, extent in enumerate(leaf.shape)
    )
    piece_elements = max(1, MAX_PIECE_NBYTES // itemsize(leaf.dtype))
    num_elements = math.prod(leaf.shape)
    yield _encode_text("chunks") + _container_header(0x80, 0xDE, -(-num_elements // piece_elements))
    for number, start in enumerate(range(0, num_elements, piece_elements)):
        yield _encode_text(str(number))
        yield from _encode_array(leaf, (min(piece_elements, num_elements - start),))


def _encode_array(leaf: MsgpackLeaf, shape: tuple[int, ...]) -> Iterator[_Segment]:
    # An array is an extension of type EXT_ARRAY. Its content is the msgpack list [shape, dtype, bytes].
    nbytes = math.prod(shape) * itemsize(leaf.dtype)
    dims = _container_header(0x90, 0xDC, len(shape)) + b"".join(map(_encode_uint, shape))
    header = (
        _container_header(0x90, 0xDC, 3)
        + dims
        + _encode_text(leaf.dtype)
        + _bytes_header(0xC4, nbytes)
    )
    total_nbytes = len(header) + nbytes
    # msgpack has headers of one byte for these sizes: fixext 1 to 16 are 0xD4 to 0xD8.
    if total_nbytes in (1, 2, 4, 8, 16):
        length_header = bytes([0xD3 + total_nbytes.bit_length()])
    else:
        length_header = _bytes_header(0xC7, total_nbytes)
    yield length_header + bytes([EXT_ARRAY]) + header
    yield _Payload(leaf.path, nbytes)


def _container_header(short: int, long: int, count: int) -> bytes:
    """Return the header of a map or an array with `count` items."""
    # Fewer than 16 items fit the code itself: fixmap 0x80 to 0x8F, fixarray 0x90 to 0x9F.
    if count < 16:
        return bytes([short | count])
    if count < 1 << 16:
        return bytes([long]) + count.to_bytes(2, "big")
    return bytes([long + 1]) + count.to_bytes(4, "big")


def _bytes_header(code: int, nbytes: int) -> bytes:
    """Return the header of bytes or of an extension with `nbytes` bytes."""
    # Codes of 8, 16 and 32-bit lengths follow one another, e.g. bin 8, 16, 32 are 0xC4 to 0xC6.
    width = 2
    if nbytes < 1 << 8:
        width = 0
    elif nbytes < 1 << 16:
        width = 1
    return bytes([code + width]) + nbytes.to_bytes(1 << width, "big")


def _encode_text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 32:
        return bytes([0xA0 | len(data)]) + data
    return _bytes_header(0xD9, len(data)) + data


def _encode_uint(number: int) -> bytes:
    if number < 0x80:
        return bytes([number])
    # uint 8, 16, 32 and 64 are 0xCC to 0xCF. A number takes the shortest one, as in msgpack-python.
    width = 0
    while number >= 1 << (8 << width):
        width += 1
    return bytes([0xCC + width]) + number.to_bytes(1 << width, "big")
