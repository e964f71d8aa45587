"""Opener for torch distributed checkpoints: each tensor is a set of boxes in the files of the ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from prepcli.algebra.boxes import Range
from prepcli.core.errors import Option, PrepError, text
from prepcli.core.formatting import did_you_mean
from prepcli.engine.digest import digest_pieces
from prepcli.formats.file_records import bytes_between
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.torch_dcp import DcpFolder, read_dcp_folder
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
from prepcli.planning.state_names import OPT_STATE_RULE, TRAINING_STATE_RULE
from prepcli.planning.tensor_match import TensorNames
from prepcli.sources.dcp_trees import match_dcp_tree
from prepcli.sources.model_family import find_config_path, read_folder_model
from prepcli.sources.source import Source, SourceTensor, file_position, recorded_digests
from prepcli.sources.source_hints import SourceHints
from prepcli.stores.paths import AnyPath
from prepcli.stores.reading import stat_file

DCP_LAYOUTS = [
    name for name in LIBRARIES_BY_LAYOUT if find_library(name, DCP_FORMAT).file_format == DCP_FORMAT
]
# Names in the state dicts of `get_state_dict`.
MODEL_PREFIX = "model."
STATE_PREFIX = "optimizer.state."
COUNTER_SUFFIX = ".step"
NOT_A_TENSOR_RULE = "not a tensor"


def open_dcp(
    path: AnyPath, display_name: str, hints: SourceHints, manifest: Manifest | None
) -> Source:
    """Read the metadata and the config of a torch distributed checkpoint.

    Args:
        path: The folder.
        display_name: Name of the checkpoint in messages.
        hints: User-supplied facts about the checkpoint.
        manifest: Manifest of an output of prep, else None.

    Raises:
        PrepError: A file is broken or not supported.
    """
    folder = read_dcp_folder(path)
    state: tuple[Array, ...] = ()
    others: tuple[Array, ...] = ()
    library = _find_library({tensor.name for tensor in folder.tensors}, hints)
    if library is None:
        folder, state, others = _split_state(folder)
    config_path = find_config_path(hints, path, display_name)
    types = {tensor.name: (tensor.dtype, tensor.shape) for tensor in folder.tensors}
    model = read_folder_model(path, config_path, hints, types)
    names = model.names
    tensors = _named_tensors(folder, names)
    extra_entries: tuple[DroppedTensor, ...] = ()
    if library is not None and not model.family.is_verbatim:
        tree = match_dcp_tree(
            folder,
            model.family,
            model.config,
            display_name,
            manifest or NO_MANIFEST,
            library=library,
        )
        names = tree.names
        tensors = tree.tensors
        extra_entries = tree.extra_entries
        folder = _without_entries(folder, [entry.name for entry in extra_entries])
    records = (manifest or NO_MANIFEST).tensors
    recorded: list[SourceTensor] = []
    for tensor in sorted(tensors, key=file_position):
        digests = recorded_digests(records, names.full_name(tensor.name))
        recorded.append(replace(tensor, digests=digests))
    return Source(
        display_name=display_name,
        root=path,
        family=model.family,
        config=model.config,
        names=names,
        tensors=tuple(recorded),
        files=folder.files,
        file_stamps=_written_stamps(folder, state) if manifest else _file_stamps(folder),
        small_files=tuple(
            file for file in model.side_files.copied if file.path not in folder.files
        ),
        manifest=manifest,
        extra_entries=(*extra_entries, *_extra_entries(folder, state, others)),
        config_path=config_path,
        left_files=model.side_files.left,
        omitted=model.side_files.omitted,
    )


def _find_library(names: Collection[str], hints: SourceHints) -> Library | None:
    """Return the library with the names of the tensors, or the one that the user states. None for Hugging Face.

    Raises:
        PrepError: The user names a layout of another format.
    """
    if hints.layout not in (None, *DCP_LAYOUTS):
        what = text("{} is unknown for DCP", Option("source_layout", hints.layout))
        why = f"its layouts are {', '.join(DCP_LAYOUTS)}"
        raise PrepError(what, why, did_you_mean(hints.layout or "", DCP_LAYOUTS))
    if hints.layout is None:
        return find_marked_library(names)
    if hints.layout == HF_LAYOUT:
        return None
    return find_library(hints.layout)


def _named_tensors(folder: DcpFolder, names: TensorNames) -> tuple[SourceTensor, ...]:
    """Return the tensors of a checkpoint under the names of Hugging Face."""
    tensors: list[SourceTensor] = []
    for tensor in folder.tensors:
        name = names.bare_name(tensor.name)
        tensors.append(SourceTensor(name, tensor.dtype, tensor.shape, (tensor,)))
    return tuple(tensors)


def _without_entries(folder: DcpFolder, entries: Collection[str]) -> DcpFolder:
    """Return a checkpoint without its tensors of these names, and without the other values below them.

    E.g. values below `optimizer`, and a buffer.
    """
    tensors = [tensor for tensor in folder.tensors if tensor.name not in entries]
    names = [name for name in folder.non_tensors if name.partition(".")[0] not in entries]
    return replace(folder, tensors=tuple(tensors), non_tensors=tuple(names))


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


def _extra_entries(
    folder: DcpFolder, state: Sequence[Array], others: Sequence[Array]
) -> Iterator[DroppedTensor]:
    """Yield the unused content: the optimizer state as a whole, other tensors, and values other than tensors."""
    if state:
        nbytes = sum(tensor.nbytes for tensor in state)
        yield DroppedTensor(STATE_PREFIX.removesuffix("."), nbytes, OPT_STATE_RULE)
    for tensor in others:
        yield DroppedTensor(tensor.name, tensor.nbytes, TRAINING_STATE_RULE)
    for name in folder.non_tensors:
        yield DroppedTensor(name, 0, NOT_A_TENSOR_RULE)


def _file_stamps(folder: DcpFolder) -> tuple[SourceFile, ...]:
    """Return size and time of each file. The digest is the one of the metadata."""
    stamps: list[SourceFile] = []
    for path in folder.files:
        stat = stat_file(path)
        stamps.append(SourceFile(path.name, stat.st_size, stat.st_mtime_ns, folder.digest))
    return tuple(stamps)


def _written_stamps(folder: DcpFolder, state: Sequence[Array]) -> tuple[SourceFile, ...]:
    """Return the stamps of files of prep. Each has the digest of the file's bytes outside of tensors."""
    ranges_by_file: dict[int, list[Range]] = {number: [] for number in range(len(folder.files))}
    # Counters are constants of the plan, and no streams.
    moments = [tensor for tensor in state if not tensor.name.endswith(COUNTER_SUFFIX)]
    for tensor in (*folder.tensors, *moments):
        # prep writes each tensor in one piece.
        ranges_by_file[tensor.file].append(tensor.byte_range)
    stamps: list[SourceFile] = []
    for number, path in enumerate(folder.files):
        stat = stat_file(path)
        content_digest = digest_pieces(bytes_between(path, sorted(ranges_by_file[number])))
        stamps.append(SourceFile(path.name, stat.st_size, stat.st_mtime_ns, content_digest))
    return tuple(stamps)
