"""Common steps of all converting commands: open the source, plan, show or execute the plan, report."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from prepcli.commands.operations.checkpoint_options import (
    CommonOptions,
    check_config_option,
    check_output_location,
    check_recorded_names,
    open_checkpoint,
    recorded_values,
    source_line,
)
from prepcli.commands.operations.results import Conversion
from prepcli.core.errors import (
    Command,
    Option,
    PrepError,
    join_texts,
    text,
    usage_error,
)
from prepcli.core.formatting import count_text, format_bytes, format_duration, join_names
from prepcli.core.json_values import quote_name
from prepcli.core.observer import LEAVES, Observer, Progress, RecordingObserver, observer_of
from prepcli.core.option_spec import format_command_line
from prepcli.engine.casts import format_cast, report_casts
from prepcli.engine.conversion_result import ConversionResult
from prepcli.engine.fills import fill_of
from prepcli.execution.converter import Converter, ExecutionRequest
from prepcli.execution.folder_converter import FolderConverter
from prepcli.execution.output import WORK_FOLDER, digest_plan
from prepcli.execution.workers import WorkerPool
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import MANIFEST_FILE, NO_MANIFEST, origin_record
from prepcli.formats.ocdbt import MAX_ENTRIES
from prepcli.formats.orbax import CHECKPOINT_METADATA_FILE, COMMIT_MARKER, STRINGS_FILE
from prepcli.models.verbatim import CANNOT_TRAIN
from prepcli.planning.item_storage import METADATA_FILE
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.object_files import plan_object_files
from prepcli.planning.plan import Plan
from prepcli.planning.work_units import Share, requested_share
from prepcli.sources.locate import LocatedCheckpoint, check_stream
from prepcli.sources.source import Source
from prepcli.sources.vocabulary_tensors import prediction_vocabulary
from prepcli.stores.addresses import ObjectStoreUrl, parse_out_url
from prepcli.stores.files import name_fault
from prepcli.targets.planner import Draft, Placed, make_plan

# Stands for the path of the output in the next command.
OUT_PLACEHOLDER = "{out}"
# A message names at most this many files left out of the output.
MAX_LEFT_FILES = 5
# Files that prep writes beside the data: in the folder of an item, and in the folder of the output.
ITEM_FILES = (METADATA_FILE, CHECKPOINT_METADATA_FILE, STRINGS_FILE, COMMIT_MARKER)
OUTPUT_FILES = (MANIFEST_FILE, CHECKSUMS_FILE, WORK_FOLDER)


@dataclass(frozen=True, slots=True)
class OpenedConversion:
    """The opened source of a conversion. The observer keeps the warnings for the result."""

    command: str
    common: CommonOptions
    located: LocatedCheckpoint
    source: Source
    observer: RecordingObserver
    started_s: float

    def convert(
        self,
        draft: Draft,
        placed: Placed,
        options: type,
        values: Mapping[str, Any],
        *,
        name: str,
        notes: Iterable[str],
        fields: Mapping[str, object],
        out_name: str = "",
        next_command: str = f"prep verify {OUT_PLACEHOLDER}",
        arguments: str = "",
        source_view: Source | None = None,
    ) -> Conversion:
        """Plan a draft in its layout, note the source and the plan, and execute it unless this is a dry run.

        Args:
            draft: The model of the output.
            placed: Its layout.
            options: TypedDict of the options of the command.
            values: Their values for the manifest.
            name: Name of the model in the manifest.
            notes: Lines for the user about the edits and the layout.
            fields: Their fields for JSON.
            out_name: Name of the output if the user gives none. Default: `name`.
            next_command: The usual next command, for a shell.
            arguments: Arguments of the command before the source.
            source_view: Source with all read tensors, if the source of the draft lacks some.

        Raises:
            PrepError: The output is invalid, or reading or writing failed.
        """
        source = self.source
        command = f"{self.command} {arguments}".rstrip()
        line = format_command_line(command, source.display_name, options, recorded_values(values))
        plan = make_plan(draft, placed, command=self.command, request=line, name=name)
        plan = self._with_origin(plan)
        check_index_size(plan)
        check_output_paths(plan)
        out = parse_out_url(self.common.out) or self.common.out or Path(out_name or name)
        check_output_location(out, source)
        if not isinstance(out, Path):
            # The objects of a bucket are written from memory.
            plan = plan_object_files(plan)
        details = self._plan_fields(plan, {**fields, "plan_digest": digest_plan(plan)})
        details["not_computed"] = _note_plan(plan, notes, source, self.observer)
        result = ConversionResult()
        if self.common.dry_run:
            details = {"output": str(out), "dry_run": True, **details}
        else:
            with self._open_pool() as pool:
                request = ExecutionRequest(
                    plan=plan,
                    plan_digest=details["plan_digest"],
                    source=source_view or draft.source,
                    pool=pool,
                    options=self.common,
                    say=self.observer.note,
                )
                converter = _open_converter(request, out)
                result = converter.run()
                manifest = converter.read_manifest()
            details["accounting"]["changed_values"] = _num_changed_values(manifest)
            details |= self._report(plan, out, result, manifest, pool.share)
        return Conversion(
            path=Path(str(out)),
            bytes_read=result.read_nbytes,
            bytes_written=result.written_nbytes,
            seconds=time.monotonic() - self.started_s,
            peak_bytes=result.peak_nbytes,
            already_done=result.already_done,
            plan_digest=details["plan_digest"],
            plan=plan,
            stage_seconds=result.seconds,
            details=details,
            next_command=next_command.replace(OUT_PLACEHOLDER, shlex.quote(str(out))),
            warnings=tuple(self.observer.warnings),
        )

    def _with_origin(self, plan: Plan) -> Plan:
        """Return the plan with the identity of its source in the manifest of the output, and with its earlier drops."""
        manifest = self.source.manifest
        settings = plan.settings | (manifest or NO_MANIFEST).earlier_drops
        if origin := origin_record(manifest, self.located.files.commit):
            settings |= Manifest(origin=origin)
        return replace(plan, settings=settings)

    def _plan_fields(self, plan: Plan, fields: Mapping[str, object]) -> dict[str, Any]:
        """Return the fields of the source and the plan for JSON, around those of the command."""
        source = self.source
        return {
            "source": {
                "name": source.display_name,
                "revision": self.located.files.commit,
                "files": len(source.files),
                "bytes": sum(stamp.size for stamp in source.file_stamps),
            },
            **fields,
            "accounting": _accounting(plan),
            "chunks": plan.chunk_count,
            "casts": report_casts(plan.streams),
        }

    def _open_pool(self) -> WorkerPool:
        """Return the workers of this process, with its share of the plan."""
        options = self.common
        share, launcher = requested_share(options.process_options.processes, os.environ)
        if launcher:
            self.observer.note(f"process {share.index} of {share.count}, according to {launcher}")
        return WorkerPool(
            options.process_options,
            share,
            memory_nbytes=options.memory_nbytes,
            progress=self.observer.progress(),
        )

    def _report(
        self,
        plan: Plan,
        out: Path | ObjectStoreUrl,
        result: ConversionResult,
        manifest: Manifest,
        share: Share,
    ) -> dict[str, object]:
        """Note the casts, the time and the compression of a written output, and return their JSON fields."""
        memory_nbytes = self.common.memory_nbytes
        observer = self.observer
        for entry in manifest.casts:
            observer.note(format_cast(entry))
        if result.already_done:
            observer.note(f"already done: {out} was made by the same request from the same source")
        else:
            # A tensor without elements is part of the output, and nothing is written for it.
            used = len({s.name for s in plan.streams if s.writes or not s.nbytes})
            changed = count_text(_num_changed_values(manifest), "value")
            parts = [f"{used} tensors", dropped_text(plan), f"{changed} changed"]
            seconds = time.monotonic() - self.started_s
            memory = f"peak {result.peak_nbytes >> 20} MiB of {memory_nbytes >> 20}"
            observer.note(f"done in {seconds:.1f} s, {memory}; {', '.join(filter(None, parts))}")
            stages = [f"{stage} {format_duration(s)}" for stage, s in result.seconds.items()]
            observer.note(f"busy: {', '.join(stages)}", LEAVES)
        details: dict[str, object] = {}
        if plan.compression:
            raw = sum(leaf.chunk_nbytes * math.prod(leaf.grid.chunk_counts) for leaf in plan.leaves)
            stored = sum(manifest.packed.values())
            ratio = round(stored / max(1, raw), 4)
            details["compress"] = {
                "with": manifest.compress,
                "raw": raw,
                "stored": stored,
                "ratio": ratio,
            }
            sizes = f"{format_bytes(raw)} compressed to {format_bytes(stored)}"
            observer.note(f"{sizes}, {ratio:.2f} x, with {manifest.compress}")
        details |= {
            "output": str(out),
            "casts": manifest.casts,
            "already": result.already_done,
            **result.json_fields(memory_nbytes),
        }
        if share.count > 1:
            processes = {"count": share.count, "index": share.index}
            details["processes"] = {
                **processes,
                "workers": self.common.process_options.num_workers,
            }
        return details


def open_conversion(
    command: str,
    common: CommonOptions,
    progress: Progress | Observer | None,
    is_candidate: Callable[[Path], bool] = Path.is_dir,
    *,
    allow_adapters: bool = False,
) -> OpenedConversion:
    """Open the source of a conversion. Only headers are read. See `open_checkpoint`.

    Raises:
        PrepError: The source or the options are invalid, or the source cannot be read.
    """
    started_s = time.monotonic()
    recorder = RecordingObserver(observer_of(progress))
    # The variables of launchers and the place of the output are checked before anything is read.
    requested_share(common.process_options.processes, os.environ)
    parse_out_url(common.out)
    located, source = open_checkpoint(common, recorder, is_candidate, allow_adapters=allow_adapters)
    check_recorded_names([source.display_name, *(stamp.path for stamp in source.file_stamps)])
    if common.config is not None:
        check_config_option(source)
    if common.stream:
        check_stream(located)
    return OpenedConversion(command, common, located, source, recorder, started_s)


def check_index_size(plan: Plan) -> None:
    """Raise UsageError if the index of the output would have more entries than prep reads."""
    num_entries = plan.chunk_count + len(plan.leaves)
    if num_entries > MAX_ENTRIES:
        what = f"{plan.source_name} would have {plan.chunk_count:,} chunks"
        why = f"an index has at most {MAX_ENTRIES:,} entries"
        hint = ""
        if plan.command in ("save-init", "reshard"):
            hint = text(
                "use a smaller {}, or {} for the largest leaves", Option("mesh"), Option("rules")
            )
        raise usage_error(what, why, hint)


def _open_converter(request: ExecutionRequest, out: Path | ObjectStoreUrl) -> Converter:
    # Most outputs are folders of raw chunks, and need neither obstore nor an encoder.
    if not isinstance(out, Path):
        from prepcli.execution.bucket_converter import BucketConverter

        return BucketConverter(request, out)
    if request.plan.compression:
        from prepcli.execution.packed_folder_converter import PackedFolderConverter

        return PackedFolderConverter(request, out)
    return FolderConverter(request, out)


# --- The plan for the user


def _accounting(plan: Plan) -> dict[str, Any]:
    """Return the number of used source tensors, and the dropped and the filled tensors, for JSON."""
    names = plan.display_names
    dropped: list[dict[str, object]] = []
    for tensor in plan.dropped:
        dropped.append(
            {
                "name": names.get(tensor.name, tensor.name),
                "rows": tensor.rows,
                "bytes": tensor.nbytes,
                "rule": tensor.rule,
            }
        )
        if tensor.columns is not None:
            dropped[-1]["columns"] = tensor.columns
    # New rows of a padded tensor are a stream of the same name that reads nothing. It is listed under `filled`.
    used = {s.name for s in plan.streams if (s.writes or not s.nbytes) and s.reads}
    return {
        # A union of names: a tensor that loses only padding rows is both used and dropped.
        "tensors": len(used | {tensor.name for tensor in plan.dropped}),
        "used": len(used),
        "dropped": dropped,
        "filled": [
            {"name": names.get(s.name, s.name), "rows": list(s.rows), "with": fill.kind}
            for s in plan.streams
            if (fill := fill_of(s))
        ],
        # Only the conversion itself can count the values that a cast changes.
        "changed_values": None if any(stream.is_changed for stream in plan.streams) else 0,
    }


def _num_changed_values(manifest: Manifest) -> int:
    return sum(cast.get("changed", 0) for cast in manifest.casts)


def dropped_text(plan: Plan) -> str:
    """Describe the dropped tensors of a plan, by rule."""
    # Rows and columns are dropped from a tensor that is kept. Only whole tensors count here.
    rules = Counter(part.rule for part in plan.dropped if not (part.rows or part.columns))
    return ", ".join(f"{count} dropped ({rule})" for rule, count in rules.items())


def why_not_computed(source: Source) -> str | None:
    """Return why prep cannot train or run a model, or None if it can."""
    try:
        source.family.arch_config(source.config)
    except PrepError as error:
        return join_texts(" - ", [error.what, error.why])
    return None


def _note_plan(plan: Plan, notes: Iterable[str], source: Source, observer: Observer) -> str | None:
    """Note the source and the plan, at `-v` also each leaf and each dropped tensor.

    Returns:
        Why prep cannot run the model, or None if it can.
    """
    observer.note(source_line(source))
    unsupported_reason = why_not_computed(source)
    if source.family.is_verbatim:
        observer.warn(f"{source.display_name}: {CANNOT_TRAIN}")
    elif unsupported_reason:
        observer.warn(
            f"{source.display_name} can be converted, but not trained or sampled from:"
            f" {unsupported_reason}"
        )
    if source.tower_tensors:
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
    return unsupported_reason


def _warn_of_prediction_rows(plan: Plan, source: Source, observer: Observer) -> None:
    """Warn of embeddings and heads of multi-token prediction that fit neither the source nor the output."""
    vocabulary = plan.settings.get("vocab")
    if vocabulary is None:
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


# --- The paths of an output


def check_output_paths(plan: Plan) -> None:
    """Check that each file of a plan is inside of the output, and that none is in the place of another.

    Names of tensors and files come from untrusted checkpoints. Every writer (raw, compressed, several processes, a
    bucket) joins only paths that follow from the plan, so that one check of the plan covers all of them.

    Raises:
        UsageError: The storage makes a folder of the name of a leaf, and the name cannot be one. Or a path in the
            command line is not UTF-8.
        PrepError: The path of another file leaves the output, or has the place of another one.
    """
    if plan.storage.has_chunk_files:
        for leaf in plan.leaves:
            if fault := name_fault(leaf.name):
                raise usage_error(
                    text(
                        "{} cannot store {}",
                        Option("storage", plan.settings.get("storage")),
                        quote_name(leaf.name),
                    ),
                    f"each array is a folder of its name, and {fault}",
                    text("{} has no such limit", Option("storage", "ocdbt")),
                )
    # The command line has the paths of other inputs, e.g. of a map.
    check_recorded_names([plan.request])
    paths: list[tuple[str, ...]] = []
    for path in _planned_paths(plan):
        parts = tuple(path.split("/"))
        for part in parts:
            if fault := name_fault(part):
                raise PrepError(
                    f"{quote_name(path)} cannot be a file of the output",
                    fault,
                    "rename it in the source",
                )
        paths.append(parts)
    # After sorting, a path comes directly before the first path below it, e.g. (x), (x, y), (z).
    for first, second in itertools.pairwise(sorted(paths)):
        if second[: len(first)] == first:
            first_path, second_path = quote_name("/".join(first)), quote_name("/".join(second))
            what = f"two files of the output would have the name {first_path}"
            if first != second:
                what = f"{first_path} would be a file of the output, and the folder of another one"
            hint = "rename the file in the source"
            if plan.storage.has_chunk_files:
                hint = text("{} makes no folder for an array", Option("storage", "ocdbt"))
            raise PrepError(what, f"the other one is {second_path}", hint)


def _planned_paths(plan: Plan) -> Iterator[str]:
    """Yield the paths of the files in the output. A leaf in a folder of its own counts as one path."""
    yield from OUTPUT_FILES
    for item, leaves in plan.items.items():
        folder = PurePosixPath(plan.item, item or "")
        for name in ITEM_FILES:
            yield str(folder / name)
        if plan.storage.has_chunk_files:
            for leaf in leaves:
                # Not `/`, which drops a part `.` and everything before an absolute path.
                yield "/".join((*folder.parts, leaf.name))
    data_files = () if plan.storage.has_chunk_files else plan.files
    for file in (*data_files, *plan.small_files):
        yield "/".join((*PurePosixPath(plan.item).parts, file.path))
