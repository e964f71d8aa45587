"""Execute a plan: stage the output, write it within a memory budget, verify it and publish it when it is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prepcli.console.formatting import format_bytes
from prepcli.console.progress import Progress
from prepcli.console.ui import version
from prepcli.engine import pipeline
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import Budget, anonymous_nbytes, make_budget
from prepcli.engine.digest import digest
from prepcli.engine.files import Files, RunReader, io_error
from prepcli.engine.journal import EMPTY_JOURNAL_STATE, Journal, JournalState
from prepcli.engine.low_rank import matrix_nbytes
from prepcli.engine.no_follow import check_no_symlinks
from prepcli.engine.pipeline import PipelineResult
from prepcli.errors import OutputExistsError, PrepError
from prepcli.execution import source_state
from prepcli.execution.block_checksums import checksum_recorder, delete_checksums
from prepcli.execution.coordination import PATIENCE_S, ConversionTask, WaitOptions, work_together
from prepcli.execution.finalize import check_small_files, data_folder, finalize_output, output_nbytes_to_compress
from prepcli.execution.integrity import IntegrityChecker
from prepcli.execution.output_checks import check_data_files, check_unchanged, read_stamps
from prepcli.execution.resume import StreamReader, find_outdated, verify_journal_state, zero_gaps
from prepcli.execution.signals import note_durable_work
from prepcli.execution.source_state import SourceState, read_source_state
from prepcli.execution.staging import Staging, open_staging, remove_work_folder
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.file_records import are_files_intact
from prepcli.formats.manifest import MANIFEST_FILE, foreign_output_error, read_manifest
from prepcli.planning import coverage
from prepcli.planning.plan import Plan
from prepcli.planning.plan_text import encode_text
from prepcli.planning.shares import SINGLE_PROCESS, Share
from prepcli.planning.slabs import min_buffer_nbytes, split_streams
from prepcli.sources.source import Source

ITEM_INDEX_FILES = ("_METADATA", "manifest.ocdbt")


@dataclass(frozen=True, slots=True)
class ExecuteOptions:
    """Options of a plan's execution. None of them changes a byte of the output.

    Attributes:
        out: Path of the output.
        memory_nbytes: Memory budget of this process.
        overwrite: Replace an existing output.
        restart: Drop the durable part of an earlier run.
        share: The part of the output that this process writes, if several processes write it together.
        num_workers: Number of shares, from `share` on, whose progress is shown as one.
        start_workers: Starts the worker processes, once there is work for them.
        check_workers: Raises an error if a worker has failed.
        patience_s: Seconds without a sign of life before another process counts as missing.
        allow_overflow: Cast out-of-range values to infinity.
    """

    out: Path
    memory_nbytes: int
    overwrite: bool = False
    restart: bool = False
    share: Share = SINGLE_PROCESS
    num_workers: int = 1
    start_workers: Callable[[], None] = lambda: None
    check_workers: Callable[[], None] = lambda: None
    patience_s: float = PATIENCE_S
    allow_overflow: bool = False


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """Result of an execution: the output's path, this process's pipeline result, and its peak memory above the start.

    `already_done` is true if the output existed before; the pipeline result is then empty.
    """

    out: Path
    outcome: PipelineResult
    peak_nbytes: int
    already_done: bool = False


def plan_digest(plan: Plan) -> str:
    """Return the digest of a plan. Equal digests imply equal outputs, given unchanged sources."""
    return "xxh3:" + digest(encode_text(plan).encode())


def execute_plan(
    plan: Plan, source: Source, *, options: ExecuteOptions, progress: Progress, note: Callable[[str], None]
) -> ConversionResult:
    """Execute a plan, or one share of it (the part of one process), and wait until the output is published.

    An interrupted run continues from its durable bytes.

    Args:
        plan: The plan of the whole output.
        source: The opened source of the plan.
        options: Output path, memory budget and the share of this process.
        progress: Receives the number of written bytes.
        note: Prints a line for the user.

    Returns:
        The output and the work of this process.

    Raises:
        PrepError: The source changed, the output exists and may not be replaced, another process failed, or the
            system refused to read or write.
    """
    budget = make_budget(
        options.memory_nbytes, min_buffer_nbytes(plan.streams), matrix_nbytes=matrix_nbytes(plan.streams)
    )
    run_identity = identify_run(plan)
    if _is_already_done(plan, run_identity, options):
        remove_work_folder(options.out)
        return ConversionResult(options.out, PipelineResult(), 0, already_done=True)
    start_nbytes = anonymous_nbytes()
    own_source_state = read_source_state(plan, source)
    check_small_files(plan)
    check_free_space(plan, Staging(options.out).folder)
    coverage.check(plan, lambda: split_streams(plan.streams, budget.slab_nbytes))
    with open_staging(options.out) as stage:
        division = stage.open(run_identity, options.restart, share=options.share)
        if _is_already_done(plan, run_identity, options):  # by the other processes, meanwhile
            stage.discard()
            return ConversionResult(options.out, PipelineResult(), 0, already_done=True)
        task = ConversionTask(
            plan, run_identity, stage, division, range(options.share.index, options.share.index + options.num_workers)
        )
        with stage.failures.recording_errors():
            initial_source_state = stage.read_or_write_note(
                source_state.SOURCE_STATE_FILE, {"files": own_source_state}
            )["files"]
        mover = _ShareMover(
            task,
            source,
            initial_source_state=initial_source_state,
            own_source_state=own_source_state,
            budget=budget,
            allow_overflow=options.allow_overflow,
            progress=progress,
            note=note,
        )

        def move_own_share() -> PipelineResult:
            options.start_workers()
            return mover.move_share(options.share.index)

        wait_options = WaitOptions(options.patience_s, options.check_workers, note)
        with note_durable_work(lambda: _describe_durable(task)):
            outcome = work_together(
                task,
                move_own_share,
                publish=lambda outcome: _check_and_publish(mover, options, outcome),
                wait_options=wait_options,
            )
        peak_nbytes = max(outcome.peak_nbytes, anonymous_nbytes())
    remove_work_folder(options.out)
    return ConversionResult(options.out, outcome, max(0, peak_nbytes - start_nbytes))


def _describe_durable(task: ConversionTask) -> str:
    """Describe the durable part of the output, for the message of a stopped run; empty if there is none."""
    done, total = task.team_nbytes()
    return f"{format_bytes(done)} of {format_bytes(total)} are kept in {task.stage.folder.name}" if done else ""


@dataclass(frozen=True, slots=True)
class _ShareMover:
    """Moves shares of a plan's streams from the source to the data files."""

    task: ConversionTask
    source: Source
    initial_source_state: SourceState  # when the first process began
    own_source_state: SourceState  # when this process began
    budget: Budget
    allow_overflow: bool
    progress: Progress
    note: Callable[[str], None]

    @property
    def files(self) -> list[Path]:
        """Paths of the data files."""
        return [data_folder(self.task.plan, self.task.stage.folder) / file.path for file in self.task.plan.files]

    @property
    def reader(self) -> StreamReader:
        """A reader that reads the plan's streams back."""
        return StreamReader(self.task.plan.streams, self.budget, self.progress)

    def move_share(self, index: int) -> PipelineResult:
        """Move the streams of process `index` that no earlier run completed, and return the pipeline's result."""
        task, stage, plan = self.task, self.task.stage, self.task.share_plan(index)
        had_files = any(map(_allocated_nbytes, self.files))
        with open_sink(plan, stage) as sink, open_blobs(self.source.byte_sources, self.budget.cache_nbytes) as files:
            if had_files and index == 0 and not plan.zstd_level:
                zero_gaps(task.plan, self.files)
            with task.open_journal(index, self._verify_earlier_run(index)) as journal:
                outcome = self._run_pipeline(index, files, sink, journal)
                sink.check_unchanged()
        digests = {number: outcome.digests[position] for position, number in enumerate(task.shares[index])}
        self.check_source(digests, self.own_source_state)
        return outcome

    def _run_pipeline(self, index: int, files: RunReader, sink: Files, journal: Journal) -> PipelineResult:
        task, plan, name = self.task, self.task.share_plan(index), self.task.stage.folder.name
        done, total = task.team_nbytes()
        if done:
            self.note(f"resuming {name}: {format_bytes(done)} of {format_bytes(total)} are durable")
        self.progress.begin(plan.command, total, done)
        try:
            integrity = IntegrityChecker(plan, self.source, allow_overflow=self.allow_overflow)
            checksums = checksum_recorder(plan, task.stage, index=index)
            return pipeline.run(
                plan.streams,
                files,
                sink=sink,
                budget=self.budget,
                progress=self.progress,
                journal=journal,
                on_digest=integrity.on_digest,
                checksums=checksums,
            )
        finally:
            self.progress.end()

    def _verify_earlier_run(self, index: int) -> JournalState:
        """Read back the durable part of a share, and return its intact part."""
        stage, durable = self.task.stage, self.task.durable_part(index, self.task.read_journal_state(index))
        if not durable.durable_nbytes:
            return EMPTY_JOURNAL_STATE
        touched = source_state.touched_files(self.source, self.initial_source_state, now=self.own_source_state)
        if touched:
            self.note(f"{_join_file_names(touched)} may have changed since {stage.folder.name} was started: comparing")
        intact = verify_journal_state(self.reader, durable, files=self.files, source=self.source if touched else None)
        num_damaged = len(durable.digests.keys() - intact.digests.keys()) + (durable.prefix != intact.prefix)
        if num_damaged:
            delete_checksums(stage)  # they may be of bytes that are about to be overwritten
            self.note(
                f"{num_damaged} of {len(durable.digests) + 1} tensors in {stage.folder.name} are damaged:"
                " writing them again"
            )
        return intact

    def check_source(self, digests: Mapping[int, str], baseline: SourceState) -> None:
        """Raise PrepError if the source no longer holds the bytes that were read.

        If the inode or change time of any file differs from `baseline`, all streams in `digests` are read again.
        """
        touched = source_state.touched_files(
            self.source, baseline, now=source_state.read_source_state(self.task.plan, self.source)
        )
        if touched:
            self.note(f"{_join_file_names(touched)} may have changed while it was read: comparing")
            if find_outdated(self.reader, digests, source=self.source):
                raise source_state.source_changed_error(touched, self.source)


