"""Staging of an output: `NAME.partial` next to its final name, locked, with the journals of the run in `.prep/`.

Several processes may work on one output. Each has its own lock and journal, and `.prep/division.json` records how the
plan's streams are divided. A process that joins, or that publishes the output, holds the lock `.prep/door`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from prepcli.core.errors import RERUN_HINT, Option, OutputExistsError, PrepError, text, usage_error
from prepcli.core.json_values import JsonObject
from prepcli.engine.journal import EMPTY_JOURNAL_STATE, read_journal
from prepcli.engine.no_follow import check_not_symlink, read_no_follow
from prepcli.engine.sync_files import sync_paths
from prepcli.execution.failure_notes import FAILED_STEM, HEARD_STEM, FailureNotes
from prepcli.execution.locks import (
    acquire_lock_with_retries,
    acquire_shared_lock,
    acquire_team_lock,
    exclusive_lock,
    has_shared_holders,
    is_locked,
)
from prepcli.execution.paths import is_same_file, remove_path
from prepcli.execution.run_notes import read_json_record, write_json_record
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.planning.shares import SINGLE_PROCESS, Share
from prepcli.stores.reading import io_error
from prepcli.stores.writing import MAX_NAME_NBYTES, fsync_path

# Files in the work folder
WORK_FOLDER = ".prep"
RUN_FILE = "run.json"  # identity of the run
DIVISION_FILE = "division.json"
# `journal.I` belongs to process I
JOURNAL_STEM = "journal"
# All processes share this lock. `lock.I` belongs to process I of several.
LOCK_FILE = "lock"
JOIN_LOCK_FILE = "door"
# Shared lock of the processes still moving their shares.
MOVING_LOCK_FILE = "moving"
# Name of the replaced output, until the new one has its name.
REPLACED_NAME = "replaced"

PARTIAL_SUFFIX = ".partial"
# The longest suffix of a staging folder is `.unused-I.partial` of `Staging.discard`.
MAX_OUT_NAME_NBYTES = MAX_NAME_NBYTES - len(".unused-9999.partial")
# Other processes may publish or remove the folder meanwhile.
MAX_JOIN_TRIES = 100


class Staging:
    """The staging folder of an output. `publish` gives it its final name, once all its files are durable.

    Leaving the context releases its locks.

    Attributes:
        out: Final path of the output.
        folder: `NAME.partial`, next to `out`.
        work: `NAME.partial/.prep`, the folder of journals, locks and records.
        share: Share of this process.
        durable_digests: Digests, by stream number, of the durable streams before the division
            among the processes. These streams are only read back.
        division_label: Text in journals for the division of the streams among the processes.
        session: Text of the lock file, equal for all running processes of the run.
        is_new: Whether this process has begun the run: the folder has no work of an earlier one.
    """

    def __init__(self, out: Path) -> None:
        """Set the paths, without creating them. Raise UsageError if the output's name is missing or too long."""
        if out.name in ("", ".."):
            raise usage_error(
                text("{} is invalid", Option("out", out)),
                "an output is a folder with a name of its own",
                text("{}", Option("out", "NAME")),
            )
        name_nbytes = len(os.fsencode(out.name))
        if name_nbytes > MAX_OUT_NAME_NBYTES:
            raise usage_error(
                text("{} is too long", Option("out", out)),
                f"its name has {name_nbytes} bytes, and the folder has a longer name until it is complete",
                f"use a name of at most {MAX_OUT_NAME_NBYTES} bytes",
            )
        self.out = out
        self.folder = out.with_name(out.name + PARTIAL_SUFFIX)
        self.work = self.folder / WORK_FOLDER
        self.share = SINGLE_PROCESS
        self.durable_digests: Mapping[int, str] = {}
        self.division_label = division_label(SINGLE_PROCESS.count, {})
        self.session = ""
        self.is_new = False
        self._locks: list[int] = []
        self._moving_fd = -1
        self._folder_stat: os.stat_result | None = None
        self._failures: FailureNotes | None = None

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def journal_path(self, index: int) -> Path:
        """Return the path of the journal of process `index`."""
        return self.work / f"{JOURNAL_STEM}.{index}"

    def open(
        self, run_identity: dict[str, object], restart: bool, *, share: Share = SINGLE_PROCESS
    ) -> None:
        """Create or join the folder, lock it, and divide the streams among the processes.

        Args:
            run_identity: Identity of the run. A folder with durable bytes of another run is an error.
            restart: Delete the files of an earlier run, unless processes of the same run are running.
            share: Share of this process.

        Raises:
            PrepError: The folder belongs to another run, or processes outside of this run hold its lock.
        """
        # All processes of a run hold LOCK_FILE shared until they end. JOIN_LOCK_FILE is held for
        # moments: joining and publishing exclude each other, so the first holder of LOCK_FILE may
        # delete or divide an earlier run before a second process reads it.
        self.share = share
        run_id = str(run_identity["plan"])
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            try:
                with self._holding_join_lock():
                    fd, is_first = acquire_team_lock(
                        self.work / LOCK_FILE, self.folder, count=share.count
                    )
                    self._locks.append(fd)
                    if is_first and self._is_replaceable(run_identity, restart):
                        self._delete_earlier_run()
                    earlier_identity = read_json_record(self.work / RUN_FILE)
                    self.is_new = earlier_identity is None
                    if earlier_identity is None:
                        write_json_record(self.work / RUN_FILE, run_identity)
                    elif earlier_identity != run_identity:
                        raise other_run_error(str(self.folder), earlier_identity, run_identity)
                    self.durable_digests = self._load_division(run_id, is_first)
                    self.division_label = division_label(share.count, self.durable_digests)
                    self._lock_share()
                    self._failures = FailureNotes(self.work, run_id, share=share)
                self.session = read_no_follow(self.work / LOCK_FILE).decode(errors="replace")
            except OSError as error:
                raise io_error(self.folder, error) from error
            on_error.pop_all()

    @contextlib.contextmanager
    def _holding_join_lock(self) -> Iterator[None]:
        """Create the folder if necessary, and hold its join lock inside the context.

        Another process may publish or remove the folder while this one waits for the lock. It is then created again.
        """
        with contextlib.ExitStack() as stack:
            for tries_left in reversed(range(MAX_JOIN_TRIES)):
                try:
                    self._make_folders()
                    lock_stat = stack.enter_context(exclusive_lock(self.work / JOIN_LOCK_FILE))
                except FileNotFoundError:
                    if not tries_left:
                        raise
                    continue
                if is_same_file(lock_stat, self.work / JOIN_LOCK_FILE):
                    break
                stack.close()
            self._folder_stat = self.folder.stat()
            yield

    def _lock_share(self) -> None:
        """Lock this process's share: its part of the tensors to write.

        Raises:
            PrepError: Another process has the same share.
        """
        if self.share.count == 1:
            return
        index = self.share.index
        locked_name = f"share {index} of {self.share.count} of {self.folder}"
        fd = acquire_lock_with_retries(self.work / f"{LOCK_FILE}.{index}", locked_name)
        self._locks.append(fd)
        self._moving_fd = acquire_shared_lock(self.work / MOVING_LOCK_FILE)

    def _load_division(self, run_id: str, is_first: bool) -> Mapping[int, str]:
        """Return the digests of the durable streams before the division among the processes.

        The streams are divided again if the number of processes has changed.
        """
        path = self.work / DIVISION_FILE
        count = self.share.count
        earlier_count, digests = self._read_division()
        if earlier_count == count:
            return digests
        if earlier_count and not is_first:
            raise PrepError(
                f"{self.folder} is locked",
                f"{earlier_count} processes write it, and this process is one of {count}",
                text("wait for them, or join them: {}", Option("processes", f"{earlier_count}/I")),
            )
        earlier_label = division_label(earlier_count or 1, digests)
        for index in range(earlier_count or 1):
            journal = read_journal(self.journal_path(index), run_id, division=earlier_label)
            digests |= journal.digests
        # The digests are recorded before their journals are removed. A kill between the two leaves
        # journals with the label of the earlier division, which `read_journal` ignores.
        write_json_record(path, {"count": count, "done": digests})
        for journal_path in self.work.glob(f"{JOURNAL_STEM}.*"):
            remove_path(journal_path)
        return digests

    def _read_division(self) -> tuple[int, dict[int, str]]:
        """Return the recorded number of processes, or 0 without a record, and the digests of streams durable before."""
        match read_json_record(self.work / DIVISION_FILE):
            case {"count": int(count), "done": dict(done)} if count > 0 and all(
                map(str.isdecimal, done)
            ):
                return count, {int(number): str(digest) for number, digest in done.items()}
        return 0, {}

    def _make_folders(self) -> None:
        for folder in (self.folder, self.work):
            check_not_symlink(folder)
        names: list[str] = []
        try:
            # This is a single call, because another process may be creating or publishing the folder.
            names = os.listdir(self.folder)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            if os.path.lexists(self.folder):
                names = [self.folder.name]
        if names and WORK_FOLDER not in names:
            hint = text("{}, or move it away", Option("out", "NAME"))
            raise PrepError(f"{self.folder} exists", "prep did not create it", hint)
        self.work.mkdir(parents=True, exist_ok=True)

    def _is_replaceable(self, run_identity: Mapping[str, object], restart: bool) -> bool:
        """Return whether to delete an earlier run: on request, or if it is another one without durable bytes.

        A refused source or an early kill leaves a folder without durable bytes.
        """
        if restart:
            return (self.work / RUN_FILE).exists() or (self.work / DIVISION_FILE).exists()
        earlier_identity = read_json_record(self.work / RUN_FILE)
        if earlier_identity is None or earlier_identity == run_identity:
            return False
        return not self._has_durable_bytes(str(earlier_identity.get("plan")))

    def _has_durable_bytes(self, run_id: str) -> bool:
        """Return whether a run has durable bytes. A journal that this version cannot read counts as durable."""
        count, digests = self._read_division()
        label = division_label(count or 1, digests)
        for index in range(count or 1):
            path = self.journal_path(index)
            journal = read_journal(path, run_id, division=label)
            is_unreadable = journal == EMPTY_JOURNAL_STATE and path.exists()
            if journal.durable_nbytes or is_unreadable:
                return True
        return bool(digests)

    def _delete_earlier_run(self) -> None:
        """Delete the journals, records and data files of an earlier run.

        Failure notes stay: one may be of a process started together with this one.
        """
        self._restore_replaced()
        # Journals go first, and durably: a kill while the data files are removed must not leave a
        # journal that lists their bytes as durable.
        records = [self.work / DIVISION_FILE, self.work / RUN_FILE]
        for path in [*self.work.glob(f"{JOURNAL_STEM}.*"), *records]:
            remove_path(path)
        fsync_path(self.work)
        kept_paths = (self.work, self.work / LOCK_FILE, self.work / JOIN_LOCK_FILE)
        for path in [*self.folder.iterdir(), *self.work.iterdir()]:
            if path not in kept_paths and path.stem not in (FAILED_STEM, HEARD_STEM):
                remove_path(path)

    def _restore_replaced(self) -> None:
        """Rename an output back after an interrupted replacement, if its name is free."""
        replaced = self.work / REPLACED_NAME
        if os.path.lexists(replaced) and not os.path.lexists(self.out):
            replaced.rename(self.out)

    def read_or_write_note(self, name: str, content: Mapping[str, object]) -> JsonObject | None:
        """Return the content of a file of the run. If it does not exist, create it with `content` and return None."""
        with exclusive_lock(self.work / JOIN_LOCK_FILE):
            existing = read_json_record(self.work / name)
            if existing is None:
                write_json_record(self.work / name, content)
        return existing

    @contextlib.contextmanager
    def holding_publish_lock(self) -> Iterator[bool]:
        """Keep other processes from publishing inside the context.

        Yields:
            Whether the output is still to be published.

        Raises:
            PrepError: The folder was removed or replaced.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(exclusive_lock(self.work / JOIN_LOCK_FILE))
            except OSError as error:  # expected once the folder is published
                if not self.is_published():
                    raise io_error(self.folder, error) from error
            published = self.is_published()
            if not published and not self._is_same_folder():
                why = "it was removed or replaced"
                raise PrepError(f"{self.folder} was changed by another program", why, RERUN_HINT)
            yield not published

    def is_published(self) -> bool:
        """Return whether the folder has its final name."""
        return self._folder_stat is not None and is_same_file(self._folder_stat, self.out)

    def mark_moved(self) -> None:
        """Release this process's lock for writing."""
        if self._moving_fd >= 0:
            os.close(self._moving_fd)
            self._moving_fd = -1

    def all_moved(self) -> bool:
        """Return whether all running processes have written their shares. Call it with the publish lock held."""
        return self.share.count == 1 or not has_shared_holders(self.work / MOVING_LOCK_FILE)

    def _is_same_folder(self) -> bool:
        """Return whether the path still leads to the opened folder."""
        return self._folder_stat is not None and is_same_file(self._folder_stat, self.folder)

    def is_running(self, index: int) -> bool:
        """Return whether process `index` is running. Locks may not be visible on other machines."""
        try:
            return is_locked(self.work / f"{LOCK_FILE}.{index}")
        except OSError:
            return False

    @property
    def failures(self) -> FailureNotes:
        """Failure notes of the processes that share the work, set once this process has joined."""
        assert self._failures is not None
        return self._failures

    def discard(self) -> None:
        """Remove an unneeded folder. Another process may be joining it."""
        unused_path = self.out.with_name(f"{self.out.name}.unused-{self.share.index}.partial")
        with contextlib.suppress(OSError), exclusive_lock(self.work / JOIN_LOCK_FILE):
            if self._is_same_folder():
                remove_path(unused_path)
                self.folder.rename(unused_path)
        shutil.rmtree(unused_path, ignore_errors=True)

    def publish(self, overwrite: bool = False) -> None:
        """Sync all files and folders bottom-up, then rename the folder to its final name.

        Args:
            overwrite: Replace an existing output.

        Raises:
            PrepError: The name is taken and `overwrite` is not set, or the system refused to write.
        """
        replaced = self.work / REPLACED_NAME
        if os.path.lexists(self.out) and not overwrite:
            raise OutputExistsError(
                f"{self.out} already exists",
                f"it appeared while prep wrote {self.folder}, now complete",
                text("move it away and {}, or pass {}", RERUN_HINT, Option("overwrite", True)),
            )
        # A replaced output moves into the work folder, and is removed after the new one has its
        # name. What a kill leaves:
        #   before the first rename:  OUT (old) and OUT.partial (new, complete)
        #   between the two renames:  OUT.partial only, the old output in OUT.partial/.prep/replaced
        #                             the next run publishes the new one, `--restart` restores the old
        #   after the second rename:  OUT (new) with a work folder, which `remove_leftover` removes
        try:
            # It is left from a run killed between the two renames.
            remove_path(replaced)
            # Durable before the rename: the name OUT never leads to files that a power cut could empty.
            self._sync_files()
            if os.path.lexists(self.out):
                self.out.rename(replaced)
            self.folder.rename(self.out)
            fsync_path(self.out.parent)
        except OSError as error:
            self._restore_replaced()
            raise io_error(self.out, error) from error
        self.close()
        remove_work_folder(self.out)

    def _sync_files(self) -> None:
        """Sync the files, then the entries of each folder, of the output without its work folder."""
        files: list[Path] = []
        folders: list[Path] = []
        for folder, _, names in os.walk(self.folder, topdown=False):
            if self.work in (Path(folder), *Path(folder).parents):
                continue
            files += [Path(folder, name) for name in names]
            folders.append(Path(folder))
        sync_paths(files)
        # A folder comes before the folder that contains it.
        for folder in folders:
            fsync_path(folder)

    def leave(self) -> None:
        """Record the failure notes and release the locks. This process no longer writes to the folder."""
        try:
            if self._failures is not None and self._is_same_folder():
                self._failures.record_heard()
        finally:
            self.close()

    def close(self) -> None:
        """Release the locks."""
        self.mark_moved()
        while self._locks:
            os.close(self._locks.pop())


