"""`prep export`: convert an Orbax checkpoint to a Hugging Face folder, or to Flax or EasyLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prepcli.commands.conversion import (
    CommonOptions,
    PlannedConversion,
    check_allow_overflow,
    format_command_line,
    output_config,
    run_conversion,
)
from prepcli.commands.export_adapter import plan_adapter_export
from prepcli.console.formatting import format_bytes, parse_bytes
from prepcli.console.ui import Report, Ui
from prepcli.errors import PrepError, usage_error
from prepcli.formats.manifest import LORA_KEY
from prepcli.formats.safetensors import SUFFIX
from prepcli.formats.safetensors_layout import split_into_shards
from prepcli.planning.accounting import DEFAULT_MATCH_OPTIONS, vocab_tensors
from prepcli.planning.plan import Fill, Locations, OutputFile, Plan, SmallFile
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, stored_rows
from prepcli.targets.flax_folder import STREAM_FORMAT, lay_out_flax_folder, with_tied_head
from prepcli.targets.hf_folder import (
    copied_small_files,
    header_entries,
    index_files,
    lay_out_weight_files,
    settings_files,
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
from trainer.models.parameters import HFConfig, TreeLayout

PAYLOAD_PAGE_OFFSET = 0  # payloads start at a page boundary, like chunks, so that whole pages are copied
DEFAULT_SHARD_NBYTES = 5 * 10**9
MIN_UNITLESS_NBYTES = 1 << 20  # smaller shard sizes need a unit: `5` means 5 bytes, but the user means 5 GB
HF_LAYOUT = "hf"
FORMAT_BY_LAYOUT = {HF_LAYOUT: "safetensors", "hf-flax": "msgpack", "easylm": STREAM_FORMAT}
LAYOUT_TITLES = {
    HF_LAYOUT: "Hugging Face safetensors",
    "hf-flax": "Flax msgpack for Hugging Face",
    "easylm": "EasyLM stream",
}


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Request of `prep export`."""

    common: CommonOptions
    keep_padding: bool = False  # keep the rows that pad the vocabulary
    shard_nbytes: int = DEFAULT_SHARD_NBYTES  # maximum size of a file
    true_vocab: int | None = None  # unpadded size of the vocabulary; None: from the source
    layout: str = HF_LAYOUT  # `hf`, or a tree layout of the family
    file_format: str | None = None  # None: the only format of the layout
    dtype: str | None = None  # None: no cast


def parse_shard_size(text: str) -> int:
    """Parse `--shard-size`; raise UsageError for 0, and for less than 1 MiB without a unit."""
    nbytes, number = parse_bytes(text, "--shard-size"), text.strip()
    if nbytes == 0:
        raise usage_error(f"invalid `--shard-size {text}`", "a file has at least one byte", "`--shard-size 5GB`")
    if number.replace(".", "").isdecimal() and nbytes < MIN_UNITLESS_NBYTES:
        why = f"a number without a unit is in bytes: {format_bytes(nbytes)}"
        raise usage_error(f"`--shard-size {text}` has no unit", why, f"`--shard-size {number}GB`")
    return nbytes


def export(request: ExportRequest, ui: Ui) -> Report:
    """Convert a checkpoint to a Hugging Face folder, or to a file of Flax or EasyLM.

    Args:
        request: Source, output, layout and dtype.
        ui: Receives notes, warnings and progress.

    Returns:
        Report with the output's path and the files written.

    Raises:
        PrepError: The options conflict, the layout is not supported for the model, or the conversion failed.
    """
    check_allow_overflow(request.common, request.dtype)
    return run_conversion(request.common, ui, lambda source, located: plan_export(request, source, located))


@dataclass(frozen=True, slots=True)
class _WeightFiles:
    """Layout of the weight files: the files, the locations of each tensor, and the index if there is one."""

    files: tuple[OutputFile, ...]
    locations: Mapping[str, Locations]
    index: tuple[SmallFile, ...]


def _config_for_layout(config: HFConfig, layout: TreeLayout, source: Source, is_tied: bool) -> dict[str, Any]:
    """Return the config for a library that supports fewer fields, with `tie_word_embeddings` as stored.

    Raises:
        PrepError: The library would compute another model, because it ignores some of the fields.
    """
    can_use_config = not layout.allows_tied_head or source.family.is_tied(config) == is_tied
    layout_config = {**config} if can_use_config else {**config, "tie_word_embeddings": is_tied}
    fields_read = {name: value for name, value in layout_config.items() if name not in layout.ignored_fields}
    arch_config = source.family.arch_config
    if arch_config(fields_read) != arch_config(layout_config):
        ignored_fields = ", ".join(
            f"{name} {layout_config[name]}" for name in layout.ignored_fields if name in layout_config
        )
        why = f"the config has {ignored_fields}, which its classes ignore, so that they compute another model"
        raise PrepError("the model is not supported in Flax", why, "`--layout hf` supports it")
    return layout_config


