"""Temporary folders that go with their process, also after a kill."""

from __future__ import annotations

import atexit
import fcntl
import math
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_FOLDER_PREFIX = "prep-remote-"
# Minimum age of an unlocked folder to remove: a new folder is not locked yet.
_MIN_AGE_S = 60.0


def create_temporary_folder() -> Path:
    """Create an empty temporary folder, removed at exit. Remove the folders of killed processes."""
    for leftover in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        if (fd := _try_lock(leftover, _MIN_AGE_S)) is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(fd)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    # The descriptor stays open until the process ends. The lock shows other processes that the
    # folder is in use.
    _try_lock(folder)
    atexit.register(_remove, folder)
    return folder


def _remove(folder: Path) -> None:
    """Remove a folder. Daemon threads may still write into it: under its name they find no folder any more."""
    with suppress(OSError):
        folder = folder.rename(f"{folder}-removed")
    shutil.rmtree(folder, ignore_errors=True)


def _try_lock(folder: Path, min_age_s: float = -math.inf) -> int | None:
    """Lock a folder of this user until the descriptor is closed or the process ends.

    Returns:
        The descriptor of the lock, or None if the folder is locked, too young or another user's.
    """
    try:
        # /tmp is shared: O_NOFOLLOW refuses a symbolic link with this name.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if status.st_uid == os.getuid() and time.time() - status.st_mtime >= min_age_s:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    # Locked by another process, or the file system has no locks.
    except OSError:
        pass
    os.close(fd)
    return None
