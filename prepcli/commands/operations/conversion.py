"""Common steps of all converting commands: open the source, plan, show or execute the plan, report."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from prepcli.commands.operations.opening import (
    CommonOptions,
    check_config_option,
    open_checkpoint,
    source_line,
)
from prepcli.commands.operations.output_location import check_output_location, check_output_url
from prepcli.commands.operations.results import Conversion
from prepcli.core.counts import count_text
from prepcli.core.errors import Command, Option, PrepError, join_texts, text
from prepcli.core.formatting import format_bytes
from prepcli.core.lists import join_names
from prepcli.core.observer import LEAVES, Observer, RecordingObserver
from prepcli.engine.casts import format_cast, report_casts
from prepcli.engine.pipeline import ConversionResult
from prepcli.execution.bucket_run import BucketRun
from prepcli.execution.folder_run import FolderRun
from prepcli.execution.output_paths import check_output_paths, parse_out_url
from prepcli.execution.request import ExecutionRequest, plan_digest
from prepcli.execution.workers import (
    ProcessOptions,
    WorkerPool,
)
from prepcli.formats.manifest import (
    NO_MANIFEST,
    origin_record,
    read_manifest,
)
from prepcli.models.verbatim import CANNOT_TRAIN
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.object_files import plan_object_files
from prepcli.planning.plan import DroppedTensor, Plan
from prepcli.planning.shares import Share, requested_share
from prepcli.planning.tensors import CastEntry
from prepcli.sources.locate import LocatedCheckpoint, check_stream
from prepcli.sources.source import Source
from prepcli.sources.vocabulary_tensors import prediction_vocabulary
from prepcli.stores.object_url import ObjectStoreUrl, parse_url

OUT_PLACEHOLDER = "{out}"
# A message names at most this many files left out of the output.
MAX_LEFT_FILES = 5


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
class OpenedConversion:
    """The opened source of a conversion, before its plan.

    Attributes:
        common: Options of the conversion.
        located: The located checkpoint.
        source: Its opened source.
        observer: Receives notes, warnings and progress, and keeps the warnings for the result.
        url: URL of the output. None for a folder.
        started_s: Start of the conversion, on the monotonic clock.
    """

    common: CommonOptions
    located: LocatedCheckpoint
    source: Source
    observer: RecordingObserver
    url: ObjectStoreUrl | None
    started_s: float


def open_conversion(
    common: CommonOptions,
    observer: Observer,
    is_candidate: Callable[[Path], bool] = Path.is_dir,
    *,
    allow_adapters: bool = False,
) -> OpenedConversion:
    """Open the source of a conversion. Only headers are read.

    Args:
        common: Options of the conversion.
        observer: Receives notes, warnings and progress.
        is_candidate: Condition on the folder of a default checkpoint, if the options name no checkpoint.
        allow_adapters: Open an adapter of PEFT, so that the plan can refuse it with its own message.

    Raises:
        PrepError: The source or the options are invalid, or the source cannot be read.
    """
    started_s = time.monotonic()
    recorder = RecordingObserver(observer)
    # This also checks the variables of launchers, before anything is read.
    requested_share(common.process_options.processes, os.environ)
    url = parse_out_url(common.out)
    located, source = open_checkpoint(common, recorder, is_candidate, allow_adapters=allow_adapters)
    check_config_option(common, source)
    check_stream(common.stream, located)
    return OpenedConversion(
        common, located, source, observer=recorder, url=url, started_s=started_s
    )


def run_conversion(opened: OpenedConversion, planned: PlannedConversion) -> Conversion:
    """Execute the plan of a conversion, unless this is a dry run.

    An output with a URL is written to the object store from memory.

    Raises:
        PrepError: The output is invalid, or reading or writing failed.
    """
    common = opened.common
    located = opened.located
    source = opened.source
    recorder = opened.observer
    url = opened.url
    plan = _with_origin(planned.plan, source, located)
    check_output_paths(plan)
    if url is None:
        out: Path | str = common.out or Path(planned.default_out_name)
        check_output_location(Path(out), source)
    else:
        out = str(url)
        check_output_url(url, source)
        plan = plan_object_files(plan)
    fields = plan_fields(plan, source)
    note_plan(plan, planned.notes, source, fields["not_computed"], recorder)
    details: dict[str, object] = {
        "source": source_fields(source, located),
        **planned.fields,
        **fields,
    }
    result = ConversionResult()
    if common.dry_run:
        details = {"output": str(out), "dry_run": True, **details}
    else:
        view = planned.source_view or source
        result, manifest, share = _execute(common, plan, view, out, fields["plan_digest"], recorder)
        seconds = time.monotonic() - opened.started_s
        fields["accounting"]["changed_values"] = count_changed_values(manifest.casts)
        details |= _report_result(common, plan, out, result, manifest, seconds, recorder)
        if share.count > 1:
            details["processes"] = process_fields(share, common.process_options)
    return Conversion(
        path=Path(out),
        bytes_read=result.read_nbytes,
        bytes_written=result.written_nbytes,
        seconds=time.monotonic() - opened.started_s,
        peak_bytes=result.peak_nbytes,
        already_done=result.already_done,
        plan_digest=fields["plan_digest"],
        plan=plan,
        details=details,
        next_command=planned.next_command.replace(OUT_PLACEHOLDER, shlex.quote(str(out))),
        warnings=tuple(recorder.warnings),
    )


def _execute(
    common: CommonOptions,
    plan: Plan,
    source: Source,
    out: Path | str,
    plan_digest: str,
    observer: Observer,
) -> tuple[ConversionResult, Manifest, Share]:
    """Write the output of a plan. Return its counts, its manifest, and the share of this process in the work."""
    share, launcher = requested_share(common.process_options.processes, os.environ)
    if launcher:
        observer.note(f"process {share.index} of {share.count}, according to {launcher}")
    with WorkerPool(
        common.process_options,
        share,
        memory_nbytes=common.memory_nbytes,
        progress=observer.progress(),
    ) as pool:
        request = ExecutionRequest(
            plan=plan,
            run_id=plan_digest,
            source=source,
            pool=pool,
            overwrite=common.overwrite,
            restart=common.restart,
            allow_overflow=common.allow_overflow,
            note=observer.note,
        )
        if isinstance(out, Path):
            result = FolderRun(request, out).run()
            manifest = read_manifest(out) or NO_MANIFEST
        else:
            run = BucketRun(request, parse_url(out))
            result = run.run()
            manifest = run.read_manifest()
    return result, manifest, pool.share


def _report_result(
    common: CommonOptions,
    plan: Plan,
    out: Path | str,
    result: ConversionResult,
    manifest: Manifest,
    seconds: float,
    observer: Observer,
) -> dict[str, object]:
    """Note the casts, the time and the compression of a written output, and return their JSON fields."""
    for entry in manifest.casts:
        observer.note(format_cast(entry))
    line = closing_line(plan, out, result, manifest.casts, seconds, common.memory_nbytes)
    observer.note(line)
    details: dict[str, object] = {}
    if plan.compression:
        compression = compression_fields(plan, manifest)
        details["compress"] = compression
        observer.note(compression_line(compression))
    return {
        **details,
        "output": str(out),
        "casts": manifest.casts,
        **result_fields(result, common.memory_nbytes),
    }


def _with_origin(plan: Plan, source: Source, located: LocatedCheckpoint) -> Plan:
    """Return the plan with the identity of its source in the manifest of the output, and with its earlier drops."""
    settings = plan.settings | (source.manifest or NO_MANIFEST).earlier_drops
    if origin := origin_record(source.manifest, located.files.commit):
        settings |= Manifest(origin=origin)
    return replace(plan, settings=settings)


# --- The plan and the result for the user


class Accounting(TypedDict):
    """Number of used source tensors, and lists of the dropped and the filled tensors, for JSON.

    `changed_values` is None in the plan of a conversion with casts: the values are counted while they are cast.
    """

    tensors: int
    used: int
    dropped: list[dict[str, object]]
    filled: list[dict[str, object]]
    changed_values: int | None


class PlanFields(TypedDict):
    """A plan for JSON. `not_computed` is the reason why prep cannot run the model, or None if it can."""

    plan_digest: str
    accounting: Accounting
    chunks: int
    casts: list[CastEntry]
    not_computed: str | None


# Bytes of an output's chunks before and after compression, for JSON. Not a class, because the key
# `with` is a keyword of Python.
Compression = TypedDict(
    "Compression", {"with": str | None, "raw": int, "stored": int, "ratio": float}
)


def source_fields(source: Source, located: LocatedCheckpoint) -> dict[str, object]:
    """Return the name, revision, files and bytes of a source."""
    return {
        "name": source.display_name,
        "revision": located.files.commit,
        "files": len(source.files),
        "bytes": sum(stamp.size for stamp in source.file_stamps),
    }


def plan_fields(plan: Plan, source: Source) -> PlanFields:
    """Return the digest of a plan, the accounting of its tensors, its casts, and whether prep can run the model."""
    unsupported_reason = None
    try:
        source.family.arch_config(source.config)
    except PrepError as error:
        unsupported_reason = join_texts(" - ", [error.what, error.why])
    names = plan.display_names
    # New rows of a padded tensor are a stream of the same name that reads nothing. It is listed under `filled`.
    used = {s.name for s in plan.streams if (s.writes or not s.nbytes) and s.reads}
    return {
        "plan_digest": plan_digest(plan),
        "accounting": {
            # A union of names: a tensor that loses only padding rows is both used and dropped.
            "tensors": len(used | {d.name for d in plan.dropped}),
            "used": len(used),
            "dropped": [_dropped_fields(d, names.get(d.name, d.name)) for d in plan.dropped],
            "filled": [
                {"name": names.get(s.name, s.name), "rows": list(s.rows), "with": s.fill.kind}
                for s in plan.streams
                if s.fill
            ],
            # Only the conversion itself can count the values that a cast changes.
            "changed_values": None if any(stream.is_changed for stream in plan.streams) else 0,
        },
        "chunks": plan.chunk_count,
        "casts": report_casts(plan.streams),
        "not_computed": unsupported_reason,
    }


def _dropped_fields(dropped: DroppedTensor, display_name: str) -> dict[str, object]:
    fields: dict[str, object] = {
        "name": display_name,
        "rows": dropped.rows,
        "bytes": dropped.nbytes,
        "rule": dropped.rule,
    }
    if dropped.columns is not None:
        fields["columns"] = dropped.columns
    return fields


def result_fields(result: ConversionResult, memory_nbytes: int) -> dict[str, object]:
    """Return the bytes, memory and time of a conversion."""
    return {
        "already": result.already_done,
        "bytes": {
            "read": result.read_nbytes,
            "written": result.written_nbytes,
            "moved": result.read_nbytes + result.copied_nbytes + result.written_nbytes,
            "resumed": result.resumed_nbytes,
        },
        "memory": {"budget": memory_nbytes, "peak": result.peak_nbytes},
        "time": {stage: round(seconds, 3) for stage, seconds in result.seconds.items()},
    }


def process_fields(share: Share, options: ProcessOptions) -> dict[str, int]:
    """Return how many processes and workers write an output, and the index of this process."""
    return {"count": share.count, "index": share.index, "workers": options.num_workers}


def count_changed_values(cast_counts: Sequence[CastEntry]) -> int:
    """Return how many values casts changed."""
    return sum(entry.get("changed", 0) for entry in cast_counts)


def compression_fields(plan: Plan, manifest: Manifest) -> Compression:
    """Return the raw and the stored bytes of an output's chunks, and their ratio."""
    raw = sum(leaf.chunk_nbytes * math.prod(leaf.grid.chunk_counts) for leaf in plan.leaves)
    stored = sum(manifest.packed.values())
    return {
        "with": manifest.compress,
        "raw": raw,
        "stored": stored,
        "ratio": round(stored / max(1, raw), 4),
    }


