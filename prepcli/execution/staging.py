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
from prepcli.engine.own_files import check_is_no_link, read_own, write_own
from prepcli.errors import PrepError, usage
from prepcli.execution.failure_notes import FAILED, HEARD, Failures
from prepcli.execution.locks import hold_together, is_held, is_held_together, one_at_a_time, patient_lock, shared_lock
from prepcli.planning.shares import ALONE, Division, Share

WORK = ".prep"
RUN = "run.json"  # what the run is, for messages
DIVISION = "division.json"
JOURNAL = "journal"  # `journal.I`: of process I
LOCK = "lock"  # `lock.I`: of process I, where there are several
DOOR = "door"
MOVING = "moving"  # a lock that processes share until they have moved their shares
TRIES = 100  # of joining, while others publish or remove the folder
CHECKSUM = "checksum"  # a key in these files, over all others
REPLACED = "replaced"  # what had the final name, until the output has it


class Staging:
    """The folder in which an output comes to be. `publish` gives it its name, once everything in it is durable."""

    def __init__(self, out: Path) -> None:
        """Nothing is made yet. A usage PrepError for an output without a name of its own."""
        if out.name in ("", ".."):
            raise usage(f"`--out {out}` is no name for an output", "it is replaced as a whole", "`--out NAME`")
        self.out = out
        self.folder = out.with_name(out.name + ".partial")
        self.work = self.folder / WORK
        self.share = ALONE
        self.session = ""  # which processes are at work now: the same for all of them
        self._locks: list[int] = []
        self._moving = -1
        self._is: os.stat_result | None = None
        self._failures: Failures | None = None

    @property
    def journal(self) -> Path:
        return self.journal_of(self.share.index)

    def journal_of(self, index: int) -> Path:
        """The journal of a process."""
        return self.work / f"{JOURNAL}.{index}"

    def open(self, run: dict[str, object], restart: bool, share: Share = ALONE) -> Division:
        """Make or take up the folder and lock it; how the plan is divided.

        `restart` drops what an earlier run left, unless processes are at work with which this one shares. PrepError if
        it is another run's, or other processes are at work on it.
        """
        self.share = share
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            division = self._opened(run, restart)
            self.session = self._signature()
            on_error.pop_all()
        return division

    def _opened(self, run: dict[str, object], restart: bool) -> Division:
        share = self.share
        try:
            with self._in_the_door():
                fd, first = shared_lock(self.work / LOCK, self.folder, share.count)
                self._locks.append(fd)
                if restart and first and any((self.work / name).exists() for name in (RUN, DIVISION)):
                    self._clear()
                found = self._read(RUN)
                if found is None:
                    self._write(RUN, run)
                elif found != run:
                    raise _other_run(self.folder, found, run)
                division = self._divide(str(run["plan"]), first)
                self._take_place()
                self._failures = Failures(self.work, str(run["plan"]), share)
        except OSError as error:
            raise io_error(self.folder, error) from error
        return division

    @contextlib.contextmanager
    def _in_the_door(self) -> Iterator[None]:
        """Hold the door of a folder that exists: it may be published, or removed, while this process waits for it."""
        with contextlib.ExitStack() as stack:
            for left in reversed(range(TRIES)):
                try:
                    self._make()
                    door = stack.enter_context(one_at_a_time(self.work / DOOR))
                except FileNotFoundError:
                    if not left:
                        raise
                    continue
                if _is_at(door, self.work / DOOR):
                    break
                stack.close()
            self._is = self.folder.stat()
            yield

    def _take_place(self) -> None:
        """Be the one process of this number."""
        if self.share.count > 1:
            what = f"share {self.share.index} of {self.share.count} of {self.folder}"
            self._locks.append(patient_lock(self.work / f"{LOCK}.{self.share.index}", what))
            self._moving = hold_together(self.work / MOVING)

    def _divide(self, identity: str, first: bool) -> Division:
        """How the plan is divided; anew if it was among other processes, of which none is there any more."""
        found = _division(self._read(DIVISION))
        count = self.share.count
        if found is None or found.count != count:
            if found is not None and not first:
                why = f"{found.count} processes work on it, this is one of {count}"
                hint = f"wait for them, or join them: `--processes {found.count}/I`"
                raise PrepError(f"{self.folder} is locked", why, hint)
            found = Division(count, self._gathered(identity, found or Division()))
            self._write(DIVISION, {"count": count, "done": found.done})  # before what it was made of is removed
            for path in self.work.glob(f"{JOURNAL}.*"):
                remove(path)
        return found

    def _gathered(self, identity: str, division: Division) -> dict[int, str]:
        """The digests of all streams that are whole and durable."""
        done = dict(division.done)
        for index in range(division.count):
            done |= read_journal(self.journal_of(index), identity, division.name).digests
        return done

    def _make(self) -> None:
        for folder in (self.folder, self.work):
            check_is_no_link(folder)
        try:
            names = os.listdir(self.folder)  # once: another process may be making or publishing it
        except FileNotFoundError:
            names = []
        except NotADirectoryError:
            names = [self.folder.name] if os.path.lexists(self.folder) else []
        if names and WORK not in names:
            raise PrepError(f"{self.folder} is in the way", "prep did not make it", "`--out NAME`, or move it away")
        self.work.mkdir(parents=True, exist_ok=True)

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.work / name
        try:
            found = json.loads(read_own(path))
        except FileNotFoundError:
            return None
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.pop(CHECKSUM, None) not in (None, _checksum(found)):
            raise PrepError(f"{path} is broken", "it is not what prep wrote", "`--restart` drops it")
        return found

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        path = self.work / name
        fresh = path.with_suffix(".new")
        write_own(fresh, json.dumps({**content, CHECKSUM: _checksum(content)}).encode())
        sync(fresh)
        fresh.rename(path)
        sync(self.work)

    def _clear(self) -> None:
        """Drop an earlier run: first what promises that its bytes are there, then the bytes.

        Failure notes stay. One may be of a process that was started together with this one.
        """
        self._put_back()
        for path in [*self.work.glob(f"{JOURNAL}.*"), self.work / DIVISION, self.work / RUN]:
            remove(path)
        sync(self.work)
        for path in [*self.folder.iterdir(), *self.work.iterdir()]:
            if path not in (self.work, self.work / LOCK, self.work / DOOR) and path.stem not in (FAILED, HEARD):
                remove(path)

    def _put_back(self) -> None:
        """Give an output that was about to be replaced its name again, if nothing else has it."""
        replaced = self.work / REPLACED
        if os.path.lexists(replaced) and not os.path.lexists(self.out):
            replaced.rename(self.out)

    def remember(self, name: str, content: Mapping[str, object]) -> dict[str, Any]:
        """What a file of the run says; it is made with this content if it does not exist."""
        with one_at_a_time(self.work / DOOR):
            found = self._read(name)
            if found is None:
                self._write(name, content)
        return dict(content) if found is None else found

    def _signature(self) -> str:
        """What the first of the processes at work wrote into the lock."""
        try:
            return read_own(self.work / LOCK).decode(errors="replace")
        except OSError as error:
            raise io_error(self.folder, error) from error

    @contextlib.contextmanager
    def publishing(self) -> Iterator[bool]:
        """Within, no other process publishes; whether the output still needs it."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(one_at_a_time(self.work / DOOR))
            except OSError as error:  # as there is when it is published
                if not self.published():
                    raise io_error(self.folder, error) from error
            published = self.published()
            if not published and not self._is_there():
                why = "it was removed or replaced"
                raise PrepError(f"{self.folder} was changed by somebody else", why, "run again")
            yield not published

    def published(self) -> bool:
        """Whether the folder has its final name."""
        return self._is is not None and _is_at(self._is, self.out)

    def moved(self) -> None:
        """Let others publish: this process reads and writes no more in the folder, unless it publishes itself."""
        if self._moving >= 0:
            os.close(self._moving)
            self._moving = -1

    def is_moved(self) -> bool:
        """Whether all processes at work have moved their shares. To be called while publishing, when nobody joins."""
        return self.share.count == 1 or not is_held_together(self.work / MOVING)

    def _is_there(self) -> bool:
        """Whether the folder is still the one that was opened."""
        return self._is is not None and _is_at(self._is, self.folder)

    def is_at_work(self, index: int) -> bool:
        """Whether process `index` is there, as far as locks tell: they need not reach other machines."""
        try:
            return is_held(self.work / f"{LOCK}.{index}")
        except OSError:
            return False

    @property
    def failures(self) -> Failures:
        """The failure notes of the processes that share the work, once this one has joined."""
        assert self._failures is not None
        return self._failures

    def discard(self) -> None:
        """Remove a folder that turns out not to be needed; another process may be joining it."""
        away = self.out.with_name(f"{self.out.name}.unused-{self.share.index}.partial")
        with contextlib.suppress(OSError), one_at_a_time(self.work / DOOR):
            if self._is_there():
                remove(away)
                self.folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)

    def publish(self, overwrite: bool = False) -> None:
        """Sync every file and folder bottom-up, then give the folder its final name.

        What has that name by now is kept unless it may be replaced: PrepError. What is replaced lies in the staging
        folder, and is removed once its successor has the name; a kill between the two leaves both in NAME.partial.
        """
        replaced = self.work / REPLACED
        if os.path.lexists(self.out) and not overwrite:
            why = f"it came to be while {self.folder} was made, which is whole"
            raise PrepError(f"{self.out} exists", why, "move it away, or `--overwrite`, and run again")
        try:
            remove(replaced)  # of a run that was killed between the two renames
            for folder, _, names in os.walk(self.folder, topdown=False):
                for name in [*names, "."] if self.work not in (Path(folder), *Path(folder).parents) else ():
                    sync(Path(folder, name))
            if os.path.lexists(self.out):
                self.out.rename(replaced)
            self.folder.rename(self.out)
            sync(self.out.parent)
        except OSError as error:
            self._put_back()
            raise io_error(self.out, error) from error
        self.close()
        clean(self.out)

    def leave(self) -> None:
        """End this process's part in the work: nothing is written any more."""
        if self._failures is not None and self._is_there():
            self._failures.leave()
        self.close()

    def close(self) -> None:
        """Let go of the locks."""
        self.moved()
        while self._locks:
            os.close(self._locks.pop())


