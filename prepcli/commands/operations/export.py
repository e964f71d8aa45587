"""`prep export` and `prep merge`: a Hugging Face folder, or the checkpoint of another library.

`merge` writes the folder of a base model with the values of an adapter.
"""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.checkpoint_options import (
    CommonOptions,
    check_allow_overflow,
    checkpoint_access,
    common_options,
)
from prepcli.commands.operations.conversion import (
    MAX_LEFT_FILES,
    OUT_PLACEHOLDER,
    OpenedConversion,
    open_conversion,
)
from prepcli.commands.operations.export_request import (
    DEFAULT_SHARD_NBYTES,
    check_request,
    check_storage,
    file_format,
    names_tied_head,
    no_effect_error,
    read_export_map,
    select_parts,
    shard_nbytes,
    take_quantized_bytes,
    without_files,
    written_storage,
)
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import DEFAULT_SHARD_SIZE, ExportOptions, MergeOptions
from prepcli.commands.operations.results import Conversion
from prepcli.commands.operations.training_state import (
    check_no_adapter,
    check_state_request,
    draft_state,
    exported_state_notes,
    state_folder_name,
)
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import count_text, format_bytes, join_names
from prepcli.core.launchers import PARENT_VARIABLE
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike, as_tuple, with_defaults
from prepcli.engine.digest import record_digest
from prepcli.execution.hub_push import PushTarget, check_push, parse_push_target, push_folder
from prepcli.execution.workers import ProcessOptions
from prepcli.formats.manifest import NO_MANIFEST, SAMPLE_DIGEST_KEY, read_manifest
from prepcli.planning.item_storage import OCDBT
from prepcli.planning.libraries import DCP_FORMAT, HF_LAYOUT, find_library
from prepcli.planning.manifest_fields import Manifest, MergedAdapter
from prepcli.planning.tensors import OPT_STATE_RULE
from prepcli.planning.work_units import requested_share
from prepcli.restore.digest_checks import sample_digest
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.mapped import CONTENT_KEY
from prepcli.sources.maps import TensorMap
from prepcli.sources.openers.tensor_files import is_adapter
from prepcli.sources.source import Source, stored_rows
from prepcli.stores.byte_ranges import retry_policy_from_env
from prepcli.targets.adapter_updates import (
    base_of_adapter,
    draft_adapter,
    merge_adapter,
    open_base_adapter,
    with_adapter_tokenizer,
)
from prepcli.targets.planner import Draft, Placed, start_draft, with_rows, with_tied_head
from prepcli.targets.safetensors_folder import place_adapter, place_mapped, place_safetensors
from prepcli.targets.torch_folder import (
    place_dcp,
    place_dcp_state,
    place_dcp_tree,
    place_trainer_checkpoint,
    prepare_torch_adam,
)
from prepcli.targets.trees import in_tree, place_flax, place_trainer_item


@public
def export(
    checkpoint: PathLike | None = None,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | Observer | None = None,
    process_options: ProcessOptions | None = None,
    **options: Unpack[ExportOptions],
) -> Conversion:
    """Write a Hugging Face folder, or the checkpoint of another library, without the padding of the vocabulary.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL. Default: the only checkpoint of prep in the current
            folder.
        out: Output folder. Default: a name made from the checkpoint's.
        dry_run: Return the plan from headers only. No weight is read and no file is written.
        progress: Receives the bytes written. Default: none. See `Progress`.
        process_options: Share of this process in the work. Default: all of it.
        **options: See `ExportOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the source are damaged.
        PrepError: The conversion or the upload failed. An interrupted one resumes when called again.
    """
    # Invalid sizes and repositories are found before the source is opened.
    shard_nbytes(options)
    common = common_options(
        checkpoint, out, options, dry_run=dry_run, process_options=process_options
    )
    # The option is about the output. A model that is quantised itself is refused.
    # The map is about the output, too.
    common = replace(common, quantized="refuse", tensor_map=None)
    observer = observer_of(progress)
    check_allow_overflow(options["allow_overflow"], options["dtype"])
    target = _push_target(options, common, observer)
    opened = open_conversion("export", common, observer)
    conversion = _write_export(opened, options)
    if target is None:
        return conversion
    if dry_run:
        observer.note(f"would push it to {target.repo}")
        return conversion
    try:
        commit_url = push_folder(
            conversion.path,
            target,
            progress=observer.progress(),
            retry_policy=retry_policy_from_env(os.environ, observer.note),
        )
    except PrepError as error:
        why = text("{}; the export in {} is complete", error.why, conversion.path)
        raise PrepError(error.what, why, error.hint) from error
    observer.note(f"pushed to {commit_url}")
    pushed = {"repo": target.repo, "revision": target.revision or "main", "commit": commit_url}
    return replace(conversion, details={**conversion.details, "pushed": pushed})


