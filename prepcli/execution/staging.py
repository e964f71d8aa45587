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
from typing import Any

from prepcli.engine.files import io_error
from prepcli.engine.journal import read_journal
from prepcli.engine.no_follow import check_not_symlink, read_no_follow
from prepcli.errors import RERUN_HINT, OutputExistsError, PrepError, usage_error
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
from prepcli.execution.run_notes import read_note, write_note
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.planning.shares import SINGLE_PROCESS, Division, Share
from trainer.files.writing import MAX_NAME_NBYTES, fsync_path

WORK_FOLDER = ".prep"
RUN_FILE = "run.json"  # identity of the run
DIVISION_FILE = "division.json"
JOURNAL_STEM = "journal"  # `journal.I` belongs to process I
LOCK_FILE = "lock"  # `lock.I` belongs to process I of several
JOIN_LOCK_FILE = "door"
MOVING_LOCK_FILE = "moving"  # shared lock of the processes that still move their shares
MAX_OUT_NAME_NBYTES = MAX_NAME_NBYTES - len(".unused-9999.partial")  # the longest suffix of a staging folder
MAX_JOIN_TRIES = 100  # other processes may publish or remove the folder meanwhile
PARTIAL_SUFFIX = ".partial"
REPLACED_NAME = "replaced"  # the replaced output, until the new one has its name


