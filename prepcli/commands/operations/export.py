"""`prep export`: convert a checkpoint to a Hugging Face folder, or to the checkpoint of another library."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Unpack

from prepcli.commands.operations.conversion import (
    OUT_PLACEHOLDER,
    OpenedConversion,
    PlannedConversion,
    open_conversion,
    run_conversion,
)
from prepcli.commands.operations.export_checks import (
    DEFAULT_SHARD_NBYTES,
    WrittenMap,
    check_request,
    file_format,
    read_export_map,
    shard_nbytes,
    written_storage,
)
from prepcli.commands.operations.export_sources import (
    no_effect_error,
    select_parts,
    take_quantized_bytes,
)
from prepcli.commands.operations.opening import (
    check_allow_overflow,
    checkpoint_access,
    common_options,
    recorded_values,
)
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import DEFAULT_SHARD_SIZE, ExportOptions
from prepcli.commands.operations.push import check_private, convert_and_push
from prepcli.commands.operations.results import Conversion
from prepcli.commands.operations.training_state import (
    check_no_adapter,
    check_state_request,
    draft_state,
    exported_state_notes,
    state_folder_name,
)
from prepcli.core.errors import (
    GET_AGAIN_HINT,
    Command,
    Option,
    PrepError,
    text,
    usage_error,
)
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.json_values import JsonObject
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike, format_command_line
from prepcli.execution.hub_push import parse_push_target
from prepcli.execution.workers import PARENT_VARIABLE, ProcessOptions
from prepcli.formats.safetensors import ADAPTER_CONFIG
from prepcli.models.lora import saved_module_name, saved_modules, select_targets
from prepcli.models.lora_config import LoraConfig, lora_from_manifest
from prepcli.models.peft_names import module_suffixes, peft_patterns
from prepcli.models.registry import family_of
from prepcli.planning.item_storage import OCDBT
from prepcli.planning.libraries import DCP_FORMAT, HF_LAYOUT, find_library
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan, SmallFile
from prepcli.planning.state_names import OPT_STATE_RULE
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source, stored_axis_maps
from prepcli.targets.flax_folder import place_flax
from prepcli.targets.hf_folder import json_bytes
from prepcli.targets.layout_leaves import in_tree
from prepcli.targets.planner import (
    Draft,
    Placed,
    make_plan,
    start_draft,
    with_rows,
    with_tied_head,
)
from prepcli.targets.safetensors_folder import place_adapter, place_mapped, place_safetensors
from prepcli.targets.tokenizer_files import adapter_tokenizer
from prepcli.targets.torch_folder import (
    place_dcp,
    place_dcp_state,
    place_dcp_tree,
    place_trainer_checkpoint,
    prepare_torch_adam,
)
from prepcli.targets.trainer_item import place_trainer_item

NO_MAP = WrittenMap()


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
        opened = open_conversion(common, observer)
        return run_conversion(opened, plan_export(options, opened, check_towers=not dry_run))

    repository = options["push"]
    if repository is None:
        check_private(options["private"])
        return convert()
    if PARENT_VARIABLE in os.environ:
        # A worker writes its share of the folder. Its parent uploads the folder.
        return convert()
    target = parse_push_target(repository, options["private"])
    return convert_and_push(target, common, observer, convert)


def plan_export(
    options: ExportOptions, opened: OpenedConversion, *, check_towers: bool
) -> PlannedConversion:
    """Plan the copy of every tensor to the files of the requested layout.

    `check_towers` compares the towers of a multimodal model with a training step's record of them.
    """
    source = opened.source
    located = opened.located
    if source.tree_manifest.is_adapter:
        return _plan_adapter(options, source, located)
    access = checkpoint_access(opened.common, opened.observer)
    source = select_parts(options, source, access, check_digest=check_towers)
    check_request(options, source)
    if options["training_state"]:
        check_state_request(options, source)
    source = take_quantized_bytes(options, source, located, opened.common, opened.observer)
    written_map = read_export_map(options, source)
    draft = draft_export(options, source, written_map)
    plan = plan_draft(
        options,
        draft,
        located,
        command="export",
        request=_command_line(options, source),
        written_map=written_map,
    )
    suffix = options["layout"]
    if suffix == HF_LAYOUT and file_format(options) == DCP_FORMAT:
        suffix = DCP_FORMAT
    name = f"{plan.settings['name']}-{suffix}"
    if draft.state is not None:
        name = state_folder_name(options, draft.state) or name
    next_command = f"prep verify {OUT_PLACEHOLDER}"
    if not _has_rounding(plan) and not options["dtype"]:
        # Only values that were not changed can be compared with the source.
        next_command += f" {shlex.quote(source.display_name)}"
    return PlannedConversion(
        plan,
        name,
        notes=tuple(_notes(options, draft, plan, located)),
        fields=report_fields(options, draft, plan),
        next_command=next_command,
        source_view=draft.source,
    )


def draft_export(options: ExportOptions, source: Source, written_map: WrittenMap = NO_MAP) -> Draft:
    """Return the draft of an export: the model in the requested dtype and tree, and its training state."""
    tied_head = _stored_tied_head(options, source, written_map)
    source = with_tied_head(source) if tied_head else source
    draft = start_draft(
        source,
        stored_axis_maps(source),
        true_vocab=options["true_vocab"],
        dtype=options["dtype"],
        kept=tied_head,
    )
    if not options["keep_padding"]:
        draft = with_rows(draft, draft.vocabulary.true_size)
    draft = replace(draft, settings=written_map.record)
    if options["training_state"]:
        draft = draft_state(options, draft)
    if options["layout"] in source.family.layouts:
        draft = in_tree(draft, options["layout"])
    return draft


def plan_draft(
    options: ExportOptions,
    draft: Draft,
    located: LocatedCheckpoint,
    *,
    command: str,
    request: str,
    written_map: WrittenMap = NO_MAP,
) -> Plan:
    """Return the plan of a draft in the requested layout. See `make_plan`.

    Raises:
        PrepError: The draft does not fit the layout.
    """
    settings = Manifest()
    if options["layout"] != HF_LAYOUT:
        settings |= Manifest(layout=options["layout"])
    storage = written_storage(options)
    if storage != OCDBT:
        settings |= Manifest(storage=storage.name)
    placed = replace(_place(options, draft, written_map), settings=settings)
    name = located.model_name
    if draft.vocabulary.stored_size == draft.vocabulary.true_size:
        name = name.removesuffix("-padded")
    return make_plan(draft, placed, command=command, request=request, name=name)


def _place(options: ExportOptions, draft: Draft, written_map: WrittenMap) -> Placed:
    """Place the tensors of a draft in the files of the requested layout and format."""
    tree = options["layout"]
    container = file_format(options)
    max_nbytes = shard_nbytes(options)
    if written_map.tensor_map is not None:
        return place_mapped(draft, written_map.tensor_map, max_nbytes)
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


def report_fields(options: ExportOptions, draft: Draft, plan: Plan) -> dict[str, object]:
    """Return the fields of an export for JSON."""
    vocabulary = draft.vocabulary
    return {
        "vocab": {"true": vocabulary.true_size, "written": vocabulary.stored_size},
        "files": len(plan.files),
        "layout": options["layout"],
        "format": file_format(options),
    }


def _notes(
    options: ExportOptions, draft: Draft, plan: Plan, located: LocatedCheckpoint
) -> Iterator[str]:
    """Yield lines for the user: `llama-13b-init step 200 -> Hugging Face safetensors, 6 files; …`."""
    step = draft.source.tree_manifest.step
    name = located.model_name if step is None else f"{located.model_name} step {step}"
    title = find_library(options["layout"], file_format(options)).title
    line = f"{name} -> {title}, {len(plan.files)} file{'s' if len(plan.files) > 1 else ''}"
    removed_rows = draft.resize.vocabulary.stored_size - draft.vocabulary.stored_size
    if removed_rows > 0:
        line += f"; {count_text(removed_rows, 'row')} of padding removed"
    dropped_nbytes = sum(part.nbytes for part in draft.left if part.rule == OPT_STATE_RULE)
    if dropped_nbytes:
        line += f"; optimizer state ({format_bytes(dropped_nbytes)}) dropped"
    yield line
    if _has_rounding(plan):
        yield (
            "the layout changes values with rounding: an output is read back only if every value returns"
        )
    if draft.state is not None:
        yield from exported_state_notes(options, draft)


def _has_rounding(plan: Plan) -> bool:
    """Return whether the layout changes values with rounding."""
    return any(stream.scale and not stream.scale.is_exact for stream in plan.streams)


def _stored_tied_head(
    options: ExportOptions, source: Source, written_map: WrittenMap
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
    if is_tied or written_map.names_tied_head(source):
        return frozenset([source.family.tying.head_tensor])
    return frozenset()


def _command_line(options: ExportOptions, source: Source) -> str:
    """Return the command line for the manifest, with the size of files in bytes."""
    values = recorded_values(options)
    nbytes = shard_nbytes(options)
    if file_format(options) != DCP_FORMAT:
        # The other formats follow from the layout.
        values["format"] = None
    values["shard_size"] = DEFAULT_SHARD_SIZE if nbytes == DEFAULT_SHARD_NBYTES else nbytes
    return format_command_line("export", source.display_name, ExportOptions, values)


# --- Adapters


def _plan_adapter(
    options: ExportOptions, source: Source, located: LocatedCheckpoint
) -> PlannedConversion:
    """Plan the export of trained adapters to the files of PEFT."""
    _check_adapter_request(options, source)
    check_no_adapter(options, source)
    manifest = source.tree_manifest
    lora = lora_from_manifest(manifest)
    assert lora is not None
    if lora.modules_to_save and manifest.tied:
        # PEFT saves a tied head as well, and does not load an adapter without it.
        source = with_tied_head(source)
    dtype = options["dtype"]
    draft = start_draft(
        source,
        stored_axis_maps(source),
        dtype=dtype,
        kept={tensor.name for tensor in source.tensors},
    )
    # Embeddings and head that were trained as a whole lose the padding of the vocabulary.
    draft = with_rows(draft, draft.vocabulary.true_size)
    adapter_config = SmallFile(ADAPTER_CONFIG, json_bytes(_peft_settings(source, lora)))
    draft = replace(
        draft,
        match=replace(draft.match, checks=()),
        dropped=(),
        config=None,
        side_files=(adapter_config, *adapter_tokenizer(source)),
        settings=Manifest(kind="adapter", prefixed=True, tied=manifest.tied, config=source.config),
    )
    plan = make_plan(
        draft,
        place_adapter(draft),
        command="export",
        request=format_command_line("export", source.display_name, ExportOptions, {"dtype": dtype}),
        name=located.model_name,
    )
    return PlannedConversion(
        plan,
        f"{located.model_name}-adapter",
        notes=(f"{located.model_name} -> adapter of PEFT, rank {lora.rank}",),
        fields={"layout": "peft", "format": "safetensors", "files": 1},
        next_command=f"prep merge {OUT_PLACEHOLDER} {shlex.quote(_base_of_adapter(manifest))}",
        source_view=source,
    )


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


def _peft_settings(source: Source, lora: LoraConfig) -> JsonObject:
    """Return the content of adapter_config.json."""
    family = family_of(source.config)
    config = source.config
    has_encoder = family.arch_config(config).encoder is not None
    patterns = peft_patterns(family, config, lora)
    # PEFT compares the name of a module with the end of its own, e.g. `lm_head`.
    paths = [path for name in lora.modules_to_save for path in saved_modules(family, config)[name]]
    saved = list(dict.fromkeys(saved_module_name(family, path) for path in paths))
    is_tied = source.tree_manifest.tied
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if has_encoder else "CAUSAL_LM",
        "base_model_name_or_path": _base_of_adapter(source.tree_manifest),
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "use_dora": False,
        "bias": "none",
        "target_modules": [*module_suffixes(family, config, lora)],
        "target_parameters": [*patterns.target_parameters] or None,
        "rank_pattern": {**patterns.rank_pattern},
        "alpha_pattern": {name: _number(alpha) for name, alpha in patterns.alpha_pattern.items()},
        "modules_to_save": [*saved] or None,
        # With this setting PEFT keeps a trained embedding tied to the head.
        "ensure_weight_tying": is_tied and bool(saved),
        # GPT-2 stores its weights as [in, out]. With this flag PEFT transposes its update B A, which is [out, in].
        "fan_in_fan_out": any(
            p.is_transposed for p in select_targets(family, config, lora.targets)
        ),
        "init_lora_weights": True,
        # PEFT writes True in every saved adapter, and sets it again from `is_trainable` when it loads one.
        "inference_mode": True,
    }


def _number(value: float) -> float:
    """Return a whole number as int. PEFT declares `lora_alpha` as int and writes 16, not 16.0."""
    if value.is_integer():
        return int(value)
    return value


def _base_of_adapter(manifest: Manifest) -> str:
    """Return the name of the base model of the adapters."""
    name = manifest.base.get("name")
    if not isinstance(name, str):
        raise PrepError(
            "the manifest does not name the base of the adapters",
            "`base` is missing",
            GET_AGAIN_HINT,
        )
    return name
