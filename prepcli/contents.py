"""What a checkpoint holds as it is stored: names, shapes, dtypes and places. Needs no family and reads no weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.blobs import Blob
from prepcli.detect import Kind
from prepcli.formats.orbax import ArrayMeta, Other, dotted, find_item
from prepcli.formats.orbax_read import Chunks, Stored, read_item
from prepcli.formats.safetensors import read_folder
from prepcli.locate import Located
from prepcli.manifest import manifest_folder, read_manifest
from prepcli.slots import PARAMS
from prepcli.sources import CONFIG, read_config
from prepcli.tensors import Tensor, bits_of
from trainer.axes import Row
from trainer.families import FAMILIES
from trainer.table import Family, rows

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
    chunks: Chunks

    @property
    def nbytes(self) -> int:
        return bits_of(self.dtype, self.shape) // 8

    @property
    def first(self) -> Stored | None:
        """Where its first chunk lies; None if that is in an index, or if there is none."""
        stored = next(iter(self.chunks.values()), None)
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


def _read_item(path: Path, name: str) -> Contents:
    item = read_item(find_item(path) or path)
    manifest = read_manifest(manifest_folder(item.folder)) or {}
    entries = tuple(_of_array(meta, chunks) for meta, chunks in zip(item.arrays, item.chunks))
    asides = (*map(_aside, item.others), *(f"{each} is in the index, but not in the tree" for each in item.unlisted))
    return Contents(name, "orbax", item.folder, entries, item.files, manifest.get("config", {}), manifest, asides)


def _of_array(meta: ArrayMeta, chunks: Chunks) -> Entry:
    path = tuple(map(str, meta.path[: MAX_DEPTH - 1]))
    rest = (dotted(meta.path[MAX_DEPTH - 1 :]),) if len(meta.path) >= MAX_DEPTH else ()
    return Entry(meta.name, path + rest, meta.dtype, meta.shape, meta.chunk, chunks)


def _aside(other: Other) -> str:
    value = f"the text {other.text!r}" if other.value_type == "string" else f"an empty {other.value_type}"
    return f"{dotted(other.path)} is {value}"


def nbytes_below(contents: Contents, root: str) -> int:
    """Bytes of the entries in a part of the tree, as `opt_state`."""
    return sum(entry.nbytes for entry in contents.entries if entry.path[0] == root)


def parameters(contents: Contents) -> int | None:
    """Values of the model's parameters, without buffers, copies of tied ones and optimizer state; None where prep does
    not know which these are."""
    family = contents.family
    if family is None:
        return None
    if contents.kind == "orbax":
        return sum(math.prod(entry.shape) for entry in contents.entries if entry.path[0] == PARAMS)
    shapes = {entry.name.removeprefix(family.prefix): entry.shape for entry in contents.entries}
    if family.tied(contents.config) and family.tie.embedding in shapes:
        shapes.pop(family.tie.tensor, None)
    patterns = [_pattern(row) for row in rows(family, contents.config).values()]
    return sum(math.prod(shape) for name, shape in shapes.items() if any(p.fullmatch(name) for p in patterns))


def _pattern(row: Row) -> re.Pattern[str]:
    """What the names of a row's tensors look like; any number will do, so a wrong config does no harm."""
    return re.compile("".join(re.escape(part) if isinstance(part, str) else "[0-9]+" for part in row.name))
