"""An output until it is whole: `NAME.partial` beside its final name, locked, the journal of the run in `.prep/`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from prepcli.errors import PrepError, usage
from prepcli.files import io_error
from prepcli.locks import lock

WORK = ".prep"
RUN = "run.json"  # what the run is, for messages
JOURNAL = "journal"
LOCK = "lock"
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
        self._lock = -1

    @property
    def journal(self) -> Path:
        return self.work / JOURNAL

    def open(self, run: dict[str, object], restart: bool) -> bool:
        """Make or take up the folder and lock it; True if an earlier run of the same plan left something there.

        PrepError if it is another run's, or another process is at work on it.
        """
        try:
            self._make()
            self._lock = lock(self.work / LOCK, self.folder)
            if restart and any((self.work / name).exists() for name in (RUN, JOURNAL)):
                self._clear()
            found = self._read_run()
            if found is None:
                self._write_run(run)
        except OSError as error:
            raise io_error(self.folder, error) from error
        if found is not None and found != run:
            raise _other_run(self.folder, found, run)
        return found is not None

    def _make(self) -> None:
        is_ours = self.work.exists() or not self.folder.exists()
        if not is_ours and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise PrepError(f"{self.folder} is in the way", "prep did not make it", "`--out NAME`, or move it away")
        self.work.mkdir(parents=True, exist_ok=True)

    def _read_run(self) -> dict[str, object] | None:
        path = self.work / RUN
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise PrepError(f"{path} is broken", "it is not what prep wrote", "`--restart` drops it")
        return found

    def _write_run(self, run: dict[str, object]) -> None:
        path = self.work / RUN
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(run))
        sync(fresh)
        fresh.rename(path)
        sync(self.work)

    def _clear(self) -> None:
        """Drop an earlier run: first what promises that its bytes are there, then the bytes."""
        self._put_back()
        remove(self.journal)
        remove(self.work / RUN)
        sync(self.work)
        for path in [*self.folder.iterdir(), *self.work.iterdir()]:
            if path not in (self.work, self.work / LOCK):
                remove(path)

    def _put_back(self) -> None:
        """Give an output that was about to be replaced its name again, if nothing else has it."""
        replaced = self.work / REPLACED
        if os.path.lexists(replaced) and not os.path.lexists(self.out):
            replaced.rename(self.out)

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
                for name in [*names, "."]:
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

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def clean(out: Path) -> None:
    """Remove what a run leaves in a published output; also after one that was killed right after publishing."""
    shutil.rmtree(out / WORK, ignore_errors=True)


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Staging]:
    """A Staging whose lock is let go in the end."""
    stage = Staging(out)
    try:
        yield stage
    finally:
        stage.close()


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
