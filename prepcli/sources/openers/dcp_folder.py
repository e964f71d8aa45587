"""Opener for torch distributed checkpoints: each tensor is a set of boxes in the files of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from prepcli.algebra.boxes import Range
from prepcli.core.errors import Option, PrepError, text
from prepcli.core.formatting import did_you_mean
from prepcli.core.json_values import HFConfig
from prepcli.engine.digest import record_digest_of_pieces
from prepcli.formats.manifest import NO_MANIFEST, bytes_between
from prepcli.formats.model_files import FileHeader
from prepcli.formats.torch_dcp import DcpFolder, read_dcp_folder
from prepcli.models.parameters import Family
from prepcli.planning.arrays import Array
from prepcli.planning.libraries import (
    DCP_FORMAT,
    HF_LAYOUT,
    LIBRARIES_BY_LAYOUT,
    Library,
    find_library,
    find_marked_library,
)
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import DroppedTensor, SourceFile
from prepcli.planning.tensors import OPT_STATE_RULE, TRAINING_STATE_RULE
from prepcli.sources.foreign_trees import ForeignTree, match_foreign_tree
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.model_family import find_config_path, read_folder_model
from prepcli.sources.openers.hf_folder import file_tensors, make_source, with_recorded_digests
from prepcli.sources.references import SourceHints
from prepcli.sources.source import (
    Source,
    file_stamps,
)

DCP_LAYOUTS = [
    name for name in LIBRARIES_BY_LAYOUT if find_library(name, DCP_FORMAT).file_format == DCP_FORMAT
]
# Names in the state dicts of `get_state_dict`.
MODEL_PREFIX = "model."
STATE_PREFIX = "optimizer.state."
COUNTER_SUFFIX = ".step"
NOT_A_TENSOR_RULE = "not a tensor"


def read(located: LocatedCheckpoint, hints: SourceHints) -> Source:
    """Read the metadata and the config of a torch distributed checkpoint."""
    path = located.files.path
    folder = read_dcp_folder(path)
    state: tuple[Array, ...] = ()
    others: tuple[Array, ...] = ()
    if hints.layout not in (None, *DCP_LAYOUTS):
        what = text("{} is unknown for DCP", Option("source_layout", hints.layout))
        why = f"its layouts are {', '.join(DCP_LAYOUTS)}"
        raise PrepError(what, why, did_you_mean(hints.layout or "", DCP_LAYOUTS))
    if hints.layout is None:
        library = find_marked_library({tensor.name for tensor in folder.tensors})
    elif hints.layout == HF_LAYOUT:
        library = None
    else:
        library = find_library(hints.layout)
    if library is None:
        folder, state, others = _split_state(folder)
    config_path = find_config_path(hints, path, located.display_name)
    types = {tensor.name: (tensor.dtype, tensor.shape) for tensor in folder.tensors}
    model = read_folder_model(located, config_path, hints, types)
    tensors = file_tensors(folder.tensors, model.names, None)
    extra_entries: tuple[DroppedTensor, ...] = ()
    if library is not None and not model.family.is_verbatim:
        tree = match_dcp_tree(
            folder.tensors,
            model.family,
            model.config,
            located.display_name,
            located.manifest or NO_MANIFEST,
            library=library,
        )
        model = replace(model, names=tree.names)
        tensors = tree.tensors
        extra_entries = tree.extra_entries
        entries = [entry.name for entry in extra_entries]
        kept_tensors = [tensor for tensor in folder.tensors if tensor.name not in entries]
        names = [name for name in folder.non_tensors if name.partition(".")[0] not in entries]
        folder = replace(folder, tensors=tuple(kept_tensors), non_tensors=tuple(names))
    copied = tuple(file for file in model.side_files.copied if file.path not in folder.files)
    source = make_source(
        located,
        replace(model, side_files=replace(model.side_files, copied=copied)),
        with_recorded_digests(tensors, model.names, located.manifest),
        folder.files,
        _file_stamps(folder, state, is_written=located.manifest is not None),
    )
    unused: list[DroppedTensor] = []
    if state:
        nbytes = sum(tensor.nbytes for tensor in state)
        unused.append(DroppedTensor(STATE_PREFIX.removesuffix("."), nbytes, OPT_STATE_RULE))
    for tensor in others:
        unused.append(DroppedTensor(tensor.name, tensor.nbytes, TRAINING_STATE_RULE))
    for name in folder.non_tensors:
        unused.append(DroppedTensor(name, 0, NOT_A_TENSOR_RULE))
    extra_entries = (*extra_entries, *unused)
    return replace(source, extra_entries=extra_entries)


def _split_state(
    folder: DcpFolder,
) -> tuple[DcpFolder, tuple[Array, ...], tuple[Array, ...]]:
    """Split a training checkpoint into model, optimizer state and other tensors, e.g. averages of the parameters.

    The names in the model lose their prefix. A checkpoint without optimizer state is returned unchanged.
    """
    state = tuple(tensor for tensor in folder.tensors if tensor.name.startswith(STATE_PREFIX))
    if not state:
        return folder, (), ()
    model: list[Array] = []
    others: list[Array] = []
    for tensor in folder.tensors:
        if tensor.name.startswith(MODEL_PREFIX):
            model.append(replace(tensor, name=tensor.name.removeprefix(MODEL_PREFIX)))
        elif not tensor.name.startswith(STATE_PREFIX):
            others.append(tensor)
    return replace(folder, tensors=tuple(model)), state, tuple(others)


def _file_stamps(
    folder: DcpFolder, state: Sequence[Array], *, is_written: bool
) -> tuple[SourceFile, ...]:
    """Return the stamp of each file. Files of prep have the digest of their bytes outside of tensors.

    Other files have the digest of the metadata.
    """
    if not is_written:
        return file_stamps(folder.headers)
    ranges_by_file: dict[int, list[Range]] = {number: [] for number in range(len(folder.files))}
    # Counters are constants of the plan, and no streams.
    moments = [tensor for tensor in state if not tensor.name.endswith(COUNTER_SUFFIX)]
    for tensor in (*folder.tensors, *moments):
        # prep writes each tensor in one piece.
        ranges_by_file[tensor.file].append(tensor.byte_range)
    headers: list[FileHeader] = []
    for number, header in enumerate(folder.headers):
        pieces = bytes_between(header.path, sorted(ranges_by_file[number]))
        headers.append(replace(header, digest=record_digest_of_pieces(pieces)))
    return file_stamps(headers)


def match_dcp_tree(
    tensors: Iterable[Array],
    family: Family,
    config: HFConfig,
    display_name: str,
    manifest: Manifest = NO_MANIFEST,
    *,
    library: Library,
) -> ForeignTree:
    """Match the tensors of a checkpoint with the state dict of a library, e.g. torchtitan."""
    (layout,) = library.layouts
    if layout not in family.layouts:
        why = f"its tensors have the names of {layout}, and prep has no layout of it for {family.name}"
        hint = f"save it with the names of Hugging Face, {library.hub_names_hint}"
        raise PrepError(f"{display_name} is not supported", why, hint)
    leaves = {tensor.name: tensor for tensor in tensors}
    return match_foreign_tree(
        leaves, family, config, display_name, roots=("",), layout=layout, manifest=manifest
    )