def plan_export(request: ExportRequest, source: Source, located: LocatedCheckpoint) -> PlannedConversion:
    """Plan the copy of every tensor to the files of the requested layout.

    Args:
        request: Layout, padding, dtype and maximum file size.
        source: Opened source.
        located: Located source; its model name determines the output's default name.

    Returns:
        Plan with the notes and fields of its report.

    Raises:
        PrepError: The request does not fit the source, or tensors are missing, unexpected or of another shape.
    """
    if LORA_KEY in source.tree_manifest:
        _check_adapter_request(request, source)
        return plan_adapter_export(source, located, request.dtype)
    _check_request(request, source)
    return plan_copy(request, source, located)


def plan_copy(request: ExportRequest, source: Source, located: LocatedCheckpoint) -> PlannedConversion:
    """Plan an export whose request has been checked; see `plan_export`."""
    vocabulary = source.vocabulary(request.true_vocab)
    vocab_rows = vocabulary.stored_size if request.keep_padding else vocabulary.true_size
    tied_head = {source.family.tying.head_tensor} if _stores_tied_head(request, source) else set()
    source = with_tied_head(source) if tied_head else source
    match = match_source_tensors(source, stored_rows(source), DEFAULT_MATCH_OPTIONS)
    resize = VocabResize(vocabulary, vocab_tensors(match), Fill("zeros"))
    tensors = [t.cast(request.dtype) for t in source.tensors if t.name in match.uses or t.name in tied_head]
    row_counts = output_rows(tensors, resize.tensors, vocab_size=vocab_rows)
    weight_files = _lay_out_weights(request, source, tensors, row_counts, vocab_rows=vocab_rows)
    targets = {t.name: TensorTarget(weight_files.locations[t.name], row_counts[t.name], t.dtype) for t in tensors}
    config = output_config(source, Vocabulary(vocabulary.true_size, vocab_rows), match.is_tied, request.dtype)
    if layout := source.family.layouts.get(request.layout):
        config = _config_for_layout(config, layout, source, match.is_tied)
    base_name = located.model_name.removesuffix("-padded") if vocab_rows == vocabulary.true_size else located.model_name
    plan = Plan(
        command="export",
        request=_command_line(request, source),
        source_name=source.display_name,
        source_files=source.file_stamps,
        streams=build_streams(source, targets, resize=resize, compared={c.name for c in match.checks}),
        files=weight_files.files,
        small_files=(
            *settings_files(config, (), extra_files=copied_small_files(source)),
            *weight_files.index,
        ),
        dropped=(
            *(d for d in match.dropped if d.name not in tied_head),
            *dropped_padding(source, targets, resize=resize),
            *dropped_state(source),
        ),
        checks=match.checks,
        settings={
            "name": base_name,
            "kind": "hf",
            "family": source.family.name,
            "vocab": {"true": vocabulary.true_size, "padded": vocab_rows},
            **({"layout": request.layout} if request.layout != HF_LAYOUT else {}),
            "prefixed": source.names.is_prefixed,
            "tied": match.is_tied,
            "config": config,
        },
        display_names={t.name: source.names.full_name(t.name) for t in source.tensors},
    )
    fields = {
        "vocab": {"true": vocabulary.true_size, "written": vocab_rows},
        "files": len(weight_files.files),
        "layout": request.layout,
        "format": FORMAT_BY_LAYOUT[request.layout],
    }
    num_files, removed_rows = len(weight_files.files), vocabulary.stored_size - vocab_rows
    line = _summary_line(request, source, located, num_files=num_files, removed_rows=removed_rows)
    return PlannedConversion(
        plan,
        f"{base_name}-{request.layout}",
        notes=(line,),
        fields=fields,
        next_command=lambda out: f"prep verify {out}" + (f" {source.display_name}" if not request.dtype else ""),
        source_view=source,
    )