def _push_target(
    options: ExportOptions, common: CommonOptions, observer: Observer
) -> PushTarget | None:
    """Return the repository for the output, or None. A conversion may take an hour, so the upload is checked before."""
    repository = options["push"]
    if repository is None and options["private"]:
        raise usage_error(
            text("{} requires {}", Option("private", True), Option("push")),
            "it sets the visibility of a new repository",
            text("{}", Option("push", "OWNER/NAME")),
        )
    # A worker writes its share of the folder. Its parent uploads the folder.
    if repository is None or PARENT_VARIABLE in os.environ:
        return None
    target = parse_push_target(repository, options["private"])
    share, _ = requested_share(common.process_options.processes, os.environ)
    if share.count > 1:
        what = text("{} is not supported with several processes", Option("push"))
        why = "several processes write this output"
        raise usage_error(what, why, "upload it when they are done")
    check_push(target, retry_policy_from_env(os.environ, observer.note))
    return target


def _write_export(opened: OpenedConversion, options: ExportOptions) -> Conversion:
    """Copy every tensor to the files of the requested layout."""
    source = opened.source
    located = opened.located
    if source.tree_manifest.is_adapter:
        return _write_adapter(opened, options)
    access = checkpoint_access(opened.common, opened.observer)
    source, excluded = without_files(source, as_tuple(options["exclude"]))
    # A plan reads only headers.
    is_checked = not opened.common.dry_run
    source = select_parts(options, source, access, check_digest=is_checked)
    check_request(options, source)
    if options["training_state"]:
        check_state_request(options, source)
    source = take_quantized_bytes(options, source, located, opened.common, opened.observer)
    tensor_map = read_export_map(options, source)
    draft = draft_export(options, source, tensor_map)
    placed = place_export(options, draft, tensor_map)
    model_name = exported_name(located, draft)
    suffix = options["layout"]
    if suffix == HF_LAYOUT and file_format(options) == DCP_FORMAT:
        suffix = DCP_FORMAT
    out_name = f"{model_name}-{suffix}"
    if draft.state is not None:
        out_name = state_folder_name(options, draft.state) or out_name
    has_rounding = any(not scale.is_exact for scale in draft.scales.values())
    next_command = f"prep verify {OUT_PLACEHOLDER}"
    if not has_rounding and not options["dtype"]:
        # Only values that were not changed can be compared with the source.
        next_command += f" {shlex.quote(source.display_name)}"
    notes = [_headline(options, draft, placed, located)]
    if has_rounding:
        notes.append(
            "the layout changes values with rounding: an output is read back only if every value returns"
        )
    if draft.state is not None:
        notes += exported_state_notes(options, draft)
    if excluded:
        notes.append(f"excluded: {join_names(excluded, max_names=MAX_LEFT_FILES)}")
    return opened.convert(
        draft,
        placed,
        ExportOptions,
        _recorded_options(options),
        name=model_name,
        out_name=out_name,
        notes=notes,
        fields=report_fields(options, draft, placed),
        next_command=next_command,
    )


