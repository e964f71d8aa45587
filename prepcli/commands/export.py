"""`prep export`: back to a Hugging Face folder, or to a checkpoint of another library."""

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
from prepcli.console.formatting import format_bytes, parse_bytes
from prepcli.console.ui import Report, Ui
from prepcli.errors import PrepError, usage_error
from prepcli.formats.safetensors import SUFFIX
from prepcli.formats.safetensors_layout import split_into_shards
from prepcli.planning.accounting import DEFAULT_MATCH_OPTIONS, vocab_tensors
from prepcli.planning.plan import Fill, Locations, OutputFile, Plan, SmallFile
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, stored_rows
from prepcli.targets.flax_folder import STREAM_FORMAT, lay_out_flax_folder, with_tied_head
from prepcli.targets.hf_folder import copied_files, header_entries, index_files, lay_out_weight_files, settings_files
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

PAYLOAD_PAGE_OFFSET = 0  # payloads begin at a page: chunks do so too, and pages then move as they are
DEFAULT_SHARD_NBYTES = 5 * 10**9
MIN_UNITLESS_NBYTES = 1 << 20  # of a shard size without a unit: `5` is meant as 5 GB
HF_LAYOUT = "hf"
FORMAT_BY_LAYOUT = {HF_LAYOUT: "safetensors", "hf-flax": "msgpack", "easylm": STREAM_FORMAT}  # by layout
LAYOUT_TITLES = {HF_LAYOUT: "Hugging Face safetensors", "hf-flax": "Flax msgpack for Hugging Face", "easylm": "EasyLM stream"}


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Padding is taken off unless it is kept; files hold at most `shard_nbytes`. `layout` is a tree that the family
    knows, `container` the format that it is stored in (None: that which goes with it)."""

    common: CommonOptions
    keep_padding: bool = False
    shard_nbytes: int = DEFAULT_SHARD_NBYTES
    true_vocab: int | None = None
    layout: str = HF_LAYOUT
    file_format: str | None = None
    dtype: str | None = None


def parse_shard_size(text: str) -> int:
    """Read `--shard-size`. Raises a usage PrepError for 0, and for less than 1 MiB without a unit."""
    nbytes, number = parse_bytes(text), text.strip()
    if nbytes == 0:
        raise usage_error(f"`--shard-size {text}` holds nothing", "a file has at least one byte", "`--shard-size 5GB`")
    if number.replace(".", "").isdecimal() and nbytes < MIN_UNITLESS_NBYTES:
        why = f"a number without a unit is in bytes: it is {format_bytes(nbytes)}"
        raise usage_error(f"`--shard-size {text}` has no unit", why, f"`--shard-size {number}GB`")
    return nbytes


def export(request: ExportRequest, ui: Ui) -> Report:
    """An Orbax checkpoint into a Hugging Face folder, or one of another library's."""
    check_allow_overflow(request.common, request.dtype)
    return run_conversion(request.common, ui, lambda source, located: plan_export(request, source, located))


@dataclass(frozen=True, slots=True)
class _WeightFiles:
    """The files of weights, where each tensor goes in them, and the index where there is one."""

    files: tuple[OutputFile, ...]
    sides: Mapping[str, Locations]
    index: tuple[SmallFile, ...]


def _config_for_layout(config: HFConfig, layout: TreeLayout, source: Source, is_tied: bool) -> dict[str, Any]:
    """The config for another library, which knows no more of the head than whether it is the embedding. PrepError where
    that would compute something else."""
    agrees = not layout.allows_tied_head or source.family.is_tied(config) == is_tied
    told = {**config} if agrees else {**config, "tie_word_embeddings": is_tied}
    read = {name: value for name, value in told.items() if name not in layout.ignored_fields}
    traits = source.family.arch_config
    if traits(read) != traits(told):
        set_here = ", ".join(f"{name} {told[name]}" for name in layout.ignored_fields if name in told)
        why = f"the config has {set_here}, which its classes do not read, and it computes something else without"
        raise PrepError("there is no such model in Flax", why, "`--layout hf` keeps it as it is")
    return told


