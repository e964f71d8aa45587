"""Index of an OCDBT database, TensorStore's key-value format: write it, and read it node by node within fixed limits.

The manifest refers to the root of the newest version. Nodes of height 0 hold keys and values, higher nodes refer to
child nodes. Values in data files are neither read nor written. Older versions are ignored. Every configuration that
TensorStore writes is read.
Specification: https://google.github.io/tensorstore/kvstore/ocdbt/index.html.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.core.json_values import quote_name
from prepcli.formats.ocdbt_frames import (
    UINT64_MAX,
    BodyReader,
    decode_frame,
    decode_keys,
    encode_frame,
    encode_keys,
    encode_varints,
    iter_ints,
)
from prepcli.stores.files import (
    list_folder,
    read_bytes,
    resolve_named_path,
    stat_file,
    stat_indexed_file,
)
from prepcli.stores.paths import AnyPath

OCDBT_MANIFEST = "manifest.ocdbt"
NODE_MAGIC = 0x0CDB20DE
MANIFEST_MAGIC = 0x0CDB3A2A
# Decoded size of a written node, about 37,000 chunks: bounds the memory of writing.
NODE_NBYTES = 4 << 20
# TensorStore's estimate of a decoded entry without key, path and inline value.
_ENTRY_OVERHEAD_NBYTES = 32
# Configuration as in databases of Orbax.
_MAX_INLINE_NBYTES = 1024
_MAX_NODE_NBYTES = 100_000_000
_VERSION_ARITY_LOG2 = 4
# Value kinds of a leaf node.
_INLINE = 0
_IN_DATA_FILE = 1

# Limits on untrusted input. Nodes may be compressed and may refer to each other, so a file of
# 1 kB can claim any number of keys: sizes are counted after decompression, entries before they
# are decoded, and a node that was read once is refused.
MAX_MANIFEST_NBYTES = 16 << 20
MAX_INDEX_NBYTES = 256 << 20  # total decompressed size of all nodes
MAX_TEXT_NBYTES = 256 << 20  # total size of all keys and inline values
MAX_ENTRIES = 1 << 21  # entries of all nodes: far above any model
# A compressed node of a few hundred bytes may claim a million entries.
_BASE_ENTRIES = 1 << 18
_ENTRIES_PER_BYTE = 16
_MAX_VERSIONS = 1 << 16
# Number of files in a node's table, and total length of their paths.
_MAX_FILES = 1 << 18
_MAX_PATHS_NBYTES = 16 << 20
_MAX_PATH_NBYTES = 4095
_MAX_KEY_NBYTES = 65535
_MAX_OFFSET = (1 << 63) - 1
_NUMBERED_MANIFEST = re.compile(r"manifest\.[0-9a-f]{16}")


class ValueLocation(NamedTuple):
    """Byte range of a value or node in a data file. `path` is relative to the database's folder."""

    path: str
    offset: int
    nbytes: int


# A database of two values of a tree, as Orbax lays it out:
#   manifest.ocdbt   configuration and versions, with a reference to the root node of the newest version
#   d/<hex>          B-tree nodes, and values that are not inline
# All of them are durable before the output gets its name.
OcdbtEntry = tuple[bytes, "bytes | ValueLocation"]  # key and value, inline or by its location


