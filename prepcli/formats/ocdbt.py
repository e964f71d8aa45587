"""Write the index of an OCDBT database, TensorStore's key-value format (`ocdbt_read` reads it).

The caller writes the data files with the values. This module writes the sorted keys and the location of each value:
B-tree nodes in one file `d/<hex>`, and `manifest.ocdbt`, which refers to the root node. Format specification:
https://google.github.io/tensorstore/kvstore/ocdbt/index.html.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from prepcli.engine.no_follow import write_no_follow

OCDBT_MANIFEST = "manifest.ocdbt"
# Decoded size of a node, about 37,000 chunks: bounds the memory of writing.
NODE_NBYTES = 4 << 20
NODE_MAGIC = 0x0CDB20DE
MANIFEST_MAGIC = 0x0CDB3A2A
# TensorStore's estimate of a decoded entry without key, path and inline value.
_ENTRY_OVERHEAD_NBYTES = 32
# Configuration as in databases of Orbax.
_MAX_INLINE_NBYTES = 1024
_MAX_NODE_NBYTES = 100_000_000
_VERSION_ARITY_LOG2 = 4
# Value kinds of a leaf node.
_INLINE = 0
_IN_DATA_FILE = 1


class ValueLocation(NamedTuple):
    """Byte range of a value or node in a data file. `path` is relative to the database's folder."""

    path: str
    offset: int
    nbytes: int


# A database of two values of a tree, as Orbax lays it out:
#   manifest.ocdbt   configuration and versions, with a reference to the root node of the newest version
#   d/<hex>          B-tree nodes, and values that are not inline
# The order in which they are made durable: data files, node file, manifest. A kill before the
# manifest leaves unreferenced files.
OcdbtEntry = tuple[bytes, "bytes | ValueLocation"]  # key and value, inline or by its location


@dataclass(frozen=True, slots=True)
class _EncodedNode:
    """An encoded B-tree node. `num_keys` and `value_nbytes` count the whole subtree."""

    first_key: bytes
    data: bytes
    num_keys: int
    value_nbytes: int


def write_ocdbt_index(
    folder: Path, entries: Iterable[OcdbtEntry], now_ns: int, node_nbytes: int = NODE_NBYTES
) -> None:
    """Write the index of a database into its folder. See `encode_ocdbt_index`."""
    (folder / "d").mkdir(exist_ok=True)
    for path, content in encode_ocdbt_index(entries, now_ns, node_nbytes).items():
        write_no_follow(folder / path, content)


def encode_ocdbt_index(
    entries: Iterable[OcdbtEntry], now_ns: int, node_nbytes: int = NODE_NBYTES
) -> dict[str, bytes]:
    """Return the files of a database's index: the nodes, then the manifest.

    The data files need not exist yet. Equal arguments give equal bytes. Only the manifest depends on `now_ns`. Memory
    holds the entries of one node at a time and all encoded nodes.

    Args:
        entries: At least one entry, in strictly ascending order of keys.
        now_ns: Commit time in nanoseconds since the epoch.
        node_nbytes: Decoded size at which a leaf node is split.

    Returns:
        Content of each file, by its path in the folder of the database.
    """
    # The name of the node file is a digest of its leaves, so that equal entries give an equal file.
    # TensorStore draws a random number for it, and readers accept any 16 bytes.
    leaves = [_encode_leaf(batch) for batch in _split_into_nodes(entries, node_nbytes)]
    file_id = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        file_id.update(leaf.data)
    path = f"d/{file_id.hexdigest()}"
    # One interior node refers to all leaves: 10^6 chunks are about 30 leaves of NODE_NBYTES. The root is
    # the last node of the file.
    if len(leaves) == 1:
        nodes = leaves
    else:
        nodes = [*leaves, _encode_interior(leaves, path)]
    return {
        path: b"".join(node.data for node in nodes),
        OCDBT_MANIFEST: _encode_manifest(nodes, path, file_id.digest(), now_ns),
    }


def _split_into_nodes(
    entries: Iterable[OcdbtEntry], node_nbytes: int
) -> Iterator[list[OcdbtEntry]]:
    batch: list[OcdbtEntry] = []
    size = 0
    for key, value in entries:
        entry_nbytes = _ENTRY_OVERHEAD_NBYTES + len(key)
        if isinstance(value, bytes):
            entry_nbytes += len(value)
        else:
            entry_nbytes += len(value.path)
        if batch and size + entry_nbytes > node_nbytes:
            yield batch
            batch = []
            size = 0
        batch.append((key, value))
        size += entry_nbytes
    yield batch


def _encode_leaf(entries: Sequence[OcdbtEntry]) -> _EncodedNode:
    """Encode a leaf node of the tree."""
    # The format stores a node by columns: all keys, then all sizes, then all kinds. Only values in data
    # files have an entry in the columns of file numbers and offsets.
    keys: list[bytes] = []
    sizes: list[int] = []
    kinds = bytearray()
    locations: list[ValueLocation] = []
    inline: list[bytes] = []
    for key, value in entries:
        keys.append(key)
        if isinstance(value, ValueLocation):
            kinds.append(_IN_DATA_FILE)
            sizes.append(value.nbytes)
            locations.append(value)
        else:
            kinds.append(_INLINE)
            sizes.append(len(value))
            inline.append(value)
    files = sorted({location.path for location in locations})
    file_numbers = {path: n for n, path in enumerate(files)}
    body = [
        b"\0",  # height
        _encode_file_table(files),
        _encode_varints([len(entries)]),
        *_encode_sorted_keys(keys),
        _encode_varints(sizes),
        kinds,
        _encode_varints([file_numbers[location.path] for location in locations]),
        _encode_varints([location.offset for location in locations]),
        *inline,
    ]
    data = _encode_frame(NODE_MAGIC, b"".join(body))
    value_nbytes = sum(location.nbytes for location in locations)
    return _EncodedNode(keys[0], data, len(entries), value_nbytes)