def draft_export(
    options: ExportOptions, source: Source, tensor_map: TensorMap | None = None
) -> Draft:
    """Return the draft of an export: the model in the requested dtype and tree, and its training state."""
    tied_head = _stored_tied_head(options, source, tensor_map)
    source = with_tied_head(source) if tied_head else source
    draft = start_draft(
        source,
        stored_rows(source),
        true_vocab=options["true_vocab"],
        dtype=options["dtype"],
        kept=tied_head,
    )
    if not options["keep_padding"]:
        draft = with_rows(draft, draft.vocabulary.true_size)
    if tensor_map is not None:
        # With the content of its map, the output is read without a file.
        record = {
            "name": tensor_map.name,
            "xxh3": record_digest(tensor_map.content.encode()),
            CONTENT_KEY: tensor_map.content,
        }
        draft = replace(draft, settings=Manifest(map=record))
    if options["training_state"]:
        draft = draft_state(options, draft)
    if options["layout"] in source.family.layouts:
        draft = in_tree(draft, options["layout"])
    return draft


def place_export(
    options: ExportOptions, draft: Draft, tensor_map: TensorMap | None = None
) -> Placed:
    """Place the tensors of a draft in the requested layout."""
    settings = Manifest()
    if options["layout"] != HF_LAYOUT:
        settings |= Manifest(layout=options["layout"])
    storage = written_storage(options)
    if storage != OCDBT:
        settings |= Manifest(storage=storage.name)
    return replace(_place(options, draft, tensor_map), settings=settings)


def exported_name(located: LocatedCheckpoint, draft: Draft) -> str:
    """Return the name of a model in the manifest of its export."""
    if draft.vocabulary.stored_size == draft.vocabulary.true_size:
        return located.model_name.removesuffix("-padded")
    return located.model_name


def _place(options: ExportOptions, draft: Draft, tensor_map: TensorMap | None) -> Placed:
    """Place the tensors of a draft in the files of the requested layout and format."""
    tree = options["layout"]
    container = file_format(options)
    max_nbytes = shard_nbytes(options)
    if tensor_map is not None:
        return place_mapped(draft, tensor_map, max_nbytes)
    if find_library(tree, container).item is not None:
        return place_trainer_item(draft, tree, written_storage(options))
    if container == DCP_FORMAT:
        if draft.state is not None:
            return place_dcp_state(prepare_torch_adam(draft), max_nbytes)
        if tree == HF_LAYOUT:
            return place_dcp(draft, max_nbytes)
        return place_dcp_tree(draft, tree, max_nbytes)
    if tree != HF_LAYOUT:
        return place_flax(draft, tree, container, max_nbytes)
    if draft.state is not None:
        return place_trainer_checkpoint(draft, prepare_torch_adam(draft), max_nbytes)
    return place_safetensors(draft, max_nbytes)


def report_fields(options: ExportOptions, draft: Draft, placed: Placed) -> dict[str, object]:
    """Return the fields of an export for JSON."""
    vocabulary = draft.vocabulary
    return {
        "vocab": {"true": vocabulary.true_size, "written": vocabulary.stored_size},
        "files": len(placed.files),
        "layout": options["layout"],
        "format": file_format(options),
    }


def _headline(
    options: ExportOptions, draft: Draft, placed: Placed, located: LocatedCheckpoint
) -> str:
    """Return a line for the user: `llama-13b-init step 200 -> Hugging Face safetensors, 6 files; …`."""
    step = draft.source.tree_manifest.step
    name = located.model_name if step is None else f"{located.model_name} step {step}"
    title = find_library(options["layout"], file_format(options)).title
    line = f"{name} -> {title}, {len(placed.files)} file{'s' if len(placed.files) > 1 else ''}"
    removed_rows = draft.resize.vocabulary.stored_size - draft.vocabulary.stored_size
    if removed_rows > 0:
        line += f"; {count_text(removed_rows, 'row')} of padding removed"
    dropped_nbytes = sum(part.nbytes for part in draft.left if part.rule == OPT_STATE_RULE)
    if dropped_nbytes:
        line += f"; optimizer state ({format_bytes(dropped_nbytes)}) dropped"
    return line


