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
from prepcli.formats.codecs import CRC32C
from prepcli.formats.detect import Kind
from prepcli.formats.manifest import find_manifest_folder, read_manifest
from prepcli.formats.orbax import OrbaxNonArray, dotted_name, find_item, unravel_chunk_index
from prepcli.formats.orbax_read import OrbaxItem, read_item
from prepcli.formats.orbax_store import StoredRange, StoredValue
from prepcli.formats.safetensors import read_safetensors_folder
from prepcli.formats.torch_files import read_torch_folder as read_torch_folder
from prepcli.formats.zarr import ChunkIndex
from prepcli.planning.plan import Contiguous, Locations, location_copies
from prepcli.planning.state_names import PARAMS
from prepcli.planning.tensors import FileTensor, array_bits, itemsize
from prepcli.remote.placeholders import rename_in_errors
from prepcli.sources.decoded_arrays import DecodedArray
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.openers.flax_tree import read_flax_files
from prepcli.sources.openers.meta_folder import open_meta
from prepcli.sources.openers.orbax_item import find_config, stored_leaves
from prepcli.sources.openers.torch_folder import placement_of
from prepcli.sources.source import CONFIG, SourceTensor, read_config
from prepcli.sources.source_hints import NO_HINTS
from trainer.models.axis_map import Row
from trainer.models.parameters import Family, parameter_rows
from trainer.models.registry import FAMILIES

