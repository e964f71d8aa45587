"""Opener for Orbax items: init checkpoints and training steps of prep, and trees of other libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from prepcli.algebra.boxes import strides
from prepcli.algebra.grids import (
    StridedChunks,
)
from prepcli.core.errors import GET_AGAIN_HINT, Command, DamagedError, Option, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.core.json_values import HFConfig, quote_name
from prepcli.engine.digest import record_digest
from prepcli.formats.manifest import MANIFEST_FILE, NO_MANIFEST
from prepcli.formats.orbax import OrbaxItem, item_metadata_file, read_item
from prepcli.formats.orbax_chunks import dotted_name
from prepcli.models.manifest_family import manifest_family
from prepcli.models.parameters import Family
from prepcli.planning.arrays import Array
from prepcli.planning.item_storage import METADATA_FILE
from prepcli.planning.libraries import LayoutScale, recorded_scale
from prepcli.planning.manifest_fields import Manifest, ScaleRecord
from prepcli.planning.plan import DroppedTensor, SourceFile
from prepcli.sources.adam_state import (
    MomentTrees,
    add_item_state,
    match_moment_trees,
    with_state_item,
)
from prepcli.sources.decoded_arrays import decoded_array, unscaled_array
from prepcli.sources.foreign_trees import (
    ForeignTree,
    match_foreign_tree,
    split_tower_leaves,
    tensors_from_manifest,
    tower_tensors,
    verbatim_tensors,
)
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.model_family import FolderModel, select_family
from prepcli.sources.openers.tensor_files import make_source, with_recorded_digests
from prepcli.sources.references import CONFIG, SourceHints
from prepcli.sources.side_files import SideFile, SideFiles, find_side_files, matches_any
from prepcli.sources.source import (
    HF_FOLDER,
    Source,
    Wrapper,
    file_position,
    read_config,
)
from prepcli.sources.tensor_match import TensorNames
from prepcli.stores.buffers import Blob
from prepcli.stores.files import read_small_file, stat_file
from prepcli.stores.paths import AnyPath, is_remote

# The default limit of open files of a process is 1,024 on Linux and 256 on macOS.
# An item with more files opens each file when it is read.
MAX_OPEN_FILES = 200
# Rule that drops texts and empty containers.
NO_ARRAY_RULE = "not an array"
NO_SCALES: Mapping[str, LayoutScale] = MappingProxyType({})
# Small files of a model, in a folder that may contain unrelated files.
MODEL_FILES = {
    "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "special_tokens_map.json",
    "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
}  # fmt: skip


def read(located: LocatedCheckpoint, hints: SourceHints) -> Source:
    """Read the index, config and manifest of an Orbax item."""
    path = located.files.path
    manifest = located.manifest
    folder = located.item or path
    manifest_folder = located.manifest_folder
    item = read_item(folder)
    if manifest is None or manifest.is_for_trainer:
        if _has_state(hints, manifest):
            item = with_state_item(item)
        return _read_foreign_item(item, located, hints)
    if not manifest.is_tree:
        why = f"it is an Orbax item, its {MANIFEST_FILE} describes a Hugging Face folder"
        hint = text("{} shows its contents", Command("inspect"))
        raise PrepError(f"{located.display_name} has an invalid manifest", why, hint)
    names = TensorNames(manifest_family(manifest), manifest.prefixed)
    blobs, leaves = stored_leaves(item)
    leaves, tower_leaves = split_tower_leaves(leaves, manifest)
    params, state = tensors_from_manifest(leaves, names, manifest, folder)
    towers = tower_tensors(tower_leaves, names, manifest)
    side_files = find_side_files(folder / HF_FOLDER, hints.copied_files)
    config_path = folder / HF_FOLDER / CONFIG
    model = FolderModel(
        config_path if config_path.is_file() else None,
        manifest.config,
        names.family,
        names,
        side_files,
    )
    stamps = _file_stamps(item, read_small_file(manifest_folder / MANIFEST_FILE))
    params = sorted(params, key=file_position)
    source = make_source(located, model, params, _watched_files(item), stamps)
    wrapper: Wrapper | None = None
    recorded = manifest.towers
    if towers:
        wrapper = Wrapper(read_config(config_path), model.config)
    elif recorded is not None and "path" not in recorded and model.config_path is not None:
        # A multimodal model may have been saved without its towers. The item then still has its whole
        # config, while a training step has the config of the text part.
        stored_config = read_config(model.config_path)
        if stored_config.get("model_type") == recorded.get("model_type"):
            wrapper = Wrapper(stored_config, model.config)
    return replace(
        source,
        root=manifest_folder,
        state_tensors=tuple(sorted(state, key=file_position)),
        blobs=blobs,
        quantized=manifest.quantized,
        wrapper=wrapper,
        tower_tensors=tuple(sorted(towers, key=file_position)),
    )


def _read_foreign_item(item: OrbaxItem, located: LocatedCheckpoint, hints: SourceHints) -> Source:
    """Read an item in the layout of another library. The layout is detected from leaf names and shapes."""
    display_name = located.display_name
    manifest = located.manifest
    config_path = _find_foreign_config(item, located, hints)
    settings = b""
    config: HFConfig = {}
    if config_path is not None:
        config = read_config(config_path)
        settings = read_small_file(config_path)
    blobs, leaves = stored_leaves(item)
    types = {name: (leaf.dtype, leaf.shape) for name, leaf in leaves.items()}
    family = select_family(config, hints, types)
    names = TensorNames(family, is_prefixed=False)
    extra_entries: tuple[DroppedTensor, ...] = ()
    moments: MomentTrees | None = None
    scale_records: Mapping[str, ScaleRecord] = {}
    if family.is_verbatim:
        tensors = verbatim_tensors(leaves)
        extra_entries = tuple(
            DroppedTensor(dotted_name(entry.path), 0, NO_ARRAY_RULE) for entry in item.non_arrays
        )
    else:
        records = manifest or NO_MANIFEST
        match_trees = partial(_match_trees, family, config, display_name, hints, manifest)
        tree, moments = match_trees(leaves)
        # The scaled values of an output are read as they are stored, if the hints say so.
        kept = {"none": False, "rounded": bool(records.lost_values), "all": bool(records.scales)}
        if kept[hints.kept_scales]:
            scale_records = records.scales
            _check_scales(tree, moments, scale_records, display_name)
        elif tree.scales:
            # The layout is known only after the match. The leaves with a scale are then read through it.
            scales = _root_scales(tree, manifest, display_name)
            if moments is not None:
                scales |= moments.leaf_scales()
            blobs, leaves = stored_leaves(item, scales)
            tree, moments = match_trees(leaves)
        names = tree.names
        tensors = with_recorded_digests(tree.tensors, names, manifest, scale_records)
        extra_entries = tree.extra_entries
    model_files: list[SideFile] = []
    if config_path is not None:
        # The files of the model next to its config, e.g. the tokenizer, and those that match a pattern.
        for file in find_side_files(config_path.parent, hints.copied_files).copied:
            if file.name in MODEL_FILES or matches_any(file.name, hints.copied_files):
                model_files.append(file)
    side_files = SideFiles(tuple(model_files))
    source = make_source(
        located,
        FolderModel(config_path, config, family, names, side_files),
        sorted(tensors, key=file_position),
        _watched_files(item),
        _file_stamps(item, settings),
    )
    root = located.manifest_folder if manifest else item.folder
    source = replace(source, root=root, blobs=blobs, extra_entries=extra_entries)
    if moments is None:
        return source
    return add_item_state(source, moments, leaves, scale_records)


def _match_trees(
    family: Family,
    config: HFConfig,
    display_name: str,
    hints: SourceHints,
    manifest: Manifest | None,
    leaves: Mapping[str, Array],
) -> tuple[ForeignTree, MomentTrees | None]:
    """Match the leaves of an item with a layout. Return its parameters, and its moments if they are read."""
    records = manifest or NO_MANIFEST
    tree = match_foreign_tree(
        leaves, family, config, display_name, layout=hints.layout, manifest=records
    )
    if not _has_state(hints, manifest):
        return tree, None
    moments = match_moment_trees(
        leaves, family, config, display_name, manifest=records, layout=tree.format.layout
    )
    return tree, moments


def _has_state(hints: SourceHints, manifest: Manifest | None) -> bool:
    """Return whether to read the training state of an item: on request, and from an export with one."""
    if manifest is not None and "training_state" in manifest:
        return True
    return hints.training_state


def _find_foreign_config(
    item: OrbaxItem, located: LocatedCheckpoint, hints: SourceHints
) -> AnyPath | None:
    """Return the config.json of an item without prep's config. None if a verbatim source has none."""
    if hints.config_path:
        config_path = hints.config_path.expanduser()
    else:
        config_path = find_config(item.folder, located.files.path)
    if config_path is None and hints.verbatim is False:
        why = f"it has no {MANIFEST_FILE}, and no {CONFIG} in it or next to it describes the model"
        hint = text("{}: a folder with the model's {}", Option("config", "FOLDER"), CONFIG)
        raise PrepError(f"{located.display_name} was not written by prep", why, hint)
    if config_path is not None and config_path.is_dir():
        return config_path / CONFIG
    return config_path


