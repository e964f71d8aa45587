"""What a checkpoint holds as it is stored: names, shapes, dtypes and places. Needs no family and reads no weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prepcli.engine.blobs import Blob
from prepcli.errors import PrepError
from prepcli.formats import msgpack
from prepcli.formats.codecs import CHECKSUM
from prepcli.formats.detect import Kind
from prepcli.formats.manifest import manifest_folder, read_manifest
from prepcli.formats.orbax import Other, dotted, find_item, index_at
from prepcli.formats.orbax_read import OrbaxItem, read_item
from prepcli.formats.orbax_store import Stored, Value
from prepcli.formats.safetensors import read_folder
from prepcli.formats.torch_files import read_folder as read_torch_folder
from prepcli.formats.zarr import Index
from prepcli.planning.plan import Flat, Side, side_copies
from prepcli.planning.slots import PARAMS
from prepcli.planning.tensors import Tensor, bits_of, itemsize
from prepcli.remote.placeholders import told_of
from prepcli.sources.decoded import Decoded
from prepcli.sources.hints import NOTHING
from prepcli.sources.locate import Located
from prepcli.sources.openers.flax_tree import read_held
from prepcli.sources.openers.meta_folder import open_meta
from prepcli.sources.openers.orbax_item import config_beside, held_leaves
from prepcli.sources.openers.torch_folder import side_of
from prepcli.sources.source import CONFIG, SourceTensor, read_config
from trainer.models.axis_map import Row
from trainer.models.parameters import Family, rows
from trainer.models.registry import FAMILIES

MAX_DEPTH = 32  # of a name's parts: a name may be four million dots


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor or leaf, cut into equal chunks of which the last may reach beyond its edge; a tensor of a safetensors
    file is one chunk."""

    name: str
    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    chunks: Mapping[Index, Stored]
    decoded_from: Value | None = None  # its first chunk as it is stored, where `chunks` are those of a blob
    side: Side = ()  # where it lies as a whole, if that is not in chunks of its own

    @property
    def nbytes(self) -> int:
        return bits_of(self.dtype, self.shape) // 8

    @property
    def first(self) -> Stored | None:
        """Where its first chunk lies; None if that is in an index, or if there is none."""
        stored = next(iter(self.chunks.values()), None) if self.decoded_from is None else self.decoded_from
        return stored if isinstance(stored, Stored) else None


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint's entries in the order of its files, and what it says of itself; `config` is empty where it says
    nothing. `asides`: what a tree holds besides arrays."""

    name: str  # as messages call it
    kind: Kind
    folder: Path
    entries: tuple[Entry, ...]
    files: tuple[Path, ...]
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    asides: tuple[str, ...] = ()
    blobs: tuple[Path | Blob, ...] = ()  # what the entries' chunks lie in, where that is not `files`
    codecs: tuple[str, ...] = ()  # by which they are decoded

    @property
    def reads(self) -> tuple[Path | Blob, ...]:
        return self.blobs or self.files

    @property
    def family(self) -> Family | None:
        """The family, if prep knows it."""
        return FAMILIES.get(str(self.config.get("model_type")))

    @property
    def chunks(self) -> int:
        return sum(len(entry.chunks) for entry in self.entries)


def read_contents(located: Located, name: str) -> Contents:
    """Read headers or index of what was located; PrepError names what is broken or not understood."""
    remote = located.remote
    if remote is None:
        return _read_local(located, name)
    with told_of(remote.mirror, name):
        contents = _read_local(located, name)
        return replace(contents, blobs=remote.blobs(contents.files, contents.blobs))


def _read_local(located: Located, name: str) -> Contents:
    if located.kind == "torch":
        return _read_torch(located.path, name)
    if located.kind == "meta":
        return _read_meta(located.path, name)
    if located.kind in ("flax", "easylm"):
        return _read_flax(located.path, name, located.kind)
    return _read_item(located.path, name) if located.kind == "orbax" else _read_folder(located.path, name)


def _read_folder(path: Path, name: str) -> Contents:
    folder = read_folder(path)
    config = read_config(path / CONFIG) if (path / CONFIG).exists() else {}
    files = tuple(path / header.file_name for header in folder.headers)
    return Contents(
        name, "safetensors", path, tuple(map(_of_tensor, folder.tensors)), files, config, read_manifest(path) or {}
    )


def _of_tensor(tensor: Tensor) -> Entry:
    only = {(0,) * len(tensor.shape): Stored(tensor.file, tensor.offset, tensor.nbytes)}
    path = tuple(tensor.name.split(".", MAX_DEPTH - 1))
    return Entry(tensor.name, path, tensor.dtype, tensor.shape, tensor.shape, dict(only))


def _read_torch(path: Path, name: str) -> Contents:
    folder = read_torch_folder(path)
    config = read_config(path / CONFIG) if (path / CONFIG).exists() else {}
    entries = tuple(
        _of_side(t.name, t.dtype, t.shape, (side_of(t, t.file),), (t.file, t.offset)) for t in folder.tensors
    )
    asides = tuple(f"{c.file_name}: {aside}" for c in folder.checkpoints for aside in c.asides)
    return Contents(name, "torch", path, entries, folder.files, config, {}, asides)


def _read_meta(path: Path, name: str) -> Contents:
    """Its tensors as they are together, by the names that Hugging Face has for them."""
    source = open_meta(path, name, NOTHING)
    at = [source.files.index(blob) for blob in source.reads]  # of each blob the file that it is
    entries = tuple(_of_source(source.names.shown(tensor.name), tensor, at) for tensor in source.tensors)
    return Contents(name, "meta", path, entries, source.files, source.config, {}, (), source.blobs)


def _of_source(name: str, tensor: SourceTensor, at: Sequence[int]) -> Entry:
    first = next(side_copies(tensor.side, tensor.shape, itemsize(tensor.dtype), ((0, 1),) * len(tensor.shape)))
    return _of_side(name, tensor.dtype, tensor.shape, tensor.side, (at[first.file], first.offset))


def _of_side(name: str, dtype: str, shape: tuple[int, ...], side: Side, first: tuple[int, int]) -> Entry:
    """A tensor as one chunk, or where it lies; `first` is file and offset of its first element."""
    path, stored = tuple(name.split(".", MAX_DEPTH - 1)), Stored(*first, bits_of(dtype, shape) // 8)
    if isinstance(flat := side[0], Flat):
        only = {(0,) * len(shape): Stored(flat.file, flat.offset, stored.nbytes)}
        return Entry(name, path, dtype, shape, shape, dict(only), stored)
    return Entry(name, path, dtype, shape, shape, {}, stored, side)


def _read_flax(path: Path, name: str, kind: msgpack.Kind) -> Contents:
    held = read_held(path, kind)
    home = path if path.is_dir() else path.parent
    config = read_config(home / CONFIG) if (home / CONFIG).exists() else {}
    asides = tuple(str(aside) for document in held.documents for aside in document.asides)
    manifest = (read_manifest(path) or {}) if path.is_dir() else {}
    entries = tuple(_of_flax(*place) for place in held.places())
    return Contents(name, kind, path, entries, held.files, config, manifest, asides, held.blobs)


def _of_flax(array: msgpack.Array, file: int, offset: int) -> Entry:
    nbytes = sum(length for _, length in array.runs)
    only = {(0,) * len(array.shape): Stored(file, offset, nbytes)}
    return Entry(".".join(array.path), array.path, array.dtype, array.shape, array.shape, dict(only))


def _read_item(path: Path, name: str) -> Contents:
    item = read_item(find_item(path) or path)
    manifest = read_manifest(manifest_folder(item.folder)) or {}
    blobs, _ = held_leaves(item)
    at = {blob.number: number for number, blob in enumerate(blobs) if isinstance(blob, Decoded)}
    entries = tuple(_of_array(item, number, at.get(number)) for number in range(len(item.arrays)))
    config = manifest.get("config") or _config_of(item.folder, path)
    asides = (*map(_aside, item.others), *(f"{each} is in the index, but not in the tree" for each in item.unlisted))
    return Contents(name, "orbax", item.folder, entries, item.files, config, manifest, asides, blobs, codecs(item))


def _config_of(folder: Path, path: Path) -> Mapping[str, Any]:
    found = config_beside(folder, path)
    return read_config(found) if found else {}


def codecs(item: OrbaxItem) -> tuple[str, ...]:
    """How chunks are compressed, by name."""
    return tuple(dict.fromkeys(step for steps in item.steps for step in steps if step != CHECKSUM))


def _of_array(item: OrbaxItem, number: int, blob: int | None) -> Entry:
    meta, stored = item.arrays[number], item.chunks[number]
    if blob is None:
        first, chunks = None, {index: value for index, value in stored.items() if isinstance(value, Stored)}
    else:
        first, nbytes, count = next(iter(stored.values()), b""), meta.chunk_nbytes, math.prod(meta.grid)
        chunks = {index_at(meta.grid, at): Stored(blob, at * nbytes, nbytes) for at in range(count)}
    path = tuple(map(str, meta.path[: MAX_DEPTH - 1]))
    rest = (dotted(meta.path[MAX_DEPTH - 1 :]),) if len(meta.path) >= MAX_DEPTH else ()
    return Entry(meta.name, path + rest, meta.dtype, meta.shape, meta.chunk, chunks, first)


def _aside(other: Other) -> str:
    value = f"the text {other.text!r}" if other.value_type == "string" else f"an empty {other.value_type}"
    return f"{dotted(other.path)} is {value}"


def nbytes_below(contents: Contents, root: str) -> int:
    """Bytes of the entries in a part of the tree, as `opt_state`."""
    return sum(entry.nbytes for entry in contents.entries if entry.path[0] == root)


def parameters(contents: Contents) -> int | None:
    """Values of the model's parameters, without buffers, copies of tied ones and optimizer state; None where prep does
    not know which these are, or the config makes no sense."""
    family = contents.family
    if family is None:
        return None
    if contents.kind == "orbax":
        return sum(math.prod(entry.shape) for entry in contents.entries if entry.path[0] == PARAMS)
    try:
        return _parameters_of(family, contents)
    except PrepError:
        return None


def _parameters_of(family: Family, contents: Contents) -> int:
    shapes = {entry.name.removeprefix(family.prefix): entry.shape for entry in contents.entries}
    if family.tied(contents.config, shapes) and family.tie.embedding in shapes:
        shapes.pop(family.tie.tensor, None)
    table = rows(family, contents.config, tensors=shapes)
    pattern = re.compile("|".join(_pattern(row) for row in table.values()))
    return sum(math.prod(shape) for name, shape in shapes.items() if pattern.fullmatch(name))


def _pattern(row: Row) -> str:
    """What the names of a row's tensors look like; any number will do, so a wrong config does no harm."""
    return "".join(re.escape(part) if isinstance(part, str) else "[0-9]+" for part in row.name)
