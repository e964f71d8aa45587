"""A Plan carried out: staged, within memory, journalled, checked, and given its name only when it is whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prepcli.console.formatting import bytes_text
from prepcli.console.progress import Progress
from prepcli.console.ui import version
from prepcli.engine import pipeline
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import Budget, anonymous_nbytes, budget
from prepcli.engine.digest import digest
from prepcli.engine.files import Files, Reads, io_error
from prepcli.engine.journal import NOTHING, Journal, Marked
from prepcli.engine.own_files import check_no_links
from prepcli.engine.pipeline import Outcome
from prepcli.errors import PrepError
from prepcli.execution import source_state
from prepcli.execution.block_checksums import forget, recorder
from prepcli.execution.commit import check_unchanged, check_written, stamps
from prepcli.execution.coordination import PATIENCE_S, Task, Waiting, work_together
from prepcli.execution.finalize import data_folder, finish, unpacked
from prepcli.execution.integrity import Expectations
from prepcli.execution.resume import StreamReader, clear_gaps, kept, outdated
from prepcli.execution.signals import noting_kept
from prepcli.execution.source_state import State, state_of
from prepcli.execution.staging import Staging, clean, staging
from prepcli.formats.checksums import CHECKSUMS
from prepcli.formats.manifest import MANIFEST, not_ours, read_manifest
from prepcli.planning import coverage
from prepcli.planning.plan import Plan
from prepcli.planning.shares import ALONE, Share
from prepcli.planning.slabs import all_slabs, wide
from prepcli.sources.source import Source

INDEX_OF_ITEM = ("_METADATA", "manifest.ocdbt")


@dataclass(frozen=True, slots=True)
class Options:
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
    share: Share = ALONE
    workers: int = 1
    start: Callable[[], None] = lambda: None
    alarm: Callable[[], None] = lambda: None
    patience_s: float = PATIENCE_S
    allow_overflow: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """An output that is there: what this process did (nothing if it was there already), with its most memory above the
    start of the run."""

    out: Path
    outcome: Outcome
    peak_nbytes: int
    already: bool = False


def plan_digest(plan: Plan) -> str:
    """What tells two plans apart: equal digests mean equal outputs, from sources that are still the same."""
    return "xxh3:" + digest(repr(plan).encode())


def convert(plan: Plan, source: Source, options: Options, progress: Progress, note: Callable[[str], None]) -> Done:
    """Carry out a plan, or a share of it and wait for the others; run again after any interruption it goes on from what
    is durable. Raises PrepError."""
    spend = budget(options.memory_nbytes, wide(plan.streams))
    run = run_of(plan)
    if _is_done(plan, run, options):
        clean(options.out)
        return Done(options.out, Outcome(), 0, already=True)
    base_nbytes = anonymous_nbytes()
    before = state_of(plan, source)
    check_room(plan, Staging(options.out).folder)
    coverage.check(plan, lambda: all_slabs(plan.streams, spend.slab_nbytes))
    with staging(options.out) as stage:
        division = stage.open(run, options.restart, options.share)
        if _is_done(plan, run, options):  # others were faster
            stage.discard()
            return Done(options.out, Outcome(), 0, already=True)
        task = Task(plan, run, stage, division, range(options.share.index, options.share.index + options.workers))
        with stage.failures.telling():
            began = stage.remember(source_state.NAME, {"files": before})["files"]
        mover = _Move(
            task,
            source,
            began=began,
            before=before,
            spend=spend,
            allow_overflow=options.allow_overflow,
            progress=progress,
            note=note,
        )

        def move() -> Outcome:
            options.start()
            return mover.share(options.share.index)

        waiting = Waiting(options.patience_s, options.alarm, note)
        with noting_kept(lambda: _kept(task)):
            outcome = work_together(task, move, lambda outcome: _finish(mover, options, outcome), waiting)
        peak = max(outcome.peak_nbytes, anonymous_nbytes())
    clean(options.out)
    return Done(options.out, outcome, max(0, peak - base_nbytes))


def _kept(task: Task) -> str:
    """What of the output is durable, for the message of a run that was stopped; empty for nothing."""
    done, total = task.team_nbytes()
    return f"{bytes_text(done)} of {bytes_text(total)} are kept in {task.stage.folder.name}" if done else ""


@dataclass(frozen=True, slots=True)
class _Move:
    """Moves shares of a plan's streams."""

    task: Task
    source: Source
    began: State  # of the source, when the first process began
    before: State  # and when this one did
    spend: Budget
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
        return StreamReader(self.task.plan.streams, self.spend, self.progress)

    def share(self, index: int) -> Outcome:
        """Move the streams of process `index` that no earlier run left whole. Raises PrepError."""
        task, stage, plan = self.task, self.task.stage, self.task.part(index)
        had_files = any(map(_taken, self.files))
        with sink_of(plan, stage) as sink, open_blobs(self.source.reads, self.spend.cache_nbytes) as files:
            if had_files and index == 0 and not plan.zstd_level:
                clear_gaps(task.plan, self.files)
            with task.journal(index, self._kept(index)) as journal:
                outcome = self._run(index, files, sink, journal)
                sink.check_there()
        digests = {number: outcome.digests[at] for at, number in enumerate(task.shares[index])}
        self.check_source(digests, self.before)
        return outcome

    def _run(self, index: int, files: Reads, sink: Files, journal: Journal) -> Outcome:
        task, plan, name = self.task, self.task.part(index), self.task.stage.folder.name
        done, total = task.team_nbytes()
        if done:
            self.note(f"resuming {name}: {bytes_text(done)} of {bytes_text(total)} are there")
        self.progress.begin(plan.command, total, done)
        try:
            expect = Expectations(plan, self.source, self.allow_overflow)
            sums = recorder(plan, task.stage, index)
            return pipeline.run(plan.streams, files, sink, self.spend, self.progress, journal, expect.seen, sums)
        finally:
            self.progress.end()

    def _kept(self, index: int) -> Marked:
        """What an earlier run left of a share, read back."""
        stage, promised = self.task.stage, self.task.promised(index, self.task.marked(index))
        if not promised.nbytes:
            return NOTHING
        suspect = source_state.touched(self.source, self.began, self.before)
        if suspect:
            self.note(f"{_names(suspect)} may have changed since {stage.folder.name} was begun: comparing")
        found = kept(self.reader, promised, self.files, self.source if suspect else None)
        bad = len(promised.digests.keys() - found.digests.keys()) + (promised.prefix != found.prefix)
        if bad:
            forget(stage)  # checksums may be of bytes that are written anew
            self.note(f"{bad} of {len(promised.digests) + 1} tensors in {stage.folder.name} are damaged: written anew")
        return found

    def check_source(self, digests: Mapping[int, str], since: State) -> None:
        """Raise PrepError if streams differ from the source, whose files are read again only if they were touched."""
        suspect = source_state.touched(self.source, since, source_state.state_of(self.task.plan, self.source))
        if suspect:
            self.note(f"{_names(suspect)} may have changed while it was read: comparing")
            if outdated(self.reader, digests, self.source):
                raise source_state.changed(suspect, self.source)


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _finish(move: _Move, options: Options, outcome: Outcome) -> None:
    """Check and publish the output, whose shares all processes at work have moved."""
    task, plan, stage = move.task, move.task.plan, move.task.stage
    for index in task.unchecked():  # of processes that ended before this one began
        move.share(index)
    outcome = replace(outcome, digests=task.empty | task.digests())
    since = move.began if options.share.count > 1 else move.before  # others may have read at other times
    move.check_source(outcome.digests, since)
    check_written(plan, move.files, outcome.digests, move.reader)
    written = stamps(move.files)
    finish(plan, stage, task.run, outcome, move.progress)
    check_unchanged(written)
    _check_ours(options.out)  # it may have come to be meanwhile
    stage.publish(options.overwrite)


