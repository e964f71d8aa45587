"""`prep export`: convert a checkpoint to a Hugging Face folder, or to the checkpoint of another library."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

from prepcli.commands.operations.conversion import (
    OUT_PLACEHOLDER,
    CommonOptions,
    PlannedConversion,
    check_allow_overflow,
    checkpoint_access,
    common_options,
    recorded_values,
    run_conversion,
)
from prepcli.commands.operations.export_adapter import plan_adapter_export
from prepcli.commands.operations.export_checks import (
    DEFAULT_SHARD_NBYTES,
    check_request,
    shard_nbytes,
)
from prepcli.commands.operations.export_layouts import (
    WeightFiles,
    file_format,
    lay_out_weights,
    layout_scales,
    small_files,
    written_storage,
)
from prepcli.commands.operations.export_map import WrittenMap, read_export_map
from prepcli.commands.operations.export_quantized import take_quantized_bytes
from prepcli.commands.operations.export_towers import no_effect_error, select_parts
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import DEFAULT_SHARD_SIZE, ExportOptions
from prepcli.commands.operations.push import check_private, convert_and_push
from prepcli.commands.operations.results import Conversion
from prepcli.commands.operations.training_state import (
    StateExport,
    check_no_adapter,
    check_state_request,
    lay_out_training_state,
)
from prepcli.core.counts import count_text
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import format_bytes
from prepcli.core.json_types import HFConfig, JsonObject
from prepcli.core.observer import Observer, observer_of
from prepcli.core.option_spec import PathLike, format_command_line
from prepcli.core.progress import Progress
from prepcli.execution.hub_push import parse_push_target
from prepcli.execution.workers import PARENT_VARIABLE, ProcessOptions
from prepcli.models.parameters import TreeLayout
from prepcli.planning.item_storage import OCDBT
from prepcli.planning.layout_scales import LayoutScale
from prepcli.planning.libraries import DCP_FORMAT, HF_LAYOUT, find_library
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Fill, Plan
from prepcli.planning.quantization_leaves import is_decoded_tensor
from prepcli.planning.tensor_match import DEFAULT_MATCH_OPTIONS, TensorMatch
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.multimodal import towers_entry
from prepcli.sources.source import (
    Source,
    SourceTensor,
    match_source_tensors,
    stored_axis_maps,
)
from prepcli.sources.vocabulary_tensors import vocabulary_names
from prepcli.targets.flax_folder import with_tied_head
from prepcli.targets.hf_folder import (
    output_config,
)
from prepcli.targets.streams import (
    TensorTarget,
    VocabResize,
    build_streams,
    dropped_padding,
    dropped_state,
    optimizer_nbytes,
    output_rows,
)


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

    def convert() -> Conversion:
        # A plan reads only headers.
        plan = partial(
            plan_export, options, common=common, observer=observer, check_towers=not dry_run
        )
        return run_conversion(common, observer, plan)

    repository = options["push"]
    if repository is None:
        check_private(options["private"])
        return convert()
    if PARENT_VARIABLE in os.environ:
        # A worker writes its share of the folder. Its parent uploads the folder.
        return convert()
    target = parse_push_target(repository, options["private"])
    return convert_and_push(target, common, observer, convert)


def _config_for_layout(
    config: HFConfig, layout: TreeLayout, source: Source, is_tied: bool
) -> JsonObject:
    """Return the config for the library of a layout, with `tie_word_embeddings` as stored.

    Raises:
        PrepError: The library would compute another model, because it ignores some of the fields.
    """
    can_use_config = not layout.allows_tied_head or source.family.is_tied(config) == is_tied
    layout_config = {**config} if can_use_config else {**config, "tie_word_embeddings": is_tied}
    fields_read = {
        name: value for name, value in layout_config.items() if name not in layout.ignored_fields
    }
    arch_config = source.family.arch_config
    if arch_config(fields_read) != arch_config(layout_config):
        ignored_fields = ", ".join(
            f"{name} {layout_config[name]}"
            for name in layout.ignored_fields
            if name in layout_config
        )
        why = f"the config has {ignored_fields}, which its classes ignore, so that they compute another model"
        hint = text("{} supports it", Option("layout", HF_LAYOUT))
        raise PrepError("the model is not supported in Flax", why, hint)
    return layout_config


def plan_export(
    options: ExportOptions,
    source: Source,
    located: LocatedCheckpoint,
    *,
    common: CommonOptions,
    observer: Observer,
    check_towers: bool = True,
) -> PlannedConversion:
    """Plan the copy of every tensor to the files of the requested layout.

    Args:
        options: Layout, padding, dtype and maximum file size.
        source: Opened source.
        located: Located source. Its model name determines the output's default name.
        common: Options to open further models with: the one with the towers, and the quantised one.
        observer: Receives notes.
        check_towers: Whether to compare the towers of a multimodal model with a training step's record of them.

    Returns:
        Plan with the notes and fields of its report.

    Raises:
        PrepError: The request does not fit the source, or tensors are missing, unexpected or of another shape.
    """
    if source.tree_manifest.is_adapter:
        _check_adapter_request(options, source)
        check_no_adapter(options, source)
        return plan_adapter_export(source, located, options["dtype"])
    access = checkpoint_access(common, observer)
    source = select_parts(options, source, access, check_digest=check_towers)
    check_request(options, source)
    if options["training_state"]:
        check_state_request(options, source)
    source = take_quantized_bytes(options, source, located, common, observer)
    return plan_copy(options, source, located)


def plan_copy(
    options: ExportOptions, source: Source, located: LocatedCheckpoint
) -> PlannedConversion:
    """Plan an export after the checks of its request. See `plan_export`."""
    vocabulary = source.vocabulary(options["true_vocab"])
    vocab_rows = vocabulary.stored_size if options["keep_padding"] else vocabulary.true_size
    written_map = read_export_map(options, source)
    tied_head = _stored_tied_head(options, source, written_map)
    source = with_tied_head(source) if tied_head else source
    match = match_source_tensors(source, stored_axis_maps(source), DEFAULT_MATCH_OPTIONS)
    names = vocabulary_names(source, match, vocabulary)
    resize = VocabResize(vocabulary, names, Fill("zeros"))
    parameters = [t for t in source.tensors if t.name in match.uses or t.name in tied_head]
    tensors = [t.cast(options["dtype"]) for t in (*parameters, *source.tower_tensors)]
    row_counts = output_rows(tensors, resize.tensors, vocab_size=vocab_rows)
    state = _lay_out_files(options, source, tensors, row_counts, vocab_rows, written_map)
    weight_files = state.weight_files
    tensors.extend(state.tensors)
    row_counts = output_rows(tensors, resize.tensors, vocab_size=vocab_rows)
    scales = layout_scales(options, source, tensors)
    scales |= state.scales(scales)
    targets = _tensor_targets(tensors, weight_files, row_counts, scales)
    written_vocabulary = Vocabulary(vocabulary.true_size, vocab_rows)
    is_tied = match.is_tied
    config = _written_config(options, source, written_vocabulary, is_tied=is_tied)
    name = _base_name(located, written_vocabulary)
    settings = _manifest_settings(
        source, name, options, written_vocabulary, is_tied=is_tied, config=config
    )
    left_source = state.left_source
    source = state.source
    dropped = (
        *(d for d in match.dropped if d.name not in tied_head),
        *dropped_padding(source, targets, resize=resize),
        *dropped_state(left_source),
    )
    plan = Plan(
        command="export",
        request=_command_line(options, source),
        source_name=source.display_name,
        source_files=source.file_stamps,
        streams=build_streams(
            source, targets, resize=resize, compared=_compared_names(source, match)
        ),
        files=weight_files.files,
        small_files=small_files(source, config, weight_files),
        leaves=weight_files.leaves,
        dropped=dropped,
        checks=match.checks,
        settings=settings | state.settings() | written_map.record,
        display_names=source.display_names(),
        item=weight_files.folder,
        empty_nodes=weight_files.empty_nodes,
    )
    planned = _add_report_fields(
        plan, options, left_source, located, vocabulary=vocabulary, vocab_rows=vocab_rows
    )
    return state.describe(planned)


def _lay_out_files(
    options: ExportOptions,
    source: Source,
    tensors: Sequence[SourceTensor],
    row_counts: Mapping[str, int],
    vocab_rows: int,
    written_map: WrittenMap,
) -> StateExport:
    """Lay out the weight files, and the training state if it is requested."""
    file_nbytes = shard_nbytes(options)
    if options["training_state"]:
        return lay_out_training_state(
            options,
            source,
            tensors,
            row_counts,
            vocab_rows=vocab_rows,
            shard_nbytes=file_nbytes,
        )
    weight_files = lay_out_weights(
        options,
        source,
        tensors,
        row_counts,
        vocab_rows=vocab_rows,
        shard_nbytes=file_nbytes,
        tensor_map=written_map.tensor_map,
    )
    return StateExport(weight_files, source)


def _base_name(located: LocatedCheckpoint, vocabulary: Vocabulary) -> str:
    """Return the start of the output's default name."""
    name = located.model_name
    if vocabulary.stored_size == vocabulary.true_size:
        return name.removesuffix("-padded")
    return name


