"""An output until it is whole: `NAME.partial` beside its final name, locked, the journals of the run in `.prep/`.

Several processes may work on one: each has a lock and a journal of its own, and which streams of the plan are whose is
written down in `.prep/division.json`. Who comes, and who gives the output its name, holds `.prep/door`: one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prepcli.engine.digest import digest
from prepcli.engine.files import io_error
from prepcli.engine.journal import read_journal
from prepcli.engine.no_follow import check_not_symlink, read_no_follow, write_no_follow
from prepcli.errors import PrepError, usage_error
from prepcli.execution.failure_notes import FAILED_STEM, HEARD_STEM, FailureNotes
from prepcli.execution.locks import (
    acquire_lock_with_retries,
    acquire_shared_lock,
    acquire_team_lock,
    exclusive_lock,
    has_shared_holders,
    is_locked,
)
from prepcli.planning.shares import SINGLE_PROCESS, Division, Share

WORK_FOLDER = ".prep"
RUN_FILE = "run.json"  # what the run is, for messages
DIVISION_FILE = "division.json"
JOURNAL_STEM = "journal"  # `journal.I`: of process I
LOCK_FILE = "lock"  # `lock.I`: of process I, where there are several
JOIN_LOCK_FILE = "door"
MOVING_LOCK_FILE = "moving"  # a lock that processes share until they have moved their shares
MAX_JOIN_TRIES = 100  # of joining, while others publish or remove the folder
CHECKSUM_KEY = "checksum"  # a key in these files, over all others
REPLACED_NAME = "replaced"  # what had the final name, until the output has it


class Staging:
    """The folder in which an output comes to be. `publish` gives it its name, once everything in it is durable."""

    def __init__(self, out: Path) -> None:
        """Nothing is made yet. A usage PrepError for an output without a name of its own."""
        if out.name in ("", ".."):
            raise usage_error(f"`--out {out}` is no name for an output", "it is replaced as a whole", "`--out NAME`")
        self.out = out
        self.folder = out.with_name(out.name + ".partial")
        self.work = self.folder / WORK_FOLDER
        self.share = SINGLE_PROCESS
        self.session = ""  # which processes are at work now: the same for all of them
        self._locks: list[int] = []
        self._moving_fd = -1
        self._folder_stat: os.stat_result | None = None
        self._failures: FailureNotes | None = None

    @property
    def journal_path(self) -> Path:
        return self.journal_path_of(self.share.index)

    def journal_path_of(self, index: int) -> Path:
        """The journal of a process."""
        return self.work / f"{JOURNAL_STEM}.{index}"

    def open(self, run_identity: dict[str, object], restart: bool, share: Share = SINGLE_PROCESS) -> Division:
        """Make or take up the folder and lock it; how the plan is divided.

        `restart` drops what an earlier run left, unless processes are at work with which this one shares. PrepError if
        it is another run's, or other processes are at work on it.
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
                fd, first = acquire_team_lock(self.work / LOCK_FILE, self.folder, share.count)
                self._locks.append(fd)
                if restart and first and any((self.work / name).exists() for name in (RUN_FILE, DIVISION_FILE)):
                    self._drop_earlier_run()
                found = self._read_note(RUN_FILE)
                if found is None:
                    self._write_note(RUN_FILE, run_identity)
                elif found != run_identity:
                    raise _other_run_error(self.folder, found, run_identity)
                division = self._load_division(str(run_identity["plan"]), first)
                self._lock_share()
                self._failures = FailureNotes(self.work, str(run_identity["plan"]), share)
        except OSError as error:
            raise io_error(self.folder, error) from error
        return division

    @contextlib.contextmanager
    def _holding_join_lock(self) -> Iterator[None]:
        """Hold the door of a folder that exists: it may be published, or removed, while this process waits for it."""
        with contextlib.ExitStack() as stack:
            for left in reversed(range(MAX_JOIN_TRIES)):
                try:
                    self._make_folders()
                    door = stack.enter_context(exclusive_lock(self.work / JOIN_LOCK_FILE))
                except FileNotFoundError:
                    if not left:
                        raise
                    continue
                if _is_same_file(door, self.work / JOIN_LOCK_FILE):
                    break
                stack.close()
            self._folder_stat = self.folder.stat()
            yield

    def _lock_share(self) -> None:
        """Be the one process of this number."""
        if self.share.count > 1:
            what = f"share {self.share.index} of {self.share.count} of {self.folder}"
            self._locks.append(acquire_lock_with_retries(self.work / f"{LOCK_FILE}.{self.share.index}", what))
            self._moving_fd = acquire_shared_lock(self.work / MOVING_LOCK_FILE)

    def _load_division(self, identity: str, is_first: bool) -> Division:
        """How the plan is divided; anew if it was among other processes, of which none is there any more."""
        found = _parse_division(self._read_note(DIVISION_FILE))
        count = self.share.count
        if found is None or found.count != count:
            if found is not None and not is_first:
                why = f"{found.count} processes work on it, this is one of {count}"
                hint = f"wait for them, or join them: `--processes {found.count}/I`"
                raise PrepError(f"{self.folder} is locked", why, hint)
            found = Division(count, self._durable_digests(identity, found or Division()))
            self._write_note(
                DIVISION_FILE, {"count": count, "done": found.durable_digests}
            )  # before what it was made of is removed
            for path in self.work.glob(f"{JOURNAL_STEM}.*"):
                remove_path(path)
        return found

    def _durable_digests(self, identity: str, division: Division) -> dict[int, str]:
        """The digests of all streams that are whole and durable."""
        done = dict(division.durable_digests)
        for index in range(division.count):
            done |= read_journal(self.journal_path_of(index), identity, division.label).digests
        return done

    def _make_folders(self) -> None:
        for folder in (self.folder, self.work):
            check_not_symlink(folder)
        try:
            names = os.listdir(self.folder)  # once: another process may be making or publishing it
        except FileNotFoundError:
            names = []
        except NotADirectoryError:
            names = [self.folder.name] if os.path.lexists(self.folder) else []
        if names and WORK_FOLDER not in names:
            raise PrepError(f"{self.folder} is in the way", "prep did not make it", "`--out NAME`, or move it away")
        self.work.mkdir(parents=True, exist_ok=True)

    def _read_note(self, name: str) -> dict[str, Any] | None:
        path = self.work / name
        try:
            found = json.loads(read_no_follow(path))
        except FileNotFoundError:
            return None
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.pop(CHECKSUM_KEY, None) not in (None, _checksum(found)):
            raise PrepError(f"{path} is broken", "it is not what prep wrote", "`--restart` drops it")
        return found

    def _write_note(self, name: str, content: Mapping[str, object]) -> None:
        path = self.work / name
        fresh = path.with_suffix(".new")
        write_no_follow(fresh, json.dumps({**content, CHECKSUM_KEY: _checksum(content)}).encode())
        fsync_path(fresh)
        fresh.rename(path)
        fsync_path(self.work)

    def _drop_earlier_run(self) -> None:
        """Drop an earlier run: first what promises that its bytes are there, then the bytes.

        Failure notes stay. One may be of a process that was started together with this one.
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
        """Give an output that was about to be replaced its name again, if nothing else has it."""
        replaced = self.work / REPLACED_NAME
        if os.path.lexists(replaced) and not os.path.lexists(self.out):
            replaced.rename(self.out)

    def read_or_write_note(self, name: str, content: Mapping[str, object]) -> dict[str, Any]:
        """What a file of the run says; it is made with this content if it does not exist."""
        with exclusive_lock(self.work / JOIN_LOCK_FILE):
            found = self._read_note(name)
            if found is None:
                self._write_note(name, content)
        return dict(content) if found is None else found

    def _read_session(self) -> str:
        """What the first of the processes at work wrote into the lock."""
        try:
            return read_no_follow(self.work / LOCK_FILE).decode(errors="replace")
        except OSError as error:
            raise io_error(self.folder, error) from error

    @contextlib.contextmanager
    def holding_publish_lock(self) -> Iterator[bool]:
        """Within, no other process publishes; whether the output still needs it."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(exclusive_lock(self.work / JOIN_LOCK_FILE))
            except OSError as error:  # as there is when it is published
                if not self.is_published():
                    raise io_error(self.folder, error) from error
            published = self.is_published()
            if not published and not self._is_same_folder():
                why = "it was removed or replaced"
                raise PrepError(f"{self.folder} was changed by somebody else", why, "run again")
            yield not published

    def is_published(self) -> bool:
        """Whether the folder has its final name."""
        return self._folder_stat is not None and _is_same_file(self._folder_stat, self.out)

    def mark_moved(self) -> None:
        """Let others publish: this process reads and writes no more in the folder, unless it publishes itself."""
        if self._moving_fd >= 0:
            os.close(self._moving_fd)
            self._moving_fd = -1

    def all_moved(self) -> bool:
        """Whether all processes at work have moved their shares. To be called while publishing, when nobody joins."""
        return self.share.count == 1 or not has_shared_holders(self.work / MOVING_LOCK_FILE)

    def _is_same_folder(self) -> bool:
        """Whether the folder is still the one that was opened."""
        return self._folder_stat is not None and _is_same_file(self._folder_stat, self.folder)

    def is_running(self, index: int) -> bool:
        """Whether process `index` is there, as far as locks tell: they need not reach other machines."""
        try:
            return is_locked(self.work / f"{LOCK_FILE}.{index}")
        except OSError:
            return False

    @property
    def failures(self) -> FailureNotes:
        """The failure notes of the processes that share the work, once this one has joined."""
        assert self._failures is not None
        return self._failures

    def discard(self) -> None:
        """Remove a folder that turns out not to be needed; another process may be joining it."""
        away = self.out.with_name(f"{self.out.name}.unused-{self.share.index}.partial")
        with contextlib.suppress(OSError), exclusive_lock(self.work / JOIN_LOCK_FILE):
            if self._is_same_folder():
                remove_path(away)
                self.folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)

    def publish(self, overwrite: bool = False) -> None:
        """Sync every file and folder bottom-up, then give the folder its final name.

        What has that name by now is kept unless it may be replaced: PrepError. What is replaced lies in the staging
        folder, and is removed once its successor has the name; a kill between the two leaves both in NAME.partial.
        """
        replaced = self.work / REPLACED_NAME
        if os.path.lexists(self.out) and not overwrite:
            why = f"it came to be while {self.folder} was made, which is whole"
            raise PrepError(f"{self.out} exists", why, "move it away, or `--overwrite`, and run again")
        try:
            remove_path(replaced)  # of a run that was killed between the two renames
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
        """End this process's part in the work: nothing is written any more."""
        if self._failures is not None and self._is_same_folder():
            self._failures.record_heard()
        self.close()

    def close(self) -> None:
        """Let go of the locks."""
        self.mark_moved()
        while self._locks:
            os.close(self._locks.pop())


