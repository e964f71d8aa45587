"""An Orbax item: an init checkpoint or a step of a training run that prep wrote, or what others saved."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from prepcli.engine.blobs import Blob
from prepcli.engine.digest import digest
from prepcli.errors import PrepError
from prepcli.formats.manifest import MANIFEST, OF_A_TREE, manifest_folder, read_manifest
from prepcli.formats.orbax import METADATA, find_item
from prepcli.formats.orbax_read import OrbaxItem, read_item
from prepcli.formats.orbax_store import Stored
from prepcli.formats.untrusted import read_small
from prepcli.planning.accounting import Names
from prepcli.planning.boxes import strides
from prepcli.planning.grids import Lattice, Places, Scatter
from prepcli.planning.moves import Region
from prepcli.planning.placing import Want, cells_together
from prepcli.planning.plan import SourceFile
from prepcli.sources.decoded import Decoded
from prepcli.sources.hints import Given
from prepcli.sources.source import CONFIG, HF_FOLDER, Source, SourceTensor, read_config, small_files
from prepcli.sources.tree_tensors import HeldLeaf, foreign_tensors, tree_tensors
from trainer.models.registry import family_of

MOST_FILES = 200  # that are open at once; of more, each is opened when it is read
OF_A_MODEL = {
    *("added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "special_tokens_map.json"),
    *("spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
}  # beside a config.json in a folder that holds other things too


def open_item(path: Path, name: str, given: Given) -> Source:
    """Read index, settings and manifest of the item that `path` means. PrepError names what is broken or unknown."""
    folder = find_item(path) or path
    home = manifest_folder(folder)
    item, manifest = read_item(folder), read_manifest(home)
    if manifest is None:
        return _foreign(item, path, name, given)
    if manifest["kind"] not in OF_A_TREE:
        why = f"its {MANIFEST} says that it is a Hugging Face folder"
        raise PrepError(f"{name} is not what it says", why, "`prep inspect` shows what it holds")
    config = manifest["config"]
    names = Names(family_of(config), bool(manifest["prefixed"]))
    blobs, leaves = held_leaves(item)
    tensors, state = (tuple(sorted(found, key=_position)) for found in tree_tensors(leaves, names, manifest, folder))
    facts = _facts(item, read_small(home / MANIFEST))
    small, files = small_files(folder / HF_FOLDER), _files(item)
    return Source(name, home, names.family, config, names, tensors, files, facts, small, manifest, (), state, blobs)


def _foreign(item: OrbaxItem, path: Path, name: str, given: Given) -> Source:
    """What Orbax saved for others: the config is beside it or given, the layout is found by names and shapes."""
    config_path = given.config.expanduser() if given.config else config_beside(item.folder, path)
    if config_path is None:
        why = f"it has no {MANIFEST}, and no {CONFIG} is in it or beside it: nothing says what model it is of"
        raise PrepError(f"{name} was not written by prep", why, f"`--config FOLDER`, the one with the model's {CONFIG}")
    config_path = config_path / CONFIG if config_path.is_dir() else config_path
    config = read_config(config_path)
    blobs, leaves = held_leaves(item)
    found = foreign_tensors(leaves, family_of(config), config, name)
    tensors = tuple(sorted(found.tensors, key=_position))
    facts = _facts(item, read_small(config_path))
    small = tuple(p for p in small_files(config_path.parent) if p.name in OF_A_MODEL)
    return Source(
        name=name,
        root=item.folder,
        family=found.names.family,
        config=config,
        names=found.names,
        tensors=tensors,
        files=_files(item),
        facts=facts,
        small_files=small,
        manifest=None,
        blobs=blobs,
        beside=found.beside,
    )


def config_beside(folder: Path, path: Path) -> Path | None:
    """The config.json in an item, in a folder above it up to that which holds `path`, or in the `hf` of such a one."""
    folder, top = folder.absolute(), path.absolute().parent
    roots = [folder, *(parent for parent in folder.parents if top in (parent, *parent.parents))]
    places = (root / sub / CONFIG for root in roots for sub in ("", HF_FOLDER))
    return next((place for place in places if place.is_file()), None)


def _facts(item: OrbaxItem, settings: bytes) -> tuple[SourceFile, ...]:
    stamp = digest(item.stamp.encode() + settings)
    stats = ((path, path.stat()) for path in _files(item))
    return tuple(
        SourceFile(str(path.relative_to(item.folder)), stat.st_size, stat.st_mtime_ns, stamp) for path, stat in stats
    )


def _files(item: OrbaxItem) -> tuple[Path, ...]:
    """The files that are watched for changes: a small item may have all that it holds in its index."""
    return item.files or (item.folder / METADATA,)


def held_leaves(item: OrbaxItem) -> tuple[tuple[Path | Blob, ...], dict[str, HeldLeaf]]:
    """The leaves by dotted name, and what their places number: data files, then arrays that are not in them as they
    are; nothing where it is the item's files alone."""
    direct = [is_direct(item, number) for number in range(len(item.arrays))]
    blobs: list[Path | Blob] = [*item.files] if any(direct) else []
    leaves: dict[str, HeldLeaf] = {}
    for number, meta in enumerate(item.arrays):
        places: Callable[[Want], Places] = partial(_places, item, number)
        if not direct[number]:
            zeros = (0,) * len(meta.shape)
            lattice = Lattice(len(blobs), 0, zeros, strides(meta.grid, meta.chunk_nbytes))
            places = partial(_within, lattice)
            blobs.append(Decoded(item, number))
        leaves[meta.name] = HeldLeaf(meta.shape, meta.dtype, meta.chunk, places)
    return (() if all(direct) else tuple(blobs)), leaves


def is_direct(item: OrbaxItem, number: int) -> bool:
    """Whether an array's chunks lie in data files as they are, all of them, and those can be open together."""
    chunks = item.chunks[number]
    return (
        len(item.files) <= MOST_FILES
        and not item.steps[number]
        and len(chunks) == math.prod(item.arrays[number].grid)
        and all(isinstance(stored, Stored) for stored in chunks.values())
    )


def _within(lattice: Lattice, want: Want) -> Lattice:
    """The part of a lattice that holds a tensor, which tells where it begins."""
    first, _ = cells_together(want)
    file, offset = lattice.find(first)
    return Lattice(file, offset, first, lattice.strides)


def _position(tensor: SourceTensor) -> tuple[int, int]:
    part = tensor.side[0]
    assert isinstance(part, Region)
    return (p.file, p.offset) if isinstance(p := part.places, Lattice) else min(p.chunks.values())


def _places(item: OrbaxItem, number: int, want: Want) -> Places:
    """Where the chunks of a tensor lie: one formula where they lie regularly, as prep writes them, else one by one."""
    first, stop = cells_together(want)
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for index in itertools.product(*(range(low, high) for low, high in zip(first, stop))):
        stored = item.chunks[number][index]
        assert isinstance(stored, Stored)  # is_direct
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