def _join_file_names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _check_and_publish(mover: _ShareMover, options: ExecuteOptions, outcome: PipelineResult) -> None:
    """Verify and publish the output, after all running processes have moved their shares."""
    task, plan, stage = mover.task, mover.task.plan, mover.task.stage
    for index in task.unverified_shares():  # of processes that ended before this one started
        mover.move_share(index)
    outcome = replace(outcome, digests=task.empty_digests | task.durable_digests())
    # with several processes, each read the source at another time
    baseline = mover.initial_source_state if options.share.count > 1 else mover.own_source_state
    mover.check_source(outcome.digests, baseline)
    check_data_files(plan, mover.files, digests=outcome.digests, reader=mover.reader)
    stamps = read_stamps(mover.files)
    finalize_output(plan, stage, run_identity=task.run_identity, outcome=outcome, progress=mover.progress)
    check_unchanged(stamps)
    _check_replaceable(options.out)  # another program may have created it meanwhile
    stage.publish(options.overwrite)


def identify_run(plan: Plan) -> dict[str, object]:
    """Return the identity of a run. Runs with equal identities write equal bytes."""
    source_digest = digest(encode_text(plan.source_files).encode())
    return {"request": plan.request, "source": source_digest, "plan": plan_digest(plan), "prep": version()}


