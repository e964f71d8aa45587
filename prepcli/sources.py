"""A checkpoint seen as tensors, whatever holds them: what every conversion reads from."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.accounting import Names, Shaped, names_of
from prepcli.boxes import strides
from prepcli.digest import digest
from prepcli.errors import PrepError
from prepcli.formats import safetensors
from prepcli.formats.orbax import find_item
from prepcli.formats.orbax_read import OrbaxItem, Stored, read_item
from prepcli.grids import Grid, Lattice, Places, Scatter
from prepcli.manifest import MANIFEST, read_manifest
from prepcli.moves import Region
from prepcli.placing import Want, cells_together
from prepcli.plan import Flat, Side, SourceFile
from prepcli.tensors import ITEM_BITS, itemsize
from prepcli.vocabulary import Vocabulary, read_vocabulary
from trainer.axes import bind
from trainer.families import family_of
from trainer.table import Config, Family, rows

CONFIG = "config.json"
HF_FOLDER = "hf"  # in an init checkpoint: config, tokenizer and what else belongs to the model
INDEX_FILES = (safetensors.INDEX, "pytorch_model.bin.index.json")
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".msgpack", ".h5", ".gguf", ".onnx", ".ot", ".npz"}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor by its name in rows, where its bytes are, and the digests of its rows that a manifest records."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    side: Side
    digests: tuple[tuple[int, int, str], ...] = ()  # (first row, one past the last, digest)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint: tensors in the order in which they lie, data files by number, and what belongs to it."""

    name: str  # as messages call it
    root: Path
    family: Family
    config: Config
    names: Names
    tensors: tuple[SourceTensor, ...]
    files: tuple[Path, ...]
    facts: tuple[SourceFile, ...]
    small_files: tuple[Path, ...]
    manifest: Mapping[str, Any] | None
    file_names: tuple[str, ...] = ()  # of each tensor's file, for a Hugging Face folder

    def vocabulary(self, true: int | None = None) -> Vocabulary:
        """True and stored vocabulary; `true` is what the user says."""
        return read_vocabulary(self.config, self.family.sizes(self.config)["vocab"], true)

    def shaped(self) -> dict[str, Shaped]:
        """Name -> shape of every tensor."""
        return {t.name: Shaped(t.dtype, t.shape, t.nbytes) for t in self.tensors}


def open_source(path: Path, name: str) -> Source:
    """Read headers and settings of a checkpoint, no weights. PrepError names what is broken or not understood."""
    item = find_item(path)
    return _open_item(item, name) if item else _open_folder(path, name)