def _root_scales(
    tree: ForeignTree, manifest: Manifest | None, display_name: str
) -> dict[str, LayoutScale]:
    """Return the scale of each leaf with one."""
    manifest = manifest or NO_MANIFEST
    records = manifest.scales
    if manifest.lost_values:
        lossy = {
            recorded_scale(record).description: None
            for record in records.values()
            if record["lost"]
        }
        why = f"its layout {' and '.join(lossy)}, which changed {count_text(manifest.lost_values, 'value')}"
        hint = text(
            "read the model that it was made from; {} checks the stored values",
            Command("verify", display_name),
        )
        raise PrepError(f"{display_name} cannot be converted back", why, hint)
    names = [tree.names.full_name(name) for name in tree.scaled_tensors]
    significant = {records[name]["significant"] for name in names if name in records}
    dtype = significant.pop() if len(significant) == 1 else ""
    return {leaf: replace(scale, significant=dtype) for leaf, scale in tree.scales.items()}


def _check_scales(
    tree: ForeignTree,
    moments: MomentTrees | None,
    records: Mapping[str, ScaleRecord],
    display_name: str,
) -> None:
    """Raise DamagedError if a manifest records other scales than its layout has."""
    scales = {tree.names.full_name(name): scale for name, scale in tree.scaled_tensors.items()}
    if moments is not None:
        scales |= moments.tensor_scales()
    for name, record in records.items():
        recorded = recorded_scale(record)
        if scales.get(name) != recorded:
            what = f"the manifest of {display_name} records another scale than its layout has"
            why = f"the values of {quote_name(name)} are said to be {recorded.formula}"
            raise DamagedError(what, why, GET_AGAIN_HINT)


