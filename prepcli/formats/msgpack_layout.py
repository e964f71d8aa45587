"""Flax msgpack and EasyLM streams, laid out: what is written between payloads, which the engine then fills. Pure.

The bytes are those that `flax.serialization` writes for a tree as JAX orders it: the keys of every dict sorted as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prepcli.errors import PrepError
from prepcli.formats.msgpack import CHUNKED_MARKER, EXT_ARRAY, KeyPath
from prepcli.planning.tensors import ITEM_BITS, itemsize

MAX_PIECE_NBYTES = 1 << 30  # of an array: Flax stores a larger one in pieces
MAX_RECORD_NBYTES = (1 << 32) - 1  # of a record of a stream: its length has 32 bits


@dataclass(frozen=True, slots=True)
class MsgpackLeaf:
    """An array to be written."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class MsgpackLayout:
    """A file to be written: `fixed` bytes at offsets, and the runs (offset, nbytes) of each leaf, in the order of the
    file."""

    size: int
    fixed_bytes: tuple[tuple[int, bytes], ...]
    runs: Mapping[KeyPath, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class _Payload:
    """Bytes of a leaf that others write."""

    path: KeyPath
    nbytes: int


_Segment = bytes | _Payload


def lay_out_flax(leaves: Iterable[MsgpackLeaf]) -> MsgpackLayout:
    """A Flax file of a tree with these leaves. PrepError for a dtype that Flax does not store so."""
    return _laid_out(_tree(_nested(leaves)))


def lay_out_stream(leaves: Iterable[MsgpackLeaf]) -> MsgpackLayout:
    """An EasyLM stream of these leaves. PrepError also for a leaf that is too large for a record."""
    return _laid_out(segment for leaf in _in_order(_nested(leaves)) for segment in _record(leaf))


def sort_paths(paths: Iterable[KeyPath]) -> list[KeyPath]:
    """Paths as the leaves of a tree follow each other."""
    return [leaf.path for leaf in _in_order(_nested(MsgpackLeaf(path, "bool", ()) for path in paths))]


def _laid_out(segments: Iterable[_Segment]) -> MsgpackLayout:
    at, fixed = 0, []
    runs: dict[KeyPath, list[tuple[int, int]]] = {}
    pending = bytearray()
    for segment in segments:
        if isinstance(segment, bytes):
            pending += segment
        elif segment.nbytes:
            fixed.append((at, bytes(pending)))
            at += len(pending)
            pending.clear()
            runs.setdefault(segment.path, []).append((at, segment.nbytes))
            at += segment.nbytes
    if pending:
        fixed.append((at, bytes(pending)))
    return MsgpackLayout(at + len(pending), tuple(fixed), {path: tuple(found) for path, found in runs.items()})


_Tree = dict[str, "MsgpackLeaf | _Tree"]


def _nested(leaves: Iterable[MsgpackLeaf]) -> _Tree:
    root: _Tree = {}
    for leaf in leaves:
        at = root
        for key in leaf.path[:-1]:
            below = at.setdefault(key, {})
            if isinstance(below, MsgpackLeaf):
                raise ValueError(f"{below.path} is a leaf and has leaves below it")
            at = below
        if leaf.path[-1] in at:
            raise ValueError(f"{leaf.path} is there twice")
        at[leaf.path[-1]] = leaf
    return root


def _in_order(tree: _Tree) -> Iterator[MsgpackLeaf]:
    for _, value in sorted(tree.items()):
        if isinstance(value, MsgpackLeaf):
            yield value
        else:
            yield from _in_order(value)


def _tree(tree: _Tree) -> Iterator[_Segment]:
    yield _counted(0x80, 0xDE, len(tree))
    for key, value in sorted(tree.items()):
        yield _text(key)
        yield from _leaf(value) if isinstance(value, MsgpackLeaf) else _tree(value)


def _record(leaf: MsgpackLeaf) -> Iterator[_Segment]:
    value = list(_leaf(leaf))
    nbytes = sum(segment.nbytes if isinstance(segment, _Payload) else len(segment) for segment in value)
    if nbytes > MAX_RECORD_NBYTES:
        why = f"it takes {nbytes:,} bytes, a record holds {MAX_RECORD_NBYTES:,}"
        raise PrepError(f"{'.'.join(leaf.path)} is too large for an EasyLM stream", why, "`--layout hf-flax`")
    yield _counted(0x90, 0xDC, 2) + _counted(0x90, 0xDC, len(leaf.path)) + b"".join(map(_text, leaf.path))
    yield _sized(0xC4, nbytes)
    yield from value


def _leaf(leaf: MsgpackLeaf) -> Iterator[_Segment]:
    if ITEM_BITS[leaf.dtype] % 8:
        raise PrepError(f"{'.'.join(leaf.path)} is {leaf.dtype}", "its elements are smaller than a byte")
    if leaf.nbytes <= MAX_PIECE_NBYTES:
        yield from _array(leaf, leaf.shape)
        return
    yield (
        _counted(0x80, 0xDE, 3)
        + _text(CHUNKED_MARKER)
        + b"\xc3"
        + _text("shape")
        + _counted(0x80, 0xDE, len(leaf.shape))
    )
    yield b"".join(_text(str(dim)) + _count(extent) for dim, extent in enumerate(leaf.shape))
    step, values = max(1, MAX_PIECE_NBYTES // itemsize(leaf.dtype)), math.prod(leaf.shape)
    yield _text("chunks") + _counted(0x80, 0xDE, -(-values // step))
    for number, low in enumerate(range(0, values, step)):
        yield _text(str(number))
        yield from _array(leaf, (min(step, values - low),))


def _array(leaf: MsgpackLeaf, shape: tuple[int, ...]) -> Iterator[_Segment]:
    nbytes = math.prod(shape) * itemsize(leaf.dtype)
    dims = _counted(0x90, 0xDC, len(shape)) + b"".join(map(_count, shape))
    head = _counted(0x90, 0xDC, 3) + dims + _text(leaf.dtype) + _sized(0xC4, nbytes)
    total = len(head) + nbytes
    size = bytes([0xD3 + total.bit_length()]) if total in (1, 2, 4, 8, 16) else _sized(0xC7, total)
    yield size + bytes([EXT_ARRAY]) + head
    yield _Payload(leaf.path, nbytes)


def _counted(short: int, long: int, count: int) -> bytes:
    """The head of a map or an array."""
    if count < 16:
        return bytes([short | count])
    return bytes([long]) + count.to_bytes(2, "big") if count < 1 << 16 else bytes([long + 1]) + count.to_bytes(4, "big")


def _sized(code: int, nbytes: int) -> bytes:
    """The head of bytes or of an extension."""
    width = 0 if nbytes < 1 << 8 else 1 if nbytes < 1 << 16 else 2
    return bytes([code + width]) + nbytes.to_bytes(1 << width, "big")


def _text(text: str) -> bytes:
    data = text.encode()
    return bytes([0xA0 | len(data)]) + data if len(data) < 32 else _sized(0xD9, len(data)) + data


def _count(number: int) -> bytes:
    if number < 0x80:
        return bytes([number])
    width = next(width for width in range(4) if number < 1 << (8 << width))
    return bytes([0xCC + width]) + number.to_bytes(1 << width, "big")
