"""OCDBT, TensorStore's key-value database in files: its index written byte by byte (`ocdbt_read` reads it).

Values lie in data files that somebody else fills; what is written here is the sorted list of keys and where their
values are: B-tree nodes in one file `d/<hex>`, and `manifest.ocdbt`, which names the root.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from prepcli.engine.no_follow import open_no_follow, write_no_follow

OCDBT_MANIFEST = "manifest.ocdbt"
NODE_NBYTES = 4 << 20  # decoded size of a node, some 37,000 chunks: it bounds the memory of writing
NODE_MAGIC, MANIFEST_MAGIC = 0x0CDB20DE, 0x0CDB3A2A
_ENTRY_BYTES = 32  # what TensorStore counts for a decoded entry beside key, path and inline value
_INLINE_BYTES, _MAX_NODE_BYTES, _VERSION_ARITY_LOG2 = 1024, 100_000_000, 4  # as Orbax configures its databases


class ValueLocation(NamedTuple):
    """`nbytes` bytes from `offset` of the file `path`, which is relative to the database's folder."""

    path: str
    offset: int
    nbytes: int


OcdbtEntry = tuple[bytes, "bytes | ValueLocation"]  # a key and its value: inline, or where it lies


@dataclass(frozen=True, slots=True)
class _Node:
    """An encoded B-tree node and what its parent says of it (both sums include everything below it)."""

    first_key: bytes
    data: bytes
    num_keys: int
    value_bytes: int


