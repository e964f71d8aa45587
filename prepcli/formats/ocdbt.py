"""Index of an OCDBT database, TensorStore's key-value format: write it, and read it node by node within fixed limits.

The manifest refers to the root of the newest version. Nodes of height 0 hold keys and values, higher nodes refer to
child nodes. Values in data files are neither read nor written. Older versions are ignored. Every configuration that
TensorStore writes is read. Specification: https://google.github.io/tensorstore/kvstore/ocdbt/index.html.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from prepcli.core.counts import count_text
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.core.json_values import quote_name
from prepcli.formats.codecs import StoredBytesReader, Zstd
from prepcli.stores.paths import AnyPath
from prepcli.stores.reading import (
    list_folder,
    read_bytes,
    resolve_named_path,
    stat_file,
    stat_indexed_file,
)

# CRC-32C, at the end of the frame
_CHECKSUM_NBYTES = 4
# 4 of the magic and 8 of the length
_HEADER_NBYTES = 12
_READ_BLOCK_NBYTES = 1 << 20
_VARINT_BATCH = 1 << 16  # varints decoded at a time
_MAX_DIGITS = 10  # bytes of a 64-bit varint
UINT64_MAX = (1 << 64) - 1


def encode_frame(magic: int, body: bytes) -> bytes:
    """Encode magic, total length, format version 0, compression 0 (none), body and CRC-32C of all of these."""
    # 18 = 4 magic + 8 length + 1 version + 1 compression + 4 checksum. The magic is big endian,
    # all other numbers are little endian.
    framed = struct.pack(">I", magic) + struct.pack("<Q", len(body) + 18) + b"\0\0" + body
    return framed + struct.pack("<I", google_crc32c.value(framed))


def decode_frame(data: bytes, magic: int, max_nbytes: int) -> BodyReader:
    """Check a frame and return a reader of its body, which has at most `max_nbytes` after decompression."""
    if len(data) < _HEADER_NBYTES + _CHECKSUM_NBYTES or data[:4] != struct.pack(">I", magic):
        raise ValueError(f"it does not start with {magic:08x}")
    (length,) = struct.unpack_from("<Q", data, 4)
    if length != len(data):
        raise ValueError(f"its length field is {count_text(length, 'byte')}, it has {len(data):,}")
    (checksum,) = struct.unpack_from("<I", data, len(data) - _CHECKSUM_NBYTES)
    if google_crc32c.value(data[:-_CHECKSUM_NBYTES]) != checksum:
        raise ValueError("its checksum does not match")
    body = BodyReader(memoryview(data)[_HEADER_NBYTES:-_CHECKSUM_NBYTES])
    version = body.read_varint()
    compression = body.read_varint()  # 0 none, 1 zstd
    if version or compression > 1:
        raise ValueError(
            f"its version is {version}, its compression {compression}; supported: version 0, compression 0 and 1"
        )
    if compression:
        return BodyReader(memoryview(_decompress(body, max_nbytes)))
    return body


def _decompress(body: BodyReader, max_nbytes: int) -> bytearray:
    # In blocks, because a few bytes of zstd may decompress to gigabytes: the limit is checked after
    # each block, not after all of them.
    reader = Zstd(StoredBytesReader(lambda _, count: body.take(count), body.remaining_nbytes))
    decompressed = bytearray()
    while block := reader.read(_READ_BLOCK_NBYTES):
        decompressed += block
        if len(decompressed) > max_nbytes:
            raise ValueError(f"it decompresses to more than {max_nbytes:,} bytes")
    return decompressed


class BodyReader:
    """Sequential reader of a decoded frame's body."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._offset = 0

    @property
    def remaining_nbytes(self) -> int:
        """Return the number of unread bytes."""
        return len(self._data) - self._offset

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if count > self.remaining_nbytes:
            raise ValueError("it is cut short")
        self._offset += count
        return bytes(self._data[self._offset - count : self._offset])

    def expect_end(self) -> None:
        """Raise ValueError unless all bytes were read."""
        if self.remaining_nbytes:
            raise ValueError(
                f"{count_text(self.remaining_nbytes, 'byte follows', 'bytes follow')} its end"
            )

    def read_varint(self, max_value: int = UINT64_MAX) -> int:
        """Return the next varint."""
        return int(self.read_varints(1, max_value)[0])

    def read_varints(self, count: int, max_value: int = UINT64_MAX) -> NDArray[np.uint64]:
        """Return the next `count` varints, each at most `max_value`."""
        if count > self.remaining_nbytes:
            raise ValueError("it is cut short")
        values = np.zeros(count, np.uint64)
        for start in range(0, count, _VARINT_BATCH):
            self._decode_varints(values[start : start + _VARINT_BATCH])
        if count and values.max() > max_value:
            raise ValueError(f"it has the number {values.max():,}, the limit is {max_value:,}")
        return values

    def _decode_varints(self, out: NDArray[np.uint64]) -> None:
        data = np.frombuffer(
            self._data, np.uint8, min(_MAX_DIGITS * len(out), self.remaining_nbytes), self._offset
        )
        ends = np.flatnonzero(data < 128)[: len(out)]  # the top bit is set if another digit follows
        if len(ends) < len(out):
            raise ValueError("it is cut short, or has a number of more than 64 bits")
        starts = np.append(0, ends[:-1] + 1)
        digits = ends - starts + 1
        # The tenth digit has place for one bit only: 9 * 7 = 63.
        if (digits + (data[ends] > 1)).max() > _MAX_DIGITS:
            raise ValueError("it has a number of more than 64 bits")
        # One turn per digit for all numbers at once: offsets below 32 GiB have at most 5 digits.
        for digit in range(digits.max()):
            has_digit = digits > digit
            out[has_digit] |= (data[starts[has_digit] + digit] & 127).astype(
                np.uint64
            ) << np.uint64(7 * digit)
        self._offset += int(ends[-1]) + 1


