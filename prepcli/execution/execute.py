"""A Plan carried out: staged, within memory, journalled, checked, and given its name only when it is whole."""

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
from prepcli.engine.no_follow import check_no_symlinks
from prepcli.engine.pipeline import PipelineResult
from prepcli.errors import PrepError
from prepcli.execution import source_state
from prepcli.execution.block_checksums import checksum_recorder, delete_checksums
from prepcli.execution.coordination import PATIENCE_S, ConversionTask, WaitOptions, work_together
from prepcli.execution.finalize import data_folder, finalize_output, output_nbytes_to_compress
from prepcli.execution.integrity import IntegrityChecker
from prepcli.execution.output_checks import check_data_files, check_unchanged, read_stamps
from prepcli.execution.resume import StreamReader, find_outdated, verify_marked, zero_gaps
from prepcli.execution.signals import note_durable_work
from prepcli.execution.source_state import SourceState, read_source_state
from prepcli.execution.staging import Staging, open_staging, remove_work_folder
from prepcli.formats.checksums import CHECKSUMS_FILE
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
    """How a plan is carried out; none of this changes a byte of the output.

    `share`: this process's among those that write it together; it ends once all are done. With the `workers` - 1 shares
    after it progress is shown as one; `start` starts them when there is work, `alarm` raises when one of them failed.
    Others may give no sign of life for `patience_s` before they count as gone. `allow_overflow`: values that are too
    large for the dtype that they are cast into become infinite.
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
    """An output that is there: what this process did (nothing if it was there already), with its most memory above the
    start of the run."""

    out: Path
    outcome: PipelineResult
    peak_nbytes: int
    already_done: bool = False


def plan_digest(plan: Plan) -> str:
    """What tells two plans apart: equal digests mean equal outputs, from sources that are still the same."""
    return "xxh3:" + digest(encode_text(plan).encode())


def execute_plan(
    plan: Plan, source: Source, options: ExecuteOptions, progress: Progress, note: Callable[[str], None]
) -> ConversionResult:
    """Carry out a plan, or a share of it and wait for the others; run again after any interruption it goes on from what
    is durable. Raises PrepError."""
    spend = make_budget(options.memory_nbytes, min_buffer_nbytes(plan.streams))
    run = identify_run(plan)
    if _is_already_done(plan, run, options):
        remove_work_folder(options.out)
        return ConversionResult(options.out, PipelineResult(), 0, already_done=True)
    base_nbytes = anonymous_nbytes()
    before = read_source_state(plan, source)
    check_free_space(plan, Staging(options.out).folder)
    coverage.check(plan, lambda: split_streams(plan.streams, spend.slab_nbytes))
    with open_staging(options.out) as stage:
        division = stage.open(run, options.restart, options.share)
        if _is_already_done(plan, run, options):  # others were faster
            stage.discard()
            return ConversionResult(options.out, PipelineResult(), 0, already_done=True)
        task = ConversionTask(
            plan, run, stage, division, range(options.share.index, options.share.index + options.num_workers)
        )
        with stage.failures.recording_errors():
            began = stage.read_or_write_note(source_state.SOURCE_STATE_FILE, {"files": before})["files"]
        mover = _ShareMover(
            task,
            source,
            initial_source_state=began,
            own_source_state=before,
            budget=spend,
            allow_overflow=options.allow_overflow,
            progress=progress,
            note=note,
        )

        def move() -> PipelineResult:
            options.start_workers()
            return mover.move_share(options.share.index)

        waiting = WaitOptions(options.patience_s, options.check_workers, note)
        with note_durable_work(lambda: _describe_durable(task)):
            outcome = work_together(task, move, lambda outcome: _check_and_publish(mover, options, outcome), waiting)
        peak = max(outcome.peak_nbytes, anonymous_nbytes())
    remove_work_folder(options.out)
    return ConversionResult(options.out, outcome, max(0, peak - base_nbytes))


def _describe_durable(task: ConversionTask) -> str:
    """What of the output is durable, for the message of a run that was stopped; empty for nothing."""
    done, total = task.team_nbytes()
    return f"{format_bytes(done)} of {format_bytes(total)} are kept in {task.stage.folder.name}" if done else ""


@dataclass(frozen=True, slots=True)
class _ShareMover:
    """Moves shares of a plan's streams."""

    task: ConversionTask
    source: Source
    initial_source_state: SourceState  # of the source, when the first process began
    own_source_state: SourceState  # and when this one did
    budget: Budget
    allow_overflow: bool
    progress: Progress
    note: Callable[[str], None]

    @property
    def files(self) -> list[Path]:
        """The data files."""
        return [data_folder(self.task.plan, self.task.stage.folder) / file.path for file in self.task.plan.files]

    @property
    def reader(self) -> StreamReader:
        """Reads the plan's streams back."""
        return StreamReader(self.task.plan.streams, self.budget, self.progress)

    def move_share(self, index: int) -> PipelineResult:
        """Move the streams of process `index` that no earlier run left whole. Raises PrepError."""
        task, stage, plan = self.task, self.task.stage, self.task.share_plan(index)
        had_files = any(map(_allocated_nbytes, self.files))
        with open_sink(plan, stage) as sink, open_blobs(self.source.byte_sources, self.budget.cache_nbytes) as files:
            if had_files and index == 0 and not plan.zstd_level:
                zero_gaps(task.plan, self.files)
            with task.open_journal(index, self._verify_earlier_run(index)) as journal:
                outcome = self._run_pipeline(index, files, sink, journal)
                sink.check_unchanged()
        digests = {number: outcome.digests[at] for at, number in enumerate(task.shares[index])}
        self.check_source(digests, self.own_source_state)
        return outcome

    def _run_pipeline(self, index: int, files: RunReader, sink: Files, journal: Journal) -> PipelineResult:
        task, plan, name = self.task, self.task.share_plan(index), self.task.stage.folder.name
        done, total = task.team_nbytes()
        if done:
            self.note(f"resuming {name}: {format_bytes(done)} of {format_bytes(total)} are there")
        self.progress.begin(plan.command, total, done)
        try:
            expect = IntegrityChecker(plan, self.source, self.allow_overflow)
            sums = checksum_recorder(plan, task.stage, index)
            return pipeline.run(plan.streams, files, sink, self.budget, self.progress, journal, expect.on_digest, sums)
        finally:
            self.progress.end()

    def _verify_earlier_run(self, index: int) -> JournalState:
        """What an earlier run left of a share, read back."""
        stage, promised = self.task.stage, self.task.durable_part(index, self.task.read_marked(index))
        if not promised.durable_nbytes:
            return EMPTY_JOURNAL_STATE
        suspect = source_state.touched_files(self.source, self.initial_source_state, self.own_source_state)
        if suspect:
            self.note(f"{_join_file_names(suspect)} may have changed since {stage.folder.name} was begun: comparing")
        found = verify_marked(self.reader, promised, self.files, self.source if suspect else None)
        bad = len(promised.digests.keys() - found.digests.keys()) + (promised.prefix != found.prefix)
        if bad:
            delete_checksums(stage)  # checksums may be of bytes that are written anew
            self.note(f"{bad} of {len(promised.digests) + 1} tensors in {stage.folder.name} are damaged: written anew")
        return found

    def check_source(self, digests: Mapping[int, str], since: SourceState) -> None:
        """Raise PrepError if streams differ from the source, whose files are read again only if they were touched."""
        suspect = source_state.touched_files(
            self.source, since, source_state.read_source_state(self.task.plan, self.source)
        )
        if suspect:
            self.note(f"{_join_file_names(suspect)} may have changed while it was read: comparing")
            if find_outdated(self.reader, digests, self.source):
                raise source_state.source_changed_error(suspect, self.source)