def compression_line(compression: Compression) -> str:
    """Describe the size of compressed chunks."""
    sizes = (
        f"{format_bytes(compression['raw'])} compressed to {format_bytes(compression['stored'])}"
    )
    return f"{sizes}, {compression['ratio']:.2f} x, with {compression['with']}"


def dropped_text(plan: Plan) -> str:
    """Describe the dropped tensors of a plan, by rule."""
    by_rule: dict[str, int] = {}
    for dropped in plan.dropped:
        # Rows and columns are dropped from a tensor that is kept. Only whole tensors count here.
        if dropped.rows or dropped.columns:
            continue
        by_rule[dropped.rule] = by_rule.get(dropped.rule, 0) + 1
    return ", ".join(f"{count} dropped ({rule})" for rule, count in by_rule.items())


def closing_line(
    plan: Plan,
    out: Path | str,
    result: ConversionResult,
    cast_counts: Sequence[CastEntry],
    seconds: float,
    memory_nbytes: int,
) -> str:
    """Describe a finished conversion: tensors, bytes, speed, memory and changed values."""
    if result.already_done:
        return f"already done: {out} was made by the same request from the same source"
    # A tensor without elements is part of the output, and nothing is written for it.
    used = len({s.name for s in plan.streams if s.writes or not s.nbytes})
    memory = f"peak {result.peak_nbytes >> 20} MiB of {memory_nbytes >> 20}"
    parts = [
        f"{used} tensors",
        *filter(None, [dropped_text(plan)]),
        f"{count_text(count_changed_values(cast_counts), 'value')} changed",
    ]
    return f"done in {seconds:.1f} s, {memory}; {', '.join(parts)}"


