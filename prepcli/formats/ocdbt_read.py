"""Read the index of an OCDBT database node by node, within fixed limits. Values in data files are not read.

The manifest refers to the root of the newest version. Nodes of height 0 hold keys and values, higher nodes refer to
child nodes. Older versions are ignored. Every configuration that TensorStore writes is supported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.formats.ocdbt import (
    MANIFEST_MAGIC,
    NODE_MAGIC,
    OCDBT_MANIFEST,
    OcdbtEntry,
    ValueLocation,
)
from prepcli.formats.ocdbt_decode import (
    UINT64_MAX,
    BodyReader,
    decode_frame,
    decode_keys,
    iter_ints,
)
from prepcli.formats.untrusted import (
    list_folder,
    quote_name,
    read_bytes,
    stat_file,
    stat_indexed_file,
)
from prepcli.stores.reading import resolve_named_path

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


BeforeRead = Callable[[ValueLocation], None]


def ignore_read(location: ValueLocation) -> None:
    """Do nothing before a read: the file is complete."""


def read_ocdbt_index(folder: Path, before_read: BeforeRead = ignore_read) -> Iterator[OcdbtEntry]:
    """Yield all entries of the newest version in ascending order of keys, node by node.

    Paths are checked to stay in the folder and nodes to be inside their files. The caller checks the
    locations of values.

    Args:
        folder: Folder of the database.
        before_read: Called with the location of each node before it is read, for example to download it.

    Raises:
        PrepError: The database is missing, invalid, or exceeds a limit of this module.
    """
    if not (folder / OCDBT_MANIFEST).is_file():
        why = "the checkpoint is unfinished or was copied in part"
        raise DamagedError(f"{folder} has no {OCDBT_MANIFEST}", why, GET_AGAIN_HINT)
    try:
        root = _read_root(folder)
        yield from _IndexReader(folder, before_read).iter_entries(root) if root else ()
    except ValueError as error:
        raise DamagedError(
            f"the index of {folder} cannot be read", str(error), GET_AGAIN_HINT
        ) from error


def _read_root(folder: Path) -> _NodeRef | None:
    """Return a reference to the root of the newest version. None for an empty database."""
    body = _read_newest_manifest(folder)
    files = _read_file_table(body, folder, b"")
    count = body.read_varint(_MAX_VERSIONS)
    if not count:
        raise ValueError("its manifest names no version")
    body.read_varints(count)  # generation numbers
    height = body.take(count)[-1]
    file_number, offset, nbytes = (
        int(column[-1]) for column in _read_references(body, count, files)
    )
    # TensorStore marks an empty tree by these two numbers
    if offset == nbytes == UINT64_MAX:
        return None
    return _NodeRef(
        files[file_number].make_reference(offset, nbytes), files[file_number].base_path, height
    )


def _read_newest_manifest(folder: Path) -> BodyReader:
    """Return the newest manifest, positioned at its file table. Numbered manifests have one file per version."""
    body = _read_manifest(folder / OCDBT_MANIFEST)
    if not _uses_numbered_manifests(body):
        return body
    numbered = [name for name in list_folder(folder) if _NUMBERED_MANIFEST.fullmatch(name)]
    if not numbered:
        raise ValueError("its manifest refers to numbered manifests, and none exists")
    body = _read_manifest(folder / numbered[-1])
    if _uses_numbered_manifests(body):
        raise ValueError(f"{numbered[-1]} names no version")
    return body


def _read_manifest(path: Path) -> BodyReader:
    nbytes = stat_file(path).st_size
    if nbytes > MAX_MANIFEST_NBYTES:
        raise ValueError(f"{path.name} has {nbytes:,} bytes, the limit is {MAX_MANIFEST_NBYTES:,}")
    return decode_frame(read_bytes(path, 0, nbytes), MANIFEST_MAGIC, MAX_MANIFEST_NBYTES)


def _uses_numbered_manifests(body: BodyReader) -> bool:
    """Read the configuration of a manifest and return whether its versions are in numbered manifests."""
    body.take(16)  # uuid
    kind = body.read_varint(1)
    body.read_varints(2)  # limits of an inline value and of a node
    body.take(1)  # arity of the version tree
    if body.read_varint(1):
        body.take(4)  # compression level
    return kind == 1


def _read_file_table(body: BodyReader, folder: Path, base_path: bytes) -> list[_DataFile]:
    """Read the file table of a node or manifest. `base_path` is prepended to all paths."""
    count = body.read_varint(_MAX_FILES)
    prefix_lengths = body.read_varints(max(0, count - 1))
    suffix_lengths = body.read_varints(count, _MAX_PATH_NBYTES)
    base_lengths = body.read_varints(count)
    suffixes = body.take(int(suffix_lengths.sum()))
    files = []
    nbytes = 0
    for path, base_nbytes in zip(
        decode_keys(prefix_lengths, suffix_lengths, suffixes, _MAX_PATH_NBYTES - len(base_path)),
        iter_ints(base_lengths),
    ):
        if base_nbytes > len(path):
            shown_path = quote_name(path.decode(errors="replace"))
            raise ValueError(
                f"a node has the file {shown_path} with a base path of {base_nbytes:,} bytes"
            )
        files.append(
            _DataFile(_decode_inner_path(folder, base_path + path), base_path + path[:base_nbytes])
        )
        nbytes += len(base_path) + len(path)
        if nbytes > _MAX_PATHS_NBYTES:
            raise ValueError(f"a node has file paths of more than {_MAX_PATHS_NBYTES:,} bytes")
    return files


def _decode_inner_path(folder: Path, stored: bytes) -> str:
    """Return the path of a data file relative to the folder. Raise PrepError if it is not inside."""
    path = stored.decode(errors="replace")
    # A table may have an entry without a name, and no reference to it.
    if path:
        resolve_named_path(folder, path, f"the index of {folder}")
    return path


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

    def __init__(self, folder: Path, before: Callable[[ValueLocation], object]) -> None:
        self._folder = folder
        self._before = before
        self._seen: set[ValueLocation] = set()
        self._nbytes = self._stored_nbytes = self._text_nbytes = self._entries = 0

    def iter_entries(self, root: _NodeRef) -> Iterator[OcdbtEntry]:
        """Yield all entries of a subtree in ascending order of keys."""
        last_key: bytes | None = None
        stack: list[Iterator[_NodeRef]] = [iter([root])]
        while stack:
            if (node := next(stack[-1], None)) is None:
                stack.pop()
            elif node.height:
                stack.append(_iter_children(node, *self._open_node(node)))
            else:
                for key, value in _iter_leaf_entries(node, *self._open_node(node)):
                    # Readers search by bisection. Keys out of order would make two readers
                    # disagree on what the database holds.
                    if last_key is not None and key <= last_key:
                        raise ValueError(
                            f"key {quote_name(repr(key))} follows {quote_name(repr(last_key))}"
                        )
                    self._add_to_text(key, value)
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
        self._add_to_entries(count)
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
        self._before(location)
        self._stored_nbytes += location.nbytes
        return read_bytes(path, location.offset, location.nbytes)

    def _add_to_entries(self, count: int) -> None:
        max_entries = min(MAX_ENTRIES, _BASE_ENTRIES + _ENTRIES_PER_BYTE * self._stored_nbytes)
        self._entries += count
        if not 0 < count <= self._entries <= max_entries:
            raise ValueError(
                f"a node claims {count:,} entries; the limit for {self._stored_nbytes:,} bytes is {max_entries:,}"
            )

    def _add_to_text(self, key: bytes, value: bytes | ValueLocation) -> None:
        self._text_nbytes += len(key) + (len(value) if isinstance(value, bytes) else 0)
        if self._text_nbytes > MAX_TEXT_NBYTES:
            raise ValueError(f"its keys and inline values have more than {MAX_TEXT_NBYTES:,} bytes")


def _iter_children(
    node: _NodeRef, body: BodyReader, files: Sequence[_DataFile], count: int
) -> Iterator[_NodeRef]:
    """Yield references to the children of an inner node."""
    prefix_lengths = body.read_varints(count - 1)
    suffix_lengths = body.read_varints(count, _MAX_KEY_NBYTES)
    common_lengths = body.read_varints(count)
    keys = decode_keys(
        prefix_lengths, suffix_lengths, body.take(int(suffix_lengths.sum())), _MAX_KEY_NBYTES
    )
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
    prefix_lengths = body.read_varints(count - 1)
    suffix_lengths = body.read_varints(count, _MAX_KEY_NBYTES)
    keys = decode_keys(
        prefix_lengths, suffix_lengths, body.take(int(suffix_lengths.sum())), _MAX_KEY_NBYTES
    )
    value_lengths = body.read_varints(count)
    is_indirect = body.take(count)
    if max(is_indirect) > 1:
        raise ValueError(f"a value has the unknown kind {max(is_indirect)}")
    indirect_count = is_indirect.count(1)
    locations = zip(
        iter_ints(body.read_varints(indirect_count, len(files) - 1)),
        iter_ints(body.read_varints(indirect_count)),
    )
    for key, nbytes, indirect in zip(keys, iter_ints(value_lengths), is_indirect):
        if indirect:
            file_number, offset = next(locations)
            yield node.key_prefix + key, files[file_number].make_reference(offset, nbytes)
        else:
            yield node.key_prefix + key, body.take(nbytes)
    body.expect_end()