def _join_file_names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _check_and_publish(mover: _ShareMover, options: ExecuteOptions, outcome: PipelineResult) -> None:
    """Check and publish the output, whose shares all processes at work have moved."""
    task, plan, stage = mover.task, mover.task.plan, mover.task.stage
    for index in task.unverified_shares():  # of processes that ended before this one began
        mover.move_share(index)
    outcome = replace(outcome, digests=task.empty_digests | task.durable_digests())
    since = (
        mover.initial_source_state if options.share.count > 1 else mover.own_source_state
    )  # others may have read at other times
    mover.check_source(outcome.digests, since)
    check_data_files(plan, mover.files, outcome.digests, mover.reader)
    written = read_stamps(mover.files)
    finalize_output(plan, stage, task.run_identity, outcome, mover.progress)
    check_unchanged(written)
    _check_replaceable(options.out)  # it may have come to be meanwhile
    stage.publish(options.overwrite)


def identify_run(plan: Plan) -> dict[str, object]:
    """What an output is asked for by: two runs that say the same of it write the same bytes."""
    facts = digest(encode_text(plan.source_files).encode())
    return {"request": plan.request, "source": facts, "plan": plan_digest(plan), "prep": version()}


def _is_already_done(plan: Plan, run_identity: dict[str, object], options: ExecuteOptions) -> bool:
    """Whether the output is there; PrepError if something else is, and may not be replaced.

    One of several processes may come when the others are done: what they made is never taken for an older output.
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
    same = manifest is not None and manifest["plan"] == run_identity["plan"]
    whole = same and _is_complete(plan, out, manifest or {})
    if whole and (options.share.count > 1 or not (options.restart or options.overwrite)):
        return True
    if options.overwrite:
        return False
    hint = "`--out NAME` or `--overwrite`"
    if same:
        raise PrepError(f"{out} exists", "it was made by this request" if whole else "but its files are damaged", hint)
    raise PrepError(f"{out} exists and is something else", _describe_origin(manifest, plan), hint)


def _check_replaceable(out: Path) -> None:
    """PrepError where something has the name that is no output of prep's, be it damaged, nor an empty folder."""
    try:
        names = os.listdir(out)  # opened once: another process may be giving the name to its successor
    except FileNotFoundError:
        ours = not out.is_symlink()
    except NotADirectoryError:
        ours = False
    except OSError as error:
        raise io_error(out, error) from error
    else:
        ours = not names or MANIFEST_FILE in names
    if not ours:
        raise foreign_output_error(str(out))


