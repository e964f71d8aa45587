"""Steps that all converting commands share: open the source, plan, show or execute the plan, report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prepcli.commands.conflicts import check_needs, check_stream
from prepcli.commands.conversion_report import (
    closing_line,
    compression_fields,
    compression_line,
    count_changed_values,
    dry_run_line,
    note_plan_details,
    plan_fields,
    result_fields,
    source_fields,
)
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import Report, Ui
from prepcli.engine import casts
from prepcli.engine.budget import anonymous_nbytes
from prepcli.errors import PrepError, usage_error
from prepcli.execution.execute import ConversionResult, ExecuteOptions, execute_plan
from prepcli.execution.staging import remove_leftover
from prepcli.execution.uploads import UploadRequest, make_and_upload, parse_out_url
from prepcli.execution.workers import (
    ONE_PROCESS,
    PARENT_VARIABLE,
    ProcessOptions,
    WorkerPool,
    add_worker_reports,
    worker_memory_nbytes,
)
from prepcli.formats.manifest import FILES_KEY, MANIFEST_FILE, find_manifest_folder, read_manifest
from prepcli.planning.plan import Plan
from prepcli.planning.shares import requested_share
from prepcli.planning.vocabulary import Vocabulary, with_vocabulary
from prepcli.remote.retries import retry_policy_from_env
from prepcli.sources.averages import use_averages
from prepcli.sources.folders import Access
from prepcli.sources.locate import LocatedCheckpoint, locate
from prepcli.sources.opening import open_source
from prepcli.sources.references import default_checkpoint
from prepcli.sources.source import Source
from prepcli.targets.streams import optimizer_nbytes


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """Options that converting commands share."""

    checkpoint: str | None  # folder, alias, hub id or URL; None: the only prep checkpoint in the current folder
    out: Path | None  # None: a name made from the source's name
    memory_nbytes: int
    dry_run: bool = False
    overwrite: bool = False
    restart: bool = False
    offline: bool = False
    revision: str | None = None
    step: int | str | None = None  # step of a training run: a number, `best` or `last`; None: the last step
    process_options: ProcessOptions = ONE_PROCESS
    stream: bool = False  # read from the hub without a local copy
    config: Path | None = None  # config.json, for a checkpoint without one
    allow_overflow: bool = False  # cast values that are too large to infinity
    ema: bool = False  # take the moving average of a run's parameters


@dataclass(frozen=True, slots=True)
class PlannedConversion:
    """A plan with the messages and fields of its report."""

    plan: Plan
    default_out_name: str
    notes: tuple[str, ...]  # lines for the user
    fields: dict[str, Any]  # for JSON
    next_command: Callable[[Path], str]  # from the output's path
    source_view: Source | None = None  # the source that the plan reads, if not the one that was opened


def open_checkpoint(
    common: CommonOptions,
    ui: Ui,
    is_candidate: Callable[[Path], bool] = Path.is_dir,
    *,
    allow_adapters: bool = False,
) -> tuple[LocatedCheckpoint, Source]:
    """Locate and open the checkpoint of the options.

    Args:
        common: Options with the checkpoint, its step, revision, config and choice of parameters.
        ui: Receives notes, warnings and progress.
        is_candidate: Condition on the folder of a default checkpoint, if the options name no checkpoint.
        allow_adapters: Accept an adapter of PEFT.

    Returns:
        The located checkpoint and its source; only headers are read.

    Raises:
        PrepError: The checkpoint does not exist, or cannot be read.
    """
    checkpoint = common.checkpoint
    if checkpoint is None:
        checkpoint = f"./{default_checkpoint(Path(), is_candidate)}"
        ui.note(f"using {checkpoint} (the only prep checkpoint here)")
    access = make_access(ui, offline=common.offline, stream=common.stream, allow_urls=True)
    access = replace(access, allow_adapters=allow_adapters)
    located = locate(checkpoint, common.revision, step=common.step, access=access)
    if located.local_files.remote is None:
        remove_leftover(find_manifest_folder(located.local_files.path))
    source = open_source(located, common.config)
    note_unrecorded(source.display_name, source.manifest, ui)
    return located, use_averages(source) if common.ema else source


def note_unrecorded(display_name: str, manifest: Mapping[str, Any] | None, ui: Ui) -> None:
    """Print a note if the manifest of a checkpoint has no digests of its settings and tokenizer."""
    if manifest and FILES_KEY not in manifest:
        ui.note(f"{display_name} was written by an earlier prep: its settings and tokenizer files are not checked")


def make_access(ui: Ui, *, offline: bool, stream: bool = False, allow_urls: bool = False) -> Access:
    """Return the access to remote checkpoints, with progress and warnings on `ui` and time-outs of the environment."""
    policy = retry_policy_from_env(os.environ, ui.note)
    return Access(offline, stream, allow_urls, progress=ui.progress(), warn=ui.warn, retry_policy=policy)


def check_config_option(common: CommonOptions, *sources: Source) -> None:
    """Raise UsageError for `--config` if all sources already have a config in their manifest."""
    if common.config is not None and all(source.tree_manifest for source in sources):
        names = " and ".join(source.display_name for source in sources)
        why = f"{MANIFEST_FILE} already has the config of the model"
        raise usage_error(f"`--config` has no effect for {names}", why, "remove `--config`")


def check_allow_overflow(common: CommonOptions, dtype: str | None) -> None:
    """Raise UsageError for `--allow-overflow` without a cast."""
    if dtype is None:
        check_needs("--allow-overflow", common.allow_overflow, "--dtype", "without a cast no value overflows")


def run_conversion(
    common: CommonOptions,
    ui: Ui,
    make_plan: Callable[[Source, LocatedCheckpoint], PlannedConversion],
    is_candidate: Callable[[Path], bool] = Path.is_dir,
) -> Report:
    """Plan a conversion, then show the plan (`--dry-run`) or execute it.

    An output with a URL is written to a local folder first, and then uploaded.

    Args:
        common: Options of the command.
        ui: Receives notes, warnings and progress.
        make_plan: Makes the plan from the opened source.
        is_candidate: Condition on the folder of a default checkpoint, if the options name no checkpoint.

    Returns:
        Report with the output's path, counts and times.

    Raises:
        PrepError: The source, the options or the output are invalid, or reading or writing failed.
    """
    share, _ = requested_share(common.process_options.processes, os.environ)  # also validates the variables
    url = parse_out_url(common.out)
    if url is None:
        return _run_to_folder(common, ui, make_plan, is_candidate)
    request = UploadRequest(url, common.dry_run, common.overwrite, common.restart)
    if PARENT_VARIABLE in os.environ:
        return _run_to_folder(replace(common, out=request.local_folder), ui, make_plan, is_candidate)

    def convert(out: Path, dry_run: bool) -> Report:
        return _run_to_folder(replace(common, out=out, dry_run=dry_run), ui, make_plan, is_candidate)

    return make_and_upload(request, share.count > 1, ui=ui, make_output=convert)


def _run_to_folder(
    common: CommonOptions,
    ui: Ui,
    make_plan: Callable[[Source, LocatedCheckpoint], PlannedConversion],
    is_candidate: Callable[[Path], bool],
) -> Report:
    """Convert into a local folder."""
    located, source = open_checkpoint(common, ui, is_candidate)
    check_config_option(common, source)
    check_stream(common.stream, located)
    planned = make_plan(source, located)
    out = common.out or Path(planned.default_out_name)
    _check_output_location(out, source)
    ui.note(source_line(source))
    if unsupported_reason := unsupported_model_reason(source):
        ui.warn(f"{source.display_name} can be converted, but not trained or sampled from: {unsupported_reason}")
    for line in planned.notes:
        ui.note(line)
    note_plan_details(planned.plan, ui)
    fields = {"source": source_fields(source, located), **planned.fields, **plan_fields(planned.plan, ui)}
    fields["not_computed"] = unsupported_reason
    if common.dry_run:
        return Report(dry_run_line(planned.plan, out), {"output": str(out), "dry_run": True, **fields})
    result, process_fields = _execute_plan(planned.plan, planned.source_view or source, out, common, ui)
    manifest = read_manifest(out) or {}
    cast_counts = manifest.get("casts", [])
    for entry in cast_counts:
        ui.note(casts.format_cast(entry))
    ui.note(closing_line(planned.plan, result, cast_counts, ui, common.memory_nbytes))
    fields["accounting"]["changed_values"] = count_changed_values(cast_counts)
    if planned.plan.zstd_level:
        fields["compress"] = compression = compression_fields(planned.plan, manifest)
        ui.note(compression_line(compression))
    fields |= {
        "output": str(out),
        "casts": cast_counts,
        **result_fields(result, common.memory_nbytes),
        **process_fields,
    }
    return Report(str(out), fields, planned.next_command(out))


def _execute_plan(
    plan: Plan, source: Source, out: Path, common: CommonOptions, ui: Ui
) -> tuple[ConversionResult, dict[str, Any]]:
    """Write the output with this process and its workers; return their result and JSON fields of the processes."""
    process_options, own_nbytes = common.process_options, anonymous_nbytes()
    share, launcher = requested_share(process_options.processes, os.environ)
    if launcher:
        ui.note(f"process {share.index} of {share.count}, as {launcher} says")
    own_share, *worker_shares = share.split(process_options.num_workers)
    memory_nbytes = worker_memory_nbytes(common.memory_nbytes, process_options.num_workers, baseline_nbytes=own_nbytes)
    with WorkerPool(
        process_options.argv, worker_shares, memory_nbytes=memory_nbytes, progress=ui.progress()
    ) as workers:
        options = ExecuteOptions(
            out,
            memory_nbytes,
            overwrite=common.overwrite,
            restart=common.restart,
            share=own_share,
            num_workers=process_options.num_workers,
            start_workers=workers.start,
            check_workers=workers.check,
            allow_overflow=common.allow_overflow,
        )
        result = execute_plan(plan, source, options=options, progress=workers.progress, note=ui.note)
        result = add_worker_reports(result, workers.wait_for_reports(), baseline_nbytes=own_nbytes)
    fields = {"count": own_share.count, "index": own_share.index, "workers": process_options.num_workers}
    return result, {"processes": fields} if own_share.count > 1 else {}


def _check_output_location(out: Path, source: Source) -> None:
    """Raise UsageError if writing the output would change or delete the source or the user's own folders."""
    target = out.resolve()
    partial = target.with_name(target.name + ".partial")
    source_files = () if source.root.is_file() else (*source.files, *source.small_files)
    file_folders = (path.resolve().parent for path in source_files)  # links may point to other folders
    weight_folders = {source.root.resolve(), *(path.resolve().parent for path in source.files)}
    for root in dict.fromkeys((source.root.resolve(), *file_folders)):
        if root in (target, partial):
            raise usage_error(f"the output {out} is the source", "sources are never written to", "`--out NAME`")
        if root in target.parents and root in weight_folders:  # an output inside a folder of settings is allowed
            hint = f"`--out ../{out.name}`"
            raise usage_error(f"the output {out} is inside the source", "sources are never written to", hint)
        if target in root.parents:
            raise usage_error(f"the source is inside the output {out}", "it would be deleted", "`--out NAME`")
    for folder in (Path.cwd(), Path(os.path.expanduser("~")).resolve()):
        if target == folder or target in folder.parents:
            what = f"the output {out} would replace the current folder or your home folder"
            raise usage_error(what, f"{folder} is inside it, and outputs replace whole folders", "`--out NAME`")