@dataclass(frozen=True, slots=True)
class _EncodedNode:
    """An encoded B-tree node. `num_keys` and `value_nbytes` count the whole subtree."""

    first_key: bytes
    data: bytes
    num_keys: int
    value_nbytes: int


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
    nodes: list[_EncodedNode] = []
    batch: list[OcdbtEntry] = []
    size = 0
    for key, value in entries:
        content = value if isinstance(value, bytes) else value.path
        entry_nbytes = _ENTRY_OVERHEAD_NBYTES + len(key) + len(content)
        if batch and size + entry_nbytes > node_nbytes:
            nodes.append(_encode_leaf(batch))
            batch = []
            size = 0
        batch.append((key, value))
        size += entry_nbytes
    nodes.append(_encode_leaf(batch))
    file_id = hashlib.blake2b(digest_size=16)
    for leaf in nodes:
        file_id.update(leaf.data)
    path = f"d/{file_id.hexdigest()}"
    # One interior node refers to all leaves: 10^6 chunks are about 30 leaves of NODE_NBYTES. The root is
    # the last node of the file.
    if len(nodes) > 1:
        sizes = [len(leaf.data) for leaf in nodes]
        offsets = [0, *itertools.accumulate(sizes[:-1])]
        # Length of the common key prefix of each child's subtree: 0.
        common_lengths = bytes(len(nodes))
        body = [
            b"\1",  # height
            _encode_file_table([path]),
            encode_varints([len(nodes)]),
            encode_keys([leaf.first_key for leaf in nodes], common_lengths),
            _encode_references(nodes, offsets, sizes),
        ]
        data = encode_frame(NODE_MAGIC, b"".join(body))
        num_keys = sum(leaf.num_keys for leaf in nodes)
        value_nbytes = sum(leaf.value_nbytes for leaf in nodes)
        nodes.append(_EncodedNode(nodes[0].first_key, data, num_keys, value_nbytes))
    tree_nbytes = sum(len(node.data) for node in nodes)
    root = nodes[-1]
    body = [
        file_id.digest(),
        b"\0",  # manifest kind: a single file
        encode_varints([_MAX_INLINE_NBYTES, _MAX_NODE_NBYTES]),
        bytes([_VERSION_ARITY_LOG2, 0]),  # 0: nodes are not compressed
        _encode_file_table([path]),
        encode_varints([1, 1]),  # number of versions, generation number
        bytes([len(nodes) > 1]),  # height of the root
        _encode_references([root], [tree_nbytes - len(root.data)], [tree_nbytes]),
        struct.pack("<Q", now_ns),
        b"\0",  # number of older version tree nodes
    ]
    return {
        path: b"".join(node.data for node in nodes),
        OCDBT_MANIFEST: encode_frame(MANIFEST_MAGIC, b"".join(body)),
    }


def _encode_leaf(entries: Sequence[OcdbtEntry]) -> _EncodedNode:
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
        encode_varints([len(entries)]),
        encode_keys(keys),
        encode_varints(sizes),
        kinds,
        encode_varints([file_numbers[location.path] for location in locations]),
        encode_varints([location.offset for location in locations]),
        *inline,
    ]
    data = encode_frame(NODE_MAGIC, b"".join(body))
    value_nbytes = sum(location.nbytes for location in locations)
    return _EncodedNode(keys[0], data, len(entries), value_nbytes)


def _encode_file_table(paths: Sequence[str]) -> bytes:
    # A base path would move the file to another folder. Length 0: relative to the database.
    keys = encode_keys([path.encode() for path in paths], bytes(len(paths)))
    return encode_varints([len(paths)]) + keys


def _encode_references(
    nodes: Sequence[_EncodedNode], offsets: Sequence[int], tree_nbytes: Sequence[int]
) -> bytes:
    """Encode references to nodes of file 0 as columns."""
    columns = [
        offsets,
        [len(node.data) for node in nodes],
        [node.num_keys for node in nodes],
        tree_nbytes,
        [node.value_nbytes for node in nodes],
    ]
    return bytes(len(nodes)) + b"".join(map(encode_varints, columns))


@dataclass(frozen=True, slots=True)
class _DataFile:
    """A data file in a node's file table. `base_path` is the prefix of the paths in a node that this file holds."""

    path: str
    base_path: bytes

    def make_reference(self, offset: int, nbytes: int) -> ValueLocation:
        """Return the location of a byte range of the file. Raise ValueError if it exceeds any file size."""
        if offset + nbytes > _MAX_OFFSET:
            raise ValueError(f"it refers to {nbytes:,} bytes at offset {offset:,}, beyond any file")
        return ValueLocation(self.path, offset, nbytes)


@dataclass(frozen=True, slots=True)
class _NodeRef:
    """A reference to a node. `key_prefix` is prepended to all of its keys."""

    location: ValueLocation
    base_path: bytes
    height: int
    key_prefix: bytes = b""


