"""The index of an OCDBT database, read node by node within stated bounds; values are for others to read.

A manifest names the root of the newest version, nodes of height 0 hold keys and values, those above refer to nodes.
Older versions are left alone. What TensorStore writes is read, whatever the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prepcli.errors import PrepError
from prepcli.formats.ocdbt import MANIFEST_MAGIC, NODE_MAGIC, OCDBT_MANIFEST, OcdbtEntry, ValueLocation
from prepcli.formats.ocdbt_decode import UINT64_MAX, BodyReader, decode_frame, decode_keys, iter_ints
from prepcli.formats.untrusted import list_folder, quote_name, read_bytes, stat_file

MAX_MANIFEST_NBYTES = 16 << 20
MAX_INDEX_NBYTES = 256 << 20  # of all nodes, decompressed
MAX_TEXT_NBYTES = 256 << 20  # of all keys, and the values that lie in nodes
MAX_ENTRIES = 1 << 21  # of all nodes: far above any model
_FREE_ENTRIES, _ENTRIES_PER_BYTE = 1 << 18, 16  # a compressed node of a few hundred bytes may claim a million
_MOST_VERSIONS = 1 << 16
_MOST_FILES, _MOST_PATHS_NBYTES = 1 << 18, 16 << 20  # that a node knows
_MOST_PATH_NBYTES = 4095
_MOST_KEY_NBYTES = 65535
_MOST_OFFSET = (1 << 63) - 1
_NUMBERED = re.compile(r"manifest\.[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class _File:
    """A data file that a node knows; the node in it, if one is, knows files below `base`."""

    path: str
    base: bytes

    def place(self, offset: int, nbytes: int) -> ValueLocation:
        if offset + nbytes > _MOST_OFFSET:
            raise ValueError(f"it refers to {nbytes:,} bytes at {offset:,}, where no file has any")
        return ValueLocation(self.path, offset, nbytes)


@dataclass(frozen=True, slots=True)
class _Node:
    """A reference to a node; `prefix` goes before all of its keys."""

    place: ValueLocation
    base: bytes
    height: int
    prefix: bytes = b""


def read_ocdbt_index(folder: Path, before_read: Callable[[ValueLocation], object] = str) -> Iterator[OcdbtEntry]:
    """All entries of the newest version in ascending order of their keys, node by node.

    `before` is told the place of each node before it is read: it may have to be fetched. Paths are checked to stay in
    the folder, nodes to lie in their files; what else the places of values hold is the caller's to check. Raises
    PrepError for a database that is missing, broken, or beyond the bounds above.
    """
    if not (folder / OCDBT_MANIFEST).is_file():
        raise PrepError(f"{folder} has no {OCDBT_MANIFEST}", "the checkpoint was not finished, or was copied in part")
    try:
        root = _root(folder)
        yield from _Index(folder, before_read).entries(root) if root else ()
    except ValueError as error:
        what, hint = f"the index of {folder} cannot be read", "copy the folder again, with all it holds"
        raise PrepError(what, str(error), hint) from error


def _root(folder: Path) -> _Node | None:
    """The root of the newest version; None: it is empty."""
    body = _newest_manifest(folder)
    files = _files(body, folder, b"")
    count = body.read_varint(_MOST_VERSIONS)
    if not count:
        raise ValueError("its manifest names no version")
    body.read_varints(count)  # generation numbers
    height = body.take(count)[-1]
    number, offset, nbytes = (int(column[-1]) for column in _references(body, count, files))
    if offset == nbytes == UINT64_MAX:
        return None
    return _Node(files[number].place(offset, nbytes), files[number].base, height)


def _newest_manifest(folder: Path) -> BodyReader:
    """The manifest from its table of files on. Stores that cannot replace a file have one for each version."""
    body = _manifest(folder / OCDBT_MANIFEST)
    if not _is_numbered(body):
        return body
    numbered = [name for name in list_folder(folder) if _NUMBERED.fullmatch(name)]
    if not numbered:
        raise ValueError("its versions have manifests of their own, and there is none")
    body = _manifest(folder / numbered[-1])
    if _is_numbered(body):
        raise ValueError(f"{numbered[-1]} names no version")
    return body


def _manifest(path: Path) -> BodyReader:
    nbytes = stat_file(path).st_size
    if nbytes > MAX_MANIFEST_NBYTES:
        raise ValueError(f"{path.name} has {nbytes:,} bytes, prep takes {MAX_MANIFEST_NBYTES:,}")
    return decode_frame(read_bytes(path, 0, nbytes), MANIFEST_MAGIC, MAX_MANIFEST_NBYTES)


def _is_numbered(body: BodyReader) -> bool:
    """Takes the configuration off a manifest, and says whether nothing follows: versions are in numbered files."""
    body.take(16)  # uuid
    kind = body.read_varint(1)
    body.read_varints(2)  # most bytes of an inline value, and of a node
    body.take(1)  # arity of the version tree
    if body.read_varint(1):
        body.take(4)  # level of compression
    return kind == 1


def _files(body: BodyReader, folder: Path, base: bytes) -> list[_File]:
    """The table of files that begins a node, or a manifest's versions; `base` goes before all paths."""
    count = body.read_varint(_MOST_FILES)
    shared, rests = body.read_varints(max(0, count - 1)), body.read_varints(count, _MOST_PATH_NBYTES)
    bases = body.read_varints(count)
    text = body.take(int(rests.sum()))
    files = []
    nbytes = 0
    for path, base_nbytes in zip(decode_keys(shared, rests, text, _MOST_PATH_NBYTES - len(base)), iter_ints(bases)):
        if base_nbytes > len(path):
            raise ValueError(
                f"a node knows {quote_name(path.decode(errors='replace'))}, of which {base_nbytes:,} bytes are a base"
            )
        files.append(_File(_inside(folder, base + path), base + path[:base_nbytes]))
        nbytes += len(base) + len(path)
        if nbytes > _MOST_PATHS_NBYTES:
            raise ValueError(f"a node knows paths of more than {_MOST_PATHS_NBYTES:,} bytes")
    return files