def _tensor_targets(
    tensors: Sequence[SourceTensor],
    weight_files: WeightFiles,
    row_counts: Mapping[str, int],
    scales: Mapping[str, LayoutScale],
) -> dict[str, TensorTarget]:
    """Return the target of each tensor, by name."""
    targets: dict[str, TensorTarget] = {}
    for tensor in tensors:
        name = tensor.name
        targets[name] = TensorTarget(
            weight_files.locations[name], row_counts[name], tensor.dtype, scales.get(name)
        )
    return targets


def _compared_names(source: Source, match: TensorMatch) -> set[str]:
    """Return the names of tensors to read for a comparison, but not to write."""
    decoded = {tensor.name for tensor in source.state_tensors if is_decoded_tensor(tensor.name)}
    return decoded | {check.name for check in match.checks}


def _add_report_fields(
    plan: Plan,
    options: ExportOptions,
    source: Source,
    located: LocatedCheckpoint,
    *,
    vocabulary: Vocabulary,
    vocab_rows: int,
) -> PlannedConversion:
    """Return the plan with its default name, its notes and the fields of its report."""
    layout = options["layout"]
    num_files = len(plan.files)
    line = _summary_line(
        options,
        source,
        located,
        num_files=num_files,
        removed_rows=vocabulary.stored_size - vocab_rows,
    )
    fields = {
        "vocab": {"true": vocabulary.true_size, "written": vocab_rows},
        "files": num_files,
        "layout": layout,
        "format": file_format(options),
    }
    next_command = f"prep verify {OUT_PLACEHOLDER}"
    notes = [line]
    if any(stream.scale and not stream.scale.is_exact for stream in plan.streams):
        notes.append(
            "the layout changes values with rounding: an output is read back only if every value returns"
        )
    elif not options["dtype"]:
        # Only values that were not changed can be compared with the source.
        next_command += f" {shlex.quote(source.display_name)}"
    return PlannedConversion(
        plan,
        f"{plan.settings['name']}-{_output_suffix(options)}",
        notes=tuple(notes),
        fields=fields,
        next_command=next_command,
        source_view=source,
    )


