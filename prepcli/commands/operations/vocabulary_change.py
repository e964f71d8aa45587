"""Checkpoints with other tokens: a Hugging Face folder, or an Orbax checkpoint with its training state.

`add-tokens` and `remove-tokens` change the rows of the vocabulary, and the files of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast, get_args

from prepcli.commands.operations.opening import CommonOptions
from prepcli.commands.operations.options import SaveInitOptions
from prepcli.commands.operations.pad_vocab import mesh_rows
from prepcli.commands.operations.save_init import check_index_size, resolve_layout
from prepcli.core.counts import count_text
from prepcli.core.errors import Command, Option, text, usage_error
from prepcli.core.lists import join_names
from prepcli.core.option_spec import with_defaults
from prepcli.formats.added_tokens import RECORD_FILE, Addition, parse_record
from prepcli.planning.item_storage import StorageName
from prepcli.planning.manifest_fields import Manifest, VocabularyRecord
from prepcli.planning.plan import Plan, SmallFile
from prepcli.planning.state_names import split_name
from prepcli.planning.state_rows import is_leaf_path
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.averages import AVERAGE_SLOT
from prepcli.sources.openers.peft_folder import ADAPTER_FAMILY
from prepcli.sources.source import Source
from prepcli.sources.vocabulary_tensors import VocabularyTensors
from prepcli.targets.orbax_item import OrbaxLayout
from prepcli.targets.planner import (
    Draft,
    draft_of,
    make_plan,
    resize_vocabulary,
    with_source_state,
)
from prepcli.targets.safetensors_folder import place_in_source_files
from prepcli.targets.streams import VocabResize
from prepcli.targets.token_files import read_side_file


def folder_options(common: CommonOptions) -> CommonOptions:
    """Return options to open a checkpoint with. A quantised model keeps its codes and scales."""
    return replace(common, quantized="stored", verbatim=None)


def count_with_ids(first: int, count: int) -> tuple[str, str]:
    """Return the number of tokens and their ids as texts, e.g. `2 tokens` and `ids 7 to 8`."""
    if count == 1:
        ids = f"id {first}"
    else:
        ids = f"ids {first} to {first + count - 1}"
    return count_text(count, "token"), ids


def recorded_additions(source: Source) -> tuple[Addition, ...]:
    """Return the recorded additions of a source.

    Raises:
        DamagedError: The record is damaged.
    """
    data = read_side_file(source, RECORD_FILE)
    if data is None:
        return ()
    return parse_record(source.root / RECORD_FILE, data)


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


def padded_rows(source: Source, present: VocabularyTensors, num_rows: int) -> int:
    """Return the rows of a vocabulary in the output. For an Orbax checkpoint they are a multiple for its mesh."""
    layout = _item_layout(source)
    if layout is None or layout.partitioning.mesh is None:
        return num_rows
    return mesh_rows(present.axis_maps, layout.partitioning, num_rows)


def draft_change(
    source: Source,
    present: VocabularyTensors,
    vocabulary: Vocabulary,
    resize: VocabResize,
    files: Mapping[str, bytes | None],
) -> Draft:
    """Return a draft of a checkpoint with other rows and other small files. Content None removes a file."""
    # Other tensors that the family ignores, such as buffers, are copied to a folder. Only `--drop` removes a tensor.
    kept = {tensor.name for tensor in source.tensors} if source.tensor_file_names else ()
    draft = resize_vocabulary(draft_of(source, present, kept=kept), vocabulary, resize)
    side_files = [file for file in draft.side_files if file.path not in files]
    for path, content in files.items():
        if content is not None:
            side_files.append(SmallFile(path, content))
    return replace(draft, side_files=tuple(side_files))


def plan_change(draft: Draft, *, command: str, request: str, name: str) -> Plan:
    """Plan a draft in the format and layout of its source. See `make_plan`.

    Raises:
        PrepError: The training state has tensors with some dims of the embedding.
    """
    source = draft.source
    layout = _item_layout(source)
    if layout is None:
        vocabulary = draft.vocabulary
        vocab: VocabularyRecord = {
            "true": vocabulary.true_size,
            "padded": vocabulary.stored_size,
            "init": "zeros",
        }
        settings = Manifest(vocab=vocab) | draft.settings
        draft = replace(draft, left=source.extra_entries, settings=settings)
        placed = place_in_source_files(draft)
    else:
        _check_state(source)
        # New rows of moments are zeros: no step has changed them.
        resize = replace(draft.resize, zero_tensors=frozenset(_moments(draft)))
        draft = with_source_state(replace(draft, resize=resize))
        placed = layout.place(draft)
    plan = make_plan(draft, placed, command=command, request=request, name=name)
    check_index_size(plan)
    return plan


def _item_layout(source: Source) -> OrbaxLayout | None:
    """Return the layout of an Orbax checkpoint. None for a Hugging Face folder."""
    manifest = source.tree_manifest
    if not manifest:
        return None
    options = with_defaults(SaveInitOptions, {"compress": manifest.compress})
    if manifest.storage in get_args(StorageName):
        options["storage"] = cast(StorageName, manifest.storage)
    return resolve_layout(options, source, params_only=False)


def _moments(draft: Draft) -> Iterator[str]:
    """Yield the tensors of the training state with one row per token, except for averages of parameters."""
    for tensor in draft.source.state_tensors:
        slot, name = split_name(tensor.name)
        if name in draft.resize.tensors and slot != AVERAGE_SLOT:
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