def iter_ints(column: NDArray[np.uint64]) -> Iterator[int]:
    """Yield the numbers of a column as Python ints, converted in batches."""
    for start in range(0, len(column), _VARINT_BATCH):
        yield from column[start : start + _VARINT_BATCH].tolist()


def encode_varints(values: Sequence[int]) -> bytes:
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


def encode_keys(keys: Sequence[bytes], column: bytes = b"") -> bytes:
    """Encode sorted keys as columns: prefix lengths, suffix lengths, `column` with one number per key, suffixes."""
    if not keys:
        return column
    # Each key shares a prefix with the previous one, e.g. [b"a.w/.zarray", b"a.w/0.0", b"a.w/0.1"]:
    # prefix lengths [4, 6] (the first key has none), suffix lengths [11, 3, 1], suffixes
    # b"a.w/.zarray", b"0.0", b"1".
    prefix_lengths: list[int] = []
    suffixes = [keys[0]]
    for previous, key in itertools.pairwise(keys):
        # The XOR of two keys has zeros where they agree: b"ab1", b"ab2" give 0x000003, 2 bits long, so
        # 1 byte differs and 2 are common.
        nbytes = min(len(previous), len(key))
        differing = int.from_bytes(previous[:nbytes], "big") ^ int.from_bytes(key[:nbytes], "big")
        prefix_length = nbytes - (differing.bit_length() + 7) // 8
        prefix_lengths.append(prefix_length)
        suffixes.append(key[prefix_length:])
    suffix_lengths = list(map(len, suffixes))
    return b"".join(
        [encode_varints(prefix_lengths), encode_varints(suffix_lengths), column, *suffixes]
    )


def decode_keys(
    body: BodyReader, count: int, max_key_nbytes: int, *, has_column: bool
) -> tuple[Iterator[bytes], NDArray[np.uint64]]:
    """Decode `count` keys, and the numbers in front of the suffixes if there are any: the inverse of `encode_keys`.

    The keys are decoded one by one. Iteration raises ValueError for a key that is too long.
    """
    prefix_lengths = body.read_varints(max(0, count - 1))
    suffix_lengths = body.read_varints(count, max_key_nbytes)
    column = body.read_varints(count if has_column else 0)
    suffixes = body.take(int(suffix_lengths.sum()))
    return _iter_keys(prefix_lengths, suffix_lengths, suffixes, max_key_nbytes), column


def _iter_keys(
    prefix_lengths: NDArray[np.uint64],
    suffix_lengths: NDArray[np.uint64],
    suffixes: bytes,
    max_key_nbytes: int,
) -> Iterator[bytes]:
    key = b""
    offset = 0
    for prefix_length, suffix_length in zip(
        itertools.chain([0], iter_ints(prefix_lengths)), iter_ints(suffix_lengths)
    ):
        if prefix_length > len(key) or prefix_length + suffix_length > max_key_nbytes:
            key_length = prefix_length + suffix_length
            raise ValueError(
                f"it has a name of {key_length:,} bytes, {prefix_length:,} of them from one of {len(key):,}"
            )
        key = key[:prefix_length] + suffixes[offset : offset + suffix_length]
        offset += suffix_length
        yield key


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
# The order in which they are made durable: data files, node file, manifest. A kill before the
# manifest leaves unreferenced files.
OcdbtEntry = tuple[bytes, "bytes | ValueLocation"]  # key and value, inline or by its location
BeforeRead = Callable[[ValueLocation], None]


