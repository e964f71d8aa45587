"""`prep merge`: add an adapter to the weights of its base model, and write a Hugging Face folder."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.conversion import OpenedConversion, open_conversion
from prepcli.commands.operations.export import (
    draft_export,
    exported_name,
    place_export,
    report_fields,
)
from prepcli.commands.operations.export_sources import select_parts
from prepcli.commands.operations.opening import checkpoint_access, common_options, recorded_values
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import ExportOptions, MergeOptions
from prepcli.commands.operations.results import Conversion
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import count_text
from prepcli.core.observer import Observer, Progress
from prepcli.core.option_spec import PathLike, format_command_line, with_defaults
from prepcli.execution.workers import ProcessOptions
from prepcli.formats.manifest import NO_MANIFEST, SAMPLE_DIGEST_KEY, read_manifest
from prepcli.planning.manifest_fields import Manifest, MergedAdapter
from prepcli.restore.digest_checks import sample_digest
from prepcli.sources.folders import Access
from prepcli.sources.openers.peft_folder import is_adapter
from prepcli.sources.source import Source
from prepcli.targets.adapter_updates import (
    merge_adapter,
    open_base_adapter,
    with_adapter_tokenizer,
)


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
    return _merge(open_conversion("merge", common, progress), adapter, options)


def _merge(opened: OpenedConversion, adapter_path: Path, options: MergeOptions) -> Conversion:
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
    source = _with_towers(copy_options, source, access, check_digest=check_base)
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
    return opened.run(
        *with_adapter_tokenizer(draft, placed, adapter_path),
        format_command_line(
            f"merge {adapter_path}", source.display_name, MergeOptions, recorded_values(options)
        ),
        name=exported_name(located, draft),
        out_name=f"{located.model_name}-merged",
        notes=[f"{adapter_path}{origin} -> {source.display_name}: {change}"],
        fields={**report_fields(copy_options, draft, placed), "merged": merged},
        source_view=source_view,
    )


def _with_towers(
    options: ExportOptions, source: Source, access: Access, *, check_digest: bool
) -> Source:
    """Return the base. A training step of a multimodal model has the towers of its start model.

    Raises:
        PrepError: The towers cannot be read, or differ from the ones of the run's start.
    """
    try:
        return select_parts(options, source, access, check_digest=check_digest)
    except PrepError as error:
        export_step = Command("export", source.display_name, Option("towers", "CHECKPOINT"))
        hint = text("{} writes a base with towers", export_step)
        raise PrepError(error.what, error.why, hint) from error


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