class Staging:
    """The staging folder of an output. `publish` gives it its final name, once all its files are durable."""

    def __init__(self, out: Path) -> None:
        """Set the paths, without creating them; raise UsageError if the output's name is missing or too long."""
        if out.name in ("", ".."):
            raise usage_error(
                f"`--out {out}` is invalid", "an output is a folder with a name of its own", "`--out NAME`"
            )
        name_nbytes = len(os.fsencode(out.name))
        if name_nbytes > MAX_OUT_NAME_NBYTES:
            why = f"its name has {name_nbytes} bytes, and its partial folder needs a longer one"
            raise usage_error(f"`--out {out}` is too long", why, f"a name of at most {MAX_OUT_NAME_NBYTES} bytes")
        self.out = out
        self.folder = out.with_name(out.name + PARTIAL_SUFFIX)
        self.work = self.folder / WORK_FOLDER
        self.share = SINGLE_PROCESS
        self.session = ""  # equal for all running processes of the run
        self._locks: list[int] = []
        self._moving_fd = -1
        self._folder_stat: os.stat_result | None = None
        self._failures: FailureNotes | None = None

    @property
    def journal_path(self) -> Path:
        """Path of this process's journal."""
        return self.journal_path_of(self.share.index)

    def journal_path_of(self, index: int) -> Path:
        """Return the path of the journal of process `index`."""
        return self.work / f"{JOURNAL_STEM}.{index}"

    def open(self, run_identity: dict[str, object], restart: bool, *, share: Share = SINGLE_PROCESS) -> Division:
        """Create or join the folder, and lock it.

        Args:
            run_identity: Identity of the run; a folder of another run is an error.
            restart: Drop an earlier run, unless processes of the same run are running.
            share: Share of this process.

        Returns:
            How the plan's streams are divided among the processes.

        Raises:
            PrepError: The folder belongs to another run, or processes outside of this run hold its lock.
        """
        self.share = share
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            division = self._join(run_identity, restart)
            self.session = self._read_session()
            on_error.pop_all()
        return division

    def _join(self, run_identity: dict[str, object], restart: bool) -> Division:
        share = self.share
        try:
            with self._holding_join_lock():
                fd, is_first = acquire_team_lock(self.work / LOCK_FILE, self.folder, count=share.count)
                self._locks.append(fd)
                if restart and is_first and any((self.work / name).exists() for name in (RUN_FILE, DIVISION_FILE)):
                    self._drop_earlier_run()
                earlier_identity = read_note(self.work / RUN_FILE)
                if earlier_identity is None:
                    write_note(self.work / RUN_FILE, run_identity)
                elif earlier_identity != run_identity:
                    raise _other_run_error(self.folder, earlier_identity, run_identity)
                division = self._load_division(str(run_identity["plan"]), is_first)
                self._lock_share()
                self._failures = FailureNotes(self.work, str(run_identity["plan"]), share=share)
        except OSError as error:
            raise io_error(self.folder, error) from error
        return division

    @contextlib.contextmanager
    def _holding_join_lock(self) -> Iterator[None]:
        """Hold the join lock of an existing folder.

        The folder may be published or removed while this process waits for the lock; it is then created again.
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
        """Lock this process's share; PrepError if another process has the same share."""
        if self.share.count > 1:
            locked_name = f"share {self.share.index} of {self.share.count} of {self.folder}"
            self._locks.append(acquire_lock_with_retries(self.work / f"{LOCK_FILE}.{self.share.index}", locked_name))
            self._moving_fd = acquire_shared_lock(self.work / MOVING_LOCK_FILE)

    def _load_division(self, run_id: str, is_first: bool) -> Division:
        """Return the division of the plan; divide it again if the earlier processes were of another number."""
        division = _parse_division(read_note(self.work / DIVISION_FILE))
        count = self.share.count
        if division is None or division.count != count:
            if division is not None and not is_first:
                why = f"{division.count} processes work on it, this is one of {count}"
                hint = f"wait for them, or join them: `--processes {division.count}/I`"
                raise PrepError(f"{self.folder} is locked", why, hint)
            division = Division(count, self._durable_digests(run_id, division or Division()))
            # written before the journals it was derived from are removed
            write_note(self.work / DIVISION_FILE, {"count": count, "done": division.durable_digests})
            for path in self.work.glob(f"{JOURNAL_STEM}.*"):
                remove_path(path)
        return division

    def _durable_digests(self, run_id: str, division: Division) -> dict[int, str]:
        """Return the digests of all complete, durable streams."""
        digests = dict(division.durable_digests)
        for index in range(division.count):
            digests |= read_journal(self.journal_path_of(index), run_id, division=division.label).digests
        return digests

    def _make_folders(self) -> None:
        for folder in (self.folder, self.work):
            check_not_symlink(folder)
        try:
            names = os.listdir(self.folder)  # a single call: another process may be creating or publishing it
        except FileNotFoundError:
            names = []
        except NotADirectoryError:
            names = [self.folder.name] if os.path.lexists(self.folder) else []
        if names and WORK_FOLDER not in names:
            raise PrepError(f"{self.folder} exists", "prep did not create it", "`--out NAME`, or move it away")
        self.work.mkdir(parents=True, exist_ok=True)

    def _drop_earlier_run(self) -> None:
        """Drop an earlier run: first the journals, then the recorded bytes.

        Failure notes stay: one may be of a process started together with this one.
        """
        self._restore_replaced()
        for path in [*self.work.glob(f"{JOURNAL_STEM}.*"), self.work / DIVISION_FILE, self.work / RUN_FILE]:
            remove_path(path)
        fsync_path(self.work)
        for path in [*self.folder.iterdir(), *self.work.iterdir()]:
            if path not in (self.work, self.work / LOCK_FILE, self.work / JOIN_LOCK_FILE) and path.stem not in (
                FAILED_STEM,
                HEARD_STEM,
            ):
                remove_path(path)

    def _restore_replaced(self) -> None:
        """Rename an output back after an interrupted replacement, if its name is free."""
        replaced = self.work / REPLACED_NAME
        if os.path.lexists(replaced) and not os.path.lexists(self.out):
            replaced.rename(self.out)

    def read_or_write_note(self, name: str, content: Mapping[str, object]) -> dict[str, Any]:
        """Return the content of a file of the run; create the file with `content` if it does not exist."""
        with exclusive_lock(self.work / JOIN_LOCK_FILE):
            existing = read_note(self.work / name)
            if existing is None:
                write_note(self.work / name, content)
        return dict(content) if existing is None else existing

    def _read_session(self) -> str:
        """Return the lock file's text, equal for all running processes."""
        try:
            return read_no_follow(self.work / LOCK_FILE).decode(errors="replace")
        except OSError as error:
            raise io_error(self.folder, error) from error

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
        """Release the moving lock: this process has moved its share, and only publishes from now on."""
        if self._moving_fd >= 0:
            os.close(self._moving_fd)
            self._moving_fd = -1

    def all_moved(self) -> bool:
        """Return whether all running processes have moved their shares. Call it with the publish lock held."""
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
        """Failure notes of the processes that share the work; set once this process has joined."""
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

        A replaced output is moved to the work folder, and removed after the rename. A kill between the two renames
        leaves both in NAME.partial.

        Args:
            overwrite: Replace an existing output.

        Raises:
            PrepError: The name is taken and `overwrite` is not set, or the system refused to write.
        """
        replaced = self.work / REPLACED_NAME
        if os.path.lexists(self.out) and not overwrite:
            why = f"it was created while {self.folder} was written, which is complete"
            hint = f"move it away and {RERUN_HINT}, or pass `--overwrite`"
            raise OutputExistsError(f"{self.out} already exists", why, hint)
        try:
            remove_path(replaced)  # left by a kill between the two renames
            for folder, _, names in os.walk(self.folder, topdown=False):
                for name in [*names, "."] if self.work not in (Path(folder), *Path(folder).parents) else ():
                    fsync_path(Path(folder, name))
            if os.path.lexists(self.out):
                self.out.rename(replaced)
            self.folder.rename(self.out)
            fsync_path(self.out.parent)
        except OSError as error:
            self._restore_replaced()
            raise io_error(self.out, error) from error
        self.close()
        remove_work_folder(self.out)

    def leave(self) -> None:
        """Record the failure notes and release the locks; this process no longer writes to the folder."""
        if self._failures is not None and self._is_same_folder():
            self._failures.record_heard()
        self.close()

    def close(self) -> None:
        """Release the locks."""
        self.mark_moved()
        while self._locks:
            os.close(self._locks.pop())


def _parse_division(content: Mapping[str, Any] | None) -> Division | None:
    match content:
        case {"count": int(count), "done": dict(done)} if count > 0 and all(map(str.isdecimal, done)):
            return Division(count, {int(number): str(digest) for number, digest in done.items()})
    return None


def remove_work_folder(out: Path) -> None:
    """Remove the work folder from a published output; a kill after the rename may leave it there."""
    shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)


def remove_leftover(out: Path) -> None:
    """Remove the work folder of a complete output after a kill, unless a process still uses it."""
    work = out / WORK_FOLDER
    # NAME.partial has a manifest too, shortly before it is renamed; its work folder is needed to resume
    is_output = (out / MANIFEST_FILE).is_file() and out.suffix != PARTIAL_SUFFIX
    if is_output and work.is_dir() and not work.is_symlink() and not _is_in_use(work):
        remove_work_folder(out)


def _is_in_use(work: Path) -> bool:
    """Return whether a process holds the lock of a work folder."""
    try:
        return is_locked(work / LOCK_FILE)
    except OSError:
        return False


@contextlib.contextmanager
def open_staging(out: Path) -> Iterator[Staging]:
    """Yield the staging folder of an output; its locks are released at the end."""
    stage = Staging(out)
    try:
        yield stage
    finally:
        stage.leave()


def _other_run_error(folder: Path, earlier_identity: dict[str, object], run_identity: dict[str, object]) -> PrepError:
    is_same_request = earlier_identity.get("request") == run_identity.get("request")
    if is_same_request and earlier_identity.get("source") != run_identity.get("source"):
        why = "the source has changed since: its files have other sizes, times or headers"
    elif is_same_request:
        why = "it was started by another version of prep"
    else:
        why = f"it was started by `{earlier_identity.get('request')}`, this is `{run_identity.get('request')}`"
    return PrepError(f"{folder} belongs to another run", why, "`--restart` drops it")
