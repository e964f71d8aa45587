"""Common steps of all converting commands: open the source, plan, show or execute the plan, report."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.operations.conflicts import reject_without
from prepcli.commands.operations.conversion_details import (
    PlanFields,
    closing_line,
    compression_fields,
    compression_line,
    count_changed_values,
    plan_fields,
    process_fields,
    result_fields,
    source_fields,
)
from prepcli.commands.operations.options import DEFAULT_MEMORY
from prepcli.commands.operations.output_location import check_output_location, check_output_url
from prepcli.commands.operations.plan_notes import note_plan
from prepcli.commands.operations.results import Conversion
from prepcli.commands.operations.source_arguments import check_verbatim, read_map_option
from prepcli.core.errors import Option, text, usage_error
from prepcli.core.observer import Observer, RecordingObserver
from prepcli.core.option_spec import PathLike, as_tuple
from prepcli.engine import casts
from prepcli.engine.budget import parse_memory
from prepcli.engine.pipeline import ConversionResult
from prepcli.execution.bucket_executor import BucketExecutor
from prepcli.execution.execute import ConversionExecutor
from prepcli.execution.output_paths import check_output_paths
from prepcli.execution.output_urls import parse_out_url
from prepcli.execution.request import ExecutionRequest
from prepcli.execution.staging import remove_leftover
from prepcli.execution.workers import (
    ONE_PROCESS,
    ProcessOptions,
    WorkerPool,
)
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    NO_MANIFEST,
    find_manifest_folder,
    origin_record,
    read_manifest,
)
from prepcli.formats.safetensors import ADAPTER_FILE, SUFFIX
from prepcli.formats.torch_dcp import SUFFIX as DCP_SUFFIX
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.object_files import plan_object_files
from prepcli.planning.plan import Plan
from prepcli.planning.shares import Share, requested_share
from prepcli.planning.tensor_match import MatchOptions
from prepcli.restore.earlier_checkpoints import note_missing_file_digests
from prepcli.sources.averages import use_averaged_params
from prepcli.sources.dequantized import is_quantized
from prepcli.sources.dropped_tensors import drop_tensors
from prepcli.sources.folders import Access, make_access
from prepcli.sources.locate import LocatedCheckpoint, check_stream, locate
from prepcli.sources.multimodal import text_part_fault
from prepcli.sources.opening import has_unread_state, open_source
from prepcli.sources.references import default_checkpoint
from prepcli.sources.source import Source
from prepcli.sources.source_hints import KeptScales
from prepcli.stores.object_url import ObjectStoreUrl
from prepcli.stores.paths import AnyPath

if TYPE_CHECKING:
    from prepcli.formats.lock_file import Lock

OUT_PLACEHOLDER = "{out}"


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """Common options of converting commands.

    Attributes:
        checkpoint: Folder, alias, hub id or URL. None for the only checkpoint of prep in the current folder.
        out: Output folder or URL. None for a name made from the source's name.
        memory_nbytes: Memory limit.
        dry_run: Plan without reading weights or writing files.
        overwrite: Replace an existing output.
        restart: Delete an unfinished output, and start again.
        offline: Use only files in the cache of the hub.
        revision: Branch, tag or commit of the hub.
        step: Step of a training run: a number, `best` or `last`. None for the last step.
        process_options: Processes and workers of the conversion.
        stream: Read from the hub without a local copy.
        config: config.json for a checkpoint without one.
        allow_overflow: Cast too large values to infinity.
        ema: Take the moving average of a run's parameters.
        verbatim: Keep the names of the files. None for a checkpoint without a family of its model type.
        copied_files: Patterns of further small files to copy.
        lock: Lock file of the checkpoint.
        tensor_map: File of the map of the checkpoint's tensors.
        source_layout: Layout of a tree of another library. None selects the best match.
        quantized: `keep` or `dequantize` quantised weights, or `refuse` them. `stored`: like `keep`, without a note,
            or the decoded tensors of GGUF. `decode`: like `dequantize`, also for a model without quantised weights.
        training_state: Read the optimizer state of another framework.
        drop: Patterns of tensors to drop.
        strict: Refuse tensors that the index of the checkpoint does not name.
    """

    checkpoint: str | None
    out: Path | None
    memory_nbytes: int
    dry_run: bool = False
    overwrite: bool = False
    restart: bool = False
    offline: bool = False
    revision: str | None = None
    step: int | str | None = None
    process_options: ProcessOptions = ONE_PROCESS
    stream: bool = False
    config: Path | None = None
    allow_overflow: bool = False
    ema: bool = False
    verbatim: bool | None = False
    copied_files: tuple[str, ...] = ()
    lock: Path | None = None
    tensor_map: Path | None = None
    source_layout: str | None = None
    quantized: str = "refuse"
    training_state: bool = False
    drop: tuple[str, ...] = ()
    strict: bool = False


@dataclass(frozen=True, slots=True)
class PlannedConversion:
    """A plan with the messages and fields of its report.

    Attributes:
        plan: The plan.
        default_out_name: Name of the output if the user gives none.
        notes: Lines for the user.
        fields: Fields for JSON.
        next_command: The usual next command, for a shell, with OUT_PLACEHOLDER for the path of the output.
        source_view: Source of the plan, if it differs from the opened one.
    """

    plan: Plan
    default_out_name: str
    notes: tuple[str, ...]
    fields: Mapping[str, object]
    next_command: str
    source_view: Source | None = None


@dataclass(frozen=True, slots=True)
class _OpenedConversion:
    """The located checkpoint, its opened source, and the plan of its conversion."""

    located: LocatedCheckpoint
    source: Source
    planned: PlannedConversion


def common_options(
    checkpoint: PathLike | None,
    out: PathLike | None,
    options: Mapping[str, Any],
    *,
    dry_run: bool = False,
    process_options: ProcessOptions | None = None,
) -> CommonOptions:
    """Return the common options of converting operations."""
    config = options.get("config")
    tensor_map = options.get("map")
    lock = options.get("lock")
    return CommonOptions(
        checkpoint=None if checkpoint is None else str(checkpoint),
        out=Path(out) if out is not None else None,
        memory_nbytes=parse_memory(options.get("memory", DEFAULT_MEMORY)),
        dry_run=dry_run,
        overwrite=options.get("overwrite", False),
        restart=options.get("restart", False),
        offline=options.get("offline", False),
        revision=options.get("revision"),
        step=options.get("step"),
        process_options=process_options or ONE_PROCESS,
        stream=options.get("stream", False),
        config=Path(config) if config is not None else None,
        allow_overflow=options.get("allow_overflow", False),
        ema=options.get("ema", False),
        quantized=options.get("quantized", "refuse"),
        training_state=options.get("training_state", False),
        strict=options.get("strict", False),
        verbatim=options.get("verbatim", False),
        copied_files=as_tuple(options.get("copy", ())),
        lock=Path(lock) if lock is not None else None,
        tensor_map=Path(tensor_map) if tensor_map is not None else None,
        source_layout=options.get("source_layout"),
        drop=as_tuple(options.get("drop", ())),
    )


def make_match_options(options: Mapping[str, Any]) -> MatchOptions:
    """Return the options of the tensor match, e.g. whether a stored head becomes a leaf."""
    return MatchOptions(
        options["untie"], offers_verbatim="verbatim" in options, offers_drop="drop" in options
    )


def recorded_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options as in a manifest, e.g. `rules="a=mp"` -> `("a=mp",)`."""
    values = dict(options)
    for name in ("drop", "rules", "copy"):
        if name in values:
            values[name] = as_tuple(values[name])
    for name in ("config", "map"):
        if values.get(name) is not None:
            values[name] = Path(values[name])
    # An omitted seed means 0. Manifests record neither, so that an equal request has an equal line.
    values["seed"] = values.get("seed") or None
    return values


