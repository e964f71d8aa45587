"""`prep export` of a run with LoRA: the adapter in the format of PEFT."""

from __future__ import annotations

import shlex

from prepcli.commands.operations.conversion import OUT_PLACEHOLDER, PlannedConversion
from prepcli.commands.operations.options import ExportOptions
from prepcli.core.errors import GET_AGAIN_HINT, PrepError
from prepcli.core.json_types import JsonObject
from prepcli.core.option_spec import format_command_line
from prepcli.formats.manifest import adapter_fields
from prepcli.formats.safetensors import ADAPTER_CONFIG, ADAPTER_FILE
from prepcli.models.lora import (
    saved_module_name,
    saved_modules,
    select_targets,
)
from prepcli.models.lora_config import LoraConfig, lora_from_manifest
from prepcli.models.peft_names import module_suffixes, peft_patterns
from prepcli.models.registry import family_of
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Fill, Plan, SmallFile
from prepcli.planning.tensor_match import DEFAULT_MATCH_OPTIONS
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source, match_source_tensors, stored_axis_maps
from prepcli.sources.vocabulary_tensors import vocabulary_names
from prepcli.targets.flax_folder import with_tied_head
from prepcli.targets.hf_folder import header_entries, json_bytes, lay_out_weight_files
from prepcli.targets.streams import (
    TensorTarget,
    VocabResize,
    build_streams,
    dropped_padding,
    dropped_state,
    output_rows,
)
from prepcli.targets.tokenizer_files import adapter_tokenizer

PEFT_LAYOUT = "peft"


def plan_adapter_export(
    source: Source, located: LocatedCheckpoint, dtype: str | None
) -> PlannedConversion:
    """Plan the export of trained adapters to the files that PEFT reads.

    Args:
        source: Opened step of a run with LoRA.
        located: Located source. Its model name determines the output's default name.
        dtype: Dtype of the output, or None for no cast.

    Returns:
        Plan with the notes and fields of its report.

    Raises:
        PrepError: The manifest does not name the base of the adapters.
    """
    lora = lora_from_manifest(source.tree_manifest)
    assert lora is not None
    if lora.modules_to_save and source.tree_manifest.tied:
        # PEFT saves a tied head as well, and does not load an adapter without it.
        source = with_tied_head(source)
    match = match_source_tensors(source, stored_axis_maps(source), DEFAULT_MATCH_OPTIONS)
    tensors = [tensor.cast(dtype) for tensor in source.tensors]
    # Embeddings and head that were trained as a whole lose the padding of the vocabulary.
    vocabulary = source.vocabulary()
    names = vocabulary_names(source, match, vocabulary)
    resize = VocabResize(vocabulary, names, Fill("zeros"))
    row_counts = output_rows(tensors, resize.tensors, vocab_size=vocabulary.true_size)
    entries = header_entries(source, tensors, rows=row_counts)
    files, locations, _ = lay_out_weight_files([(ADAPTER_FILE, entries, None)])
    targets = {
        t.name: TensorTarget(
            (locations[source.names.full_name(t.name)],), row_counts[t.name], t.dtype
        )
        for t in tensors
    }
    manifest = source.tree_manifest
    plan = Plan(
        command="export",
        request=format_command_line("export", source.display_name, ExportOptions, {"dtype": dtype}),
        source_name=source.display_name,
        source_files=source.file_stamps,
        streams=build_streams(source, targets, resize=resize),
        files=files,
        small_files=(
            SmallFile(ADAPTER_CONFIG, json_bytes(_peft_settings(source, lora))),
            *adapter_tokenizer(source),
        ),
        dropped=(
            *dropped_padding(source, targets, resize=resize),
            *dropped_state(source),
        ),
        settings=adapter_fields(manifest)
        | Manifest(
            name=located.model_name,
            kind="adapter",
            family=source.family.name,
            prefixed=True,
            tied=manifest.tied,
            config=source.config,
        ),
        display_names=source.display_names(),
    )
    base_name = _base_name(source.tree_manifest)
    return PlannedConversion(
        plan,
        f"{located.model_name}-adapter",
        notes=(f"{located.model_name} -> adapter of PEFT, rank {lora.rank}",),
        fields={"layout": PEFT_LAYOUT, "format": "safetensors", "files": 1},
        next_command=f"prep merge {OUT_PLACEHOLDER} {shlex.quote(base_name)}",
        source_view=source,
    )


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