def ignore_read(location: ValueLocation) -> None:
    """Do nothing before a read: the file is complete."""


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
    nodes = [_encode_leaf(batch) for batch in _split_into_nodes(entries, node_nbytes)]
    file_id = hashlib.blake2b(digest_size=16)
    for leaf in nodes:
        file_id.update(leaf.data)
    path = f"d/{file_id.hexdigest()}"
    # One interior node refers to all leaves: 10^6 chunks are about 30 leaves of NODE_NBYTES. The root is
    # the last node of the file.
    if len(nodes) > 1:
        nodes.append(_encode_interior(nodes, path))
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


def _encode_interior(leaves: Sequence[_EncodedNode], path: str) -> _EncodedNode:
    """Encode the parent of leaves stored consecutively in the file `path`. Keys are stored in full."""
    sizes = [len(leaf.data) for leaf in leaves]
    offsets = [0, *itertools.accumulate(sizes[:-1])]
    # Length of the common key prefix of each child's subtree: 0.
    common_lengths = bytes(len(leaves))
    body = [
        b"\1",  # height
        _encode_file_table([path]),
        encode_varints([len(leaves)]),
        encode_keys([leaf.first_key for leaf in leaves], common_lengths),
        _encode_references(leaves, offsets, sizes),
    ]
    data = encode_frame(NODE_MAGIC, b"".join(body))
    num_keys = sum(leaf.num_keys for leaf in leaves)
    return _EncodedNode(
        leaves[0].first_key, data, num_keys, sum(leaf.value_nbytes for leaf in leaves)
    )


def _encode_manifest(nodes: Sequence[_EncodedNode], path: str, uuid: bytes, now_ns: int) -> bytes:
    """Encode a manifest of one version. Its root is the last node in the file `path`."""
    tree_nbytes = sum(len(node.data) for node in nodes)
    root = nodes[-1]
    body = [
        uuid,
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
    return encode_frame(MANIFEST_MAGIC, b"".join(body))


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

    Args:
        folder: Folder of the database.

    Raises:
        PrepError: The database is missing, invalid, or exceeds a limit of this module.
    """
    if not (folder / OCDBT_MANIFEST).is_file():
        why = "the checkpoint is unfinished or was copied in part"
        raise DamagedError(f"{folder} has no {OCDBT_MANIFEST}", why, GET_AGAIN_HINT)
    try:
        root = _read_root(folder)
        if root is not None:
            yield from _IndexReader(folder).iter_entries(root)
    except ValueError as error:
        raise DamagedError(
            f"the index of {folder} cannot be read", str(error), GET_AGAIN_HINT
        ) from error


def _read_root(folder: AnyPath) -> _NodeRef | None:
    """Return a reference to the root of the newest version. None for an empty database."""
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
    if offset == nbytes == UINT64_MAX:
        return None
    file = files[file_number]
    return _NodeRef(file.make_reference(offset, nbytes), file.base_path, height)


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
        body = decode_frame(
            self._read_node(node.location), NODE_MAGIC, MAX_INDEX_NBYTES - self._nbytes
        )
        self._nbytes += max(body.remaining_nbytes, node.location.nbytes)
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

    def _read_node(self, location: ValueLocation) -> bytes:
        # Without this check, a few small nodes could encode any number of keys.
        if location in self._seen:
            raise ValueError(
                f"it refers twice to the node at byte {location.offset:,} of {quote_name(location.path)}"
            )
        self._seen.add(location)
        path = self._folder / location.path
        end = location.offset + location.nbytes
        size = stat_indexed_file(path).st_size
        if end > size:
            why = f"an index node ends at byte {end:,}, the file at {size:,}"
            raise DamagedError(f"{path} is cut short", why, GET_AGAIN_HINT)
        if location.nbytes > MAX_INDEX_NBYTES - self._nbytes:
            raise ValueError(f"its nodes have more than {MAX_INDEX_NBYTES:,} bytes")
        self._stored_nbytes += location.nbytes
        return read_bytes(path, location.offset, location.nbytes)


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
