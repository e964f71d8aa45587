"""One process at a time: a lock on a file that says who has it, and that ends with its process."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

from prepcli.errors import PrepError


def lock(path: Path, what: Path) -> int:
    """A descriptor that holds the lock until it is closed. PrepError names the process that works on `what`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
        os.close(fd)
        raise PrepError(f"{what} is locked", f"another process works on it: {holder}", "wait for it") from None
    os.ftruncate(fd, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
    return fd
