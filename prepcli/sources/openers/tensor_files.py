"""Openers for files of tensors: a Hugging Face folder, an adapter of PEFT, a torch distributed checkpoint, a Flax tree.

The parts that all openers share are here, too. Of PyTorch files, no pickled code is run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.formatting import did_you_mean
from prepcli.core.json_values import HFConfig
from prepcli.engine.digest import record_digest_of_pieces
from prepcli.formats import safetensors
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    NO_MANIFEST,
    bytes_between,
    check_header,
    read_manifest,
)
from prepcli.formats.model_files import FileHeader, ModelFiles, shard_name
from prepcli.formats.msgpack import MsgpackKind, MsgpackNonArray, read_flax_files
from prepcli.formats.registry import FORMATS
from prepcli.formats.safetensors import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    ADAPTER_HINT,
    read_adapter_files,
)
from prepcli.formats.torch_dcp import DcpFolder, read_dcp_folder
from prepcli.models.parameters import Family, WeightTying
from prepcli.planning.arrays import Array
from prepcli.planning.libraries import (
    DCP_FORMAT,
    HF_LAYOUT,
    LIBRARIES_BY_LAYOUT,
    Library,
    find_library,
    find_marked_library,
    scaled_digests,
)
from prepcli.planning.manifest_fields import NOTHING, Manifest, ScaleRecord, TensorRecord
from prepcli.planning.plan import DroppedTensor, SourceFile
from prepcli.planning.tensors import OPT_STATE_RULE, PARAMS, TRAINING_STATE_RULE
from prepcli.sources.dropped_tensors import unindexed_entries
from prepcli.sources.foreign_trees import ForeignTree, match_foreign_tree, verbatim_tensors
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.model_family import (
    FolderModel,
    find_config_path,
    read_folder_model,
    select_family,
)
from prepcli.sources.references import (
    CONFIG,
    FLAX_PARAMS,
    TRAIN_STATE_PARTS,
    SourceHints,
    split_part,
)
from prepcli.sources.side_files import SideFile, find_side_files, matches_any
from prepcli.sources.source import (
    Source,
    SourceTensor,
    file_position,
    file_stamps,
    recorded_digests,
)
from prepcli.sources.tensor_match import TensorNames
from prepcli.stores.paths import AnyPath

# Several tensors may be views of the same bytes. A file with more of them on one byte is refused, because each
# such tensor opens the file once more.
MAX_SHARING_TENSORS = 64


def read_folder(located: LocatedCheckpoint, hints: SourceHints) -> Source:
    """Read the headers and the config of a folder. Of PyTorch files, no pickled code is run."""
    path = located.files.path
    row = FORMATS[located.kind]
    assert row.read_files is not None
    stored = row.read_files(path)
    config_path = find_config_path(hints, path, located.display_name)
    types = {tensor.name: (tensor.dtype, tensor.shape) for tensor in stored.tensors}
    manifest = located.manifest if row.has_recorded_headers else None
    model = read_folder_model(located, config_path, hints, types, manifest=manifest)
    arrays: Sequence[Array] = stored.tensors
    numbers, blobs = assign_blobs(arrays, stored.files)
    has_shared_bytes = len(blobs) > len(stored.files)
    if has_shared_bytes:
        arrays = [array.in_file(number) for array, number in zip(arrays, numbers)]
    source = make_source(
        replace(located, manifest=manifest),
        model,
        file_tensors(arrays, model.names, manifest),
        stored.files,
        file_stamps(stored.headers),
    )
    names = [safetensors_file_name(header.file_name) for header in stored.headers]
    return replace(
        source,
        tensor_file_names=tuple(names[tensor.file] for tensor in stored.tensors),
        blobs=blobs if has_shared_bytes else (),
        extra_entries=unindexed_entries(stored.unindexed) if stored.unindexed else (),
        notes=tuple(header.remark for header in stored.headers if header.remark),
    )


def make_source(
    located: LocatedCheckpoint,
    model: FolderModel,
    tensors: Iterable[SourceTensor],
    files: Sequence[AnyPath],
    stamps: Sequence[SourceFile],
) -> Source:
    """Return the source of a located checkpoint. An opener adds the facts that only its format has."""
    return Source(
        display_name=located.display_name,
        root=located.files.path,
        family=model.family,
        config=model.config,
        names=model.names,
        tensors=tuple(tensors),
        files=tuple(files),
        file_stamps=tuple(stamps),
        side_files=model.side_files.copied,
        manifest=located.manifest,
        config_path=model.config_path,
        left_files=model.side_files.left,
        omitted=model.side_files.omitted,
    )


def file_tensors(
    arrays: Iterable[Array], names: TensorNames, manifest: Manifest | None
) -> tuple[SourceTensor, ...]:
    """Return the tensors of files under the names of the family, with the digests in the manifest."""
    records = (manifest or NO_MANIFEST).tensors
    tensors: list[SourceTensor] = []
    for array in arrays:
        digests = recorded_digests(records, array.name)
        name = names.bare_name(array.name)
        tensors.append(SourceTensor(name, array.dtype, array.shape, (array,), digests))
    return tuple(tensors)


def with_recorded_digests(
    tensors: Iterable[SourceTensor],
    names: TensorNames,
    manifest: Manifest | None,
    scale_records: Mapping[str, ScaleRecord] = NOTHING,
) -> tuple[SourceTensor, ...]:
    """Return the tensors of a tree in the order of their bytes, with the digests in the manifest.

    A tensor with a scale record is read as it is stored, and has the digests of the scaled values.
    """
    records = (manifest or NO_MANIFEST).tensors
    recorded: list[SourceTensor] = []
    for tensor in sorted(tensors, key=file_position):
        name = names.full_name(tensor.name)
        digests = recorded_digests(records, name)
        if name in scale_records:
            digests = scaled_digests(scale_records[name], tensor.shape[0])
        recorded.append(replace(tensor, digests=digests))
    return tuple(recorded)


def assign_blobs(
    tensors: Sequence[Array], files: Sequence[AnyPath]
) -> tuple[list[int], tuple[AnyPath, ...]]:
    """Assign each tensor a blob, i.e. a file that is opened on its own, in which no two tensors overlap.

    Tied tensors share bytes of a file. The file is then opened several times, and each of them has another blob.

    The tensors are in the order of files and offsets.

    Returns:
        The blob number of each tensor, and the file of each blob. The first blob of each file has its number.

    Raises:
        PrepError: More than MAX_SHARING_TENSORS tensors share a byte.
    """
    blobs = list(files)
    blobs_of_file: list[list[int]] = [[number] for number in range(len(files))]
    ends = [0] * len(files)  # end of the last tensor of each blob
    blob_numbers: list[int] = []
    for tensor in tensors:
        # E.g. a tied embedding and head share bytes 0 to 100 of a file: the first one is in blob
        # 0, the second one in a separate blob, which is the same file again. The engine reads
        # each blob in ascending order and never twice.
        start, stop = tensor.byte_range
        candidates = blobs_of_file[tensor.file]
        blob = next(
            (number for number in candidates if ends[number] <= start or start == stop), len(blobs)
        )
        if blob == len(blobs):
            if len(candidates) == MAX_SHARING_TENSORS:
                why = f"more than {MAX_SHARING_TENSORS} tensors share byte {start:,}"
                hint = "clone the tensors in PyTorch, and `torch.save` them again"
                raise PrepError(f"{files[tensor.file].name} is not supported", why, hint)
            blobs.append(files[tensor.file])
            candidates.append(blob)
            ends.append(0)
        ends[blob] = max(ends[blob], stop)
        blob_numbers.append(blob)
    return blob_numbers, tuple(blobs)


def safetensors_file_name(file_name: str) -> str:
    """Return the name of the output's safetensors file for tensors of a file, e.g. of `pytorch_model.bin`."""
    if file_name.endswith(".safetensors"):
        return file_name
    return re.sub(r"^pytorch_model", "model", Path(file_name).stem) + ".safetensors"


