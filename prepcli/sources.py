"""A checkpoint seen as tensors, whatever holds them: what every conversion reads from."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prepcli.accounting import Account, Names, Shaped, Wishes, account, names_of
from prepcli.boxes import strides
from prepcli.digest import digest
from prepcli.errors import PrepError
from prepcli.formats import safetensors
from prepcli.formats.orbax import find_item
from prepcli.formats.orbax_read import OrbaxItem, Stored, read_item
from prepcli.grids import Grid, Lattice, Places, Scatter
from prepcli.manifest import MANIFEST, OF_A_TREE, manifest_folder, read_manifest
from prepcli.moves import Region
from prepcli.placing import Want, cells_together
from prepcli.plan import Flat, Side, SourceFile
from prepcli.slots import PARAMS, alone, joined, parted, slots_of
from prepcli.tensors import ITEM_BITS, itemsize
from prepcli.vocabulary import Vocabulary, read_vocabulary
from trainer.axes import AxisMap, Row, bind
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
    """An opened checkpoint: tensors in the order in which they lie, data files by number, and what belongs to it.

    `state`: what a training checkpoint holds besides parameters, named as `slots` has it.
    """

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
    state: tuple[SourceTensor, ...] = ()

    @property
    def everything(self) -> tuple[SourceTensor, ...]:
        """Parameters, and what else a training checkpoint holds."""
        return *self.tensors, *self.state

    def shown_names(self) -> dict[str, str]:
        """How each tensor is called outside of prep."""
        shown = {t.name: self.names.full(t.name) for t in self.tensors}
        for slot, name in (parted(t.name) for t in self.state):
            shown[joined(slot, name)] = joined(slot, self.names.full(name)) if slot else name
        return shown

    def vocabulary(self, true: int | None = None) -> Vocabulary:
        """True and stored vocabulary; `true` is what the user says."""
        return read_vocabulary(self.config, self.family.sizes(self.config)["vocab"], true)

    def shaped(self) -> dict[str, Shaped]:
        """Name -> shape of every tensor."""
        return {t.name: Shaped(t.dtype, t.shape, t.nbytes) for t in self.tensors}


@dataclass(frozen=True, slots=True)
class HeldLeaf:
    """A leaf that is read: its chunks, and where those that hold a tensor are."""

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    places: Callable[[Want], Places]


def counted(source: Source, table: Mapping[str, Row], wishes: Wishes) -> Account:
    """Which row has which tensor of the source."""
    sizes = source.family.sizes(source.config)
    return account(source.names, source.config, sizes, table, source.shaped(), wishes, source.name)


def table_of(source: Source, scan: bool = True, scan_axis: int = 0) -> dict[str, Row]:
    """The rows of the source's family for its config."""
    return rows(source.family, source.config, scan, scan_axis, {t.name for t in source.tensors})


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
    return Source(name, path, family, config, names, tensors, files, facts, small_files(path), manifest, held)