def read_config(path: Path) -> dict[str, Any]:
    """A config.json; PrepError where it is missing or no JSON object."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise PrepError(f"{path.parent} has no {path.name}", "it says what model the weights are of") from None
    except (ValueError, RecursionError) as error:
        raise PrepError(f"{path} is broken", str(error)) from error
    if not isinstance(found, dict):
        raise PrepError(f"{path} is broken", "it holds no JSON object")
    return found


def _open_folder(path: Path, name: str) -> Source:
    folder = safetensors.read_folder(path)
    config = read_config(path / CONFIG)
    family = family_of(config)
    manifest = read_manifest(path)
    names = names_of(family, config, [t.name for t in folder.tensors])
    said = (manifest or {}).get("tensors", {})
    tensors = tuple(
        SourceTensor(names.bare(t.name), t.dtype, t.shape, (Flat(t.file, t.offset),), _said(said, t.name))
        for t in folder.tensors
    )
    facts = tuple(SourceFile(h.file_name, h.size, h.mtime_ns, h.digest) for h in folder.headers)
    files = tuple(path / h.file_name for h in folder.headers)
    held = tuple(h.file_name for h in folder.headers for _ in h.tensors)
    return Source(name, path, family, config, names, tensors, files, facts, _small_files(path), manifest, held)


def _said(tensors: Mapping[str, Any], name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((low, high, text) for low, high, text in tensors.get(name, {}).get("digests", ()))


def _small_files(folder: Path) -> tuple[Path, ...]:
    """What belongs to a model besides its weights: tokenizer, generation config, licence …; never code."""
    if not folder.is_dir():
        return ()
    skipped = {CONFIG, MANIFEST, *INDEX_FILES}
    return tuple(
        p
        for p in sorted(folder.iterdir())
        if p.is_file() and p.name not in skipped and p.suffix not in {*WEIGHTS, ".py"} and not p.name.startswith(".")
    )


def _open_item(folder: Path, name: str) -> Source:
    item, manifest = read_item(folder), read_manifest(folder)
    if manifest is None:
        why = f"it has no {MANIFEST}: the config, the family and the vocabulary are not known"
        raise PrepError(f"{name} was not written by prep", why, "`prep inspect` shows what it holds")
    config = manifest["config"]
    family = family_of(config)
    names = Names(family, bool(manifest["prefixed"]))
    tensors = sorted(_item_tensors(item, manifest, family, names), key=_position)
    stamp = (folder / "manifest.ocdbt").read_bytes() + (folder / MANIFEST).read_bytes()
    facts = tuple(
        SourceFile(str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns, digest(stamp))
        for p in item.files
    )
    small = _small_files(folder / HF_FOLDER)
    return Source(name, folder, family, config, names, tuple(tensors), item.files, facts, small, manifest)


def _position(tensor: SourceTensor) -> tuple[int, int]:
    region = tensor.side[0]
    if isinstance(region, Flat):
        return region.file, region.offset
    places = region.places
    return (places.file, places.offset) if isinstance(places, Lattice) else min(places.chunks.values())


def _item_tensors(item: OrbaxItem, manifest: Mapping[str, Any], family: Family, names: Names) -> Iterator[SourceTensor]:
    """The tensors that the leaves of an item hold, by the family's rows and the layout that the manifest names."""
    config = manifest["config"]
    sizes = family.sizes(config)
    arrays = {array.path: number for number, array in enumerate(item.arrays)}
    sides: dict[str, list[Region]] = {}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path, row in rows(family, config, manifest["scan"], manifest["scan_axis"]).items():
        if path == family.tie.leaf and manifest["tied"]:
            continue
        bound = bind(row, sizes)
        for name, at in bound.tensors():
            key = ("params", *path.format(**at).split("."))
            if key not in arrays:
                raise PrepError(f"{item.folder} lacks the leaf {'.'.join(key)}", "its manifest and its tree differ")
            meta = item.arrays[arrays[key]]
            if meta.shape != bound.leaf_shape:
                why = f"shape {list(meta.shape)}, its manifest's config makes it {list(bound.leaf_shape)}"
                raise PrepError(f"{item.folder}: the leaf {meta.name} is not what it should be", why)
            want = Want(meta.name, bound, tuple(at.items()), Grid(meta.shape, meta.chunk), itemsize(meta.dtype))
            region = Region(bound, want.at, want.grid, _places(item, arrays[key], want), want.itemsize)
            sides.setdefault(name, []).append(region)
            shapes[name] = meta.dtype, bound.source_shape
    said = manifest["tensors"]
    for name, regions in sides.items():
        dtype, shape = shapes[name]
        yield SourceTensor(name, dtype, shape, tuple(regions), _said(said, names.full(name)))


def _places(item: OrbaxItem, number: int, want: Want) -> Places:
    """Where the chunks of a tensor lie: one formula where they lie regularly, as prep writes them, else one by one."""
    first, stop = cells_together(want)
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for index in itertools.product(*(range(low, high) for low, high in zip(first, stop))):
        stored = item.chunks[number].get(index)
        if not isinstance(stored, Stored):
            why = "small arrays lie in its index, as TensorStore's own writer puts them"
            raise PrepError(f"{item.folder}: {want.leaf} is not in data files", why, "prep reads data files so far")
        found[index] = stored.file, stored.offset
    counts = [high - low for low, high in zip(first, stop)]
    return _regular(found, first, counts) or Scatter(found)


def _regular(
    found: Mapping[tuple[int, ...], tuple[int, int]], first: tuple[int, ...], counts: list[int]
) -> Lattice | None:
    places = list(found.values())
    step = places[1][1] - places[0][1] if len(places) > 1 else 0
    if any(place != (places[0][0], places[0][1] + i * step) for i, place in enumerate(places)):
        return None
    return Lattice(*places[0], first, strides(counts, step))
