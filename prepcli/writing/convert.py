"""A Plan carried out: staged, within memory, journalled, checked, and given its name only when it is whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.engine import pipeline
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import Budget, anonymous_nbytes, budget
from prepcli.engine.digest import digest
from prepcli.engine.files import Files, io_error
from prepcli.engine.pipeline import Outcome
from prepcli.errors import PrepError
from prepcli.manifest import MANIFEST, not_ours, read_manifest
from prepcli.planning import coverage
from prepcli.planning.plan import Plan
from prepcli.planning.shares import ALONE, Share
from prepcli.planning.slabs import all_slabs, wide
from prepcli.progress import Progress
from prepcli.reading.sources import Source
from prepcli.signals import noting_kept
from prepcli.ui import version
from prepcli.units import bytes_text
from prepcli.writing.checksums import recorder
from prepcli.writing.expectations import Expectations
from prepcli.writing.finishing import data_folder, finish, unpacked
from prepcli.writing.staging import Staging, clean, staging
from prepcli.writing.together import PATIENCE_S, Task, Waiting, work_together

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
    coverage.check(plan, lambda: all_slabs(plan.streams, spend.slab_nbytes))
    with staging(options.out) as stage:
        division = stage.open(run, options.restart, options.share)
        if _is_done(plan, run, options):  # others were faster
            stage.discard()
            return Done(options.out, Outcome(), 0, already=True)
        task = Task(plan, run, stage, division, range(options.share.index, options.share.index + options.workers))

        def move() -> Outcome:
            options.start()
            outcome = _moved(task, source, spend, options.allow_overflow, progress, note)
            _check_unchanged(plan, source)
            return outcome

        def end(outcome: Outcome) -> None:
            _check_unchanged(plan, source)  # the others' shares too were read from it
            finish(plan, stage, run, outcome, progress)
            _check_ours(options.out)  # it may have come to be meanwhile
            stage.publish(options.overwrite)

        waiting = Waiting(options.patience_s, options.alarm, note)
        with noting_kept(lambda: _kept(task)):
            outcome = work_together(task, move, end, waiting)
        peak = max(outcome.peak_nbytes, anonymous_nbytes())
    clean(options.out)
    return Done(options.out, outcome, max(0, peak - base_nbytes))


def _kept(task: Task) -> str:
    """What of the output is durable, for the message of a run that was stopped; empty for nothing."""
    done, total = task.team_nbytes()
    return f"{bytes_text(done)} of {bytes_text(total)} are kept in {task.stage.folder.name}" if done else ""


def _moved(
    task: Task, source: Source, spend: Budget, allow_overflow: bool, progress: Progress, note: Callable[[str], None]
) -> Outcome:
    """The streams of this process moved."""
    plan, stage = task.mine, task.stage
    check_room(plan, stage.folder)
    promised = task.promises()
    with (
        task.journal() as journal,
        sink_of(plan, stage, promised) as sink,
        open_blobs(source.reads, spend.cache_nbytes) as files,
    ):
        done, total = task.team_nbytes()
        if done:
            note(f"resuming {stage.folder.name}: {bytes_text(done)} of {bytes_text(total)} are there")
        progress.begin(plan.command, total, done)
        try:
            expect = Expectations(plan, source, allow_overflow)
            checksums = recorder(plan, stage)
            outcome = pipeline.run(plan.streams, files, sink, spend, progress, journal, expect.seen, checksums)
        finally:
            progress.end()
        sink.check_there()
    return outcome


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
    return sizes and all((folder / path).is_file() for path in small)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _made_by(manifest: Mapping[str, Any] | None, plan: Plan) -> str:
    if manifest is None:
        return "it is empty"
    if manifest["request"] != plan.request:
        return f"made by `{manifest['request']}`, asked for `{plan.request}`"
    return f"made by the same `{plan.request}` from a source that has changed since"


@contextlib.contextmanager
def sink_of(plan: Plan, stage: Staging, promised: bool = False) -> Iterator[Files]:
    """The output's data files, made with their size and head. PrepError if a journal promises bytes of them, and one is
    not as it was left."""
    paths = [data_folder(plan, stage.folder) / file.path for file in plan.files]
    spoiled = [path for path, file in zip(paths, plan.files) if not _has_size(path, file.size)]
    if promised and spoiled:
        why = f"{spoiled[0].name} is missing or has another size than an earlier run gave it"
        raise PrepError(f"{stage.folder} is damaged", why, "`--restart` drops it")
    for folder in {path.parent for path in paths}:
        folder.mkdir(parents=True, exist_ok=True)
    with Files(paths, [file.size for file in plan.files]) as sink:
        for number, file in enumerate(plan.files):
            for offset, data in ((0, file.head), *file.fixed):
                if data:
                    sink.write_head(number, data, offset)
        yield sink


def check_room(plan: Plan, folder: Path) -> None:
    """PrepError if the disk has no room for what is still to be written."""
    needed = sum(file.size - _taken(data_folder(plan, folder) / file.path) for file in plan.files)
    needed += unpacked(plan, folder)  # which is there raw and compressed until it is whole
    usage = shutil.disk_usage(folder)
    if needed > usage.free:
        why = f"needs {bytes_text(needed)}, its disk has {bytes_text(usage.free)} free"
        raise PrepError(f"not enough room for {folder.name.removesuffix('.partial')}", why, "`--out` on another disk")


def _taken(path: Path) -> int:
    """Bytes of the disk that a file has, if it is there."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _check_unchanged(plan: Plan, source: Source) -> None:
    """PrepError if a file of the source was written to while it was read."""
    for fact, path in zip(plan.sources, source.files):
        try:
            now = path.stat()
        except OSError as error:
            raise io_error(path, error) from error
        if (now.st_size, now.st_mtime_ns) != (fact.size, fact.mtime_ns):
            raise PrepError(f"{path.name} changed while it was read", f"in {source.name}", "run again with `--restart`")