def _is_already_done(plan: Plan, run_identity: dict[str, object], options: ExecuteOptions) -> bool:
    """Return whether the requested output exists.

    With several processes, a process that joins late never replaces the output of its peers.

    Raises:
        PrepError: The path holds something else, and `overwrite` is not set.
    """
    out = options.out
    if not os.path.lexists(out):
        return False
    _check_replaceable(out)
    try:
        manifest = read_manifest(out)
    except PrepError:
        if options.overwrite:
            return False
        raise
    is_same_plan = manifest is not None and manifest["plan"] == run_identity["plan"]
    is_complete = is_same_plan and _is_complete(plan, out, manifest or {})
    if is_complete and (options.share.count > 1 or not (options.restart or options.overwrite)):
        return True
    if options.overwrite:
        return False
    hint = "`--out NAME` or `--overwrite`"
    if is_same_plan:
        raise OutputExistsError(
            f"{out} already exists",
            "this command created it earlier" if is_complete else "this command created it, but its files are damaged",
            hint,
        )
    raise OutputExistsError(f"{out} exists and is something else", _describe_origin(manifest, plan), hint)


def _check_replaceable(out: Path) -> None:
    """Raise PrepError if the path is neither free, nor an empty folder, nor an output of prep."""
    try:
        names = os.listdir(out)  # a single call: another process may be replacing the output
    except FileNotFoundError:
        is_replaceable = not out.is_symlink()
    except NotADirectoryError:
        is_replaceable = False
    except OSError as error:
        raise io_error(out, error) from error
    else:
        is_replaceable = not names or MANIFEST_FILE in names
    if not is_replaceable:
        raise foreign_output_error(str(out))