def _encode_interior(leaves: Sequence[_EncodedNode], path: str) -> _EncodedNode:
    """Encode the parent of leaves stored consecutively in the file `path`. Keys are stored in full."""
    sizes = [len(leaf.data) for leaf in leaves]
    prefix_lengths, suffix_lengths, *suffixes = _encode_sorted_keys(
        [leaf.first_key for leaf in leaves]
    )
    body = [
        b"\1",  # height
        _encode_file_table([path]),
        _encode_varints([len(leaves)]),
        prefix_lengths,
        suffix_lengths,
        # Length of the common key prefix of each child's subtree: 0.
        bytes(len(leaves)),
        *suffixes,
        *_encode_references([0, *itertools.accumulate(sizes[:-1])], leaves, sizes),
    ]
    data = _encode_frame(NODE_MAGIC, b"".join(body))
    statistics = sum(leaf.num_keys for leaf in leaves), sum(leaf.value_nbytes for leaf in leaves)
    return _EncodedNode(leaves[0].first_key, data, *statistics)


def _encode_references(
    offsets: Sequence[int], nodes: Sequence[_EncodedNode], tree_nbytes: Sequence[int]
) -> list[bytes]:
    """Encode references to nodes of file 0 as columns."""
    return [
        bytes(len(nodes)),
        _encode_varints(offsets),
        _encode_varints([len(node.data) for node in nodes]),
        _encode_varints([node.num_keys for node in nodes]),
        _encode_varints(tree_nbytes),
        _encode_varints([node.value_nbytes for node in nodes]),
    ]


def _encode_manifest(nodes: Sequence[_EncodedNode], path: str, uuid: bytes, now_ns: int) -> bytes:
    """Encode a manifest of one version. Its root is the last node in the file `path`."""
    tree_bytes = sum(len(node.data) for node in nodes)
    root = nodes[-1]
    body = [
        uuid,
        b"\0",  # manifest kind: a single file
        _encode_varints([_MAX_INLINE_NBYTES, _MAX_NODE_NBYTES]),
        bytes([_VERSION_ARITY_LOG2, 0]),  # 0: nodes are not compressed
        _encode_file_table([path]),
        _encode_varints([1, 1]),  # number of versions, generation number
        bytes([len(nodes) > 1]),  # height of the root
        *_encode_references([tree_bytes - len(root.data)], [root], [tree_bytes]),
        struct.pack("<Q", now_ns),
        b"\0",  # number of older version tree nodes
    ]
    return _encode_frame(MANIFEST_MAGIC, b"".join(body))


def _encode_frame(magic: int, body: bytes) -> bytes:
    """Encode magic, total length, format version 0, compression 0 (none), body and CRC-32C of all of these."""
    # 18 = 4 magic + 8 length + 1 version + 1 compression + 4 checksum. The magic is big endian,
    # all other numbers are little endian.
    framed = struct.pack(">I", magic) + struct.pack("<Q", len(body) + 18) + b"\0\0" + body
    return framed + struct.pack("<I", google_crc32c.value(framed))


def _encode_file_table(paths: Sequence[str]) -> bytes:
    if not paths:
        return _encode_varints([0])
    prefix_lengths, suffix_lengths, *suffixes = _encode_sorted_keys(
        [path.encode() for path in paths]
    )
    # A base path would move the file to another folder. Length 0: relative to the database.
    no_base_paths = bytes(len(paths))
    return b"".join(
        [_encode_varints([len(paths)]), prefix_lengths, suffix_lengths, no_base_paths, *suffixes]
    )


def _encode_sorted_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Encode sorted keys as columns: common prefix lengths with the previous key, suffix lengths, suffixes."""
    # E.g. [b"a.w/.zarray", b"a.w/0.0", b"a.w/0.1"] -> prefix lengths [4, 6] (the first key has
    # none), suffix lengths [11, 3, 1], suffixes b"a.w/.zarray", b"0.0", b"1".
    prefix_lengths: list[int] = []
    suffixes = [keys[0]]
    for previous, key in itertools.pairwise(keys):
        prefix_length = _common_prefix_nbytes(previous, key)
        prefix_lengths.append(prefix_length)
        suffixes.append(key[prefix_length:])
    return [
        _encode_varints(prefix_lengths),
        _encode_varints(list(map(len, suffixes))),
        *suffixes,
    ]


def _common_prefix_nbytes(a: bytes, b: bytes) -> int:
    """Return the length of the common prefix, from the leading zeros of one XOR."""
    nbytes = min(len(a), len(b))
    # E.g. b"ab1", b"ab2": the XOR is 0x000003, 2 bits long, so 1 byte differs and 2 are common.
    differing = int.from_bytes(a[:nbytes], "big") ^ int.from_bytes(b[:nbytes], "big")
    return nbytes - (differing.bit_length() + 7) // 8


def _encode_varints(values: Sequence[int]) -> bytes:
    """Encode numbers as varints: base 128, lowest digit first, top bit set if another byte follows."""
    if not values:
        return b""
    # E.g. 300 = 0b10_0101100 -> digits [0x2c, 2] -> bytes ac 02. One row of `digits` per number,
    # as wide as the longest one; `used` drops the leading zeros of the shorter ones.
    width = max(1, -(-max(values).bit_length() // 7))
    digits = np.array(values, np.uint64)[:, None] >> np.arange(0, 7 * width, 7, dtype=np.uint64)
    used = digits != 0
    used[:, 0] = True
    more = np.where(digits > 127, 128, 0)
    return ((digits & np.uint64(127)).astype(np.uint8) | more.astype(np.uint8))[used].tobytes()