def _is_same_file(found: os.stat_result, path: Path) -> bool:
    """Whether a path leads to the very file or folder that was found."""
    try:
        return os.path.samestat(found, path.stat())
    except FileNotFoundError:
        return False


def _checksum(content: Mapping[str, object]) -> str:
    """The checksum of what a file of the run says, as JSON has it: keys are text there."""
    return digest(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def _parse_division(found: Mapping[str, Any] | None) -> Division | None:
    if found is None:
        return None
    match found:
        case {"count": int(count), "done": dict(done)} if count > 0 and all(map(str.isdecimal, done)):
            return Division(count, {int(number): str(digest) for number, digest in done.items()})
    return None


def remove_work_folder(out: Path) -> None:
    """Remove what a run leaves in a published output; also after one that was killed right after publishing."""
    shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)


@contextlib.contextmanager
def open_staging(out: Path) -> Iterator[Staging]:
    """A Staging whose locks are released in the end."""
    stage = Staging(out)
    try:
        yield stage
    finally:
        stage.leave()


def remove_path(path: Path) -> None:
    """Remove what is there, if anything is: a folder with all that is in it, of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync_path(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _other_run_error(folder: Path, found: dict[str, object], run_identity: dict[str, object]) -> PrepError:
    if found.get("request") == run_identity.get("request") and found.get("source") != run_identity.get("source"):
        why = "the source has changed since: its files have other sizes, times or headers"
    elif found.get("request") == run_identity.get("request"):
        why = "another version of prep began it"
    else:
        why = f"it was begun by `{found.get('request')}`, this is `{run_identity.get('request')}`"
    return PrepError(f"{folder} belongs to another run", why, "`--restart` drops it")