def _inside(folder: Path, stored: bytes) -> str:
    path = stored.decode(errors="replace")
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise PrepError(
            f"the index of {folder} refers to {quote_name(path)}", "data files must lie inside the checkpoint"
        )
    return path


def _references(body: BodyReader, count: int, files: Sequence[_File]) -> tuple[NDArray[np.uint64], ...]:
    """Of `count` nodes the number of the file, the offset and the bytes."""
    places = (body.read_varints(count, len(files) - 1), body.read_varints(count), body.read_varints(count))
    body.read_varints(3 * count)  # statistics of what is below
    return places


class _Index:
    """The nodes of a database, and how much of them was read."""

    def __init__(self, folder: Path, before: Callable[[ValueLocation], object]) -> None:
        self._folder, self._before = folder, before
        self._seen: set[ValueLocation] = set()
        self._nbytes = self._stored_nbytes = self._text_nbytes = self._entries = 0

    def entries(self, root: _Node) -> Iterator[OcdbtEntry]:
        """All that is below a node, in order."""
        last: bytes | None = None
        waiting: list[Iterator[_Node]] = [iter([root])]
        while waiting:
            if (node := next(waiting[-1], None)) is None:
                waiting.pop()
            elif node.height:
                waiting.append(_children(node, *self._opened(node)))
            else:
                for key, value in _leaf(node, *self._opened(node)):
                    if last is not None and key <= last:
                        raise ValueError(f"key {quote_name(repr(key))} follows {quote_name(repr(last))}")
                    self._count_text(key, value)
                    last = key
                    yield key, value

    def _opened(self, node: _Node) -> tuple[BodyReader, list[_File], int]:
        """The node's body from its entries on, its files, and the number of its entries."""
        body = decode_frame(self._read(node.place), NODE_MAGIC, MAX_INDEX_NBYTES - self._nbytes)
        self._nbytes += max(body.remaining_nbytes, node.place.nbytes)
        height = body.take(1)[0]
        if height != node.height:  # also what keeps a node from being its own child
            raise ValueError(f"a node says height {height}, its parent {node.height}")
        files = _files(body, self._folder, node.base)
        count = body.read_varint()
        self._count_entries(count)
        return body, files, count

    def _read(self, place: ValueLocation) -> bytes:
        if place in self._seen:  # a few small nodes could otherwise stand for any number of keys
            raise ValueError(f"it refers twice to the node at byte {place.offset:,} of {quote_name(place.path)}")
        self._seen.add(place)
        path, end = self._folder / place.path, place.offset + place.nbytes
        size = stat_file(path).st_size
        if end > size:
            raise PrepError(f"{path} is cut short", f"an index node ends at byte {end}, the file at {size}")
        if place.nbytes > MAX_INDEX_NBYTES - self._nbytes:
            raise ValueError(f"its nodes have more than {MAX_INDEX_NBYTES:,} bytes")
        self._before(place)
        self._stored_nbytes += place.nbytes
        return read_bytes(path, place.offset, place.nbytes)

    def _count_entries(self, count: int) -> None:
        most = min(MAX_ENTRIES, _FREE_ENTRIES + _ENTRIES_PER_BYTE * self._stored_nbytes)
        self._entries += count
        if not 0 < count <= self._entries <= most:
            raise ValueError(f"a node claims {count:,} entries; {self._stored_nbytes:,} bytes may hold {most:,} in all")

    def _count_text(self, key: bytes, value: bytes | ValueLocation) -> None:
        self._text_nbytes += len(key) + (len(value) if isinstance(value, bytes) else 0)
        if self._text_nbytes > MAX_TEXT_NBYTES:
            raise ValueError(f"its keys and the values beside them have more than {MAX_TEXT_NBYTES:,} bytes")


def _children(node: _Node, body: BodyReader, files: Sequence[_File], count: int) -> Iterator[_Node]:
    shared, rests = body.read_varints(count - 1), body.read_varints(count, _MOST_KEY_NBYTES)
    common = body.read_varints(count)
    keys = decode_keys(shared, rests, body.take(int(rests.sum())), _MOST_KEY_NBYTES)
    columns = _references(body, count, files)
    body.expect_end()
    for key, nbytes_common, number, offset, nbytes in zip(keys, iter_ints(common), *map(iter_ints, columns)):
        file = files[number]
        yield _Node(file.place(offset, nbytes), file.base, node.height - 1, node.prefix + key[:nbytes_common])


def _leaf(node: _Node, body: BodyReader, files: Sequence[_File], count: int) -> Iterator[OcdbtEntry]:
    shared, rests = body.read_varints(count - 1), body.read_varints(count, _MOST_KEY_NBYTES)
    keys = decode_keys(shared, rests, body.take(int(rests.sum())), _MOST_KEY_NBYTES)
    sizes = body.read_varints(count)
    is_place = body.take(count)
    if max(is_place) > 1:
        raise ValueError(f"a value is of kind {max(is_place)}, which prep does not know")
    in_files = is_place.count(1)
    places = zip(iter_ints(body.read_varints(in_files, len(files) - 1)), iter_ints(body.read_varints(in_files)))
    for key, nbytes, lies in zip(keys, iter_ints(sizes), is_place):
        if lies:
            number, offset = next(places)
            yield node.prefix + key, files[number].place(offset, nbytes)
        else:
            yield node.prefix + key, body.take(nbytes)
    body.expect_end()