def checkpoint_access(common: CommonOptions, observer: Observer) -> Access:
    """Return the access to the checkpoints of a command."""
    return make_access(observer, offline=common.offline, stream=common.stream, allow_urls=True)


def _read_lock(common: CommonOptions, checkpoint: str) -> tuple[Lock | None, str | None]:
    """Return the lock of the options, if any, and the revision of the checkpoint to read."""
    if common.lock is None:
        return None, common.revision
    # Only conversions with a lock need the models of lock files, which pydantic builds at import.
    from prepcli.formats.lock_file import read_lock
    from prepcli.sources.locked import pinned_revision

    lock = read_lock(common.lock)
    return lock, pinned_revision(checkpoint, common.revision, lock)


def open_checkpoint(
    common: CommonOptions,
    observer: Observer,
    is_candidate: Callable[[Path], bool] = Path.is_dir,
    *,
    allow_adapters: bool = False,
    kept_scales: KeptScales = "none",
    notes_names: bool = True,
) -> tuple[LocatedCheckpoint, Source]:
    """Locate and open the checkpoint of the options.

    Args:
        common: Options with the checkpoint, its step, revision, config and choice of parameters.
        observer: Receives notes, warnings and progress.
        is_candidate: Condition on the folder of a default checkpoint, if the options name no checkpoint.
        allow_adapters: Accept an adapter of PEFT.
        kept_scales: Outputs of another trainer's layout to read as they are stored.
        notes_names: Call `note_file_names`. A command that takes recorded drops off the source calls it later.

    Returns:
        The located checkpoint and its source. Only headers are read.

    Raises:
        PrepError: The checkpoint does not exist, or cannot be read.
    """
    checkpoint = common.checkpoint
    if checkpoint is None:
        checkpoint = f"./{default_checkpoint(Path(), is_candidate)}"
        observer.note(f"using {checkpoint} (the only prep checkpoint here)")
    access = checkpoint_access(common, observer)
    is_decoded = common.quantized in ("dequantize", "decode")
    is_kept = _keeps_codes(common)
    access = replace(
        access,
        allow_adapters=allow_adapters,
        allow_quantized=is_decoded or is_kept,
        allow_gguf=is_decoded or common.quantized == "stored",
        copied_files=common.copied_files,
        strict=common.strict,
    )
    lock, revision = _read_lock(common, checkpoint)
    located = locate(checkpoint, revision, step=common.step, access=access)
    if isinstance(located.files.path, Path):
        # A kill after the rename of a complete output leaves its work folder. It is removed at the next use.
        remove_leftover(find_manifest_folder(located.files.path))
    verbatim = common.verbatim
    if is_kept and is_quantized(located.files.path):
        verbatim = True
        if common.quantized == "keep":
            option = Option("quantized", "dequantize")
            observer.note(text("quantised weights are kept; {} decodes them", option))
    source = open_source(
        located,
        common.config,
        verbatim=verbatim,
        copied_files=common.copied_files,
        dequantize=_decodes_weights(common, located.files.path),
        kept_scales=kept_scales,
        training_state=common.training_state,
        tensor_map=read_map_option(common.tensor_map, verbatim=common.verbatim),
        layout=common.source_layout,
        drop=common.drop,
    )
    check_verbatim(common.verbatim, source)
    if notes_names:
        note_file_names(common, source, observer)
    note_missing_file_digests(source.display_name, source.manifest, observer)
    if has_unread_state(source):
        observer.warn(f"the training state of {source.display_name} is not read: it is on the hub")
    if lock is not None:
        from prepcli.sources.locked import apply_lock

        commit = located.files.commit
        is_mapped = common.tensor_map is not None
        source = apply_lock(source, lock, str(common.lock), commit, is_mapped=is_mapped)
    source = drop_tensors(source, common.drop)
    return located, use_averaged_params(source) if common.ema else source