def _is_complete(plan: Plan, out: Path, manifest: Mapping[str, Any]) -> bool:
    """Return whether all files of an output exist, its listed files are intact, and data files have their sizes."""
    folder = out / plan.item
    sizes_by_path = manifest.get("packed", {}) if plan.zstd_level else {file.path: file.size for file in plan.files}
    small_files = [file.path for file in plan.small_files] + ([*ITEM_INDEX_FILES] if plan.leaves else [])
    have_sizes = all(_has_size(folder / path, size) for path, size in sizes_by_path.items())
    has_checksums = "checksums" not in manifest or (out / CHECKSUMS_FILE).is_file()
    has_files = have_sizes and has_checksums and all((folder / path).is_file() for path in small_files)
    return has_files and are_files_intact(out, manifest)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _describe_origin(manifest: Mapping[str, Any] | None, plan: Plan) -> str:
    if manifest is None:
        return "it is empty"
    if manifest["request"] != plan.request:
        return f"made by `{manifest['request']}`, asked for `{plan.request}`"
    return f"made by the same `{plan.request}` from a source that has changed since"


@contextlib.contextmanager
def open_sink(plan: Plan, stage: Staging) -> Iterator[Files]:
    """Create the output's data files with their sizes and headers. PrepError for symbolic links among them."""
    check_no_symlinks(stage.folder)
    paths = [data_folder(plan, stage.folder) / file.path for file in plan.files]
    for folder in {path.parent for path in paths}:
        folder.mkdir(parents=True, exist_ok=True)
    with Files(paths, [file.size for file in plan.files]) as sink:
        for number, file in enumerate(plan.files):
            for offset, data in ((0, file.header), *file.constant_ranges):
                if data:
                    sink.write_bytes(number, data, offset=offset)
        yield sink


def check_free_space(plan: Plan, folder: Path) -> None:
    """Raise PrepError if the disk has no room for the remaining bytes. `folder` need not exist."""
    needed_nbytes = sum(file.size - _allocated_nbytes(data_folder(plan, folder) / file.path) for file in plan.files)
    needed_nbytes += output_nbytes_to_compress(plan, folder)  # chunks are on disk both raw and compressed until the end
    usage = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.is_dir()))
    if needed_nbytes > usage.free:
        why = f"needs {format_bytes(needed_nbytes)}, its disk has {format_bytes(usage.free)} free"
        raise PrepError(f"not enough room for {folder.name.removesuffix('.partial')}", why, "`--out` on another disk")


def _allocated_nbytes(path: Path) -> int:
    """Return the size of the file on disk; 0 if it does not exist."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