def _is_complete(plan: Plan, out: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether all files of an output are there, those that are large with their size."""
    folder = out / plan.item
    files = manifest.get("packed", {}) if plan.zstd_level else {file.path: file.size for file in plan.files}
    small = [file.path for file in plan.small_files] + ([*ITEM_INDEX_FILES] if plan.leaves else [])
    sizes = all(_has_size(folder / path, size) for path, size in files.items())
    summed = "checksums" not in manifest or (out / CHECKSUMS_FILE).is_file()
    return sizes and summed and all((folder / path).is_file() for path in small)


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
    """The output's data files, made with their size and head. PrepError for links among them."""
    check_no_symlinks(stage.folder)
    paths = [data_folder(plan, stage.folder) / file.path for file in plan.files]
    for folder in {path.parent for path in paths}:
        folder.mkdir(parents=True, exist_ok=True)
    with Files(paths, [file.size for file in plan.files]) as sink:
        for number, file in enumerate(plan.files):
            for offset, data in ((0, file.header), *file.constant_ranges):
                if data:
                    sink.write_bytes(number, data, offset)
        yield sink


def check_free_space(plan: Plan, folder: Path) -> None:
    """Raise PrepError if the disk has no room for what is still to be written to a folder, which need not exist."""
    needed = sum(file.size - _allocated_nbytes(data_folder(plan, folder) / file.path) for file in plan.files)
    needed += output_nbytes_to_compress(plan, folder)  # which is there raw and compressed until it is whole
    usage = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.is_dir()))
    if needed > usage.free:
        why = f"needs {format_bytes(needed)}, its disk has {format_bytes(usage.free)} free"
        raise PrepError(f"not enough room for {folder.name.removesuffix('.partial')}", why, "`--out` on another disk")


def _allocated_nbytes(path: Path) -> int:
    """Bytes of the disk that a file has, if it is there."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