DCP_LAYOUTS = [
    name for name in LIBRARIES_BY_LAYOUT if find_library(name, DCP_FORMAT).file_format == DCP_FORMAT
]
# Names in the state dicts of `get_state_dict`.
MODEL_PREFIX = "model."
STATE_PREFIX = "optimizer.state."
COUNTER_SUFFIX = ".step"
NOT_A_TENSOR_RULE = "not a tensor"


def read_dcp(located: LocatedCheckpoint, hints: SourceHints) -> Source:
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
        folder, state, others = _split_state(with_state_names(folder))
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


def with_state_names(folder: DcpFolder) -> DcpFolder:
    """Return a checkpoint with the prefixes `model.` and `optimizer.`.

    PyTorch's tutorial saves `{"app": {"model": ..., "optim": ...}}`, and other loops only the inner dict.
    """
    names = [*(tensor.name for tensor in folder.tensors), *folder.non_tensors]
    wrapper = ""
    if any(name.startswith(("app.model.", "app.optim.")) for name in names):
        wrapper = "app."
    optimizer = f"{wrapper}optim."
    has_state = any(name.startswith(f"{optimizer}state.") for name in names)
    if not (wrapper or has_state):
        return folder

    def rename(name: str) -> str:
        if name.startswith(optimizer):
            return f"optimizer.{name.removeprefix(optimizer)}"
        return name.removeprefix(wrapper)

    return replace(
        folder,
        tensors=tuple(replace(tensor, name=rename(tensor.name)) for tensor in folder.tensors),
        non_tensors=tuple(map(rename, folder.non_tensors)),
        archives={rename(name): place for name, place in folder.archives.items()},
    )


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