def note_file_names(common: CommonOptions, source: Source, observer: Observer) -> None:
    """Print a note if a multimodal model is read under the names in its files, although nothing asks for it."""
    keeps_codes = _keeps_codes(common) and is_quantized(source.root)
    is_choice = keeps_codes or common.verbatim is not None or source.manifest is not None
    if not is_choice and (why := text_part_fault(source, common.drop)):
        observer.note(f"{source.display_name} is read under the names in its files: {why}")


def _keeps_codes(common: CommonOptions) -> bool:
    """Return whether quantised weights are read as they are stored.

    A checkpoint keeps its codes and scales only under the names in its files (the verbatim family).
    """
    return common.quantized in ("keep", "stored") and common.verbatim is not False


def _decodes_weights(common: CommonOptions, path: AnyPath) -> bool:
    """Return whether to decode the weights of a checkpoint. With `dequantize`, dense weights are an error later."""
    if common.quantized == "decode":
        return is_quantized(path)
    return common.quantized == "dequantize"


def check_config_option(common: CommonOptions, *sources: Source) -> None:
    """Raise UsageError for a config if all sources already have a config in their manifest."""
    if common.config is not None and all(source.tree_manifest for source in sources):
        names = " and ".join(source.display_name for source in sources)
        why = f"{MANIFEST_FILE} already has the config of the model"
        config = Option("config")
        what = text("{} has no effect for {}", config, names)
        raise usage_error(what, why, text("remove {}", config))