def division_label(count: int, durable_digests: Mapping[int, str]) -> str:
    """Return the text in journals for the division of the streams, e.g. `2 without 0,3`."""
    return f"{count} without {','.join(map(str, sorted(durable_digests)))}"


def remove_work_folder(out: Path) -> None:
    """Remove the work folder from a published output. A kill after the rename may leave it there."""
    shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)


def remove_leftover(out: Path) -> None:
    """Remove the work folder of a complete output after a kill, unless a process still uses it."""
    work = out / WORK_FOLDER
    # NAME.partial has a manifest too, shortly before the rename. A resumed run needs its work folder.
    is_output = (out / MANIFEST_FILE).is_file() and out.suffix != PARTIAL_SUFFIX
    if is_output and work.is_dir() and not work.is_symlink() and not _is_in_use(work):
        remove_work_folder(out)


def _is_in_use(work: Path) -> bool:
    """Return whether a process holds the lock of a work folder."""
    try:
        return is_locked(work / LOCK_FILE)
    except OSError:
        return False


def other_run_error(
    name: str, earlier_identity: Mapping[str, object], run_identity: Mapping[str, object]
) -> PrepError:
    """Return the error for an unfinished output of another run, given its folder or URL."""
    is_same_request = earlier_identity.get("request") == run_identity.get("request")
    if is_same_request and earlier_identity.get("source") != run_identity.get("source"):
        why = "the source has changed since: its files have other sizes, times or headers"
    elif is_same_request:
        why = "it was started by another version of prep"
    else:
        why = f"it was started by `{earlier_identity.get('request')}`, this is `{run_identity.get('request')}`"
    hint = text("{} deletes it", Option("restart", True))
    return PrepError(f"{name} belongs to another run", why, hint)
