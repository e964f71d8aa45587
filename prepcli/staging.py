"""An output until it is whole: `NAME.partial` beside its final name, locked, the journal of the run in `.prep/`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from prepcli.errors import PrepError
from prepcli.files import io_error

WORK = ".prep"
RUN = "run.json"  # what the run is, for messages
JOURNAL = "journal"
REPLACED = ".replaced"


class Staging:
    """The folder in which an output comes to be. `publish` gives it its name, once everything in it is durable."""

    def __init__(self, out: Path) -> None:
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
        self._make()
        self._take_lock()
        found = self._read_run()
        if restart and found is not None:
            self._clear()
            found = None
        if found is not None and found != run:
            raise _other_run(self.folder, found, run)
        if found is None:
            self._write_run(run)
        return found is not None

    def _make(self) -> None:
        try:
            self.work.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise PrepError(f"{self.folder} is in the way", "it is not a folder") from None
        except OSError as error:
            raise io_error(self.folder, error) from error

    def _take_lock(self) -> None:
        self._lock = os.open(self.work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip()
            self.close()
            raise PrepError(
                f"{self.folder} is locked", f"another process works on it: {holder}", "wait for it"
            ) from None
        os.ftruncate(self._lock, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def _read_run(self) -> dict[str, object] | None:
        path = self.work / RUN
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            raise PrepError(f"{path} is broken", "it is not what prep wrote", "`--restart` drops it") from None

    def _write_run(self, run: dict[str, object]) -> None:
        path = self.work / RUN
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(run))
        fresh.rename(path)

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path != self.work:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in self.work.iterdir():
            if path.name != "lock":
                path.unlink()

    def publish(self) -> None:
        """Sync every file and folder bottom-up, then give the folder its final name; what had it goes away after."""
        replaced = self.out.with_name(self.out.name + REPLACED)
        try:
            for folder, _, names in os.walk(self.folder, topdown=False):
                for name in [*names, "."]:
                    _sync(Path(folder, name))
            if self.out.exists():
                self.out.rename(replaced)
            self.folder.rename(self.out)
            _sync(self.out.parent)
        except OSError as error:
            raise io_error(self.out, error) from error
        self.close()
        clean(self.out)

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def clean(out: Path) -> None:
    """Remove what a run leaves beside a published output; also after one that was killed right after publishing."""
    shutil.rmtree(out / WORK, ignore_errors=True)
    shutil.rmtree(out.with_name(out.name + REPLACED), ignore_errors=True)


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Staging]:
    """A Staging whose lock is let go in the end."""
    stage = Staging(out)
    try:
        yield stage
    finally:
        stage.close()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _other_run(folder: Path, found: dict[str, object], run: dict[str, object]) -> PrepError:
    if found.get("request") == run.get("request") and found.get("source") != run.get("source"):
        why = "the source has changed since: its files have other sizes, times or headers"
    else:
        why = f"it was begun by `{found.get('request')}`, this is `{run.get('request')}`"
    return PrepError(f"{folder} belongs to another run", why, "`--restart` drops it")
