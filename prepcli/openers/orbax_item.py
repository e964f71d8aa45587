"""An Orbax item that prep wrote: an init checkpoint, or a step of a training run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from prepcli.accounting import Names
from prepcli.boxes import strides
from prepcli.digest import digest
from prepcli.errors import PrepError
from prepcli.formats.orbax import find_item
from prepcli.formats.orbax_read import OrbaxItem, Stored, read_item
from prepcli.grids import Lattice, Places, Scatter
from prepcli.held import HeldLeaf, tree_tensors
from prepcli.manifest import MANIFEST, OF_A_TREE, manifest_folder, read_manifest
from prepcli.moves import Region
from prepcli.placing import Want, cells_together
from prepcli.plan import SourceFile
from prepcli.sources import HF_FOLDER, Source, SourceTensor, small_files
from trainer.families import family_of


def open_item(path: Path, name: str) -> Source:
    """Read index, settings and manifest of the item that `path` means. PrepError names what is broken or unknown."""
    folder = find_item(path) or path
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
    part = tensor.side[0]
    if not isinstance(part, Region):
        return part.file, part.offset
    return (p.file, p.offset) if isinstance(p := part.places, Lattice) else min(p.chunks.values())


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