def find_config(folder: AnyPath, path: AnyPath) -> AnyPath | None:
    """Return the config.json closest to an item, if there is one."""
    folder = folder.absolute()
    top = path.absolute().parent
    # The search ends at the parent of what the user named: a config.json further up may describe
    # another model.
    roots = [folder, *(parent for parent in folder.parents if top in (parent, *parent.parents))]
    for root in roots:
        for candidate in (root / CONFIG, root / HF_FOLDER / CONFIG):
            if candidate.is_file():
                return candidate
    return None


def _file_stamps(item: OrbaxItem, settings: bytes) -> tuple[SourceFile, ...]:
    """Return size and time of the watched files. Each has one digest, of the item's metadata and `settings`."""
    settings_digest = record_digest(item.metadata_digest.encode() + settings)
    stats = ((path, stat_file(path)) for path in _watched_files(item))
    return tuple(
        SourceFile(
            os.path.relpath(str(path), str(item.folder)),
            stat.st_size,
            stat.st_mtime_ns,
            settings_digest,
        )
        for path, stat in stats
    )


def _watched_files(item: OrbaxItem) -> tuple[AnyPath, ...]:
    """Return the files to watch for changes: data files, or the metadata of an item with all values in its index."""
    return item.files or (item.folder / (item_metadata_file(item.folder) or METADATA_FILE),)


def stored_leaves(
    item: OrbaxItem, scales: Mapping[str, LayoutScale] = NO_SCALES
) -> tuple[tuple[AnyPath | Blob, ...], dict[str, Array]]:
    """Return what the bytes of an item are read from, and its leaves.

    `scales` are taken off the values of leaves, by name.

    Returns:
        Byte sources: the data files, then one `DerivedArrays` per encoded array. The placement of a leaf states the
        number of its source in this tuple. The tuple is empty if the sources are just the item's files.
        Leaves, by dotted name.
    """
    direct: list[bool] = []
    for number, meta in enumerate(item.arrays):
        direct.append(meta.name not in scales and is_read_directly(item, number))
    # An item whose arrays are all encoded needs no numbers for its files: each array is a blob, and
    # opens the files of its chunks itself.
    blobs: list[AnyPath | Blob] = []
    if any(direct):
        blobs.extend(item.files)
    leaves: dict[str, Array] = {}
    for number, array in enumerate(item.arrays):
        leaves[array.name] = array
        if direct[number]:
            continue
        zeros = (0,) * len(array.shape)
        chunk_strides = strides(array.grid.chunk_counts, array.chunk_nbytes)
        decoded_chunks = StridedChunks(len(blobs), 0, zeros, chunk_strides)
        leaves[array.name] = replace(array, chunks=decoded_chunks, codecs=())
        if array.name in scales:
            blobs.append(unscaled_array(item, number, scales[array.name]))
        else:
            blobs.append(decoded_array(item, number))
    if all(direct):
        return (), leaves
    return tuple(blobs), leaves


def is_read_directly(item: OrbaxItem, array_number: int) -> bool:
    """Return whether all chunks of an array are uncompressed in a few data files. All of these can be open."""
    has_few_files = is_remote(item.files) or len(item.files) <= MAX_OPEN_FILES
    return has_few_files and item.arrays[array_number].is_direct
