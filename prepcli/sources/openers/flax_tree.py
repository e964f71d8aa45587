"""Openers for Flax msgpack files and EasyLM streams. The tree layout is detected from the leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat

from prepcli.core.errors import GET_AGAIN_HINT, PrepError
from prepcli.formats import safetensors
from prepcli.formats.flax_folder import find_weight_files, select_indexed
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.msgpack import MsgpackHeader, MsgpackKind, read_msgpack_header
from prepcli.formats.shard_index import UnindexedTensor, shard_name
from prepcli.planning.arrays import Array
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import DroppedTensor, SourceFile
from prepcli.planning.tensor_match import TensorNames
from prepcli.planning.tensors import PARAMS, TRAINING_STATE_RULE
from prepcli.sources.dropped_tensors import unindexed_entries
from prepcli.sources.foreign_trees import (
    ForeignTree,
    match_foreign_tree,
    verbatim_tensors,
)
from prepcli.sources.model_family import find_config_path, select_family
from prepcli.sources.references import FLAX_PARAMS, TRAIN_STATE_PARTS, SourceHints, split_part
from prepcli.sources.side_files import SideFile, find_side_files, matches_any
from prepcli.sources.source import (
    CONFIG,
    Source,
    SourceTensor,
    file_position,
    read_config,
    recorded_digests,
)
from prepcli.stores.paths import AnyPath, map_files

# Suffixes of a model's small files. The folder may have files of any name.
SETTINGS_SUFFIXES = {
    ".json",
    ".txt",
    ".model",
    ".jinja",
    ".md",
}


def open_flax(
    path: AnyPath, display_name: str, hints: SourceHints, manifest: Manifest | None
) -> Source:
    """Read the headers and config of a Flax msgpack file, or of a folder with such files.

    Args:
        path: The file or folder.
        display_name: Name of the checkpoint in messages.
        hints: User-supplied facts about the checkpoint.
        manifest: Manifest of an output of prep, else None.

    Raises:
        PrepError: A file is broken or not supported.
    """
    return _open_tree(path, display_name, hints, "flax", manifest)


def open_easylm(
    path: AnyPath, display_name: str, hints: SourceHints, manifest: Manifest | None
) -> Source:
    """Read the header and config of an EasyLM stream, or of a folder with one. Arguments as for `open_flax`."""
    return _open_tree(path, display_name, hints, "easylm", manifest)


def _open_tree(
    path: AnyPath,
    display_name: str,
    hints: SourceHints,
    kind: MsgpackKind,
    manifest: Manifest | None,
) -> Source:
    """Open a Flax file or folder as a source."""
    _check_kind(kind, hints, display_name)
    if path.is_dir():
        folder = path
    else:
        folder = path.parent
    config_path = find_config_path(hints, folder, display_name)
    config = read_config(config_path) if config_path else {}
    flax_files = read_flax_files(path, kind)
    leaves = flax_files.leaves(display_name)
    types = {name: (leaf.dtype, leaf.shape) for name, leaf in leaves.items()}
    family = select_family(config, hints, types)
    names = TensorNames(family, is_prefixed=False)
    tree_tensors = verbatim_tensors(leaves) if family.is_verbatim else ()
    extra_entries: tuple[DroppedTensor, ...] = ()
    recorded = manifest or NO_MANIFEST
    if not family.is_verbatim:
        tree = match_foreign_tree(
            leaves, family, config, display_name, layout=hints.layout, manifest=recorded
        )
        _check_no_scale(tree, display_name)
        _check_easylm_prefix(tree, hints, display_name)
        names = tree.names
        tree_tensors = tree.tensors
        extra_entries = (*tree.extra_entries, *_extra_scalars(flax_files, tree))
    tensors = _with_recorded_digests(tree_tensors, names, recorded)
    # `trainstate_params::` asks for the parameters, so leaving the rest is no loss to report.
    if hints.part == "trainstate_params":
        extra_entries = ()
    side_files = find_side_files((config_path or folder / CONFIG).parent, hints.copied_files)
    return Source(
        display_name=display_name,
        root=folder if path.is_dir() else path,
        family=family,
        config=config,
        names=names,
        tensors=tensors,
        files=flax_files.files,
        file_stamps=flax_files.stamps,
        small_files=_settings_files(side_files.copied, hints, has_config=config_path is not None),
        manifest=manifest,
        tensor_file_names=tuple(
            flax_files.safetensors_file_name(file_position(tensor)[0]) for tensor in tensors
        ),
        extra_entries=(*extra_entries, *unindexed_entries(flax_files.unindexed)),
        config_path=config_path,
        left_files=side_files.left if config_path else (),
        omitted=side_files.omitted if config_path else (),
    )


def _with_recorded_digests(
    tensors: Iterable[SourceTensor], names: TensorNames, manifest: Manifest
) -> tuple[SourceTensor, ...]:
    """Return the tensors in the order of their bytes, with the digests in the manifest."""
    recorded: list[SourceTensor] = []
    for tensor in sorted(tensors, key=file_position):
        digests = recorded_digests(manifest.tensors, names.full_name(tensor.name))
        recorded.append(replace(tensor, digests=digests))
    return tuple(recorded)


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


def _extra_scalars(flax_files: FlaxFiles, tree: ForeignTree) -> Iterator[DroppedTensor]:
    """Yield the scalar entries of a training state, such as the step number."""
    listed_names = {entry.name for entry in tree.extra_entries}
    if not tree.format.root:
        return
    for document in flax_files.documents:
        for entry in document.non_arrays:
            if entry.path:
                key = entry.path[0]
            else:
                key = PARAMS
            if key not in listed_names and key != PARAMS:
                listed_names.add(key)
                yield DroppedTensor(key, 0, TRAINING_STATE_RULE)


@dataclass(frozen=True, slots=True)
class FlaxFiles:
    """Headers of the msgpack files of a checkpoint.

    Attributes:
        documents: Header of each file.
        unindexed: Records of further arrays in the files, which the index does not name.
    """

    documents: tuple[MsgpackHeader, ...]
    unindexed: tuple[UnindexedTensor, ...] = ()

    @property
    def files(self) -> tuple[AnyPath, ...]:
        """Path of each file."""
        return tuple(document.path for document in self.documents)

    @property
    def stamps(self) -> tuple[SourceFile, ...]:
        """Size, time and digest of each file."""
        stamps: list[SourceFile] = []
        for document in self.documents:
            stamp = SourceFile(
                document.path.name, document.size, document.mtime_ns, document.digest
            )
            stamps.append(stamp)
        return tuple(stamps)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of all files."""
        arrays: list[Array] = []
        for number, document in enumerate(self.documents):
            arrays += [array.moved(number) for array in document.arrays]
        return tuple(arrays)

    def leaves(self, display_name: str) -> dict[str, Array]:
        """Return the arrays by dotted name.

        Raises:
            PrepError: A name occurs twice.
        """
        leaves: dict[str, Array] = {}
        for array in self.arrays:
            if array.name in leaves:
                why = f"two leaves are named {array.name}"
                raise PrepError(f"{display_name} has a leaf twice", why, GET_AGAIN_HINT)
            leaves[array.name] = array
        return leaves

    def safetensors_file_name(self, file: int) -> str:
        """Return the name of the output's safetensors file for tensors of a file."""
        count = len(self.documents)
        if count == 1:
            return safetensors.SINGLE_FILE
        return shard_name("model", file + 1, count, safetensors.SUFFIX)


def read_flax_files(path: AnyPath, kind: MsgpackKind) -> FlaxFiles:
    """Read the headers of all files of a checkpoint."""
    files = find_weight_files(path, kind)
    stored = map_files(read_msgpack_header, files, repeat(kind))
    documents, unindexed = select_indexed(path, stored)
    return FlaxFiles(tuple(documents), tuple(unindexed))


def _check_no_scale(tree: ForeignTree, display_name: str) -> None:
    """Raise PrepError if the layout of the tree scales values. Only Orbax items are read with a scale."""
    if tree.scales:
        why = f"its tree is that of {tree.format.layout}, which prep reads from Orbax items"
        raise PrepError(f"{display_name} is not supported", why, "save it with Orbax")


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