def read_ocdbt_index(folder: AnyPath) -> Iterator[OcdbtEntry]:
    """Yield all entries of the newest version in ascending order of keys, node by node.

    Paths are checked to stay in the folder and nodes to be inside their files. The caller checks the
    locations of values.

    Raises:
        PrepError: The database is missing, invalid, or exceeds a limit of this module.
    """
    if not (folder / OCDBT_MANIFEST).is_file():
        why = "the checkpoint is unfinished or was copied in part"
        raise DamagedError(f"{folder} has no {OCDBT_MANIFEST}", why, GET_AGAIN_HINT)
    try:
        body, is_numbered = _open_manifest(folder / OCDBT_MANIFEST)
        if is_numbered:
            # Numbered manifests have one file per version.
            numbered = [name for name in list_folder(folder) if _NUMBERED_MANIFEST.fullmatch(name)]
            if not numbered:
                raise ValueError("its manifest refers to numbered manifests, and none exists")
            body, is_numbered = _open_manifest(folder / numbered[-1])
            if is_numbered:
                raise ValueError(f"{numbered[-1]} names no version")
        files = _read_file_table(body, folder, b"")
        count = body.read_varint(_MAX_VERSIONS)
        if not count:
            raise ValueError("its manifest names no version")
        body.read_varints(count)  # generation numbers
        height = body.take(count)[-1]
        columns = _read_references(body, count, files)
        file_number, offset, nbytes = (int(column[-1]) for column in columns)
        # TensorStore marks an empty tree by these two numbers
        if not offset == nbytes == UINT64_MAX:
            file = files[file_number]
            root = _NodeRef(file.make_reference(offset, nbytes), file.base_path, height)
            yield from _IndexReader(folder).iter_entries(root)
    except ValueError as error:
        raise DamagedError(
            f"the index of {folder} cannot be read", str(error), GET_AGAIN_HINT
        ) from error


def _open_manifest(path: AnyPath) -> tuple[BodyReader, bool]:
    """Return a reader at a manifest's file table, and whether its versions are in numbered manifests instead."""
    nbytes = stat_file(path).st_size
    if nbytes > MAX_MANIFEST_NBYTES:
        raise ValueError(f"{path.name} has {nbytes:,} bytes, the limit is {MAX_MANIFEST_NBYTES:,}")
    body = decode_frame(read_bytes(path, 0, nbytes), MANIFEST_MAGIC, MAX_MANIFEST_NBYTES)
    body.take(16)  # uuid
    kind = body.read_varint(1)
    body.read_varints(2)  # limits of an inline value and of a node
    body.take(1)  # arity of the version tree
    if body.read_varint(1):
        body.take(4)  # compression level
    return body, kind == 1


def _read_file_table(body: BodyReader, folder: AnyPath, base_path: bytes) -> list[_DataFile]:
    """Read the file table of a node or manifest. `base_path` is prepended to all paths."""
    count = body.read_varint(_MAX_FILES)
    max_path_nbytes = _MAX_PATH_NBYTES - len(base_path)
    paths, base_lengths = decode_keys(body, count, max_path_nbytes, has_column=True)
    files: list[_DataFile] = []
    nbytes = 0
    for path, base_nbytes in zip(paths, iter_ints(base_lengths)):
        if base_nbytes > len(path):
            shown_path = quote_name(path.decode(errors="replace"))
            raise ValueError(
                f"a node has the file {shown_path} with a base path of {base_nbytes:,} bytes"
            )
        full_path = (base_path + path).decode(errors="replace")
        # A table may have an entry without a name, and no reference to it.
        if full_path:
            resolve_named_path(folder, full_path, f"the index of {folder}")
        files.append(_DataFile(full_path, base_path + path[:base_nbytes]))
        nbytes += len(base_path) + len(path)
        if nbytes > _MAX_PATHS_NBYTES:
            raise ValueError(f"a node has file paths of more than {_MAX_PATHS_NBYTES:,} bytes")
    return files


def _read_references(
    body: BodyReader, count: int, files: Sequence[_DataFile]
) -> tuple[NDArray[np.uint64], ...]:
    """Read `count` node references as columns: file number, offset, length in bytes."""
    columns = (
        body.read_varints(count, len(files) - 1),
        body.read_varints(count),
        body.read_varints(count),
    )
    body.read_varints(3 * count)  # statistics of the subtrees
    return columns