def run_of(plan: Plan) -> dict[str, object]:
    """What an output is asked for by: two runs that say the same of it write the same bytes."""
    facts = digest(repr(plan.sources).encode())
    return {"request": plan.request, "source": facts, "plan": plan_digest(plan), "prep": version()}


def _is_done(plan: Plan, run: dict[str, object], options: Options) -> bool:
    """Whether the output is there; PrepError if something else is, and may not be replaced.

    One of several processes may come when the others are done: what they made is never taken for an older output.
    """
    out = options.out
    if not os.path.lexists(out):
        return False
    _check_ours(out)
    try:
        manifest = read_manifest(out)
    except PrepError:
        if options.overwrite:
            return False
        raise
    same = manifest is not None and manifest["plan"] == run["plan"]
    whole = same and _is_whole(plan, out, manifest or {})
    if whole and (options.share.count > 1 or not (options.restart or options.overwrite)):
        return True
    if options.overwrite:
        return False
    hint = "`--out NAME` or `--overwrite`"
    if same:
        raise PrepError(f"{out} exists", "it was made by this request" if whole else "but its files are damaged", hint)
    raise PrepError(f"{out} exists and is something else", _made_by(manifest, plan), hint)


def _check_ours(out: Path) -> None:
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
        ours = not names or MANIFEST in names
    if not ours:
        raise not_ours(str(out))


def _is_whole(plan: Plan, out: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether all files of an output are there, those that are large with their size."""
    folder = out / plan.item
    files = manifest.get("packed", {}) if plan.zstd_level else {file.path: file.size for file in plan.files}
    small = [file.path for file in plan.small_files] + ([*INDEX_OF_ITEM] if plan.leaves else [])
    sizes = all(_has_size(folder / path, size) for path, size in files.items())
    summed = "checksums" not in manifest or (out / CHECKSUMS).is_file()
    return sizes and summed and all((folder / path).is_file() for path in small)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _made_by(manifest: Mapping[str, Any] | None, plan: Plan) -> str:
    if manifest is None:
        return "it is empty"
    if manifest["request"] != plan.request:
        return f"made by `{manifest['request']}`, asked for `{plan.request}`"
    return f"made by the same `{plan.request}` from a source that has changed since"


@contextlib.contextmanager
def sink_of(plan: Plan, stage: Staging) -> Iterator[Files]:
    """The output's data files, made with their size and head. PrepError for links among them."""
    check_no_links(stage.folder)
    paths = [data_folder(plan, stage.folder) / file.path for file in plan.files]
    for folder in {path.parent for path in paths}:
        folder.mkdir(parents=True, exist_ok=True)
    with Files(paths, [file.size for file in plan.files]) as sink:
        for number, file in enumerate(plan.files):
            for offset, data in ((0, file.head), *file.fixed):
                if data:
                    sink.write_head(number, data, offset)
        yield sink


def check_room(plan: Plan, folder: Path) -> None:
    """Raise PrepError if the disk has no room for what is still to be written to a folder, which need not exist."""
    needed = sum(file.size - _taken(data_folder(plan, folder) / file.path) for file in plan.files)
    needed += unpacked(plan, folder)  # which is there raw and compressed until it is whole
    usage = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.is_dir()))
    if needed > usage.free:
        why = f"needs {bytes_text(needed)}, its disk has {bytes_text(usage.free)} free"
        raise PrepError(f"not enough room for {folder.name.removesuffix('.partial')}", why, "`--out` on another disk")


def _taken(path: Path) -> int:
    """Bytes of the disk that a file has, if it is there."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
