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
from prepcli.formats.manifest import KEYS_BY_KIND, MANIFEST_FILE, find_manifest_folder, read_manifest
from prepcli.formats.orbax import METADATA_FILE, find_item
from prepcli.formats.orbax_read import OrbaxItem, read_item
from prepcli.formats.orbax_store import StoredRange
from prepcli.formats.untrusted import read_small_file
from prepcli.planning.accounting import TensorNames
from prepcli.planning.boxes import strides
from prepcli.planning.chunk_placement import LeafPiece, chunk_group
from prepcli.planning.grids import ExplicitPlacement, Placement, StridedPlacement
from prepcli.planning.plan import SourceFile
from prepcli.planning.strided_copies import Region
from prepcli.sources.decoded_arrays import DecodedArray
from prepcli.sources.source import CONFIG, HF_FOLDER, Source, SourceTensor, read_config, small_files
from prepcli.sources.source_hints import SourceHints
from prepcli.sources.tree_tensors import StoredLeaf, match_foreign_tree, tensors_from_manifest
from trainer.models.registry import family_of

MAX_OPEN_FILES = 200  # that are open at once; of more, each is opened when it is read
MODEL_FILES = {
    *("added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "special_tokens_map.json"),
    *("spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
}  # beside a config.json in a folder that holds other things too


def open_orbax(path: Path, display_name: str, hints: SourceHints) -> Source:
    """Read index, settings and manifest of the item that `path` means. PrepError names what is broken or unknown."""
    folder = find_item(path) or path
    home = find_manifest_folder(folder)
    item, manifest = read_item(folder), read_manifest(home)
    if manifest is None:
        return _foreign(item, path, display_name, hints)
    if manifest["kind"] not in KEYS_BY_KIND:
        why = f"its {MANIFEST_FILE} says that it is a Hugging Face folder"
        raise PrepError(f"{display_name} is not what it says", why, "`prep inspect` shows what it holds")
    config = manifest["config"]
    names = TensorNames(family_of(config), bool(manifest["prefixed"]))
    blobs, leaves = stored_leaves(item)
    tensors, state = (
        tuple(sorted(found, key=_position)) for found in tensors_from_manifest(leaves, names, manifest, folder)
    )
    facts = _facts(item, read_small_file(home / MANIFEST_FILE))
    small, files = small_files(folder / HF_FOLDER), _files(item)
    return Source(
        display_name, home, names.family, config, names, tensors, files, facts, small, manifest, (), state, blobs
    )


def _foreign(item: OrbaxItem, path: Path, name: str, given: SourceHints) -> Source:
    """What Orbax saved for others: the config is beside it or given, the layout is found by names and shapes."""
    config_path = given.config_path.expanduser() if given.config_path else find_config(item.folder, path)
    if config_path is None:
        why = f"it has no {MANIFEST_FILE}, and no {CONFIG} is in it or beside it: nothing says what model it is of"
        raise PrepError(f"{name} was not written by prep", why, f"`--config FOLDER`, the one with the model's {CONFIG}")
    config_path = config_path / CONFIG if config_path.is_dir() else config_path
    config = read_config(config_path)
    blobs, leaves = stored_leaves(item)
    found = match_foreign_tree(leaves, family_of(config), config, name)
    tensors = tuple(sorted(found.tensors, key=_position))
    facts = _facts(item, read_small_file(config_path))
    small = tuple(p for p in small_files(config_path.parent) if p.name in MODEL_FILES)
    return Source(
        display_name=name,
        root=item.folder,
        family=found.names.family,
        config=config,
        names=found.names,
        tensors=tensors,
        files=_files(item),
        file_stamps=facts,
        small_files=small,
        manifest=None,
        blobs=blobs,
        extra_entries=found.extra_entries,
    )


def find_config(folder: Path, path: Path) -> Path | None:
    """The config.json in an item, in a folder above it up to that which holds `path`, or in the `hf` of such a one."""
    folder, top = folder.absolute(), path.absolute().parent
    roots = [folder, *(parent for parent in folder.parents if top in (parent, *parent.parents))]
    places = (root / sub / CONFIG for root in roots for sub in ("", HF_FOLDER))
    return next((place for place in places if place.is_file()), None)


def _facts(item: OrbaxItem, settings: bytes) -> tuple[SourceFile, ...]:
    stamp = digest(item.metadata_digest.encode() + settings)
    stats = ((path, path.stat()) for path in _files(item))
    return tuple(
        SourceFile(str(path.relative_to(item.folder)), stat.st_size, stat.st_mtime_ns, stamp) for path, stat in stats
    )


def _files(item: OrbaxItem) -> tuple[Path, ...]:
    """The files that are watched for changes: a small item may have all that it holds in its index."""
    return item.files or (item.folder / METADATA_FILE,)


def stored_leaves(item: OrbaxItem) -> tuple[tuple[Path | Blob, ...], dict[str, StoredLeaf]]:
    """The leaves by dotted name, and what their places number: data files, then arrays that are not in them as they
    are; nothing where it is the item's files alone."""
    direct = [is_read_directly(item, number) for number in range(len(item.arrays))]
    blobs: list[Path | Blob] = [*item.files] if any(direct) else []
    leaves: dict[str, StoredLeaf] = {}
    for number, meta in enumerate(item.arrays):
        places: Callable[[LeafPiece], Placement] = partial(_places, item, number)
        if not direct[number]:
            zeros = (0,) * len(meta.shape)
            lattice = StridedPlacement(len(blobs), 0, zeros, strides(meta.grid, meta.chunk_nbytes))
            places = partial(_within, lattice)
            blobs.append(DecodedArray(item, number))
        leaves[meta.name] = StoredLeaf(meta.shape, meta.dtype, meta.chunk_shape, places)
    return (() if all(direct) else tuple(blobs)), leaves


def is_read_directly(item: OrbaxItem, array_number: int) -> bool:
    """Whether an array's chunks lie in data files as they are, all of them, and those can be open together."""
    chunks = item.chunks[array_number]
    return (
        len(item.files) <= MAX_OPEN_FILES
        and not item.codec_names[array_number]
        and len(chunks) == math.prod(item.arrays[array_number].grid)
        and all(isinstance(stored, StoredRange) for stored in chunks.values())
    )


def _within(lattice: StridedPlacement, want: LeafPiece) -> StridedPlacement:
    """The part of a lattice that holds a tensor, which tells where it begins."""
    first, _ = chunk_group(want)
    file, offset = lattice.find(first)
    return StridedPlacement(file, offset, first, lattice.strides)


def _position(tensor: SourceTensor) -> tuple[int, int]:
    part = tensor.placement[0]
    assert isinstance(part, Region)
    return (p.file, p.offset) if isinstance(p := part.placement, StridedPlacement) else min(p.chunks.values())


def _places(item: OrbaxItem, number: int, want: LeafPiece) -> Placement:
    """Where the chunks of a tensor lie: one formula where they lie regularly, as prep writes them, else one by one."""
    first, stop = chunk_group(want)
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for index in itertools.product(*(range(low, high) for low, high in zip(first, stop))):
        stored = item.chunks[number][index]
        assert isinstance(stored, StoredRange)  # is_direct
        found[index] = stored.file, stored.offset
    counts = [high - low for low, high in zip(first, stop)]
    return _regular(found, first, counts) or ExplicitPlacement(found)


def _regular(
    found: Mapping[tuple[int, ...], tuple[int, int]], first: tuple[int, ...], counts: list[int]
) -> StridedPlacement | None:
    places = list(found.values())
    if not places:
        return None
    step = places[1][1] - places[0][1] if len(places) > 1 else 0
    if any(place != (places[0][0], places[0][1] + i * step) for i, place in enumerate(places)):
        return None
    return StridedPlacement(*places[0], first, strides(counts, step))