def source_line(source: Source) -> str:
    """Describe a source in one line: `EleutherAI/gpt-neo-1.3B  gpt_neo  316 tensors  4.90 GiB float32`."""
    dtypes = _weight_dtypes(source)
    size = format_bytes(sum(t.nbytes for t in source.tensors))
    parts = [source.display_name, source.family.name, f"{len(source.tensors)} tensors", f"{size} {', '.join(dtypes)}"]
    if nbytes := optimizer_nbytes(source):
        parts.append(f"optimizer state {format_bytes(nbytes)}")
    if len(source.files) > 1:
        parts.append(f"{len(source.files)} files")
    return "  ".join(parts)


def unsupported_model_reason(source: Source) -> str | None:
    """Return the reason why prep cannot run the source's model, or None if it can."""
    try:
        source.family.arch_config(source.config)
    except PrepError as error:
        return str(error)
    return None


def _weight_dtypes(source: Source) -> list[str]:
    """Return the dtypes of the tensors with at least 1/8 of the bytes of the largest."""
    largest_nbytes = max((t.nbytes for t in source.tensors), default=0)
    return sorted({t.dtype for t in source.tensors if t.nbytes * 8 >= largest_nbytes})


def output_config(source: Source, vocabulary: Vocabulary, is_tied: bool, dtype: str | None = None) -> dict[str, Any]:
    """Return the source's config with the vocabulary, weight tying and, if not None, the dtype of the output."""
    config = with_vocabulary(source.config, vocabulary)
    dtype_keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]  # transformers 5 and 4
    config |= dict.fromkeys(dtype_keys, dtype) if dtype else {}
    if is_tied or not source.family.is_tied(config, (source.family.tying.head_tensor,)):
        return config
    return config | {"tie_word_embeddings": False, **source.family.tying.untied_fields(config)}


def format_command_line(command: str, source: Source, options: Sequence[tuple[str, object]]) -> str:
    """Return the command line of a request, without the options at their defaults (None, False, empty)."""
    words = [f"prep {command} {source.display_name}"]
    for flag, value in options:
        if value is True:
            words.append(flag)
        elif isinstance(value, tuple):
            words += [f"{flag} {item}" for item in value]
        elif value is not None and value is not False:
            words.append(f"{flag} {value}")
    return " ".join(words)