def plan_export(request: ExportRequest, source: Source, located: LocatedCheckpoint) -> PlannedConversion:
    """Every tensor of the rows into files as others read them. PrepError where that does not add up."""
    _check_request(request, source)
    vocabulary = source.vocabulary(request.true_vocab)
    rows = vocabulary.stored_size if request.keep_padding else vocabulary.true_size
    head = {source.family.tying.head_tensor} if _stores_tied_head(request, source) else set()
    source = with_tied_head(source) if head else source
    found = match_source_tensors(source, stored_rows(source), DEFAULT_MATCH_OPTIONS)
    cut = VocabResize(vocabulary, vocab_tensors(found), Fill("zeros"))
    kept = [t.cast(request.dtype) for t in source.tensors if t.name in found.uses or t.name in head]
    sizes = output_rows(kept, cut.tensors, rows)
    output = _lay_out_weights(request, source, kept, sizes, rows)
    targets = {t.name: TensorTarget(output.sides[t.name], sizes[t.name], t.dtype) for t in kept}
    config = output_config(source, Vocabulary(vocabulary.true_size, rows), found.is_tied, request.dtype)
    if layout := source.family.layouts.get(request.layout):
        config = _config_for_layout(config, layout, source, found.is_tied)
    base = located.model_name.removesuffix("-padded") if rows == vocabulary.true_size else located.model_name
    made = Plan(
        command="export",
        request=_command_line(request, source),
        source_name=source.display_name,
        source_files=source.file_stamps,
        streams=build_streams(source, targets, cut, {c.name for c in found.checks}),
        files=output.files,
        small_files=(*settings_files(config, (), copied_files(source.small_files, source.root)), *output.index),
        dropped=(
            *(d for d in found.dropped if d.name not in head),
            *dropped_padding(source, targets, cut),
            *dropped_state(source),
        ),
        checks=found.checks,
        settings={
            "name": base,
            "kind": "hf",
            "family": source.family.name,
            "vocab": {"true": vocabulary.true_size, "padded": rows},
            **({"layout": request.layout} if request.layout != HF_LAYOUT else {}),
            "prefixed": source.names.is_prefixed,
            "tied": found.is_tied,
            "config": config,
        },
        display_names={t.name: source.names.full_name(t.name) for t in source.tensors},
    )
    fields = {
        "vocab": {"true": vocabulary.true_size, "written": rows},
        "files": len(output.files),
        "layout": request.layout,
        "format": FORMAT_BY_LAYOUT[request.layout],
    }
    line = _summary_line(request, source, located, len(output.files), vocabulary.stored_size - rows)
    return PlannedConversion(
        made,
        f"{base}-{request.layout}",
        (line,),
        fields,
        lambda out: f"prep verify {out}" + (f" {source.display_name}" if not request.dtype else ""),
        source,
    )


def _check_request(request: ExportRequest, source: Source) -> None:
    """Usage PrepError for a layout, format or size that do not go together, and where nothing is to be done."""
    if FORMAT_BY_LAYOUT.get(request.layout) is None or request.file_format not in (None, FORMAT_BY_LAYOUT[request.layout]):
        pairs = ", ".join(f"`--layout {layout} --format {container}`" for layout, container in FORMAT_BY_LAYOUT.items())
        asked = f"`--layout {request.layout}`" + (f" `--format {request.file_format}`" if request.file_format else "")
        raise usage_error(f"{asked} is not written", "a layout goes with a format", f"one of {pairs}")
    if request.layout not in (HF_LAYOUT, *source.family.layouts):
        known = ", ".join((HF_LAYOUT, *source.family.layouts))
        raise usage_error(f"{source.family.name} has no layout {request.layout}", f"prep knows {known} of it")
    if FORMAT_BY_LAYOUT[request.layout] == STREAM_FORMAT and request.shard_nbytes != DEFAULT_SHARD_NBYTES:
        raise usage_error("`--shard-size` is not for streams", "an EasyLM stream is one file")
    as_it_is = request.layout == HF_LAYOUT and not request.dtype
    if as_it_is and source.tensor_file_names and not source.manifest and _is_safetensors(source):
        why = "there is nothing to export: transformers reads it as it is"
        raise usage_error(
            f"{source.display_name} is a Hugging Face folder", why, f"`prep save-init {source.display_name}`"
        )


def _stores_tied_head(request: ExportRequest, source: Source) -> bool:
    """Whether a head that is the embedding is written all the same: the other library knows no tied one."""
    tied = source.family.is_tied(source.config)
    return tied and request.layout != HF_LAYOUT and not source.family.layouts[request.layout].allows_tied_head


def _is_safetensors(source: Source) -> bool:
    return all(path.name.endswith(f".{SUFFIX}") for path in source.files)


def _lay_out_weights(
    request: ExportRequest, source: Source, tensors: Sequence[SourceTensor], row_counts: Mapping[str, int], vocab_rows: int
) -> _WeightFiles:
    if request.layout == HF_LAYOUT:
        groups = split_into_shards(header_entries(source, tensors, row_counts), request.shard_nbytes)
        files, places, layouts = lay_out_weight_files([(name, group, PAYLOAD_PAGE_OFFSET) for name, group in groups])
        return _WeightFiles(files, {t.name: (places[source.names.full_name(t.name)],) for t in tensors}, index_files(layouts))
    found = lay_out_flax_folder(source, tensors, request.layout, FORMAT_BY_LAYOUT[request.layout], vocab_rows, request.shard_nbytes)
    return _WeightFiles(found.files, found.sides, found.index)


def _summary_line(request: ExportRequest, source: Source, located: LocatedCheckpoint, num_files: int, removed_rows: int) -> str:
    """`llama-13b-init step 200 -> Hugging Face safetensors, 6 files; …`."""
    step = source.tree_manifest.get("step")
    called = located.model_name if step is None else f"{located.model_name} step {step}"
    off = f"; {removed_rows} rows of padding taken off" if removed_rows > 0 else ""
    state = optimizer_nbytes(source)
    off += f"; optimizer state ({format_bytes(state)}) left out" if state else ""
    return f"{called} -> {LAYOUT_TITLES[request.layout]}, {num_files} file{'s' if num_files > 1 else ''}{off}"


def _command_line(request: ExportRequest, source: Source) -> str:
    options = [
        ("--dtype", request.dtype),
        ("--layout", request.layout if request.layout != HF_LAYOUT else None),
        ("--keep-padding", request.keep_padding),
        ("--shard-size", request.shard_nbytes if request.shard_nbytes != DEFAULT_SHARD_NBYTES else None),
        ("--true-vocab", request.true_vocab),
        ("--config", request.common.config),
    ]
    return format_command_line("export", source, options)