def check_allow_overflow(allow_overflow: bool, dtype: str | None) -> None:
    """Raise UsageError for the option `allow_overflow` without a cast."""
    if dtype is None:
        why = "without a cast no value overflows"
        reject_without(Option("allow_overflow"), allow_overflow, Option("dtype"), why)


def run_conversion(
    common: CommonOptions,
    observer: Observer,
    make_plan: Callable[[Source, LocatedCheckpoint], PlannedConversion],
    is_candidate: Callable[[Path], bool] = Path.is_dir,
    *,
    allow_adapters: bool = False,
) -> Conversion:
    """Plan a conversion, and execute the plan unless this is a dry run.

    An output with a URL is written to the object store from memory.

    Args:
        common: Options of the conversion.
        observer: Receives notes, warnings and progress.
        make_plan: Makes the plan from the opened source.
        is_candidate: Condition on the folder of a default checkpoint, if the options name no checkpoint.
        allow_adapters: Open an adapter of PEFT, so that `make_plan` can refuse it with its own message.

    Returns:
        The output's path, counts and times.

    Raises:
        PrepError: The source, the options or the output are invalid, or reading or writing failed.
    """
    started_s = time.monotonic()
    recorder = RecordingObserver(observer)
    # This also checks the variables of launchers, before anything is read.
    requested_share(common.process_options.processes, os.environ)
    url = parse_out_url(common.out)
    opened = _open_and_plan(
        common, recorder, make_plan, is_candidate, allow_adapters=allow_adapters
    )
    if url is not None and not _is_read_from_bucket(opened.planned.plan):
        opened = replace(opened, planned=replace(opened.planned, next_command=""))
    if url is None:
        conversion = _convert_to_folder(common, recorder, opened, started_s)
    else:
        conversion = _convert_to_bucket(common, recorder, opened, started_s, url)
    seconds = time.monotonic() - started_s
    return replace(conversion, seconds=seconds, warnings=tuple(recorder.warnings))


def _is_read_from_bucket(plan: Plan) -> bool:
    """Return whether the commands read the format of an output from a bucket."""
    if plan.leaves:
        return True
    names = {file.path for file in plan.files}
    if ADAPTER_FILE in names:
        return False
    # A checkpoint of Trainer has `optimizer.pt` next to its safetensors files.
    return any(name.endswith((f".{SUFFIX}", DCP_SUFFIX)) for name in names)


def _open_and_plan(
    common: CommonOptions,
    observer: Observer,
    make_plan: Callable[[Source, LocatedCheckpoint], PlannedConversion],
    is_candidate: Callable[[Path], bool],
    *,
    allow_adapters: bool,
) -> _OpenedConversion:
    """Open the source, and plan the conversion."""
    located, source = open_checkpoint(common, observer, is_candidate, allow_adapters=allow_adapters)
    check_config_option(common, source)
    check_stream(common.stream, located)
    planned = _with_origin(make_plan(source, located), source, located)
    check_output_paths(planned.plan)
    return _OpenedConversion(located, source, planned)


def _convert_to_folder(
    common: CommonOptions, observer: Observer, opened: _OpenedConversion, started_s: float
) -> Conversion:
    """Convert into a local folder."""
    out = common.out or Path(opened.planned.default_out_name)
    check_output_location(out, opened.source)

    def execute(request: ExecutionRequest) -> tuple[ConversionResult, Manifest]:
        result = ConversionExecutor(request, out).run()
        return result, read_manifest(out) or NO_MANIFEST

    return _convert(common, observer, opened, started_s, out=out, execute=execute)


def _convert_to_bucket(
    common: CommonOptions,
    observer: Observer,
    opened: _OpenedConversion,
    started_s: float,
    url: ObjectStoreUrl,
) -> Conversion:
    """Convert into an object store, without a local copy."""
    check_output_url(url, opened.source)
    plan = opened.planned.plan
    plan = plan_object_files(plan)
    opened = replace(opened, planned=replace(opened.planned, plan=plan))

    def execute(request: ExecutionRequest) -> tuple[ConversionResult, Manifest]:
        executor = BucketExecutor(request, url)
        result = executor.run()
        return result, executor.read_manifest()

    return _convert(common, observer, opened, started_s, out=str(url), execute=execute)


