"""`prep export` of a run with LoRA: the adapter in the format of PEFT."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import shlex
from dataclasses import replace

from prepcli.commands.operations.conversion import OUT_PLACEHOLDER, PlannedConversion
from prepcli.commands.operations.export_sources import no_effect_error
from prepcli.commands.operations.options import ExportOptions
from prepcli.commands.operations.training_state import check_no_adapter
from prepcli.core.errors import (
    GET_AGAIN_HINT,
    Command,
    Option,
    PrepError,
    text,
    usage_error,
)
from prepcli.core.json_types import JsonObject
from prepcli.core.option_spec import format_command_line
from prepcli.formats.manifest import adapter_fields
from prepcli.formats.safetensors import ADAPTER_CONFIG
from prepcli.models.lora import saved_module_name, saved_modules, select_targets
from prepcli.models.lora_config import LoraConfig, lora_from_manifest
from prepcli.models.peft_names import module_suffixes, peft_patterns
from prepcli.models.registry import family_of
from prepcli.planning.libraries import HF_LAYOUT
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import SmallFile
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source, stored_axis_maps
from prepcli.targets.hf_folder import json_bytes
from prepcli.targets.planner import make_plan, start_draft, with_rows, with_tied_head
from prepcli.targets.safetensors_folder import place_adapter
from prepcli.targets.streams import dropped_state
from prepcli.targets.tokenizer_files import adapter_tokenizer

PEFT_LAYOUT = "peft"


def plan_adapter_export(
    options: ExportOptions, source: Source, located: LocatedCheckpoint
) -> PlannedConversion:
    """Plan the export of trained adapters to the files that PEFT reads.

    Args:
        options: Options of the export.
        source: Opened step of a run with LoRA.
        located: Located source. Its model name determines the output's default name.

    Returns:
        Plan with the notes and fields of its report.

    Raises:
        PrepError: An option is for complete models, or the manifest does not name the base of the adapters.
    """
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
        left=tuple(dropped_state(source)),
        config=None,
        side_files=(adapter_config, *adapter_tokenizer(source)),
        first_settings=adapter_fields(manifest),
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
        fields={"layout": PEFT_LAYOUT, "format": "safetensors", "files": 1},
        next_command=f"prep merge {OUT_PLACEHOLDER} {shlex.quote(_base_name(manifest))}",
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
        "base_model_name_or_path": _base_name(source.tree_manifest),
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


def _base_name(manifest: Manifest) -> str:
    """Return the name of the base model of the adapters."""
    name = manifest.base.get("name")
    if not isinstance(name, str):
        raise PrepError(
            "the manifest does not name the base of the adapters",
            "`base` is missing",
            GET_AGAIN_HINT,
        )
    return name