def _is_at(found: os.stat_result, path: Path) -> bool:
    """Whether a path leads to the very file or folder that was found."""
    try:
        return os.path.samestat(found, path.stat())
    except FileNotFoundError:
        return False


def _checksum(content: Mapping[str, object]) -> str:
    """The checksum of what a file of the run says, as JSON has it: keys are text there."""
    return digest(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def _division(found: Mapping[str, Any] | None) -> Division | None:
    if found is None:
        return None
    match found:
        case {"count": int(count), "done": dict(done)} if count > 0 and all(map(str.isdecimal, done)):
            return Division(count, {int(number): str(digest) for number, digest in done.items()})
    return None


def clean(out: Path) -> None:
    """Remove what a run leaves in a published output; also after one that was killed right after publishing."""
    shutil.rmtree(out / WORK, ignore_errors=True)


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Staging]:
    """A Staging whose locks are released in the end."""
    stage = Staging(out)
    try:
        yield stage
    finally:
        stage.leave()


def remove(path: Path) -> None:
    """Remove what is there, if anything is: a folder with all that is in it, of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _other_run(folder: Path, found: dict[str, object], run: dict[str, object]) -> PrepError:
    if found.get("request") == run.get("request") and found.get("source") != run.get("source"):
        why = "the source has changed since: its files have other sizes, times or headers"
    elif found.get("request") == run.get("request"):
        why = "another version of prep began it"
    else:
        why = f"it was begun by `{found.get('request')}`, this is `{run.get('request')}`"
    return PrepError(f"{folder} belongs to another run", why, "`--restart` drops it")