# Suffixes of a model's small files. The folder may have files of any name.
SETTINGS_SUFFIXES = {
    ".json",
    ".txt",
    ".model",
    ".jinja",
    ".md",
}


def read_flax(located: LocatedCheckpoint, hints: SourceHints) -> Source:
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
    settings: list[SideFile] = []
    for file in side_files.copied:
        # The folder of a file without a config may have files of any kind.
        is_of_model = config_path is not None or file.is_at_top
        is_setting = is_of_model and file.path.suffix in SETTINGS_SUFFIXES
        if is_setting or matches_any(file.name, hints.copied_files):
            settings.append(file)
    side_files = replace(side_files, copied=tuple(settings))
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


NO_RECORD: TensorRecord = {"digests": []}
DAMAGE_HINT = f"get or export the adapter again; without its {MANIFEST_FILE} it is not checked"


def is_adapter(path: AnyPath) -> bool:
    """Return whether a folder has an adapter of PEFT."""
    return (path / ADAPTER_CONFIG).is_file()


def read_checked_header(path: AnyPath) -> tuple[FileHeader, Manifest | None]:
    """Read the header of an adapter's tensors, and compare it with the manifest if prep wrote the adapter.

    Returns:
        The header, and the manifest. None if PEFT wrote the adapter.
    """
    (header,) = read_adapter_files(path).headers
    manifest = read_manifest(path)
    if manifest is not None:
        check_header(path / ADAPTER_FILE, manifest, header.digest)
        for tensor in header.tensors:
            record = manifest.tensors.get(tensor.name, NO_RECORD)
            recorded = record.get("dtype"), record.get("shape")
            if recorded != (tensor.dtype, list(tensor.shape)):
                stored = f"{tensor.name}, {tensor.dtype} {list(tensor.shape)}"
                expected = f"{record.get('dtype')!s:.60} {record.get('shape')!s:.60}"
                if record is NO_RECORD:
                    expected = "no such tensor"
                why = f"{ADAPTER_FILE} has {stored}, {MANIFEST_FILE} records {expected}"
                raise DamagedError(f"{path} is damaged", why, DAMAGE_HINT)
            num_rows = tensor.shape[0] if tensor.shape else 1
            if [digest[:2] for digest in record["digests"]] != [[0, num_rows]]:
                why = f"{MANIFEST_FILE} has no digest of all rows of {tensor.name}"
                raise DamagedError(f"{path} is damaged", why, DAMAGE_HINT)
        # A tensor that was removed from the file has no digest left to compare, so the names are
        # compared in both directions.
        missing = sorted(manifest.tensors.keys() - {tensor.name for tensor in header.tensors})
        if missing:
            raise DamagedError(
                f"{path} is damaged", f"{ADAPTER_FILE} has no {missing[0]:.200}", DAMAGE_HINT
            )
    return header, manifest


def open_adapter(path: AnyPath, family: Family, config: HFConfig) -> Source:
    """Read the header of an adapter, and the digests of its tensors if prep wrote it.

    Returns:
        A source with the tensors of the adapter. They are not compared with the family's parameters.
    """
    header, manifest = read_checked_header(path)
    names = TensorNames(family)
    return Source(
        display_name=str(path),
        root=path,
        family=family,
        config=config,
        names=names,
        tensors=file_tensors(header.tensors, names, manifest),
        files=(path / header.file_name,),
        file_stamps=file_stamps([header]),
        side_files=(),
        manifest=manifest,
    )


def read_adapter(located: LocatedCheckpoint, hints: SourceHints) -> Source:
    """Read the header of an adapter without its base. See `open_adapter`, which also reads the manifest."""
    del hints  # the config of the base is not needed
    source = open_adapter(located.files.path, ADAPTER_FAMILY, {})
    return replace(source, display_name=located.display_name)


def _no_model(config: HFConfig) -> NoReturn:
    raise PrepError("an adapter is not a model", "it has no config.json", ADAPTER_HINT)


# Family of an adapter without its base model. Its tensors keep their names in the file.
ADAPTER_FAMILY = Family(
    name="adapter",
    prefix="",
    unprefixed=(),
    sizes=_no_model,
    parameters={},
    dropped={},
    tying=WeightTying(head_leaf="", head_tensor="", embedding_tensor="", tied_by_default=False),
    arch_config=_no_model,
)