def write_ocdbt_index(folder: Path, entries: Iterable[OcdbtEntry], now_ns: int, node_nbytes: int = NODE_NBYTES) -> None:
    """Write the index of `entries`, which come in ascending order of their keys, at least one, no key twice.

    Data files need not exist yet. Equal arguments give equal bytes, and only the manifest depends on `now_ns`; the
    entries of one node (`node_bytes` decoded) are in memory at a time, and all encoded nodes.
    """
    leaves = [_leaf(batch) for batch in _batches(entries, node_nbytes)]
    file_id = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        file_id.update(leaf.data)
    path = f"d/{file_id.hexdigest()}"
    nodes = leaves if len(leaves) == 1 else [*leaves, _interior(leaves, path)]
    (folder / "d").mkdir(exist_ok=True)
    with open(open_no_follow(folder / path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.writelines(node.data for node in nodes)
    write_no_follow(folder / OCDBT_MANIFEST, _manifest(nodes, path, file_id.digest(), now_ns))


def _batches(entries: Iterable[OcdbtEntry], node_bytes: int) -> Iterator[list[OcdbtEntry]]:
    batch: list[OcdbtEntry] = []
    size = 0
    for key, value in entries:
        entry_bytes = _ENTRY_BYTES + len(key) + len(value if isinstance(value, bytes) else value.path)
        if batch and size + entry_bytes > node_bytes:
            yield batch
            batch, size = [], 0
        batch.append((key, value))
        size += entry_bytes
    yield batch


def _leaf(entries: Sequence[OcdbtEntry]) -> _Node:
    values = [value for _, value in entries]
    places = [value for value in values if isinstance(value, ValueLocation)]
    inline = [value for value in values if isinstance(value, bytes)]
    files = sorted({place.path for place in places})
    number = {path: n for n, path in enumerate(files)}
    body = [
        b"\0",  # height
        _file_table(files),
        _varints([len(entries)]),
        *_keys([key for key, _ in entries]),
        _varints([value.nbytes if isinstance(value, ValueLocation) else len(value) for value in values]),
        bytes(isinstance(value, ValueLocation) for value in values),
        _varints([number[place.path] for place in places]),
        _varints([place.offset for place in places]),
        *inline,
    ]
    data = _framed(NODE_MAGIC, b"".join(body))
    return _Node(entries[0][0], data, len(entries), sum(place.nbytes for place in places))


def _interior(leaves: Sequence[_Node], path: str) -> _Node:
    """The node above leaves that lie one after the other in the file `path`; their keys are stored whole."""
    sizes = [len(leaf.data) for leaf in leaves]
    shared, suffix_lengths, *suffixes = _keys([leaf.first_key for leaf in leaves])
    body = [
        b"\1",  # height
        _file_table([path]),
        _varints([len(leaves)]),
        shared,
        suffix_lengths,
        bytes(len(leaves)),  # bytes of the keys that the child leaves out: none
        *suffixes,
        *_references([0, *itertools.accumulate(sizes[:-1])], leaves, sizes),
    ]
    data = _framed(NODE_MAGIC, b"".join(body))
    sums = sum(leaf.num_keys for leaf in leaves), sum(leaf.value_bytes for leaf in leaves)
    return _Node(leaves[0].first_key, data, *sums)


def _references(offsets: Sequence[int], nodes: Sequence[_Node], tree_bytes: Sequence[int]) -> list[bytes]:
    """References to nodes of file 0, column by column."""
    return [
        bytes(len(nodes)),
        _varints(offsets),
        _varints([len(node.data) for node in nodes]),
        _varints([node.num_keys for node in nodes]),
        _varints(tree_bytes),
        _varints([node.value_bytes for node in nodes]),
    ]


def _manifest(nodes: Sequence[_Node], path: str, uuid: bytes, now_ns: int) -> bytes:
    """One version, whose root is the last of the nodes that fill the file `path`."""
    tree_bytes = sum(len(node.data) for node in nodes)
    root = nodes[-1]
    body = [
        uuid,
        b"\0",  # one manifest file, not one a version
        _varints([_INLINE_BYTES, _MAX_NODE_BYTES]),
        bytes([_VERSION_ARITY_LOG2, 0]),  # 0: nodes are not compressed
        _file_table([path]),
        _varints([1, 1]),  # number of versions; generation number
        bytes([len(nodes) > 1]),  # height of the root
        *_references([tree_bytes - len(root.data)], [root], [tree_bytes]),
        struct.pack("<Q", now_ns),
        b"\0",  # number of older version tree nodes
    ]
    return _framed(MANIFEST_MAGIC, b"".join(body))


def _framed(magic: int, body: bytes) -> bytes:
    """Magic, total length, format version 0, compression 0 (none), body, CRC-32C of it all."""
    framed = struct.pack(">I", magic) + struct.pack("<Q", len(body) + 18) + b"\0\0" + body
    return framed + struct.pack("<I", google_crc32c.value(framed))


def _file_table(paths: Sequence[str]) -> bytes:
    if not paths:
        return _varints([0])
    shared, suffix_lengths, *suffixes = _keys([path.encode() for path in paths])
    no_base_paths = bytes(len(paths))
    return b"".join([_varints([len(paths)]), shared, suffix_lengths, no_base_paths, *suffixes])


def _keys(keys: Sequence[bytes]) -> list[bytes]:
    """Columns of a sorted list: bytes shared with the key before (not of the first), lengths of the rest, the rests."""
    shared = [_shared(a, b) for a, b in itertools.pairwise(keys)]
    rests = [key[n:] for key, n in zip(keys, [0, *shared])]
    return [_varints(shared), _varints([len(rest) for rest in rests]), *rests]


def _shared(a: bytes, b: bytes) -> int:
    """Length of the common prefix, found in the leading zeros of one XOR."""
    n = min(len(a), len(b))
    differing = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return n - (differing.bit_length() + 7) // 8


def _varints(values: Sequence[int]) -> bytes:
    """Base-128 numbers, lowest digit first; the top bit of a byte says that another follows."""
    if not values:
        return b""
    width = max(1, -(-max(values).bit_length() // 7))
    digits = np.array(values, np.uint64)[:, None] >> np.arange(0, 7 * width, 7, dtype=np.uint64)
    used = digits != 0
    used[:, 0] = True
    more = np.where(digits > 127, 128, 0)
    return ((digits & np.uint64(127)).astype(np.uint8) | more.astype(np.uint8))[used].tobytes()