class _IndexReader:
    """Reader of the nodes of a database, with counters for the limits."""

    def __init__(self, folder: AnyPath) -> None:
        self._folder = folder
        self._seen: set[ValueLocation] = set()
        self._nbytes = 0
        self._stored_nbytes = 0
        self._text_nbytes = 0
        self._num_entries = 0

    def iter_entries(self, root: _NodeRef) -> Iterator[OcdbtEntry]:
        """Yield all entries of a subtree in ascending order of keys."""
        last_key: bytes | None = None
        stack: list[Iterator[_NodeRef]] = [iter([root])]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            body, files, count = self._open_node(node)
            if node.height:
                stack.append(_iter_children(node, body, files, count))
                continue
            for key, value in _iter_leaf_entries(node, body, files, count):
                # Readers search by bisection. Keys out of order would make two readers
                # disagree on what the database holds.
                if last_key is not None and key <= last_key:
                    raise ValueError(
                        f"key {quote_name(repr(key))} follows {quote_name(repr(last_key))}"
                    )
                self._text_nbytes += len(key)
                if isinstance(value, bytes):
                    self._text_nbytes += len(value)
                if self._text_nbytes > MAX_TEXT_NBYTES:
                    raise ValueError(
                        f"its keys and inline values have more than {MAX_TEXT_NBYTES:,} bytes"
                    )
                last_key = key
                yield key, value

    def _open_node(self, node: _NodeRef) -> tuple[BodyReader, list[_DataFile], int]:
        """Return a node's body, positioned at its entries, its file table, and the number of its entries."""
        name, offset, nbytes = node.location
        # Without this check, a few small nodes could encode any number of keys.
        if node.location in self._seen:
            raise ValueError(
                f"it refers twice to the node at byte {offset:,} of {quote_name(name)}"
            )
        self._seen.add(node.location)
        path = self._folder / name
        size = stat_indexed_file(path).st_size
        if offset + nbytes > size:
            why = f"an index node ends at byte {offset + nbytes:,}, the file at {size:,}"
            raise DamagedError(f"{path} is cut short", why, GET_AGAIN_HINT)
        remaining_nbytes = MAX_INDEX_NBYTES - self._nbytes
        if nbytes > remaining_nbytes:
            raise ValueError(f"its nodes have more than {MAX_INDEX_NBYTES:,} bytes")
        self._stored_nbytes += nbytes
        body = decode_frame(read_bytes(path, offset, nbytes), NODE_MAGIC, remaining_nbytes)
        self._nbytes += max(body.remaining_nbytes, nbytes)
        height = body.take(1)[0]
        # The check also prevents a node from being its own child.
        if height != node.height:
            raise ValueError(
                f"a node has height {height}, its parent refers to height {node.height}"
            )
        files = _read_file_table(body, self._folder, node.base_path)
        count = body.read_varint()
        max_entries = min(MAX_ENTRIES, _BASE_ENTRIES + _ENTRIES_PER_BYTE * self._stored_nbytes)
        self._num_entries += count
        if not 0 < count <= self._num_entries <= max_entries:
            raise ValueError(
                f"a node claims {count:,} entries; the limit for {self._stored_nbytes:,} bytes is {max_entries:,}"
            )
        return body, files, count


def _iter_children(
    node: _NodeRef, body: BodyReader, files: Sequence[_DataFile], count: int
) -> Iterator[_NodeRef]:
    """Yield references to the children of an inner node."""
    keys, common_lengths = decode_keys(body, count, _MAX_KEY_NBYTES, has_column=True)
    columns = _read_references(body, count, files)
    body.expect_end()
    for key, common_length, file_number, offset, nbytes in zip(
        keys, iter_ints(common_lengths), *map(iter_ints, columns)
    ):
        file = files[file_number]
        yield _NodeRef(
            file.make_reference(offset, nbytes),
            file.base_path,
            node.height - 1,
            node.key_prefix + key[:common_length],
        )


def _iter_leaf_entries(
    node: _NodeRef, body: BodyReader, files: Sequence[_DataFile], count: int
) -> Iterator[OcdbtEntry]:
    """Yield the keys of a leaf node with their values, or with the values' locations in data files."""
    keys, _ = decode_keys(body, count, _MAX_KEY_NBYTES, has_column=False)
    value_lengths = body.read_varints(count)
    kinds = body.take(count)
    if max(kinds) > _IN_DATA_FILE:
        raise ValueError(f"a value has the unknown kind {max(kinds)}")
    num_locations = kinds.count(_IN_DATA_FILE)
    locations = zip(
        iter_ints(body.read_varints(num_locations, len(files) - 1)),
        iter_ints(body.read_varints(num_locations)),
    )
    for key, nbytes, kind in zip(keys, iter_ints(value_lengths), kinds):
        if kind == _IN_DATA_FILE:
            file_number, offset = next(locations)
            yield node.key_prefix + key, files[file_number].make_reference(offset, nbytes)
        else:
            yield node.key_prefix + key, body.take(nbytes)
    body.expect_end()