def _convert(
    common: CommonOptions,
    observer: Observer,
    opened: _OpenedConversion,
    started_s: float,
    *,
    out: Path | str,
    execute: Callable[[ExecutionRequest], tuple[ConversionResult, Manifest]],
) -> Conversion:
    """Show the plan, and execute it unless this is a dry run.

    Args:
        common: Options of the conversion.
        observer: Receives notes, warnings and progress.
        opened: The source and the plan.
        started_s: Start of the command, on the monotonic clock.
        out: Folder or URL of the output.
        execute: Executes the plan. Returns the result and the manifest of the output.
    """
    planned = opened.planned
    source = opened.source
    fields = plan_fields(planned.plan, source)
    note_plan(planned.plan, planned.notes, source, fields["not_computed"], observer)
    details: dict[str, object] = {
        "source": source_fields(source, opened.located),
        **planned.fields,
        **fields,
    }
    result = ConversionResult()
    if common.dry_run:
        details = {"output": str(out), "dry_run": True, **details}
    else:
        share = _process_share(common, observer)
        read_source = planned.source_view or source
        with WorkerPool(
            common.process_options,
            share,
            memory_nbytes=common.memory_nbytes,
            progress=observer.progress(),
        ) as pool:
            request = ExecutionRequest(
                plan=planned.plan,
                run_id=fields["plan_digest"],
                source=read_source,
                pool=pool,
                overwrite=common.overwrite,
                restart=common.restart,
                allow_overflow=common.allow_overflow,
                note=observer.note,
            )
            result, manifest = execute(request)
        details |= _result_details(
            planned.plan, fields, out, result, manifest, common, started_s, observer
        )
        if pool.share.count > 1:
            details["processes"] = process_fields(pool.share, common.process_options)
    return Conversion(
        path=Path(out),
        bytes_read=result.read_nbytes,
        bytes_written=result.written_nbytes,
        seconds=0.0,
        peak_bytes=result.peak_nbytes,
        already_done=result.already_done,
        plan_digest=fields["plan_digest"],
        plan=planned.plan,
        details=details,
        next_command=planned.next_command.replace(OUT_PLACEHOLDER, shlex.quote(str(out))),
    )


def _with_origin(
    planned: PlannedConversion, source: Source, located: LocatedCheckpoint
) -> PlannedConversion:
    """Return the plan with the identity of its source in the manifest of the output, and with its earlier drops."""
    settings = planned.plan.settings | (source.manifest or NO_MANIFEST).earlier_drops
    if origin := origin_record(source.manifest, located.files.commit):
        settings |= Manifest(origin=origin)
    return replace(planned, plan=replace(planned.plan, settings=settings))


def _process_share(common: CommonOptions, observer: Observer) -> Share:
    """Return the share of this process in the work. Print a note with the name of the launcher."""
    share, launcher = requested_share(common.process_options.processes, os.environ)
    if launcher:
        observer.note(f"process {share.index} of {share.count}, according to {launcher}")
    return share


def _result_details(
    plan: Plan,
    fields: PlanFields,
    out: Path | str,
    result: ConversionResult,
    manifest: Manifest,
    common: CommonOptions,
    started_s: float,
    observer: Observer,
) -> dict[str, object]:
    """Note the casts, the time and the compression of a written output, and return their JSON fields.

    The number of changed values is set in `fields`.
    """
    cast_counts = manifest.casts
    for entry in cast_counts:
        observer.note(casts.format_cast(entry))
    seconds = time.monotonic() - started_s
    observer.note(closing_line(plan, out, result, cast_counts, seconds, common.memory_nbytes))
    fields["accounting"]["changed_values"] = count_changed_values(cast_counts)
    details: dict[str, object] = {}
    if plan.compression:
        compression = compression_fields(plan, manifest)
        details["compress"] = compression
        observer.note(compression_line(compression))
    return {
        **details,
        "output": str(out),
        "casts": cast_counts,
        **result_fields(result, common.memory_nbytes),
    }