MAX_PATH_PARTS = 32  # of a name's parts: a name may be four million dots


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor or leaf, cut into equal chunks of which the last may reach beyond its edge; a tensor of a safetensors
    file is one chunk."""

    name: str
    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    chunks: Mapping[ChunkIndex, StoredRange]
    encoded_first_chunk: StoredValue | None = (
        None  # its first chunk as it is stored, where `chunks` are those of a blob
    )
    placement: Locations = ()  # where it lies as a whole, if that is not in chunks of its own

    @property
    def nbytes(self) -> int:
        return array_bits(self.dtype, self.shape) // 8

    @property
    def first_chunk(self) -> StoredRange | None:
        """Where its first chunk lies; None if that is in an index, or if there is none."""
        stored = (
            next(iter(self.chunks.values()), None) if self.encoded_first_chunk is None else self.encoded_first_chunk
        )
        return stored if isinstance(stored, StoredRange) else None


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """A checkpoint's entries in the order of its files, and what it says of itself; `config` is empty where it says
    nothing. `asides`: what a tree holds besides arrays."""

    display_name: str  # as messages call it
    kind: Kind
    folder: Path
    entries: tuple[TensorEntry, ...]
    files: tuple[Path, ...]
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    non_arrays: tuple[str, ...] = ()
    blobs: tuple[Path | Blob, ...] = ()  # what the entries' chunks lie in, where that is not `files`
    codecs: tuple[str, ...] = ()  # by which they are decoded

    @property
    def byte_sources(self) -> tuple[Path | Blob, ...]:
        return self.blobs or self.files

    @property
    def family(self) -> Family | None:
        """The family, if prep knows it."""
        return FAMILIES.get(str(self.config.get("model_type")))

    @property
    def num_chunks(self) -> int:
        return sum(len(entry.chunks) for entry in self.entries)


def read_contents(located: LocatedCheckpoint, display_name: str) -> CheckpointContents:
    """Read headers or index of what was located; PrepError names what is broken or not understood."""
    remote = located.remote
    if remote is None:
        return _read_local(located, display_name)
    with rename_in_errors(remote.placeholder_folder, display_name):
        contents = _read_local(located, display_name)
        return replace(contents, blobs=remote.blobs(contents.files, contents.blobs))


def _read_local(located: LocatedCheckpoint, name: str) -> CheckpointContents:
    if located.kind == "torch":
        return _read_torch(located.path, name)
    if located.kind == "meta":
        return _read_meta(located.path, name)
    if located.kind in ("flax", "easylm"):
        return _read_flax(located.path, name, located.kind)
    return _read_item(located.path, name) if located.kind == "orbax" else _read_folder(located.path, name)


def _read_folder(path: Path, name: str) -> CheckpointContents:
    folder = read_safetensors_folder(path)
    config = read_config(path / CONFIG) if (path / CONFIG).exists() else {}
    files = tuple(path / header.file_name for header in folder.headers)
    return CheckpointContents(
        name, "safetensors", path, tuple(map(_of_tensor, folder.tensors)), files, config, read_manifest(path) or {}
    )


def _of_tensor(tensor: FileTensor) -> TensorEntry:
    only = {(0,) * len(tensor.shape): StoredRange(tensor.file, tensor.offset, tensor.nbytes)}
    path = tuple(tensor.name.split(".", MAX_PATH_PARTS - 1))
    return TensorEntry(tensor.name, path, tensor.dtype, tensor.shape, tensor.shape, dict(only))


def _read_torch(path: Path, name: str) -> CheckpointContents:
    folder = read_torch_folder(path)
    config = read_config(path / CONFIG) if (path / CONFIG).exists() else {}
    entries = tuple(
        _of_side(t.name, t.dtype, t.shape, (placement_of(t, t.file),), (t.file, t.offset)) for t in folder.tensors
    )
    asides = tuple(f"{c.file_name}: {aside}" for c in folder.headers for aside in c.non_tensors)
    return CheckpointContents(name, "torch", path, entries, folder.files, config, {}, asides)


def _read_meta(path: Path, name: str) -> CheckpointContents:
    """Its tensors as they are together, by the names that Hugging Face has for them."""
    source = open_meta(path, name, NO_HINTS)
    at = [source.files.index(blob) for blob in source.byte_sources]  # of each blob the file that it is
    entries = tuple(_of_source(source.names.display_name(tensor.name), tensor, at) for tensor in source.tensors)
    return CheckpointContents(name, "meta", path, entries, source.files, source.config, {}, (), source.blobs)


def _of_source(name: str, tensor: SourceTensor, at: Sequence[int]) -> TensorEntry:
    first = next(location_copies(tensor.placement, tensor.shape, itemsize(tensor.dtype), ((0, 1),) * len(tensor.shape)))
    return _of_side(name, tensor.dtype, tensor.shape, tensor.placement, (at[first.file], first.file_offset))


def _of_side(name: str, dtype: str, shape: tuple[int, ...], side: Locations, first: tuple[int, int]) -> TensorEntry:
    """A tensor as one chunk, or where it lies; `first` is file and offset of its first element."""
    path, stored = tuple(name.split(".", MAX_PATH_PARTS - 1)), StoredRange(*first, array_bits(dtype, shape) // 8)
    if isinstance(flat := side[0], Contiguous):
        only = {(0,) * len(shape): StoredRange(flat.file, flat.offset, stored.nbytes)}
        return TensorEntry(name, path, dtype, shape, shape, dict(only), stored)
    return TensorEntry(name, path, dtype, shape, shape, {}, stored, side)


def _read_flax(path: Path, name: str, kind: msgpack.MsgpackKind) -> CheckpointContents:
    held = read_flax_files(path, kind)
    home = path if path.is_dir() else path.parent
    config = read_config(home / CONFIG) if (home / CONFIG).exists() else {}
    asides = tuple(str(aside) for document in held.documents for aside in document.non_arrays)
    manifest = (read_manifest(path) or {}) if path.is_dir() else {}
    entries = tuple(_of_flax(*place) for place in held.array_locations())
    return CheckpointContents(name, kind, path, entries, held.files, config, manifest, asides, held.blobs)


def _of_flax(array: msgpack.MsgpackArray, file: int, offset: int) -> TensorEntry:
    nbytes = sum(length for _, length in array.runs)
    only = {(0,) * len(array.shape): StoredRange(file, offset, nbytes)}
    return TensorEntry(".".join(array.path), array.path, array.dtype, array.shape, array.shape, dict(only))


def _read_item(path: Path, name: str) -> CheckpointContents:
    item = read_item(find_item(path) or path)
    manifest = read_manifest(find_manifest_folder(item.folder)) or {}
    blobs, _ = stored_leaves(item)
    at = {blob.array_number: number for number, blob in enumerate(blobs) if isinstance(blob, DecodedArray)}
    entries = tuple(_of_array(item, number, at.get(number)) for number in range(len(item.arrays)))
    config = manifest.get("config") or _config_of(item.folder, path)
    asides = (
        *map(_aside, item.non_arrays),
        *(f"{each} is in the index, but not in the tree" for each in item.unlisted_names),
    )
    return CheckpointContents(
        name, "orbax", item.folder, entries, item.files, config, manifest, asides, blobs, codec_names(item)
    )


def _config_of(folder: Path, path: Path) -> Mapping[str, Any]:
    found = find_config(folder, path)
    return read_config(found) if found else {}


def codec_names(item: OrbaxItem) -> tuple[str, ...]:
    """How chunks are compressed, by name."""
    return tuple(dict.fromkeys(step for steps in item.codec_names for step in steps if step != CRC32C))


def _of_array(item: OrbaxItem, number: int, blob: int | None) -> TensorEntry:
    meta, stored = item.arrays[number], item.chunks[number]
    if blob is None:
        first, chunks = None, {index: value for index, value in stored.items() if isinstance(value, StoredRange)}
    else:
        first, nbytes, count = next(iter(stored.values()), b""), meta.chunk_nbytes, math.prod(meta.grid)
        chunks = {unravel_chunk_index(meta.grid, at): StoredRange(blob, at * nbytes, nbytes) for at in range(count)}
    path = tuple(map(str, meta.path[: MAX_PATH_PARTS - 1]))
    rest = (dotted_name(meta.path[MAX_PATH_PARTS - 1 :]),) if len(meta.path) >= MAX_PATH_PARTS else ()
    return TensorEntry(meta.name, path + rest, meta.dtype, meta.shape, meta.chunk_shape, chunks, first)


def _aside(other: OrbaxNonArray) -> str:
    value = f"the text {other.text!r}" if other.value_type == "string" else f"an empty {other.value_type}"
    return f"{dotted_name(other.path)} is {value}"


def nbytes_below(contents: CheckpointContents, root: str) -> int:
    """Bytes of the entries in a part of the tree, as `opt_state`."""
    return sum(entry.nbytes for entry in contents.entries if entry.path[0] == root)


def count_parameters(contents: CheckpointContents) -> int | None:
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


def _parameters_of(family: Family, contents: CheckpointContents) -> int:
    shapes = {entry.name.removeprefix(family.prefix): entry.shape for entry in contents.entries}
    if family.is_tied(contents.config, shapes) and family.tying.embedding_tensor in shapes:
        shapes.pop(family.tying.head_tensor, None)
    table = parameter_rows(family, contents.config, tensors=shapes)
    pattern = re.compile("|".join(_pattern(row) for row in table.values()))
    return sum(math.prod(shape) for name, shape in shapes.items() if pattern.fullmatch(name))


def _pattern(row: Row) -> str:
    """What the names of a row's tensors look like; any number will do, so a wrong config does no harm."""
    return "".join(re.escape(part) if isinstance(part, str) else "[0-9]+" for part in row.name_parts)