def _said(tensors: Mapping[str, Any], name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((low, high, text) for low, high, text in tensors.get(name, {}).get("digests", ()))


def small_files(folder: Path) -> tuple[Path, ...]:
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
    home = manifest_folder(folder)
    item, manifest = read_item(folder), read_manifest(home)
    if manifest is None or manifest["kind"] not in OF_A_TREE:
        why = f"it has no {MANIFEST}: the config, the family and the vocabulary are not known"
        raise PrepError(f"{name} was not written by prep", why, "`prep inspect` shows what it holds")
    config = manifest["config"]
    names = Names(family_of(config), bool(manifest["prefixed"]))
    leaves = {
        meta.name: HeldLeaf(meta.shape, meta.dtype, meta.chunk, partial(_places, item, number))
        for number, meta in enumerate(item.arrays)
    }
    tensors, state = (tuple(sorted(found, key=_position)) for found in tree_tensors(leaves, names, manifest, folder))
    stamp = (folder / "manifest.ocdbt").read_bytes() + (home / MANIFEST).read_bytes()
    facts = tuple(
        SourceFile(str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns, digest(stamp))
        for p in item.files
    )
    small = small_files(folder / HF_FOLDER)
    return Source(name, home, names.family, config, names, tensors, item.files, facts, small, manifest, state=state)


def _position(tensor: SourceTensor) -> tuple[int, int]:
    region = tensor.side[0]
    if isinstance(region, Flat):
        return region.file, region.offset
    places = region.places
    return (places.file, places.offset) if isinstance(places, Lattice) else min(places.chunks.values())


def tree_tensors(
    leaves: Mapping[str, HeldLeaf], names: Names, manifest: Mapping[str, Any], where: object
) -> tuple[tuple[SourceTensor, ...], tuple[SourceTensor, ...]]:
    """The tensors that leaves, by dotted name, hold by the layout that a manifest names: those of the parameters, and
    of the rest of a training state. PrepError for a parameter that is not there, or not of its shape."""
    tree = _Tree(leaves, names, manifest)
    for path, bound, _, _ in tree.parts:
        leaf = leaves.get(f"{PARAMS}.{path}")
        if leaf is None:
            raise PrepError(f"{where} lacks the leaf {PARAMS}.{path}", "its manifest and its tree differ")
        if leaf.shape != bound.leaf_shape:
            why = f"shape {list(leaf.shape)}, its manifest's config makes it {list(bound.leaf_shape)}"
            raise PrepError(f"{where}: the leaf {PARAMS}.{path} is not what it should be", why)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    slots = slots_of(shapes, {path: bound.leaf_shape for path, bound, _, _ in tree.parts})
    of_slots = [tensor for slot in slots for tensor in tree.slot(slot)]
    taken = {f"{slot}.{path}" for slot in (PARAMS, *slots) for path, _, _, _ in tree.parts}
    return tuple(tree.slot(PARAMS)), (*of_slots, *(tree.alone(name) for name in leaves if name not in taken))


class _Tree:
    """Leaves with the rows that say what they hold: `parts` has the path, row, tensor and indices of each piece."""

    def __init__(self, leaves: Mapping[str, HeldLeaf], names: Names, manifest: Mapping[str, Any]) -> None:
        self._leaves, self._names, self._manifest = leaves, names, manifest
        family, config = names.family, manifest["config"]
        sizes = family.sizes(config)
        table = rows(family, config, manifest["scan"], manifest["scan_axis"])
        bound = {
            path: bind(row, sizes) for path, row in table.items() if path != family.tie.leaf or not manifest["tied"]
        }
        self.parts = [
            (path.format(**at), row, tensor, tuple(at.items()))
            for path, row in bound.items()
            for tensor, at in row.tensors()
        ]

    def slot(self, slot: str) -> Iterator[SourceTensor]:
        """The tensors of a slot, in the order of its leaves."""
        said = self._manifest["tensors"] if slot == PARAMS else self._manifest.get("slots", {}).get(slot, {})
        found: dict[str, SourceTensor] = {}
        for path, row, name, at in self.parts:
            dtype, region = self._region(f"{slot}.{path}", row, at)
            sides = (*found[name].side, region) if name in found else (region,)
            digests = _said(said, self._names.full(name))
            found[name] = SourceTensor(joined(slot, name), dtype, row.source_shape, sides, digests)
        yield from found.values()

    def alone(self, name: str) -> SourceTensor:
        """A leaf that belongs to no parameter."""
        shape = self._leaves[name].shape
        dtype, region = self._region(name, alone(name, shape), ())
        return SourceTensor(joined("", name), dtype, shape, (region,), _said(self._manifest.get("others", {}), name))

    def _region(self, name: str, row: AxisMap, at: tuple[tuple[str, int], ...]) -> tuple[str, Region]:
        leaf = self._leaves[name]
        want = Want(name, row, at, Grid(leaf.shape, leaf.chunk), itemsize(leaf.dtype))
        return leaf.dtype, Region(row, at, want.grid, leaf.places(want), want.itemsize)


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
    if not places:
        return None
    step = places[1][1] - places[0][1] if len(places) > 1 else 0
    if any(place != (places[0][0], places[0][1] + i * step) for i, place in enumerate(places)):
        return None
    return Lattice(*places[0], first, strides(counts, step))