def note_plan(
    plan: Plan,
    notes: Sequence[str],
    source: Source,
    unsupported_reason: str | None,
    observer: Observer,
) -> None:
    """Note the source and the plan, at `-v` also each leaf and each dropped tensor."""
    observer.note(source_line(source))
    if source.family.is_verbatim:
        observer.warn(f"{source.display_name}: {CANNOT_TRAIN}")
    elif unsupported_reason:
        observer.warn(
            f"{source.display_name} can be converted, but not trained or sampled from:"
            f" {unsupported_reason}"
        )
    _warn_of_prediction_rows(plan, source, observer)
    if source.left_files:
        names = join_names([file.name for file in source.left_files], max_names=MAX_LEFT_FILES)
        observer.note(text("not copied: {} ({} copies them)", names, Option("copy", "GLOB")))
    if source.omitted:
        names = join_names(source.omitted, max_names=MAX_LEFT_FILES)
        observer.note(f"left out: {names}")
    for line in notes:
        observer.note(line)
    for leaf in plan.leaves:
        grid = leaf.grid
        chunks = f"in chunks of {list(grid.chunk_shape)}"
        observer.note(f"  {leaf.name}  {list(grid.shape)} {leaf.dtype} {chunks}", LEAVES)
    for dropped in plan.dropped:
        name = plan.display_names.get(dropped.name, dropped.name)
        observer.note(f"  dropped {name}: {dropped.rule}", LEAVES)


def _warn_of_prediction_rows(plan: Plan, source: Source, observer: Observer) -> None:
    """Warn of embeddings and heads of multi-token prediction that fit neither the source nor the output."""
    vocabulary = plan.settings.get("vocab")
    if not source.tower_tensors or vocabulary is None:
        return
    num_rows = vocabulary["padded"]
    written_rows: dict[str, int] = {}
    for stream in plan.streams:
        if stream.writes:
            written_rows[stream.name] = stream.rows[1]
    names: list[str] = []
    for tensor in prediction_vocabulary(source):
        # An output without towers does not write the tensor.
        if written_rows.get(tensor.name, num_rows) != num_rows:
            names.append(source.file_name(tensor))
    if names:
        listed = join_names(names, max_names=MAX_LEFT_FILES)
        command = Command("export", source.display_name, Option("text_only", True))
        what = f"multi-token prediction has other vocabulary rows than its model: {listed}"
        observer.warn(text("{} ({} leaves it out)", what, command))
