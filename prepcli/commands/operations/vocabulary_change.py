"""Plan a checkpoint with other tokens: a Hugging Face folder, or an Orbax checkpoint with its training state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast, get_args

from prepcli.commands.operations.options import SaveInitOptions
from prepcli.commands.operations.resized_folder import plan_resized_folder
from prepcli.commands.operations.save_init import (
    ItemLayout,
    check_index_size,
    plan_item,
    planned_storage,
    resolve_layout,
)
from prepcli.commands.operations.token_folder import replaced_files
from prepcli.core.errors import Command, Option, text, usage_error
from prepcli.core.lists import join_names
from prepcli.core.option_spec import with_defaults
from prepcli.models.partition import vocab_multiple
from prepcli.planning.item_storage import StorageName
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan, SmallFile
from prepcli.planning.state_names import split_name
from prepcli.planning.state_rows import is_leaf_path
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.averages import AVERAGE_SLOT
from prepcli.sources.openers.peft_folder import ADAPTER_FAMILY
from prepcli.sources.source import Source, source_axis_maps
from prepcli.sources.vocabulary_tensors import VocabularyTensors
from prepcli.targets.orbax_item import make_item
from prepcli.targets.streams import (
    TensorTarget,
    VocabResize,
    dropped_padding,
)


@dataclass(frozen=True, slots=True)
class VocabularyChange:
    """A command to add or remove tokens.

    Attributes:
        command: Name of the command.
        request: Its recorded command line.
        name: Name of the model in the manifest.
        present: The vocabulary of the source.
        vocabulary: The vocabulary of the output.
        resize: Copied and new rows.
        files: New content of small files, by name. None removes a file.
        settings: Further fields of the manifest.
    """

    command: str
    request: str
    name: str
    present: VocabularyTensors
    vocabulary: Vocabulary
    resize: VocabResize
    files: Mapping[str, bytes | None]
    settings: Manifest = field(default_factory=Manifest)


def check_source(source: Source, command: str) -> None:
    """Raise UsageError unless tokens of a source can be added and removed."""
    manifest = source.tree_manifest
    if manifest.is_adapter or source.family is ADAPTER_FAMILY:
        what = f"{source.display_name} has only adapters"
        hint = text(
            "run {}: adapters that leave the embedding as it is fit the new base",
            Command(command, "BASE"),
        )
        raise usage_error(what, "tokenizer and embedding belong to the base model", hint)
    if source.tensor_file_names:
        return
    if not manifest:
        what = f"{source.display_name} is neither a Hugging Face folder nor an Orbax checkpoint of prep"
        hint = text("{} writes a Hugging Face folder", Command("export"))
        raise usage_error(what, f"{command} does not read its format", hint)
    if source.family.is_verbatim:
        what = f"{source.display_name} has the tensor names of its file"
        hint = text("run {} before {}", Command(command), Command("save-init"))
        raise usage_error(what, "its embedding is not known", hint)


def padded_rows(source: Source, num_rows: int) -> int:
    """Return the rows of a vocabulary in the output. For an Orbax checkpoint they are a multiple for its mesh."""
    layout = _item_layout(source)
    if layout is None or layout.partitioning.mesh is None:
        return num_rows
    dims = {path: axis_map.leaf_dims for path, axis_map in source_axis_maps(source).items()}
    multiple = vocab_multiple(dims, layout.partitioning.mesh, layout.partitioning.rules)
    return -(-num_rows // multiple) * multiple


def plan_change(source: Source, change: VocabularyChange) -> Plan:
    """Plan a copy of a checkpoint with other tokens, in the format and layout of the source.

    Raises:
        PrepError: The training state has tensors with some dims of the embedding.
    """
    layout = _item_layout(source)
    side_files = replaced_files(source, change.files)
    if layout is not None:
        return _plan_item(source, change, layout, side_files)
    return plan_resized_folder(
        source,
        change.present.match,
        change.resize,
        new_vocabulary=change.vocabulary,
        command=change.command,
        request=change.request,
        name=change.name,
        init="zeros",
        side_files=side_files,
        settings=change.settings,
    )


def _item_layout(source: Source) -> ItemLayout | None:
    """Return the layout of an Orbax checkpoint. None for a Hugging Face folder."""
    if not source.tree_manifest:
        return None
    return resolve_layout(with_defaults(SaveInitOptions, {}), source, params_only=False)


def _plan_item(
    source: Source, change: VocabularyChange, layout: ItemLayout, side_files: list[SmallFile]
) -> Plan:
    """Plan an Orbax checkpoint with its mesh, its layers, its storage and its training state."""
    _check_state(source)
    options = _stored_options(source)
    match = change.present.match
    moments = frozenset(_moments(source, change.present))
    resize = replace(change.resize, zero_tensors=moments)
    num_rows = change.vocabulary.stored_size
    targets = {name: TensorTarget((), num_rows) for name in resize.tensors}
    item = make_item(
        source,
        match,
        axis_maps=source_axis_maps(source, layout.scan, layout.scan_axis),
        vocab_tensors=resize.tensors,
        vocab_size=num_rows,
        partitioning=layout.partitioning,
        storage=planned_storage(options),
    )
    plan = plan_item(
        options,
        source,
        replace(layout, output_vocabulary=change.vocabulary),
        match,
        item,
        resize,
        command=change.command,
        request=change.request,
        dropped=(*match.dropped, *dropped_padding(source, targets, resize=resize)),
        name=change.name,
        side_files=side_files,
    )
    check_index_size(plan)
    return replace(plan, settings=plan.settings | change.settings)


def _stored_options(source: Source) -> SaveInitOptions:
    """Return the options of an output with the storage and the compression of a source."""
    options = with_defaults(SaveInitOptions, {"compress": source.tree_manifest.compress})
    storage = source.tree_manifest.storage
    if storage in get_args(StorageName):
        options["storage"] = cast(StorageName, storage)
    return options


def _moments(source: Source, present: VocabularyTensors) -> Iterator[str]:
    """Yield the tensors of the training state with one row per token, except for averages of parameters."""
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if name in present.names and slot != AVERAGE_SLOT:
            yield tensor.name


def _check_state(source: Source) -> None:
    """Raise UsageError for an optimizer state without a tensor of the full shape for each parameter."""
    partial = [t.name for t in source.state_tensors if is_leaf_path(split_name(t.name)[1])]
    if partial:
        what = f"the optimizer state of {source.display_name} is not supported"
        names = join_names(partial, max_names=3)
        why = f"it has factored moments, or moments of some parameters only: {names}"
        command = Command("reshard", source.display_name, Option("params_only", True))
        raise usage_error(what, why, text("{} leaves it out", command))