def _stored_tied_head(
    options: ExportOptions, source: Source, tensor_map: TensorMap | None
) -> frozenset[str]:
    """Return the name of a tied head to write as a separate tensor. Empty if there is none.

    A library without tied heads needs it, and a map may name it. PyTorch loads a distributed checkpoint into a state
    dict with both names.
    """
    layout = source.family.layouts.get(options["layout"])
    needs_head = layout is not None and not layout.allows_tied_head
    if options["training_state"] and file_format(options) == DCP_FORMAT:
        needs_head = True
    is_tied = needs_head and source.family.is_tied(source.config)
    if is_tied or (tensor_map is not None and names_tied_head(tensor_map, source)):
        return frozenset([source.family.tying.head_tensor])
    return frozenset()


def _recorded_options(options: ExportOptions) -> dict[str, object]:
    """Return the values of options for the manifest, with the size of files in bytes."""
    values: dict[str, object] = {**options}
    nbytes = shard_nbytes(options)
    if file_format(options) != DCP_FORMAT:
        # The other formats follow from the layout.
        values["format"] = None
    values["shard_size"] = DEFAULT_SHARD_SIZE if nbytes == DEFAULT_SHARD_NBYTES else nbytes
    return values


def _write_adapter(opened: OpenedConversion, options: ExportOptions) -> Conversion:
    """Copy trained adapters to the files of PEFT."""
    source = opened.source
    if options["layout"] != HF_LAYOUT or options["format"] is not None or options["keep_padding"]:
        what = text(
            "{}, {} and {} are not supported for adapters",
            Option("layout"),
            Option("format"),
            Option("keep_padding"),
        )
        why = f"{source.display_name} has only adapters, which are written in the format of PEFT"
        hint = text("{} writes a complete model", Command("merge", "ADAPTER", "BASE"))
        raise usage_error(what, why, hint)
    check_storage(options)
    for name in ("map", "true_vocab", "text_only", "towers", "quantized_source", "exclude"):
        value = options[name]
        if value:
            raise no_effect_error(Option(name, value), source, "it has only adapters")
    check_no_adapter(options, source)
    dtype = options["dtype"]
    draft = draft_adapter(source, dtype)
    name = opened.located.model_name
    base = shlex.quote(base_of_adapter(source.tree_manifest))
    return opened.convert(
        draft,
        place_adapter(draft),
        ExportOptions,
        {"dtype": dtype},
        name=name,
        out_name=f"{name}-adapter",
        notes=[f"{name} -> adapter of PEFT, rank {source.tree_manifest['lora']['rank']}"],
        fields={"layout": "peft", "format": "safetensors", "files": 1},
        next_command=f"prep merge {OUT_PLACEHOLDER} {base}",
    )


# --- prep merge


@public
def merge(
    adapter: PathLike,
    base: PathLike,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | Observer | None = None,
    process_options: ProcessOptions | None = None,
    **options: Unpack[MergeOptions],
) -> Conversion:
    """Add a LoRA adapter to the weights of its base model, and write a Hugging Face folder.

    Args:
        adapter: Folder of an adapter in the format of PEFT.
        base: Folder, alias, hub id, or `gs://`/`s3://` URL of the base model.
        out: Output folder. Default: a name made from the base's.
        dry_run: Return the plan from headers only. No weight is read and no file is written.
        progress: Receives the bytes written. Default: none. See `Progress`.
        process_options: Share of this process in the work. Default: all of it.
        **options: See `MergeOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: An argument is invalid.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the base are damaged.
        PrepError: The adapter does not fit the base, or the merge failed. An interrupted one resumes when called again.
    """
    adapter = Path(adapter)
    if is_adapter(Path(base)) and not is_adapter(adapter):
        why = f"{base} is an adapter and {adapter} is not one: the first argument is the adapter"
        hint = text("{}", Command("merge", str(base), str(adapter)))
        raise usage_error("adapter and base are exchanged", why, hint)
    common = common_options(base, out, options, dry_run=dry_run, process_options=process_options)
    # A merge computes nothing with the model: the names in the files are enough.
    common = replace(common, verbatim=None)
    return _write_merged(open_conversion("merge", common, progress), adapter, options)


