"""Opener for Flax msgpack files and EasyLM streams. The tree layout is detected from the leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from prepcli.core.errors import GET_AGAIN_HINT, PrepError
from prepcli.formats import safetensors
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.model_files import ModelFiles, shard_name
from prepcli.formats.msgpack import MsgpackKind, MsgpackNonArray, read_flax_files
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.tensors import PARAMS, TRAINING_STATE_RULE
from prepcli.sources.dropped_tensors import unindexed_entries
from prepcli.sources.foreign_trees import ForeignTree, match_foreign_tree, verbatim_tensors
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.model_family import FolderModel, find_config_path, select_family
from prepcli.sources.openers.hf_folder import make_source, with_recorded_digests
from prepcli.sources.references import (
    CONFIG,
    FLAX_PARAMS,
    TRAIN_STATE_PARTS,
    SourceHints,
    split_part,
)
from prepcli.sources.side_files import SideFile, find_side_files, matches_any
from prepcli.sources.source import Source, file_position, file_stamps
from prepcli.sources.tensor_match import TensorNames

# Suffixes of a model's small files. The folder may have files of any name.
SETTINGS_SUFFIXES = {
    ".json",
    ".txt",
    ".model",
    ".jinja",
    ".md",
}


def read(located: LocatedCheckpoint, hints: SourceHints) -> Source:
    """Read the headers and the config of a Flax file or an EasyLM stream, or of a folder with such files."""
    path = located.files.path
    display_name = located.display_name
    kind: MsgpackKind = "easylm" if located.kind == "easylm" else "flax"
    _check_kind(kind, hints, display_name)
    folder = path if path.is_dir() else path.parent
    config_path = find_config_path(hints, folder, display_name)
    config = located.read_config(config_path) if config_path else {}
    stored = read_flax_files(path, kind)
    leaves = {array.name: array for array in stored.tensors}
    if len(leaves) < len(stored.tensors):
        counts = Counter(array.name for array in stored.tensors)
        why = f"two leaves are named {counts.most_common(1)[0][0]}"
        raise PrepError(f"{display_name} has a leaf twice", why, GET_AGAIN_HINT)
    types = {name: (leaf.dtype, leaf.shape) for name, leaf in leaves.items()}
    family = select_family(config, hints, types)
    names = TensorNames(family, is_prefixed=False)
    extra_entries: tuple[DroppedTensor, ...] = ()
    if family.is_verbatim:
        tree_tensors = verbatim_tensors(leaves)
    else:
        manifest = located.manifest or NO_MANIFEST
        tree = match_foreign_tree(
            leaves, family, config, display_name, layout=hints.layout, manifest=manifest
        )
        if tree.scales:
            why = f"its tree is that of {tree.format.layout}, which prep reads from Orbax items"
            raise PrepError(f"{display_name} is not supported", why, "save it with Orbax")
        _check_easylm_prefix(tree, hints, display_name)
        names = tree.names
        tree_tensors = tree.tensors
        extra_entries = (*tree.extra_entries, *_extra_scalars(stored, tree))
    tensors = with_recorded_digests(tree_tensors, names, located.manifest)
    # `trainstate_params::` asks for the parameters, so leaving the rest is no loss to report.
    if hints.part == "trainstate_params":
        extra_entries = ()
    side_files = find_side_files((config_path or folder / CONFIG).parent, hints.copied_files)
    copied = _settings_files(side_files.copied, hints, has_config=config_path is not None)
    side_files = replace(side_files, copied=copied)
    if config_path is None:
        side_files = replace(side_files, left=(), omitted=())
    model = FolderModel(config_path, config, family, names, side_files)
    source = make_source(located, model, tensors, stored.files, file_stamps(stored.headers))
    count = len(stored.files)
    file_names = [safetensors.SINGLE_FILE]
    if count > 1:
        numbers = range(1, count + 1)
        file_names = [shard_name("model", n, count, safetensors.SUFFIX) for n in numbers]
    return replace(
        source,
        tensor_file_names=tuple(file_names[file_position(tensor)[0]] for tensor in tensors),
        extra_entries=(*extra_entries, *unindexed_entries(stored.unindexed)),
    )


def _settings_files(
    files: Iterable[SideFile], hints: SourceHints, *, has_config: bool
) -> tuple[SideFile, ...]:
    """Return the small files of a model, and the ones that the user asks for.

    The folder of a file without a config may have files of any kind.
    """
    settings: list[SideFile] = []
    for file in files:
        is_setting = file.path.suffix in SETTINGS_SUFFIXES and (has_config or file.is_at_top)
        if is_setting or matches_any(file.name, hints.copied_files):
            settings.append(file)
    return tuple(settings)


def _extra_scalars(stored: ModelFiles, tree: ForeignTree) -> Iterator[DroppedTensor]:
    """Yield the scalar entries of a training state, such as the step number."""
    listed_names = {entry.name for entry in tree.extra_entries}
    if not tree.format.root:
        return
    for header in stored.headers:
        for entry in header.others:
            assert isinstance(entry, MsgpackNonArray)
            key = entry.path[0] if entry.path else PARAMS
            if key not in listed_names and key != PARAMS:
                listed_names.add(key)
                yield DroppedTensor(key, 0, TRAINING_STATE_RULE)


def _check_easylm_prefix(tree: ForeignTree, hints: SourceHints, display_name: str) -> None:
    """Raise PrepError if the contents contradict the EasyLM prefix of the path."""
    path = split_part(display_name)[1]
    if hints.part in TRAIN_STATE_PARTS and not tree.extra_entries:
        raise PrepError(
            f"{display_name} is not a training state",
            "it holds only parameters",
            f"`params::{path}`",
        )
    if hints.part and hints.part not in TRAIN_STATE_PARTS and tree.extra_entries:
        why = f"it also has {', '.join(entry.name for entry in tree.extra_entries[:4])}"
        raise PrepError(f"{display_name} is a training state", why, f"`trainstate_params::{path}`")


def _check_kind(kind: MsgpackKind, hints: SourceHints, display_name: str) -> None:
    """Raise PrepError if the file's format contradicts the EasyLM prefix of the path."""
    path = split_part(display_name)[1]
    if kind == "flax" and hints.part not in ("", FLAX_PARAMS):
        raise PrepError(
            f"{display_name} is not an EasyLM stream",
            "it is one Flax msgpack map",
            f"`{FLAX_PARAMS}::{path}`",
        )
    if kind == "easylm" and hints.part == FLAX_PARAMS:
        raise PrepError(
            f"{display_name} is not a Flax msgpack file",
            "it is an EasyLM stream",
            f"`params::{path}`",
        )