def _check_request(request: ExportRequest, source: Source) -> None:
    """Raise UsageError for a conflict of layout, format and size, and for an export without any change."""
    if FORMAT_BY_LAYOUT.get(request.layout) is None or request.file_format not in (
        None,
        FORMAT_BY_LAYOUT[request.layout],
    ):
        pairs = ", ".join(
            f"`--layout {layout} --format {file_format}`" for layout, file_format in FORMAT_BY_LAYOUT.items()
        )
        requested = f"`--layout {request.layout}`" + (
            f" `--format {request.file_format}`" if request.file_format else ""
        )
        raise usage_error(f"{requested} is not supported", "each layout has one format", f"one of {pairs}")
    if request.layout not in (HF_LAYOUT, *source.family.layouts):
        known = ", ".join((HF_LAYOUT, *source.family.layouts))
        raise usage_error(f"layout {request.layout} is not supported for {source.family.name}", f"supported: {known}")
    if FORMAT_BY_LAYOUT[request.layout] == STREAM_FORMAT and request.shard_nbytes != DEFAULT_SHARD_NBYTES:
        raise usage_error("`--shard-size` is not supported for streams", "an EasyLM stream is one file")
    is_unchanged = request.layout == HF_LAYOUT and not request.dtype
    if is_unchanged and source.tensor_file_names and not source.manifest and _is_all_safetensors(source):
        why = "it is a Hugging Face folder that transformers reads already"
        raise usage_error(f"cannot export {source.display_name}", why, f"`prep save-init {source.display_name}`")


def _check_adapter_request(request: ExportRequest, source: Source) -> None:
    """Raise UsageError for options of complete models."""
    if request.layout != HF_LAYOUT or request.file_format is not None or request.keep_padding:
        what = "`--layout`, `--format` and `--keep-padding` are not supported for adapters"
        why = f"{source.display_name} has only adapters, which are written in the format of PEFT"
        raise usage_error(what, why, "`prep merge ADAPTER BASE` writes a complete model")


def _stores_tied_head(request: ExportRequest, source: Source) -> bool:
    """Return whether a tied head is written as a tensor, for a library that does not support tied heads."""
    is_tied = source.family.is_tied(source.config)
    return is_tied and request.layout != HF_LAYOUT and not source.family.layouts[request.layout].allows_tied_head


def _is_all_safetensors(source: Source) -> bool:
    return all(path.name.endswith(f".{SUFFIX}") for path in source.files)


def _lay_out_weights(
    request: ExportRequest,
    source: Source,
    tensors: Sequence[SourceTensor],
    row_counts: Mapping[str, int],
    *,
    vocab_rows: int,
) -> _WeightFiles:
    """Lay out the weight files of the requested layout; `row_counts` has the output rows of each tensor."""
    if request.layout == HF_LAYOUT:
        groups = split_into_shards(header_entries(source, tensors, rows=row_counts), request.shard_nbytes)
        files, locations, layouts = lay_out_weight_files([(name, group, PAYLOAD_PAGE_OFFSET) for name, group in groups])
        return _WeightFiles(
            files, {t.name: (locations[source.names.full_name(t.name)],) for t in tensors}, index_files(layouts)
        )
    output = lay_out_flax_folder(
        source,
        tensors,
        layout=request.layout,
        container=FORMAT_BY_LAYOUT[request.layout],
        vocab_size=vocab_rows,
        shard_nbytes=request.shard_nbytes,
    )
    return _WeightFiles(output.files, output.sides, output.index)


def _summary_line(
    request: ExportRequest, source: Source, located: LocatedCheckpoint, *, num_files: int, removed_rows: int
) -> str:
    """Describe the export: `llama-13b-init step 200 -> Hugging Face safetensors, 6 files; …`."""
    step = source.tree_manifest.get("step")
    source_name = located.model_name if step is None else f"{located.model_name} step {step}"
    notes = f"; {removed_rows} rows of padding removed" if removed_rows > 0 else ""
    state_nbytes = optimizer_nbytes(source)
    notes += f"; optimizer state ({format_bytes(state_nbytes)}) dropped" if state_nbytes else ""
    return f"{source_name} -> {LAYOUT_TITLES[request.layout]}, {num_files} file{'s' if num_files > 1 else ''}{notes}"


def _command_line(request: ExportRequest, source: Source) -> str:
    options = [
        ("--dtype", request.dtype),
        ("--layout", request.layout if request.layout != HF_LAYOUT else None),
        ("--keep-padding", request.keep_padding),
        ("--shard-size", request.shard_nbytes if request.shard_nbytes != DEFAULT_SHARD_NBYTES else None),
        ("--true-vocab", request.true_vocab),
        ("--config", request.common.config),
        ("--ema", request.common.ema),
    ]
    return format_command_line("export", source, options)