def _write_merged(
    opened: OpenedConversion, adapter_path: Path, options: MergeOptions
) -> Conversion:
    """Copy the base's tensors, with the values of an adapter added to some of them."""
    source = opened.source
    located = opened.located
    access = checkpoint_access(opened.common, opened.observer)
    if source.tree_manifest.is_adapter:
        raise usage_error(
            f"{source.display_name} is the run of an adapter",
            "it has only adapters; a base is a complete model",
            text("{}", Command("merge", "ADAPTER", "BASE")),
        )
    # A plan reads only headers.
    check_base = options["verify"] and not opened.common.dry_run
    # An export removes the padding of the vocabulary. A merge changes only the tensors of the adapter.
    copy_options = with_defaults(ExportOptions, {"keep_padding": True})
    try:
        # A training step of a multimodal model has the towers of its start model.
        source = select_parts(copy_options, source, access, check_digest=check_base)
    except PrepError as error:
        export_step = Command("export", source.display_name, Option("towers", "CHECKPOINT"))
        hint = text("{} writes a base with towers", export_step)
        raise PrepError(error.what, error.why, hint) from error
    adapter = open_base_adapter(adapter_path, source)
    if source.family.is_verbatim and adapter.settings.fan_in_fan_out:
        what = f"{source.display_name} is not supported as a base of {adapter_path}"
        why = "fan_in_fan_out is true, and which weights of this architecture are transposed is unknown"
        raise PrepError(what, why, "PEFT's `merge_and_unload()` merges the adapter")
    if check_base:
        _check_base(adapter_path, source)
    draft, source_view = merge_adapter(draft_export(copy_options, source), adapter)
    merged: MergedAdapter = {
        "adapter": str(adapter.path),
        "scaling": adapter.settings.lora_config().scaling,
        "tensors": len(draft.updates) + len(draft.replaced),
    }
    # An adapter that PEFT wrote has no manifest.
    manifest = adapter.source.manifest
    if manifest is not None and manifest.digest is not None:
        merged["manifest"] = manifest.digest
    draft = replace(draft, settings=Manifest(merged=merged))
    factors = " or ".join(
        f"{scale:g}" for scale in sorted({u.scale for u in draft.updates.values()})
    )
    change = f"{len(draft.updates)} tensors change, scaled by {factors}"
    if draft.replaced:
        replaced = count_text(len(draft.replaced), "tensor")
        change += f", and {replaced} of the adapter replaces the base's"
    base = adapter.settings.base_model_name_or_path
    origin = f" (trained with {base:.60})" if base else ""
    placed = place_export(copy_options, draft)
    return opened.convert(
        *with_adapter_tokenizer(draft, placed, adapter_path),
        MergeOptions,
        options,
        arguments=str(adapter_path),
        name=exported_name(located, draft),
        out_name=f"{located.model_name}-merged",
        notes=[f"{adapter_path}{origin} -> {source.display_name}: {change}"],
        fields={**report_fields(copy_options, draft, placed), "merged": merged},
        source_view=source_view,
    )


def _check_base(adapter: Path, source: Source) -> None:
    """Raise PrepError if the manifest of an adapter has the digest of another base.

    An adapter that PEFT wrote has no manifest, and is not checked.
    """
    base = (read_manifest(adapter) or NO_MANIFEST).base
    recorded = base.get(SAMPLE_DIGEST_KEY)
    if recorded is None or recorded == (digest := sample_digest(source)):
        return
    base_name = f"{base.get('name')!s:.60}"
    why = f"the first rows of its tensors have the digest {digest}, the rows of {base_name} had {recorded}"
    hint = text(
        "name the model that the adapter was trained with, or pass {} to merge with another one",
        Option("verify", False),
    )
    raise PrepError(
        f"{adapter} was trained with another base than {source.display_name}", why, hint
    )