def _written_config(
    options: ExportOptions, source: Source, vocabulary: Vocabulary, *, is_tied: bool
) -> JsonObject:
    """Return the config.json of the output."""
    config = output_config(source, vocabulary, is_tied, options["dtype"])
    layout = source.family.layouts.get(options["layout"])
    if layout is not None:
        config = _config_for_layout(config, layout, source, is_tied)
    return config


def _manifest_settings(
    source: Source,
    name: str,
    options: ExportOptions,
    vocabulary: Vocabulary,
    *,
    is_tied: bool,
    config: HFConfig,
) -> Manifest:
    """Return the description of the model for the output's manifest."""
    settings = Manifest(
        name=name,
        kind="hf",
        family=source.family.name,
        vocab={"true": vocabulary.true_size, "padded": vocabulary.stored_size},
    )
    if options["layout"] != HF_LAYOUT:
        settings |= Manifest(layout=options["layout"])
    storage = written_storage(options)
    if storage != OCDBT:
        settings |= Manifest(storage=storage.name)
    settings |= Manifest(prefixed=source.names.is_prefixed, tied=is_tied, config=config)
    if source.wrapper is None:
        return settings
    return settings | towers_entry(source)


def _output_suffix(options: ExportOptions) -> str:
    """Return the end of the output's default name."""
    if options["layout"] == HF_LAYOUT and file_format(options) == DCP_FORMAT:
        return DCP_FORMAT
    return options["layout"]


def _check_adapter_request(options: ExportOptions, source: Source) -> None:
    """Raise UsageError for options of complete models."""
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
    for name in ("text_only", "towers", "quantized_source"):
        value = options[name]
        if value:
            raise no_effect_error(Option(name, value), source, "it has only adapters")


def _stored_tied_head(options: ExportOptions, source: Source, written_map: WrittenMap) -> set[str]:
    """Return the name of a tied head to write as a separate tensor. Empty if there is none.

    A library without tied heads needs it, and a map may name it. PyTorch loads a distributed checkpoint into a state
    dict with both names.
    """
    layout = source.family.layouts.get(options["layout"])
    needs_head = layout is not None and not layout.allows_tied_head
    if options["training_state"] and file_format(options) == DCP_FORMAT:
        needs_head = True
    if needs_head and source.family.is_tied(source.config):
        return {source.family.tying.head_tensor}
    if written_map.names_tied_head(source):
        return {source.family.tying.head_tensor}
    return set()


def _summary_line(
    options: ExportOptions,
    source: Source,
    located: LocatedCheckpoint,
    *,
    num_files: int,
    removed_rows: int,
) -> str:
    """Describe the export: `llama-13b-init step 200 -> Hugging Face safetensors, 6 files; …`."""
    step = source.tree_manifest.step
    source_name = located.model_name if step is None else f"{located.model_name} step {step}"
    notes = f"; {count_text(removed_rows, 'row')} of padding removed" if removed_rows > 0 else ""
    state_nbytes = optimizer_nbytes(source)
    notes += f"; optimizer state ({format_bytes(state_nbytes)}) dropped" if state_nbytes else ""
    title = find_library(options["layout"], file_format(options)).title
    return f"{source_name} -> {title}, {num_files} file{'s' if num_files > 1 else ''}{notes}"


def _command_line(options: ExportOptions, source: Source) -> str:
    """Return the command line for the manifest, with the size of files in bytes."""
    values = recorded_values(options)
    nbytes = shard_nbytes(options)
    if file_format(options) != DCP_FORMAT:
        # The other formats follow from the layout.
        values["format"] = None
    values["shard_size"] = DEFAULT_SHARD_SIZE if nbytes == DEFAULT_SHARD_NBYTES else nbytes
    return format_command_line("export", source.display_name, ExportOptions, values)
